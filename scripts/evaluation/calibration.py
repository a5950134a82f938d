"""Calibration: how far confidence and accuracy agree, and a temperature that makes them agree better.

Both follow Guo et al., On calibration of modern neural networks, 2017.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch.nn import functional

from scripts.common.predictions import Predictions
from utils.record.class_metrics import BINS

SEED = 0  # of the images to fit on
FEWEST, MOST = 40, 5000  # images with which a temperature is fitted, on half of them; and images it is fitted on
LOG_LIMITS = (-4.0, 4.0)  # of the temperature's logarithm


class Bin(NamedTuple):
    """The images whose confidence is above ``low`` and at most ``high``: how many, and their means, in percent."""

    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


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


def reliability(logits: torch.Tensor, labels: torch.Tensor) -> list[Bin]:
    """The 15 bins of equal width, each without its lower and with its upper end, as in validation; empty ones too.

    ``logits`` float (n, classes), all finite, ``labels`` int64 (n,).
    """
    largest, predicted = logits.max(1)
    confidence = (largest - logits.logsumexp(1)).exp()
    edges = torch.linspace(0, 1, BINS + 1, dtype=confidence.dtype)
    places = torch.bucketize(confidence, edges[1:]).clamp_(max=BINS - 1).numpy()
    counts = np.bincount(places, minlength=BINS)
    sums = [
        np.bincount(places, weights=100 * values.double().numpy(), minlength=BINS)
        for values in (confidence, (predicted == labels))
    ]
    means = [np.divide(each, counts, out=np.full(BINS, math.nan), where=counts > 0) for each in sums]
    return [
        Bin(edges[n].item(), edges[n + 1].item(), int(counts[n]), float(means[0][n]), float(means[1][n]))
        for n in range(BINS)
    ]


def expected_error(bins: list[Bin]) -> float:
    """The expected calibration error in percent."""
    full = [one for one in bins if one.images]
    return sum(one.images * abs(one.confidence - one.accuracy) for one in full) / sum(one.images for one in full)


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
    their = labels[scored]
    return Temperature(
        temperature,
        len(fitted),
        len(scored),
        loss=(_loss(rest, their, 1.0), _loss(rest, their, temperature)),
        error=tuple(expected_error(reliability(rest / factor, their)) for factor in (1.0, temperature)),
        at_limit=bool((logits[fitted].argmax(1) == labels[fitted]).all())
        or min(abs(log - limit) for limit in LOG_LIMITS) < 0.01,
    )


def _loss(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> float:
    return functional.cross_entropy(logits.double() / temperature, labels).item()
