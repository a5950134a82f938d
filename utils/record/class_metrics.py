"""Metrics of each class, and the calibration error: whole numbers summed on the device, divided once on the host.

Three counts a class instead of a confusion matrix: 24 bytes a class, where the matrix of ImageNet-21k would take
3.8 GB, and all that precision, recall and F1 need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

BINS = 15  # of the calibration error, as in Guo et al.
NOT_A_NUMBER = BINS  # the bin of confidences that are NaN
UNIT = 2**36  # of a confidence of 1: sums of whole numbers are exact in any order, for up to 2**27 images


@dataclass(frozen=True)
class ClassReport:
    """Counts of n samples in ``classes`` classes, int64 (classes,) each, and figures of them in percent.

    ``support``: samples of the class. ``predicted``: those that the network takes for it. ``right``: both.
    The macro averages are scikit-learn's with ``zero_division=0``: they leave out a class that has neither samples nor
    predictions; one that is only predicted counts with 0. Balanced accuracy leaves out all classes without samples.
    ``ece``: the expected calibration error (Guo et al., On calibration of modern neural networks, 2017): the mean over
    samples of how far confidence and accuracy of their bin are apart, in 15 bins of equal width, each without its
    lower and with its upper end. NaN if any confidence is.
    """

    support: np.ndarray
    predicted: np.ndarray
    right: np.ndarray
    ece: float

    @classmethod
    def from_sums(cls, sums: torch.Tensor) -> ClassReport | None:
        """From ``ValidationMeter.class_sums``, added up over ranks; None of no sample."""
        numbers = sums.cpu().numpy()
        classes, bins = np.split(numbers, [len(numbers) - 3 * (BINS + 1)])
        return cls(*classes.reshape(3, -1), _ece(*bins.reshape(3, -1))) if classes.any() else None

    @cached_property
    def accuracy(self) -> np.ndarray:
        """Of each class (its recall), in percent: float64 (classes,), NaN where it has no samples."""
        return 100 * _ratio(self.right, self.support, math.nan)

    @cached_property
    def precision(self) -> np.ndarray:
        """Of each class, in percent: float64 (classes,), 0 where it is never predicted."""
        return 100 * _ratio(self.right, self.predicted)

    @cached_property
    def f1(self) -> np.ndarray:
        """Of each class, in percent: float64 (classes,), 0 where it has neither samples nor predictions."""
        return 100 * _ratio(2 * self.right, self.support + self.predicted)

    @property
    def macro_precision(self) -> float:
        return self._macro(self.precision)

    @property
    def macro_recall(self) -> float:
        return self._macro(np.nan_to_num(self.accuracy))

    @property
    def macro_f1(self) -> float:
        return self._macro(self.f1)

    @property
    def balanced_accuracy(self) -> float:
        return float(self.accuracy[self.support > 0].mean())

    @cached_property
    def guessing_loss(self) -> float:
        """The cross entropy of a guess that knows the classes' shares of the samples alone: their entropy, in nats."""
        shares = self.support[self.support > 0] / self.support.sum()
        return float(-(shares * np.log(shares)).sum()) + 0.0  # never -0

    @cached_property
    def answers_nats(self) -> float:
        """What the answers tell of the class, in nats a sample (see ``nats_of``)."""
        return nats_of(self.support, self.right)

    @property
    def commonest_answer(self) -> float:
        """Samples that the network takes for the class that it takes most of them for, in percent."""
        return float(100 * self.predicted.max() / self.support.sum())

    def _macro(self, values: np.ndarray) -> float:
        return float(values[self.support + self.predicted > 0].mean())

    def rows(self, names: Sequence[str]) -> Iterator[dict[str, str | int | float]]:
        """A row per class, in order: what ``class_metrics.csv`` holds."""
        for number, name in enumerate(names):
            yield {
                "class": name,
                "val_count": int(self.support[number]),
                "val_predicted": int(self.predicted[number]),
                "val_accuracy": float(self.accuracy[number]),
                "val_precision": float(self.precision[number]),
                "val_f1": float(self.f1[number]),
            }

    def __str__(self) -> str:
        return (
            f"macro precision {self.macro_precision:.2f}  macro recall {self.macro_recall:.2f}  "
            f"macro F1 {self.macro_f1:.2f}  balanced accuracy {self.balanced_accuracy:.2f}  "
            f"calibration error {self.ece:.2f}"
        )


def nats_of(support: np.ndarray, right: np.ndarray) -> float:
    """What answers tell of the class, in nats an image, beyond what guessing by the classes' shares would.

    The counts, int64 (classes,), are those of ``ClassReport``. Given an answer, the class is assumed to be that one
    with a probability of s + (1 - s) times its share, any other with (1 - s) times its own; s, between 0 and 1, is what
    makes the labels likeliest. Nothing if s is 0: the answers are right no more often than by chance.
    """
    count = support.sum()
    known = right > 0
    hits = right[known].astype(float)
    gain = count / support[known] - 1.0
    wrong = float(count - right.sum())

    def slope(s: float) -> float:
        return float((hits * gain / (1 + s * gain)).sum()) - wrong / (1 - s)

    low = 0.0
    high = 1.0
    if slope(low) <= 0:
        return 0.0
    for _ in range(60):  # concave, so the slope falls; at 1 it is infinite where an answer is wrong
        middle = (low + high) / 2
        low, high = (middle, high) if middle < 1 and slope(middle) > 0 else (low, middle)
    lost = wrong * math.log1p(-low) if wrong else 0.0
    return (float((hits * np.log1p(low * gain)).sum()) + lost) / float(count)


def _ratio(part: np.ndarray, whole: np.ndarray, without: float = 0.0) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(whole), without), where=whole > 0)


def _ece(counts: np.ndarray, right: np.ndarray, confidence: np.ndarray) -> float:
    """In percent, of the sums in each bin; ``confidence`` in units of 1 / ``UNIT``."""
    if counts[NOT_A_NUMBER]:
        return math.nan
    return float(100 * np.abs(confidence / UNIT - right).sum() / counts.sum())
