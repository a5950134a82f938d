"""Metrics of all images and of each class, as plain values."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.common.answers import NO_CLASS, Cell, bootstrap_interval, wilson_interval
from scripts.common.predictions import Predictions
from utils.record.metrics import Bin, ClassReport

LARGEST_MATRIX = 2000  # classes: 4 million cells


def summary(predictions: Predictions) -> dict[str, Any]:
    """The metrics of all images, in percent but for counts and loss."""
    report = predictions.report
    by_class = predictions.by_class
    hits = int(predictions.right.sum())
    not_a_number = int((predictions.predicted == NO_CLASS).sum())
    return {
        "images": report.count,
        "top1": report.top1,
        "top1_interval_bootstrap": bootstrap_interval(hits, report.count),
        "top1_interval_wilson": wilson_interval(hits, report.count),
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
    """A row per class, in order: its name, counts, and metrics in percent; recall is None without images."""
    of = predictions.by_class
    counts = (of.support.tolist(), of.predicted.tolist(), of.right.tolist())
    metrics = (of.precision.tolist(), of.accuracy.tolist(), of.f1.tolist())
    names = ("class", "images", "predicted", "right", "precision", "recall", "f1")
    rows = [dict(zip(names, row, strict=True)) for row in zip(predictions.classes, *counts, *metrics, strict=True)]
    return [row | {"recall": row["recall"] if row["images"] else None} for row in rows]


def share_of_class(predictions: Predictions, cell: Cell) -> float:
    """Share of its class's images that a cell of the confusion matrix holds, in percent."""
    return 100 * cell.count / int(predictions.by_class.support[cell.label])


def reliability(predictions: Predictions) -> list[Bin]:
    """The bins of confidence, without images for which a logit is no number or infinite."""
    finite = predictions.finite
    of_finite = ClassReport.of(predictions.logits[finite], predictions.labels[finite])
    return (of_finite or predictions.by_class).reliability


def confusion_matrix(predictions: Predictions) -> np.ndarray | None:
    """int64 (classes, classes): images of the row's class taken for the column's; None if it would be too large."""
    classes = len(predictions.classes)
    if classes > LARGEST_MATRIX:
        return None
    matrix = np.zeros((classes, classes), dtype=np.int64)
    for label, predicted, count in predictions.cells:
        matrix[label, predicted] = count
    return matrix
