"""A network's answers, image by image: right or wrong, how confident, which classes it confuses.

Metrics over all images are those of validation (``utils/record/metrics.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from utils.record.metrics import ClassReport, target_rank

FIGURES = {"top1": "top-1", "top5": "top-5", "map": "mAP", "macro_f1": "macro F1", "micro_f1": "micro F1"}  # for users
NO_CLASS = -1  # predicted if a logit is NaN: such an answer is wrong
ORDERED_CLASSES = 1500  # clustering more would take more than seconds


class Cell(NamedTuple):
    """A cell of the confusion matrix: ``count`` images of class ``label`` were predicted as class ``predicted``."""

    label: int
    predicted: int
    count: int

    @property
    def is_right(self) -> bool:
        return self.label == self.predicted


@dataclass(frozen=True)
class Answered:
    """``logits``, float32 (n, classes) on the CPU, and ``labels`` of n images."""

    logits: torch.Tensor
    labels: torch.Tensor

    @property
    def groups(self) -> np.ndarray | None:
        """Group of each image, str (n,); None if the images are independent."""
        return None

    @cached_property
    def finite(self) -> torch.Tensor:
        """Whether all logits of an image are finite, neither NaN nor infinite: bool (n,)."""
        return self.logits.isfinite().all(1)


class Answers(Answered):
    """Answers with one label per image: ``labels`` are int64 (n,)."""

    @cached_property
    def truth(self) -> np.ndarray:
        """Labels as a NumPy array, int64 (n,)."""
        return self.labels.numpy()

    @cached_property
    def predicted(self) -> np.ndarray:
        """Class with the largest logit, the first if several are equal; ``NO_CLASS`` if any is NaN: int64 (n,)."""
        return np.where(self.logits.isnan().any(1).numpy(), NO_CLASS, self.logits.numpy().argmax(1))

    @cached_property
    def right(self) -> np.ndarray:
        """Whether each answer is right: bool (n,)."""
        return self.predicted == self.truth

    @property
    def top1(self) -> float:
        """Percentage of right answers."""
        return 100 * float(self.right.mean())

    @cached_property
    def rank(self) -> np.ndarray:
        """Number of classes ranked before the image's own, 0 if the answer is right: int64 (n,)."""
        return target_rank(self.logits, self.labels).numpy()

    @cached_property
    def log_total(self) -> torch.Tensor:
        """Logarithm of the sum of the exponentials of each image's logits, float64 (n,)."""
        rows = max(1, 2**22 // self.logits.shape[1])  # a float64 copy of all logits would fill the memory
        return torch.cat([part.double().logsumexp(1) for part in self.logits.split(rows)])

    @cached_property
    def confidence(self) -> np.ndarray:
        """Probability of the predicted class, float64 (n,)."""
        return (self.logits.max(1).values.double() - self.log_total).exp().numpy()

    @cached_property
    def label_probability(self) -> np.ndarray:
        """Probability that the network gives the image's own class, float64 (n,)."""
        own = self.logits.gather(1, self.labels[:, None])[:, 0]
        return (own.double() - self.log_total).exp().numpy()

    def explained(self, image: int) -> int:
        """The class that an image's heat map explains: the predicted one."""
        return int(self.predicted[image])

    def most_confident(self, chosen: np.ndarray) -> np.ndarray:
        """The ``chosen`` images, int64 (m,), sorted by falling confidence."""
        return chosen[np.argsort(-self.confidence[chosen], kind="stable")]

    def least_confident(self, chosen: np.ndarray) -> np.ndarray:
        """The ``chosen`` images, int64 (m,), sorted by rising confidence."""
        return chosen[np.argsort(self.confidence[chosen], kind="stable")]

    @cached_property
    def by_class(self) -> ClassReport:
        """Metrics by class, and the reliability of the confidences."""
        return ClassReport.of(self.logits, self.labels)

    @cached_property
    def cells(self) -> list[Cell]:
        """Non-empty cells of the confusion matrix: mistakes before hits, each by falling count."""
        classes = self.logits.shape[1]
        answered = self.predicted != NO_CLASS
        place, counts = np.unique(self.truth[answered] * classes + self.predicted[answered], return_counts=True)
        cells = map(Cell, (place // classes).tolist(), (place % classes).tolist(), counts.tolist())
        return sorted(cells, key=lambda cell: (cell.is_right, -cell.count, cell.label, cell.predicted))

    @cached_property
    def confusions(self) -> list[Cell]:
        """Cells of the mistakes, most frequent first."""
        return [cell for cell in self.cells if not cell.is_right]

    def images_of(self, cell: Cell) -> np.ndarray:
        """Images in a cell, int64 (count,): the most confident mistakes, or the least confident hits, first."""
        found = np.flatnonzero((self.truth == cell.label) & (self.predicted == cell.predicted))
        return self.least_confident(found) if cell.is_right else self.most_confident(found)

    def matrix(self) -> np.ndarray:
        """Numbers of images of the row's class predicted as the column's: int64 (classes, classes)."""
        classes = self.logits.shape[1]
        matrix = np.zeros((classes, classes), dtype=np.int64)
        for label, predicted, count in self.cells:
            matrix[label, predicted] = count
        return matrix

    def order_by_confusion(self) -> list[int]:
        """Order of the classes that puts classes often mistaken for each other side by side.

        Leaves of an average-linkage clustering; the distance of two classes is the share of their images that are not
        mistaken for the other class. Beyond ``ORDERED_CLASSES``, the classes keep their order.
        """
        classes = self.logits.shape[1]
        if not 2 < classes <= ORDERED_CLASSES:
            return list(range(classes))
        from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering
        from scipy.spatial.distance import squareform

        mixed = self.matrix() / np.maximum(self.by_class.support, 1)[:, None]
        distance = 1 - np.clip((mixed + mixed.T) / 2, 0, 1)
        np.fill_diagonal(distance, 0)
        condensed = squareform(distance, checks=False)
        tree = linkage(condensed, "average")
        if classes <= 200:  # the time grows with the cube
            tree = optimal_leaf_ordering(tree, condensed)
        return leaves_list(tree).tolist()
