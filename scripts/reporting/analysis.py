"""What predictions show: confusions, mistakes, classes, calibration. NumPy arrays in, plain figures out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

BINS = 15  # of the reliability diagram, as of the run's calibration error
ORDERED_CLASSES = 1500  # clustering more would take more than seconds


class Bin(NamedTuple):
    """Samples whose confidence lies in one fifteenth: their number, mean confidence and accuracy between 0 and 1."""

    count: int
    confidence: float
    accuracy: float


class Pair(NamedTuple):
    """A cell of the confusion matrix: ``count`` images of class ``truth`` are taken for class ``predicted``."""

    truth: int
    predicted: int
    count: int


@dataclass(frozen=True)
class Analysis:
    """Predictions of n samples: ``logits`` float32 (n, classes), ``labels`` int64 (n,).

    Among equal logits the first class is the prediction, as in validation. Logits without probabilities, as where one
    is NaN or positive infinity, raise ``ValueError``.
    """

    logits: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        if not np.isfinite(self.logits.max(1)).all():
            raise ValueError("some of the network's outputs are not finite numbers (NaN or infinite)")

    @property
    def classes(self) -> int:
        return self.logits.shape[1]

    @cached_property
    def predicted(self) -> np.ndarray:
        """int64 (n,)."""
        return self.logits.argmax(1)

    @cached_property
    def right(self) -> np.ndarray:
        """bool (n,)."""
        return self.predicted == self.labels

    @cached_property
    def log_total(self) -> np.ndarray:
        """The logarithm of the sum of exponentials of each sample's logits, float64 (n,)."""
        from scipy.special import logsumexp

        parts = np.array_split(self.logits, 1 + self.logits.size // 2**22)  # float64 copies of all would fill memory
        return np.concatenate([logsumexp(part.astype(np.float64), axis=1) for part in parts])

    def probability(self, samples: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Of ``classes[i]`` for ``samples[i]``, float64 between 0 and 1."""
        return np.exp(self.logits[samples, classes].astype(np.float64) - self.log_total[samples])

    @cached_property
    def confidence(self) -> np.ndarray:
        """The probability of each sample's prediction, float64 (n,)."""
        return self.probability(np.arange(len(self.labels)), self.predicted)

    @property
    def top1(self) -> float:
        """In percent."""
        return 100 * float(self.right.mean())

    @cached_property
    def loss(self) -> float:
        """Mean cross entropy, in nats."""
        own = self.logits[np.arange(len(self.labels)), self.labels].astype(np.float64)
        return float((self.log_total - own).mean())

    def top1_interval(self) -> tuple[float, float]:
        """Wilson's 95 % confidence interval of top-1, in percent."""
        from scipy.stats import binomtest

        interval = binomtest(int(self.right.sum()), len(self.right)).proportion_ci(0.95, "wilson")
        return 100 * interval.low, 100 * interval.high

    def most_likely(self, sample: int, most: int) -> list[tuple[int, float]]:
        """The ``most`` likeliest classes of a sample with their probabilities, in order."""
        order = np.argsort(-self.logits[sample], kind="stable")[:most]
        return list(zip(order.tolist(), self.probability(np.full(len(order), sample), order).tolist(), strict=True))

    # --------------------------------------------------------------------------------- samples

    def worst_mistakes(self, most: int) -> np.ndarray:
        """The wrong samples of which the network is surest, the surest first: int64 (<= most,)."""
        wrong = np.flatnonzero(~self.right)
        return wrong[np.argsort(-self.confidence[wrong], kind="stable")][:most]

    def least_certain_hits(self, most: int) -> np.ndarray:
        """The right samples of which the network is least sure, the least sure first: int64 (<= most,)."""
        right = np.flatnonzero(self.right)
        return right[np.argsort(self.confidence[right], kind="stable")][:most]

    # --------------------------------------------------------------------------------- classes

    @cached_property
    def cells(self) -> list[Pair]:
        """The confusion matrix's cells that are not empty, the mistakes first, the fullest of each first."""
        place, count = np.unique(self.labels * self.classes + self.predicted, return_counts=True)
        pairs = [
            Pair(int(number // self.classes), int(number % self.classes), int(n))
            for number, n in zip(place, count, strict=True)
        ]
        return sorted(pairs, key=lambda pair: (pair.truth == pair.predicted, -pair.count, pair.truth, pair.predicted))

    @cached_property
    def support(self) -> np.ndarray:
        """Samples of each class, int64 (classes,)."""
        return np.bincount(self.labels, minlength=self.classes)

    @cached_property
    def taken(self) -> np.ndarray:
        """Samples that are taken for each class, int64 (classes,)."""
        return np.bincount(self.predicted, minlength=self.classes)

    @cached_property
    def hits(self) -> np.ndarray:
        """Samples of each class that are recognised, int64 (classes,)."""
        return np.bincount(self.labels[self.right], minlength=self.classes)

    def samples_of(self, pair: Pair) -> np.ndarray:
        """The samples in a cell, for mistakes the surest first, for hits the least sure first."""
        found = np.flatnonzero((self.labels == pair.truth) & (self.predicted == pair.predicted))
        sign = 1 if pair.truth == pair.predicted else -1
        return found[np.argsort(sign * self.confidence[found], kind="stable")]

    def order_by_confusion(self) -> list[int]:
        """The classes so that those which are often mistaken for each other stand together.

        The leaves of an average-linkage clustering, whose distance is the share of both classes' samples that are not
        mistaken for the other one. With very many classes, the order that they have.
        """
        if not 2 < self.classes <= ORDERED_CLASSES:
            return list(range(self.classes))
        from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering
        from scipy.spatial.distance import squareform

        mixed = np.zeros((self.classes, self.classes))
        for truth, predicted, count in self.cells:
            mixed[truth, predicted] += count / self.support[truth]
        distance = 1 - np.clip((mixed + mixed.T) / 2, 0, 1)
        np.fill_diagonal(distance, 0)
        condensed = squareform(distance, checks=False)
        tree = linkage(condensed, "average")
        if self.classes <= 200:  # grows with the cube
            tree = optimal_leaf_ordering(tree, condensed)
        return leaves_list(tree).tolist()

    # ----------------------------------------------------------------------------- calibration

    @cached_property
    def bins(self) -> list[Bin]:
        """Fifteen bins of equal width over the confidence, each without its lower and with its upper end."""
        place = np.clip(np.ceil(self.confidence * BINS).astype(int) - 1, 0, BINS - 1)
        counts = np.bincount(place, minlength=BINS)
        with np.errstate(invalid="ignore"):
            confidence = np.bincount(place, self.confidence, BINS) / counts
            accuracy = np.bincount(place, self.right, BINS) / counts
        return [
            Bin(int(n), float(sure), float(right)) if n else Bin(0, 0.0, 0.0)
            for n, sure, right in zip(counts, confidence, accuracy, strict=True)
        ]

    @property
    def calibration_error(self) -> float:
        """The expected calibration error (Guo et al., 2017), in percent."""
        return 100 * sum(one.count * abs(one.confidence - one.accuracy) for one in self.bins) / len(self.labels)

    def confidence_counts(self) -> tuple[list[int], list[int]]:
        """How many wrong and how many right samples have a confidence in each twentieth between 0 and 1."""
        edges = np.linspace(0, 1, 21)
        sure = np.clip(self.confidence, 0, 1)
        return tuple(np.histogram(sure[of], edges)[0].tolist() for of in (~self.right, self.right))


def turns(queues: Sequence[Sequence[int]]) -> list[int]:
    """The first of each queue, then the second of each, and so on, each number once."""
    longest = max(map(len, queues), default=0)
    return list(dict.fromkeys(int(queue[n]) for n in range(longest) for queue in queues if n < len(queue)))
