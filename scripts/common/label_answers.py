"""Answers of a multi-label network, one by one: labels given, missed and superfluous.

Metrics over all images are those of validation (``utils/record/multilabel.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from scripts.common.answers import Answered
from scripts.common.uncertainty import TAILS, around, drawn, number_of
from utils.record.multilabel import THRESHOLD, MultilabelClasses, f1_of, known_targets, micro_f1_of
from utils.record.reading import SeveralLabels

RESAMPLES, FEWEST_RESAMPLES = 1000, 200
MOST_WORK = 2 * 10**9  # images x classes x resamples


class Pair(NamedTuple):
    """Two labels, by index: how many images have both (``true``), and how many the network gives both (``given``)."""

    first: int
    second: int
    true: int
    given: int


@dataclass(frozen=True)
class LabelAnswers(Answered):
    """Answers with several labels per image: ``labels`` (n, classes) are 1, 0, or NaN if missing."""

    reading: SeveralLabels

    @cached_property
    def scores(self) -> np.ndarray:
        """Probability of each label, float64 (n, classes)."""
        return self.reading.probabilities(self.logits.double()).numpy()

    @cached_property
    def targets(self) -> np.ndarray:
        """Labels of the images, int8 (n, classes): 1, 0, or -1 if missing."""
        return known_targets(self.labels)

    @cached_property
    def given(self) -> np.ndarray:
        """Labels that the network gives, whether or not the truth is known: bool (n, classes)."""
        return self.reading.given(self.logits).numpy()

    @cached_property
    def missed(self) -> np.ndarray:
        """Labels that an image has but is not given: bool (n, classes)."""
        return (self.targets == 1) & ~self.given

    @cached_property
    def superfluous(self) -> np.ndarray:
        """Labels that an image is given but does not have: bool (n, classes)."""
        return (self.targets == 0) & self.given

    @cached_property
    def right(self) -> np.ndarray:
        """Whether an image is given all its labels and no superfluous one, missing labels aside: bool (n,).

        NaN, as a logit, answers nothing: an image with one for a known label is not right.
        """
        unanswered = np.isnan(self.scores) & (self.targets >= 0)
        return ~(self.missed | self.superfluous | unanswered).any(1)

    @cached_property
    def by_class(self) -> MultilabelClasses:
        return MultilabelClasses.of(self.scores, self.targets, self.groups)

    @cached_property
    def confidence(self) -> np.ndarray:
        """Probability of the likeliest label, float64 (n,)."""
        return self.scores.max(1)

    def explained(self, image: int) -> int:
        """The label that an image's heat map explains: the most confident mistake, or else the likeliest label."""
        wrong = self.missed[image] | self.superfluous[image]
        distance = np.abs(self.scores[image] - (self.targets[image] == 1))
        return int(np.argmax(np.where(wrong, distance, -1) if wrong.any() else self.scores[image]))

    def most_mistaken(self) -> np.ndarray:
        """Images with a wrong answer, int64 (m,), the most confident mistakes first."""
        distance = np.abs(self.scores - (self.targets == 1))  # of a probability from the truth
        order = np.argsort(-np.where(self.missed | self.superfluous, distance, 0).max(1), kind="stable")
        return order[~self.right[order]]

    def least_certain(self) -> np.ndarray:
        """Images whose labels are all right, int64 (m,), those that came closest to a wrong one first."""
        distance = np.abs(self.scores - np.array(self.reading.thresholds))
        nearest = np.where(self.targets >= 0, distance, np.inf).min(1)
        order = np.argsort(nearest, kind="stable")
        return order[self.right[order]]

    @cached_property
    def together(self) -> tuple[np.ndarray, np.ndarray]:
        """For each pair of labels, how many images have both, and are given both: int64 (classes, classes) each.

        Both matrices count only images where both labels are known, so that they can be compared. Their diagonals count
        single labels.
        """
        return count_together(self.targets == 1), count_together(self.given & (self.targets >= 0))

    @cached_property
    def pairs(self) -> list[Pair]:
        """Pairs of labels that occur together in truth or answers, those first whose numbers in both differ most."""
        true, given = self.together
        first, second = np.nonzero(np.triu((true + given) > 0, 1))
        columns = (first, second, true[first, second], given[first, second])
        pairs = map(Pair, *(column.tolist() for column in columns))
        return sorted(pairs, key=lambda pair: (-abs(pair.true - pair.given), -pair.true, pair.first, pair.second))


def count_together(has: np.ndarray) -> np.ndarray:
    """Number of images that have both labels of each pair, int64 (classes, classes); ``has``: bool (n, classes)."""
    cells = has.astype(np.float64)
    return (cells.T @ cells).astype(np.int64)


# ------------------------------------------------------------------------------------------------ intervals


class Resampled(NamedTuple):
    """Metrics in percent on samples of the images drawn with replacement, float64 (resamples,) each."""

    map: np.ndarray
    macro_f1: np.ndarray
    micro_f1: np.ndarray


def intervals(
    found: Resampled, values: Mapping[str, float], units: int, limits: tuple[float, float] = (0.0, 100.0)
) -> dict[str, tuple[float, float]]:
    """Basic bootstrap's 95 % interval of each metric, by name, within ``limits``; NaN without a finite figure.

    ``values``: the metrics on all images; ``units``: how many images, or groups, were drawn for a resample. Assumes
    that a metric differs from the truth as the resamples differ from the metric. Images drawn twice flatter average
    precision, so the plain percentiles lie too high: their 95 % intervals held the truth in 67 to 97 % of simulated
    sets of 100 to 1,000 images, the basic ones in 88 to 97 %. (Davison and Hinkley, Bootstrap methods and their
    application, 1997, section 5.2.)
    """
    spans = {}
    for name, resamples in found._asdict().items():
        if not math.isfinite(values[name]) or np.isnan(resamples).all():
            spans[name] = math.nan, math.nan
            continue
        high, low = np.nanpercentile(resamples, TAILS)
        spans[name] = around(values[name], values[name] - np.array([low, high]), units, limits)
    return spans


def intervals_of(
    metrics: Any, scores: np.ndarray, targets: np.ndarray, groups: np.ndarray | None
) -> dict[str, tuple[float, float]]:
    """95 % interval of each metric of ``Resampled``, by name; ``metrics`` has them on all images as attributes."""
    values = {name: getattr(metrics, name) for name in Resampled._fields}
    return intervals(resampled(scores, targets, groups), values, number_of(groups) or len(targets))


def resampled(scores: np.ndarray, targets: np.ndarray, groups: np.ndarray | None = None) -> Resampled:
    """Metrics on 1,000 resamples of the images or of their ``groups``; on fewer if there are very many.

    The resamples are the same for two networks, so their metrics can be subtracted. F1 uses a threshold of 0.5. A class
    without positive labels in a resample is left out of its means.
    """
    count, classes = targets.shape
    resamples = int(np.clip(MOST_WORK // (count * classes), FEWEST_RESAMPLES, RESAMPLES))
    parts = [_figures(times, scores, targets) for times in drawn(count, resamples, groups)]
    return Resampled(*map(np.concatenate, zip(*parts, strict=True)))


def _figures(times: np.ndarray, scores: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    has = targets == 1
    gets = (scores >= THRESHOLD) & (targets >= 0)
    counts = np.stack([times @ cells for cells in (has, gets, has & gets)])  # (3, resamples, classes)
    support = counts[0]
    precision = np.stack([_average_precision(times, *column) for column in zip(scores.T, targets.T, strict=True)], 1)
    f1 = f1_of(counts)
    counted = support > 0
    means = (np.where(counted, values, 0).sum(1) / np.maximum(counted.sum(1), 1) for values in (100 * precision, f1))
    map_, macro_f1 = (np.where(counted.any(1), values, np.nan) for values in means)
    return map_, macro_f1, np.array([micro_f1_of(one) for one in counts.transpose(1, 0, 2)])


def _average_precision(times: np.ndarray, scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Average precision (0 to 1) of one class in each resample, (resamples,), 0 without positive labels.

    ``times``: how often each image is drawn, (resamples, n). ``scores`` and ``targets``: of the class, (n,).
    """
    known = np.flatnonzero(targets >= 0)
    order = known[np.argsort(-scores[known], kind="stable")]
    if not (targets == 1).any() or np.isnan(scores[known]).any():
        return np.full(len(times), 0.0 if not (targets == 1).any() else np.nan)
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)  # equal scores count as one step
    taken = times[:, order].cumsum(1)[:, ends]
    right = (times[:, order] * (targets[order] == 1)).cumsum(1)[:, ends]
    steps = np.diff(right, axis=1, prepend=0) * right / np.maximum(taken, 1)
    return steps.sum(1) / np.maximum(right[:, -1], 1)
