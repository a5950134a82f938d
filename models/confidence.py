"""Temperature and distances that evaluate.py has fitted to a network and keeps in a copy of its checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from utils.config.settings import UserError

KEY = "confidence"  # of a checkpoint


@dataclass(frozen=True)
class Distance:
    """Distance of an image's features from those of the nearest class of the training images.

    The Mahalanobis distance with one covariance for all classes (Lee et al., A simple unified framework for detecting
    out-of-distribution samples and adversarial attacks, 2018), of the features that the output layer takes.

    ``mean``: float32 (d,). ``whitening``: float32 (d, r), whose product with its transpose is the inverse covariance.
    ``centres``: float32 (k, r), the whitened means, less ``mean``, of the k classes that have training images.
    ``fitted_on``: the number of training images. ``usual``: the distance that 95 % of the images evaluated then do not
    exceed.
    """

    mean: torch.Tensor
    whitening: torch.Tensor
    centres: torch.Tensor
    fitted_on: int
    usual: float

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Distances, float64 (n,), of ``features`` (n, d) on the CPU; NaN where a feature is not finite."""
        whitened = (features.double() - self.mean.double()) @ self.whitening.double()
        distances = torch.cdist(whitened, self.centres.double(), compute_mode="donot_use_mm_for_euclid_dist").amin(1)
        return distances.where(features.isfinite().all(1), math.nan)


@dataclass(frozen=True)
class Confidence:
    """A ``temperature`` that divides the logits, and a ``distance``; None for what was not fitted.

    Both hold only for the weights ``weights`` ('average' or 'trained'), shown images in the views of ``--tta`` ``tta``.
    ``fitted``: text that says which images were used for fitting, and with what result. ``images``: digest of the whole
    set of images from which those were taken.
    """

    temperature: float | None
    weights: str
    tta: str
    fitted: str
    images: str
    distance: Distance | None

    def state(self) -> dict[str, Any]:
        """Content of a checkpoint under ``KEY``."""
        return {**vars(self), "distance": None if self.distance is None else vars(self.distance)}

    @classmethod
    def from_state(cls, state: Any, path: Path) -> Confidence | None:
        """Confidence in a checkpoint's entry; None without an entry. Raises ``UserError`` if it is not valid."""
        if state is None:
            return None
        try:
            found = cls(**{**state, "distance": state["distance"] and Distance(**state["distance"])})
            temperature = 1.0 if found.temperature is None else found.temperature
            good = math.isfinite(temperature) and temperature > 0
            if found.distance is not None:
                found.distance(torch.zeros(1, len(found.distance.mean)))
        except (TypeError, KeyError, ValueError, AttributeError, RuntimeError):
            good = False
        if not good:
            raise UserError(f"{path}: its {KEY} is not what evaluate.py --store writes; evaluate the original again")
        return found


def divide_logits(network: nn.Module, temperature: float) -> None:
    """Make ``network`` divide its logits by ``temperature`` in evaluation, in float32. Its weights stay as they are."""
    network.register_forward_hook(partial(_divided, temperature))


def _divided(temperature: float, network: nn.Module, _: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits if network.training else logits.float() / temperature
