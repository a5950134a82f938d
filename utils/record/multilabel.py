"""Figures of multi-label data, from scores and targets of a whole set: on the host, in float64.

A score is the sigmoid of a logit. A target is 1, 0, or -1 where the label is missing: such a cell enters no figure. A
class without a positive label has no recall, and thus neither average precision nor F1: its figures are NaN and enter
no mean; ``counted_classes`` says how many classes the means are over. All figures are in percent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch.nn import functional

from utils.record.metrics import COUNT, ClassificationMeter, Figures, Report
from utils.record.reading import THRESHOLD
from utils.runtime.distributed import Distributed

MISSING = -1
HALVES = [0, 2]  # key of the permutation that halves a set, to choose thresholds


def scores_of(logits: torch.Tensor) -> np.ndarray:
    """Probability of each class by itself, float64, in the shape of ``logits``."""
    return torch.sigmoid(logits.detach().cpu().double()).numpy()


def known_targets(targets: torch.Tensor) -> np.ndarray:
    """Targets of a batch, floats with NaN for missing, in stored form: int8 of 0, 1 and -1."""
    return torch.where(targets.isnan(), MISSING, targets.round()).to(torch.int8).cpu().numpy()


# ------------------------------------------------------------------------------------------ of a class


def _by_score(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct ``scores`` (n,), highest first; for each, the numbers of scores and of positives at or above it."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    ends = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)
    return ranked[ends], ends + 1, np.cumsum(positive[order])[ends]


def _areas(scores: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """Average precision and AUROC from 0 to 1, NaN where undefined. As in scikit-learn, tied scores are one step."""
    positives = int(positive.sum())
    if not positives or np.isnan(scores).any():
        return math.nan, math.nan
    _, counts, right = _by_score(scores, positive)
    precision = float((np.diff(right, prepend=0) * right / counts).sum() / positives)
    negatives = len(scores) - positives
    if not negatives:
        return precision, math.nan
    sensitivity = np.append(0, right) / positives
    false_alarms = np.append(0, counts - right) / negatives
    return precision, float((np.diff(false_alarms) * (sensitivity[1:] + sensitivity[:-1]) / 2).sum())


def _best_threshold(scores: np.ndarray, positive: np.ndarray) -> float:
    if not positive.any() or np.isnan(scores).any():
        return THRESHOLD
    levels, counts, right = _by_score(scores, positive)
    best = int(np.argmax(2 * right / (counts + positive.sum())))
    return float((levels[best] + np.append(levels, 0)[best + 1]) / 2)


def best_thresholds(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Threshold with the highest F1 for each class, float64 (classes,), halfway between two neighbouring scores.

    Of equally good thresholds, the highest is taken; a class without a positive label has 0.5. Use the thresholds to
    score other images, not the ones that chose them.
    """
    cells = zip(scores.T, targets.T, strict=True)
    return np.array([_best_threshold(score[own >= 0], own[own >= 0] == 1) for score, own in cells])


def counts_at(scores: np.ndarray, targets: np.ndarray, thresholds: np.ndarray | float = THRESHOLD) -> np.ndarray:
    """Labels, answers (scores of at least the threshold) and right answers of each class: int64 (3, classes)."""
    answers = (scores >= thresholds) & (targets >= 0)
    return np.stack([(targets == 1).sum(0), answers.sum(0), (answers & (targets == 1)).sum(0)])


def f1_of(counts: np.ndarray) -> np.ndarray:
    """F1 in percent from the counts of ``counts_at``: float64 (classes,), NaN for a class without a positive label."""
    support, predicted, right = counts
    return np.where(support > 0, 100 * 2 * right / np.maximum(support + predicted, 1), math.nan)


def micro_f1_of(counts: np.ndarray) -> float:
    """Micro-averaged F1 in percent from the counts of ``counts_at``; NaN without any positive label or answer."""
    support, predicted, right = counts.sum(1).tolist()
    return 100 * 2 * right / (support + predicted) if support + predicted else math.nan


def _first_half(count: int, groups: np.ndarray | None) -> np.ndarray:
    """Which of ``count`` images, or of their ``groups``, which stay whole, are in one of two random halves, (n,)."""
    number, group = count, np.arange(count)
    if groups is not None:
        names, group = np.unique(groups, return_inverse=True)
        number = len(names)
    chosen = np.zeros(number, bool)
    chosen[np.random.Generator(np.random.Philox(key=HALVES)).permutation(number)[::2]] = True
    return chosen[group]


# ----------------------------------------------------------------------------------------- of all classes


@dataclass(frozen=True)
class MultilabelClasses:
    """Figures of k classes: arrays (k,), in percent.

    ``known``: int64, images whose label is known. ``counts``: int64 (3, k), labels, answers and right answers at a
    threshold of 0.5. ``tuned_counts``: the same, with each half of the images scored at the thresholds that are best
    for the other half, so that no image, nor another of its group, helps to choose the thresholds it is scored at; all
    0, so that F1 is NaN, if a single image or group leaves a half empty.
    ``thresholds``: the best for all images, for use on others.
    """

    known: np.ndarray
    counts: np.ndarray
    tuned_counts: np.ndarray
    thresholds: np.ndarray
    average_precision: np.ndarray
    auroc_by_class: np.ndarray

    @classmethod
    def of(cls, scores: np.ndarray, targets: np.ndarray, groups: np.ndarray | None = None) -> MultilabelClasses | None:
        """Figures from ``scores`` float64 (n, k) and ``targets`` int8 (n, k); None without images.

        ``groups``: str (n,), the images' groups, such as patients.
        """
        if not len(scores):
            return None
        first = _first_half(len(scores), groups)
        halves = first, ~first
        chosen = [best_thresholds(scores[half], targets[half]) for half in halves]
        tuned = [
            counts_at(scores[half], targets[half], thresholds)
            for half, thresholds in zip(halves, chosen[::-1], strict=True)
        ]
        cells = zip(scores.T, targets.T, strict=True)
        areas = np.array([_areas(score[own >= 0], own[own >= 0] == 1) for score, own in cells]).reshape(-1, 2)
        return cls(
            known=(targets >= 0).sum(0),
            counts=counts_at(scores, targets),
            tuned_counts=tuned[0] + tuned[1] if all(half.any() for half in halves) else np.zeros_like(tuned[0]),
            thresholds=best_thresholds(scores, targets),
            average_precision=100 * areas[:, 0],
            auroc_by_class=100 * areas[:, 1],
        )

    @property
    def support(self) -> np.ndarray:
        """Number of positive labels of each class."""
        return self.counts[0]

    @property
    def counted_classes(self) -> int:
        """Number of classes with a positive label: those whose values the means over classes average."""
        return int((self.support > 0).sum())

    @cached_property
    def f1(self) -> np.ndarray:
        """F1 of each class at a threshold of 0.5."""
        return f1_of(self.counts)

    @property
    def map(self) -> float:
        """Mean average precision."""
        return _mean(self.average_precision, self.support > 0)

    @property
    def auroc(self) -> float:
        """Mean AUROC of the classes with both positive and negative labels."""
        return _mean(self.auroc_by_class, (self.support > 0) & (self.support < self.known))

    @property
    def macro_f1(self) -> float:
        return _mean(self.f1, self.support > 0)

    @property
    def micro_f1(self) -> float:
        return micro_f1_of(self.counts)

    @property
    def tuned_macro_f1(self) -> float:
        return _mean(f1_of(self.tuned_counts), self.support > 0)

    @property
    def tuned_micro_f1(self) -> float:
        return micro_f1_of(self.tuned_counts)

    def rows(self, names: Sequence[str]) -> Iterator[dict[str, str | int | float]]:
        """A row per class, in order: the content of ``class_metrics.csv``."""
        tuned = f1_of(self.tuned_counts)
        for number, name in enumerate(names):
            yield {
                "class": name,
                "val_count": int(self.support[number]),
                "val_known": int(self.known[number]),
                "val_predicted": int(self.counts[1, number]),
                "val_average_precision": float(self.average_precision[number]),
                "val_auroc": float(self.auroc_by_class[number]),
                "val_f1": float(self.f1[number]),
                "val_tuned_f1": float(tuned[number]),
                "threshold": float(self.thresholds[number]),
            }

    def __str__(self) -> str:
        classes = len(self.known)
        counted = f" (means of {self.counted_classes} of {classes} classes)" if self.counted_classes < classes else ""
        return (
            f"mAP {self.map:.2f}  macro F1 {self.macro_f1:.2f}  micro F1 {self.micro_f1:.2f}  "
            f"AUROC {self.auroc:.2f}  at chosen thresholds: macro F1 {self.tuned_macro_f1:.2f}  "
            f"micro F1 {self.tuned_micro_f1:.2f}{counted}"
        )


def _mean(values: np.ndarray, counted: np.ndarray) -> float:
    return float(values[counted].mean()) if counted.any() else math.nan


def binary_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean over all known cells, in float64; NaN without any. ``targets``: floats with NaN for missing."""
    logits = logits.double()
    known = ~targets.isnan()
    terms = functional.binary_cross_entropy_with_logits(logits, targets.double().nan_to_num(0), reduction="none")
    return float(terms[known].sum() / known.sum())


@dataclass(frozen=True)
class MultilabelReport(Figures):
    """Means over ``count`` images: of a validation, or of training, where all but loss and ``micro_f1`` are NaN.

    ``own``: a validation's metrics from users' files, by name.
    """

    loss: float
    map: float
    macro_f1: float
    micro_f1: float
    count: int
    by_class: MultilabelClasses | None = field(default=None, compare=False, repr=False)
    own: dict[str, float] = field(default_factory=dict, compare=False, repr=False)

    HEADLINE = "map"
    FIGURES = ("map", "macro_f1", "micro_f1")

    @classmethod
    def from_sums(cls, sums: Sequence[float]) -> MultilabelReport:
        """Report from the sums of training: loss, twice the right answers, labels plus answers, and count."""
        loss, right, both, count = sums[: COUNT + 1]
        micro_f1 = 100 * right / both if both else math.nan
        return cls(loss / count if count else math.nan, math.nan, math.nan, micro_f1, round(count))

    @classmethod
    def of(cls, logits: torch.Tensor, targets: torch.Tensor, groups: np.ndarray | None = None) -> MultilabelReport:
        """Report on ``logits`` and ``targets``, floats (n, classes) with NaN for missing, on the CPU.

        ``groups``: as for ``MultilabelClasses.of``.
        """
        by_class = MultilabelClasses.of(scores_of(logits), known_targets(targets), groups)
        if by_class is None:
            return cls(math.nan, math.nan, math.nan, math.nan, 0)
        loss = binary_cross_entropy(logits, targets)
        return cls(loss, by_class.map, by_class.macro_f1, by_class.micro_f1, len(logits), by_class)

    def text(self, with_top5: bool = True, mixed: bool = False) -> str:
        of = " (mixed)" if mixed else ""
        means = "" if self.by_class is None else f"mAP {self.map:.2f}  macro F1 {self.macro_f1:.2f}  "
        return f"{means}micro F1{of} {self.micro_f1:.2f}  loss {self.loss:.4f}"


AnyReport = Report | MultilabelReport


def report_of(numbers: Sequence[float]) -> AnyReport:
    """The report with these ``numbers``, whose count tells single-label from multi-label data."""
    kind: Callable[..., AnyReport] = Report if len(numbers) == COUNT + 1 else MultilabelReport
    return kind(*numbers[:-1], round(numbers[-1]))


# ------------------------------------------------------------------------------------------- on the device


class MultilabelMeter(ClassificationMeter):
    """Training meter for multi-label data: sums the loss and what micro F1 at a threshold of 0.5 is computed from.

    Top-1 and top-5 hits are replaced by F1's numerator, twice the right answers, and its denominator, labels plus
    answers. In mixed images, a share above a half counts as a label.
    """

    def _labels(self, targets: torch.Tensor) -> torch.Tensor:
        return targets

    def _hits(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        shown = targets > THRESHOLD
        answers = (logits >= 0) & ~targets.isnan()
        return torch.stack([2 * (shown & answers).sum(1), shown.sum(1) + answers.sum(1)], dim=1)


class ValidationAnswers:
    """Logits and targets of a validation, without padding, kept on the device until gathered from all ranks.

    ``groups``: str, the group of each of the split's images, if they have groups.
    """

    def __init__(self, groups: np.ndarray | None = None) -> None:
        self._groups = groups
        self._parts: list[tuple[np.ndarray, torch.Tensor, torch.Tensor]] = []

    def update(self, indices: np.ndarray, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Keep a batch's logits and targets. ``indices``: the samples' numbers (n,)."""
        self._parts.append((indices, logits.detach().float(), targets))

    def report(self, distributed: Distributed) -> MultilabelReport:
        """Report on all ranks' images, in the order of their numbers: the same bits on any number of ranks."""
        mine = [(indices, logits.cpu().numpy(), targets.cpu().numpy()) for indices, logits, targets in self._parts]
        parts = [part for its in distributed.gather(mine) for part in its]
        return distributed.run_on_rank0(lambda: self._report_of(parts))

    def _report_of(self, parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> MultilabelReport:
        if not parts:
            return MultilabelReport.of(torch.empty(0, 1), torch.empty(0, 1))
        indices, logits, targets = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(indices, kind="stable")
        groups = None if self._groups is None else self._groups[indices[order]]
        return MultilabelReport.of(torch.from_numpy(logits[order]), torch.from_numpy(targets[order]), groups)
