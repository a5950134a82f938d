"""Metrics of multi-label predictions as plain values, and the comparison of two multi-label networks."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from scripts.common.label_answers import Resampled, intervals, intervals_of, resampled
from scripts.common.output import plain
from scripts.common.predictions import LabelPredictions
from scripts.common.uncertainty import CONFIDENCE, bootstrap_interval, number_of, wilson_interval
from scripts.evaluation.comparison import OnSameImages
from utils.record.multilabel import THRESHOLD, MultilabelClasses, counts_at, f1_of, micro_f1_of


def summary(predictions: LabelPredictions) -> dict[str, Any]:
    """Metrics over all images, in percent except for counts and loss; F1 and exact match at a threshold of 0.5.

    ``tuned_...``: F1 if each half of the images is judged with thresholds chosen on the other half. ``given_...``: F1
    with the checkpoint's own thresholds. NaN, as a logit, gives no label, and an image with one for a known label is no
    exact match.
    """
    report = predictions.report
    by_class = predictions.by_class
    targets = predictions.targets
    groups = predictions.groups
    spans = intervals_of(report, predictions.scores, targets, groups)
    known = targets >= 0
    judged = known.any(1)
    right = ((predictions.scores >= THRESHOLD) == (targets == 1)) & ~np.isnan(predictions.scores)
    exact = (right | ~known)[judged].all(1)
    judged_groups = None if groups is None else groups[judged]
    given = counts_at(predictions.scores, targets, np.array(predictions.reading.thresholds))
    not_a_number = int(predictions.logits.isnan().any(1).sum())
    return {
        "images": report.count,
        "groups": number_of(groups),
        **{name: getattr(report, name) for name in spans},
        **{f"{name}_interval_bootstrap": span for name, span in spans.items()},
        "auroc": by_class.auroc,
        "loss": report.loss,
        "tuned_macro_f1": by_class.tuned_macro_f1,
        "tuned_micro_f1": by_class.tuned_micro_f1,
        "given_macro_f1": _mean_f1(given),
        "given_micro_f1": micro_f1_of(given),
        "exact_match": 100 * float(exact.mean()) if len(exact) else None,
        "exact_match_interval_bootstrap": bootstrap_interval(exact, judged_groups) if len(exact) else None,
        "exact_match_interval_wilson": wilson_interval(exact, judged_groups) if len(exact) else None,
        "exact_match_images": int(judged.sum()),
        "classes_with_positives": by_class.counted_classes,
        "known_labels": int(by_class.known.sum()),
        "positive_labels": int(by_class.support.sum()),
        "not_a_number": not_a_number,
        "infinite": int((~predictions.finite).sum()) - not_a_number,
    }


def _mean_f1(counts: np.ndarray) -> float | None:
    f1 = f1_of(counts)
    return float(np.nanmean(f1)) if np.isfinite(f1).any() else None


def class_rows(predictions: LabelPredictions) -> list[dict[str, Any]]:
    """One row per class, in order: name, counts, and metrics in percent, None if undefined.

    ``threshold``: the network's; ``best_threshold``: the one with the highest F1 on all of these images.
    """
    of = predictions.by_class
    columns = {
        "positives": of.support,
        "known": of.known,
        "given": (predictions.given & (predictions.targets >= 0)).sum(0),
        "missed": predictions.missed.sum(0),
        "superfluous": predictions.superfluous.sum(0),
        "average_precision": of.average_precision,
        "auroc": of.auroc_by_class,
        "f1": of.f1,
        "tuned_f1": f1_of(of.tuned_counts),
        "threshold": np.array(predictions.reading.thresholds),
        "best_threshold": of.thresholds,
    }
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    rows = [plain(dict(zip(columns, row, strict=True))) for row in values]
    return [{"class": name, **row} for name, row in zip(predictions.classes, rows, strict=True)]


class LabelChange(NamedTuple):
    """A class, its number of positive labels, and its average precision with the first and with the second network."""

    name: str
    positives: int
    first: float
    second: float


class LabelComparison(OnSameImages):
    """Comparison of two networks' ``LabelPredictions``."""

    @cached_property
    def sets(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Scores and targets of both networks on the n images, with the first network's order of the classes."""
        order = [self.second.classes.index(name) for name in self.first.classes]
        one, two = self.places
        return [
            (self.first.scores[one], self.first.targets[one]),
            (self.second.scores[two][:, order], self.second.targets[two][:, order]),
        ]

    @cached_property
    def figures(self) -> list[MultilabelClasses]:
        return [MultilabelClasses.of(*one) for one in self.sets]

    @cached_property
    def differences(self) -> dict[str, tuple[float, tuple[float, float]]]:
        """Points by which the second network's metrics are higher, by name, with the bootstrap's 95 % intervals.

        The resamples of the images are the same for both networks.
        """
        one, two = (resampled(*each, self.groups) for each in self.sets)
        first, second = self.figures
        found = {name: getattr(second, name) - getattr(first, name) for name in Resampled._fields}
        between = Resampled(*(later - before for before, later in zip(one, two, strict=True)))
        spans = intervals(between, found, number_of(self.groups) or len(self.places[0]), (-100.0, 100.0))
        return {name: (found[name], spans[name]) for name in Resampled._fields}

    @cached_property
    def classes(self) -> list[LabelChange]:
        """Classes that have positive labels, those in which the two networks differ most first."""
        first, second = self.figures
        columns = (first.support.tolist(), first.average_precision.tolist(), second.average_precision.tolist())
        changes = map(LabelChange, self.first.classes, *columns)
        return sorted((one for one in changes if one.positives), key=lambda one: -abs(one.second - one.first))

    def as_dict(self) -> dict[str, Any]:
        found = {f"{name}_difference": difference for name, (difference, _) in self.differences.items()}
        spans = {f"{name}_difference_interval": span for name, (_, span) in self.differences.items()}
        return {"images": len(self.places[0]), **found, **spans, "confidence": CONFIDENCE}
