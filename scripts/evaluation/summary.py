"""Metrics over all images and by class as plain values, and a temperature that calibrates confidences.

The temperature makes confidence and accuracy agree better (Guo et al., On calibration of modern neural networks, 2017).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from scipy.optimize import minimize_scalar
from torch.nn import functional

from scripts.common.answers import NO_CLASS, Cell
from scripts.common.predictions import AnyPredictions, Predictions, classes_of
from scripts.common.uncertainty import bootstrap_interval, divided, number_of, wilson_interval
from utils.record.metrics import Bin, ClassReport

SEED = 0  # seeds the choice of images to fit on
FEWEST, MOST = 40, 5000  # fewest images for a temperature, which is fitted on half of them; most images it is fitted on
LOG_LIMITS = (-4.0, 4.0)  # limits of the temperature's logarithm


def summary(predictions: Predictions) -> dict[str, Any]:
    """Metrics over all images, in percent except for counts and loss."""
    report = predictions.report
    by_class = predictions.by_class
    not_a_number = int((predictions.predicted == NO_CLASS).sum())
    return {
        "images": report.count,
        "groups": number_of(predictions.groups),
        "top1": report.top1,
        "top1_interval_bootstrap": bootstrap_interval(predictions.right, predictions.groups),
        "top1_interval_wilson": wilson_interval(predictions.right, predictions.groups),
        "top5": report.top5,
        "loss": report.loss,
        "macro_precision": by_class.macro_precision,
        "macro_recall": by_class.macro_recall,
        "macro_f1": by_class.macro_f1,
        "balanced_accuracy": by_class.balanced_accuracy,
        "calibration_error": by_class.ece,
        "not_a_number": not_a_number,
        "infinite": int((~predictions.finite).sum()) - not_a_number,
    }


def class_rows(predictions: Predictions) -> list[dict[str, Any]]:
    """One row per class, in order: name, counts, and metrics in percent; recall is None without images."""
    of = predictions.by_class
    counts = (of.support.tolist(), of.predicted.tolist(), of.right.tolist())
    metrics = (of.precision.tolist(), of.accuracy.tolist(), of.f1.tolist())
    names = ("class", "images", "predicted", "right", "precision", "recall", "f1")
    rows = [dict(zip(names, row, strict=True)) for row in zip(predictions.classes, *counts, *metrics, strict=True)]
    return [row | {"recall": row["recall"] if row["images"] else None} for row in rows]


def share_of_class(predictions: Predictions, cell: Cell) -> float:
    """Percentage of its class's images that a cell of the confusion matrix holds."""
    return 100 * cell.count / int(predictions.by_class.support[cell.label])


def decisions(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (m, k) and labels, int64 (m,), of m choices of one class; unchanged if images have one label each.

    With multi-label ``labels`` (n, classes), each known label is a choice between 'not shown' and 'shown', whose
    softmax is the sigmoid and whose cross entropy is binary cross entropy.
    """
    if labels.ndim == 1:
        return logits, labels
    known = ~labels.isnan()
    shown = logits[known]
    return torch.stack([torch.zeros_like(shown), shown], 1), labels[known].long()


def reliability(predictions: AnyPredictions) -> list[Bin]:
    """Reliability by bins of confidence, without images that have a NaN or infinite logit."""
    finite = predictions.finite
    of_finite = ClassReport.of(*decisions(predictions.logits[finite], predictions.labels[finite]))
    return [] if of_finite is None else of_finite.reliability


class Temperature(NamedTuple):
    """A ``temperature`` to divide logits by, fitted on some images and scored on others.

    Loss and calibration error (in percent) are of these other images, before and after the division. ``at_limit``: the
    loss only falls towards a temperature of 0 or infinity, e.g. if every answer is right, so the value means nothing.
    ``not_fitted_on``: classes that have images, but none among those fitted on.
    """

    temperature: float
    fitted_on_images: int
    scored_on_images: int
    loss_before: float
    loss_after: float
    calibration_error_before: float
    calibration_error_after: float
    at_limit: bool
    not_fitted_on: list[str]


def fit_temperature(predictions: AnyPredictions) -> Temperature | None:
    """Fit a temperature on half of the images, at most ``MOST``, and score it on the others; None if too few.

    The images are drawn at random, but always the same. For multi-label data, loss and calibration error treat each
    known label as a choice of its own (``decisions``).
    """
    judged = predictions.finite & (predictions.labels == predictions.labels).reshape(len(predictions), -1).any(1)
    logits = predictions.logits[judged]
    labels = predictions.labels[judged]
    if len(labels) < FEWEST:
        return None
    groups = None if predictions.groups is None else predictions.groups[judged.numpy()]
    fitted, scored = divided(len(labels), min(len(labels) // 2, MOST), SEED, groups)
    if not len(scored):
        return None
    own = decisions(logits[fitted], labels[fitted])
    rest = decisions(logits[scored], labels[scored])
    best = minimize_scalar(
        lambda log: _loss(*own, math.exp(log)),
        bounds=LOG_LIMITS,
        method="bounded",
        options={"xatol": 1e-6},
    )
    log = float(best.x)
    factors = (1.0, math.exp(log))
    return Temperature(
        factors[1],
        len(fitted),
        len(scored),
        *(_loss(*rest, factor) for factor in factors),
        *(ClassReport.of(rest[0] / factor, rest[1]).ece for factor in factors),
        at_limit=bool((own[0].argmax(1) == own[1]).all()) or min(abs(log - limit) for limit in LOG_LIMITS) < 0.01,
        not_fitted_on=[predictions.classes[one] for one in sorted(classes_of(labels) - classes_of(labels[fitted]))],
    )


def _loss(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> float:
    return functional.cross_entropy(logits.double() / temperature, labels).item()
