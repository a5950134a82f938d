"""A network's answers, one by one: right or wrong, how confident, which classes it takes for which.

Metrics of all images are those of validation (``utils/record/metrics.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from utils.record.metrics import ClassReport, target_rank

FIGURES = {"top1": "top-1", "top5": "top-5", "map": "mAP", "macro_f1": "macro F1", "micro_f1": "micro F1"}  # in words
NO_CLASS = -1  # predicted where a logit is NaN: such an answer is wrong
CONFIDENCE = 0.95  # of the intervals
ORDERED_CLASSES = 1500  # clustering more would take more than seconds


class Cell(NamedTuple):
    """A cell of the confusion matrix: ``count`` images of class ``label`` are taken for class ``predicted``."""

    label: int
    predicted: int
    count: int

    @property
    def is_right(self) -> bool:
        return self.label == self.predicted


@dataclass(frozen=True)
class Answers:
    """``logits`` float32 (n, classes) on the CPU for images of the classes ``labels`` int64 (n,)."""

    logits: torch.Tensor
    labels: torch.Tensor

    @cached_property
    def truth(self) -> np.ndarray:
        """The labels for NumPy, int64 (n,)."""
        return self.labels.numpy()

    @cached_property
    def finite(self) -> torch.Tensor:
        """bool (n,): whether all logits of an image are numbers, neither NaN nor infinite."""
        return self.logits.isfinite().all(1)

    @cached_property
    def predicted(self) -> np.ndarray:
        """int64 (n,): the class with the largest logit, the first of equal ones; ``NO_CLASS`` if any is NaN."""
        return np.where(self.logits.isnan().any(1).numpy(), NO_CLASS, self.logits.numpy().argmax(1))

    @cached_property
    def right(self) -> np.ndarray:
        """bool (n,)."""
        return self.predicted == self.truth

    @property
    def top1(self) -> float:
        """Right answers in percent."""
        return 100 * float(self.right.mean())

    @cached_property
    def rank(self) -> np.ndarray:
        """int64 (n,): how many classes come before the image's own, 0 if the answer is right."""
        return target_rank(self.logits, self.labels).numpy()

    @cached_property
    def log_total(self) -> torch.Tensor:
        """The logarithm of the sum of exponentials of each image's logits, float64 (n,)."""
        rows = max(1, 2**22 // self.logits.shape[1])  # float64 copies of all would fill the memory
        return torch.cat([part.double().logsumexp(1) for part in self.logits.split(rows)])

    @cached_property
    def confidence(self) -> np.ndarray:
        """float64 (n,): the probability of the predicted class."""
        return (self.logits.max(1).values.double() - self.log_total).exp().numpy()

    @cached_property
    def label_probability(self) -> np.ndarray:
        """float64 (n,): the probability that the network gives the image's own class."""
        own = self.logits.gather(1, self.labels[:, None])[:, 0]
        return (own.double() - self.log_total).exp().numpy()

    def most_likely(self, image: int, most: int) -> list[tuple[int, float]]:
        """The ``most`` likeliest classes of an image with their probabilities, in order."""
        logits, places = self.logits[image].sort(descending=True, stable=True)
        shares = (logits[:most].double() - self.log_total[image]).exp()
        return list(zip(places[:most].tolist(), shares.tolist(), strict=True))

    def explained(self, image: int) -> int:
        """The class that a heat map of an image explains."""
        return int(self.predicted[image])

    def most_confident(self, chosen: np.ndarray) -> np.ndarray:
        """The ``chosen`` images, int64 (m,), those with the highest confidence first."""
        return chosen[np.argsort(-self.confidence[chosen], kind="stable")]

    def least_confident(self, chosen: np.ndarray) -> np.ndarray:
        """The ``chosen`` images, int64 (m,), those with the lowest confidence first."""
        return chosen[np.argsort(self.confidence[chosen], kind="stable")]

    @cached_property
    def by_class(self) -> ClassReport:
        """Metrics of the classes, and the reliability of the confidences."""
        return ClassReport.of(self.logits, self.labels)

    @cached_property
    def cells(self) -> list[Cell]:
        """The confusion matrix's cells that are not empty, the mistakes first, the fullest of each first."""
        classes = self.logits.shape[1]
        answered = self.predicted != NO_CLASS
        place, counts = np.unique(self.truth[answered] * classes + self.predicted[answered], return_counts=True)
        cells = map(Cell, (place // classes).tolist(), (place % classes).tolist(), counts.tolist())
        return sorted(cells, key=lambda cell: (cell.is_right, -cell.count, cell.label, cell.predicted))

    @cached_property
    def confusions(self) -> list[Cell]:
        """Pairs of classes that are taken for each other, the most frequent first."""
        return [cell for cell in self.cells if not cell.is_right]

    def images_of(self, cell: Cell) -> np.ndarray:
        """The images in a cell, the most confident mistakes or the least confident hits first: int64 (count,)."""
        found = np.flatnonzero((self.truth == cell.label) & (self.predicted == cell.predicted))
        return self.least_confident(found) if cell.is_right else self.most_confident(found)

    def order_by_confusion(self) -> list[int]:
        """The classes so that those which are often mistaken for each other stand together.

        The leaves of an average-linkage clustering, whose distance is the share of both classes' images that are not
        mistaken for the other one. With very many classes, the order that they have.
        """
        classes = self.logits.shape[1]
        if not 2 < classes <= ORDERED_CLASSES:
            return list(range(classes))
        from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering
        from scipy.spatial.distance import squareform

        mixed = np.zeros((classes, classes))
        for label, predicted, count in self.cells:
            mixed[label, predicted] = count / self.by_class.support[label]
        distance = 1 - np.clip((mixed + mixed.T) / 2, 0, 1)
        np.fill_diagonal(distance, 0)
        condensed = squareform(distance, checks=False)
        tree = linkage(condensed, "average")
        if classes <= 200:  # grows with the cube
            tree = optimal_leaf_ordering(tree, condensed)
        return leaves_list(tree).tolist()


def bootstrap_interval(hits: int, count: int) -> tuple[float, float]:
    """The percentile bootstrap's 95 % interval of ``hits`` of ``count``, in percent.

    Of ``count`` images drawn with replacement, the number that is right is binomial: its quantiles are the limits that
    any number of resamples tends to, so none is drawn. (Efron and Tibshirani, An introduction to the bootstrap, 1993.)
    """
    from scipy.stats import binom

    tail = (1 - CONFIDENCE) / 2
    low, high = binom.ppf([tail, 1 - tail], count, hits / count)
    return 100 * float(low) / count, 100 * float(high) / count


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of ``hits`` of ``count``, in percent; unlike the bootstrap's, also where all are right."""
    from scipy.stats import binomtest

    interval = binomtest(hits, count).proportion_ci(CONFIDENCE, method="wilson")
    return 100 * float(interval.low), 100 * float(interval.high)
