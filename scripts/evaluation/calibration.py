"""A temperature that makes confidence and accuracy agree better (Guo et al., On calibration of modern neural networks,
2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch.nn import functional

from scripts.common.predictions import Predictions
from utils.record.metrics import ClassReport

SEED = 0  # of the images to fit on
FEWEST, MOST = 40, 5000  # images with which a temperature is fitted, on half of them; and images it is fitted on
LOG_LIMITS = (-4.0, 4.0)  # of the temperature's logarithm


@dataclass(frozen=True)
class Temperature:
    """A ``temperature`` to divide logits by, fitted on ``fitted`` images and scored on the ``scored`` others.

    ``loss`` and ``error`` (ECE in percent) of these others: as they are, and with the temperature. ``at_limit``: the
    loss only falls towards 0 or infinity, as where every answer is right, and the value means nothing.
    """

    temperature: float
    fitted: int
    scored: int
    loss: tuple[float, float]
    error: tuple[float, float]
    at_limit: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "fitted_on_images": self.fitted,
            "scored_on_images": self.scored,
            "loss_before": self.loss[0],
            "loss_after": self.loss[1],
            "calibration_error_before": self.error[0],
            "calibration_error_after": self.error[1],
            "at_limit": self.at_limit,
        }


def fit_temperature(predictions: Predictions) -> Temperature | None:
    """Fit on half of the images and score on the others; None with too few. More than ``MOST`` it does not need.

    They are drawn at random, but always the same.
    """
    logits = predictions.logits[predictions.finite]
    labels = predictions.labels[predictions.finite]
    if len(labels) < FEWEST:
        return None
    order = np.random.default_rng(SEED).permutation(len(labels))
    fitted, scored = map(np.sort, np.split(order, [min(len(order) // 2, MOST)]))
    best = minimize_scalar(
        lambda log: _loss(logits[fitted], labels[fitted], math.exp(log)),
        bounds=LOG_LIMITS,
        method="bounded",
        options={"xatol": 1e-6},
    )
    log = float(best.x)
    temperature = math.exp(log)
    rest = logits[scored]
    rest_labels = labels[scored]
    return Temperature(
        temperature,
        len(fitted),
        len(scored),
        loss=(_loss(rest, rest_labels, 1.0), _loss(rest, rest_labels, temperature)),
        error=tuple(ClassReport.of(rest / factor, rest_labels).ece for factor in (1.0, temperature)),
        at_limit=bool((logits[fitted].argmax(1) == labels[fitted]).all())
        or min(abs(log - limit) for limit in LOG_LIMITS) < 0.01,
    )


def _loss(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> float:
    return functional.cross_entropy(logits.double() / temperature, labels).item()
