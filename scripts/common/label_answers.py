"""Answers of a network for several labels, one by one: which labels it gives, misses and adds.

Metrics of all images are those of validation (``utils/record/multilabel.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from scripts.common.answers import CONFIDENCE
from utils.record.multilabel import THRESHOLD, MultilabelClasses, f1_of, known_targets, micro_f1_of
from utils.record.reading import SeveralLabels

SEED = 0  # of the resamples
RESAMPLES, FEWEST_RESAMPLES = 1000, 200
MOST_WORK = 2 * 10**9  # images x classes x resamples
AT_ONCE = 2**22  # images x resamples


class Pair(NamedTuple):
    """Two labels, by number: on how many images both are, and on how many both are given."""

    first: int
    second: int
    true: int
    given: int


@dataclass(frozen=True)
class LabelAnswers:
    """``logits`` float32 (n, classes) on the CPU, and ``labels``, the targets: 1, 0, NaN where missing."""

    logits: torch.Tensor
    labels: torch.Tensor
    reading: SeveralLabels

    @cached_property
    def scores(self) -> np.ndarray:
        """The probability of each label, float64 (n, classes)."""
        return self.reading.probabilities(self.logits.double()).numpy()

    @cached_property
    def targets(self) -> np.ndarray:
        """int8 (n, classes): 1, 0, and -1 where missing."""
        return known_targets(self.labels)

    @cached_property
    def finite(self) -> torch.Tensor:
        """bool (n,): whether all logits of an image are numbers, neither NaN nor infinite."""
        return self.logits.isfinite().all(1)

    @cached_property
    def given(self) -> np.ndarray:
        """bool (n, classes): the labels that the network gives, whether they are known or not."""
        return self.reading.given(self.logits).numpy()

    @cached_property
    def missed(self) -> np.ndarray:
        """bool (n, classes): the labels that an image has and does not get."""
        return (self.targets == 1) & ~self.given

    @cached_property
    def superfluous(self) -> np.ndarray:
        """bool (n, classes): the labels that an image gets and does not have."""
        return (self.targets == 0) & self.given

    @cached_property
    def right(self) -> np.ndarray:
        """bool (n,): whether an image gets all of its labels, and of the others only such as are missing."""
        return ~(self.missed | self.superfluous).any(1)

    @cached_property
    def by_class(self) -> MultilabelClasses:
        return MultilabelClasses.of(self.scores, self.targets)

    @cached_property
    def most_confident_mistake(self) -> np.ndarray:
        """float64 (n,): of an image's wrong answers, how far a probability is from the truth at most; 0 of none."""
        distance = np.abs(self.scores - (self.targets == 1))
        return np.where(self.missed | self.superfluous, distance, 0).max(1)

    @cached_property
    def confidence(self) -> np.ndarray:
        """float64 (n,): the probability of the likeliest label."""
        return self.scores.max(1)

    def explained(self, image: int) -> int:
        """The label that a heat map of an image explains: the most confident mistake, or else the likeliest."""
        wrong = self.missed[image] | self.superfluous[image]
        distance = np.abs(self.scores[image] - (self.targets[image] == 1))
        return int(np.argmax(np.where(wrong, distance, -1) if wrong.any() else self.scores[image]))

    def most_mistaken(self) -> np.ndarray:
        """The images with a wrong answer, int64 (m,), the most confident mistakes first."""
        order = np.argsort(-self.most_confident_mistake, kind="stable")
        return order[~self.right[order]]

    def least_certain(self) -> np.ndarray:
        """The images whose labels are all right, int64 (m,), those first of which one was nearly wrong."""
        distance = np.abs(self.scores - np.array(self.reading.thresholds))
        nearest = np.where(self.targets >= 0, distance, np.inf).min(1)
        order = np.argsort(nearest, kind="stable")
        return order[self.right[order]]

    @cached_property
    def together(self) -> tuple[np.ndarray, np.ndarray]:
        """On how many images two labels are both there, and both given: int64 (classes, classes) each.

        Both count images alone on which both labels are known, so that they can be compared. Where row and column are
        the same, that is how often the label is there, and given.
        """
        known = self.targets >= 0
        return tuple(
            (both.T @ both).astype(np.int64) for both in ((self.targets == 1) * 1.0, (self.given & known) * 1.0)
        )

    @cached_property
    def pairs(self) -> list[Pair]:
        """The pairs of labels that are together in truth or in answers; those first where these differ most."""
        true, given = self.together
        first, second = np.nonzero(np.triu((true + given) > 0, 1))
        columns = (first, second, true[first, second], given[first, second])
        pairs = map(Pair, *(column.tolist() for column in columns))
        return sorted(pairs, key=lambda pair: (-abs(pair.true - pair.given), -pair.true, pair.first, pair.second))


# ------------------------------------------------------------------------------------------------ intervals


class Resampled(NamedTuple):
    """Figures of resamples in percent, float64 (resamples,) each: of images drawn with replacement."""

    map: np.ndarray
    macro_f1: np.ndarray
    micro_f1: np.ndarray


def intervals(found: Resampled, values: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """The basic bootstrap's 95 % interval of each figure, by name: ``values`` are those of all images.

    What resamples differ by from the figure, it differs by from the truth; so an end may lie beyond 0 or 100. Images
    that are drawn twice let average precision look better than it is, so that the percentiles themselves lie too high:
    95 % intervals of them held the truth in 67 to 97 % of simulated sets of 100 to 1,000 images, these in 88 to 97 %.
    (Davison and Hinkley, Bootstrap methods and their application, 1997, section 5.2.)
    """
    tail = 50 * (1 - CONFIDENCE)
    spans = {}
    for name, resamples in found._asdict().items():
        low, high = np.nanpercentile(resamples, [tail, 100 - tail]).tolist()
        spans[name] = (2 * values[name] - high, 2 * values[name] - low)
    return spans


def resampled(scores: np.ndarray, targets: np.ndarray) -> Resampled:
    """Figures of 1,000 resamples of the images, of fewer where there are very many images and classes.

    The images of a resample are always the same for the same number of images: two networks' can be subtracted. F1 is
    at a threshold of 0.5. A class that has no positive label in a resample is in none of its means.
    """
    count, classes = targets.shape
    resamples = int(np.clip(MOST_WORK // (count * classes), FEWEST_RESAMPLES, RESAMPLES))
    parts = [_figures(drawn, scores, targets) for drawn in _drawn(count, resamples)]
    return Resampled(*map(np.concatenate, zip(*parts, strict=True)))


def _drawn(count: int, resamples: int) -> Iterator[np.ndarray]:
    """Counts of each of ``count`` images in each resample, float64 (some, count), some resamples at a time."""
    random = np.random.default_rng(SEED)
    each = max(1, AT_ONCE // count)
    for start in range(0, resamples, each):
        rows = min(each, resamples - start)
        places = random.integers(count, size=(rows, count)) + count * np.arange(rows)[:, None]
        yield np.bincount(places.ravel(), minlength=rows * count).reshape(rows, count).astype(float)


def _figures(drawn: np.ndarray, scores: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    has = targets == 1
    gets = (scores >= THRESHOLD) & (targets >= 0)
    counts = np.stack([drawn @ cells for cells in (has, gets, has & gets)])  # (3, resamples, classes)
    support = counts[0]
    precision = np.stack([_average_precision(drawn, *column) for column in zip(scores.T, targets.T, strict=True)], 1)
    f1 = f1_of(counts)
    counted = support > 0
    means = (np.where(counted, values, 0).sum(1) / np.maximum(counted.sum(1), 1) for values in (100 * precision, f1))
    map_, macro_f1 = (np.where(counted.any(1), values, np.nan) for values in means)
    return map_, macro_f1, np.array([micro_f1_of(one) for one in counts.transpose(1, 0, 2)])


def _average_precision(drawn: np.ndarray, scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Average precision of a class in each resample, a share of 1; 0 where it has no positive label."""
    known = np.flatnonzero(targets >= 0)
    order = known[np.argsort(-scores[known], kind="stable")]
    if not (targets == 1).any() or np.isnan(scores[known]).any():
        return np.full(len(drawn), 0.0 if not (targets == 1).any() else np.nan)
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)  # equal scores are one step
    taken = drawn[:, order].cumsum(1)[:, ends]
    right = (drawn[:, order] * (targets[order] == 1)).cumsum(1)[:, ends]
    steps = np.diff(right, axis=1, prepend=0) * right / np.maximum(taken, 1)
    return steps.sum(1) / np.maximum(right[:, -1], 1)
