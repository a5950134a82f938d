"""Answers that are accepted by their confidence: how many they are and how often right, for one threshold and for all.

One threshold for all classes: if probabilities are calibrated, no other rule that rejects as many is right more often
(Chow, On optimum recognition error and reject tradeoff, 1970), and thresholds of single classes would be chosen on few
images each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from scripts.common.answers import Answers, wilson_interval
from scripts.common.trained import accepted


class Curve(NamedTuple):
    """Coverage and accuracy, both float64 (k,), with each of the k confidences as the threshold, the highest first.

    ``aurc``: area under the curve of risk, the share of wrong answers among the accepted, over coverage: its mean over
    the n most confident for each n (Geifman et al., Bias-reduced uncertainty estimation for deep neural classifiers,
    2019). Equal confidences count as in the mean over all their orders. ``perfect`` is that of an order with all right
    answers first, ``random`` of one by chance.
    """

    coverage: np.ndarray
    accuracy: np.ndarray
    aurc: float
    perfect: float
    random: float

    @classmethod
    def of(cls, confidence: np.ndarray, right: np.ndarray) -> Curve:
        """The curve of each image's confidence, float (n,), and whether its answer is right, bool (n,); NaN is last."""
        _, group, sizes = np.unique(-np.nan_to_num(confidence, nan=-1), return_inverse=True, return_counts=True)
        wrong = np.bincount(group, ~right)
        number = np.arange(1, len(right) + 1)
        risks = np.cumsum(np.repeat(wrong / sizes, sizes)) / number
        mistakes = int((~right).sum())
        perfect = np.maximum(0, number - (len(right) - mistakes)) / number
        reached = sizes.cumsum()
        return cls(
            reached / len(right),
            1 - wrong.cumsum() / reached,
            float(risks.mean()),
            float(perfect.mean()),
            mistakes / len(right),
        )


class Rejection(NamedTuple):
    """Outcome of --reject-below ``below``: so many of ``images`` accepted, ``right`` of them rightly answered."""

    below: float
    images: int
    accepted: int
    right: int
    curve: Curve

    @classmethod
    def of(cls, answers: Answers, below: float) -> Rejection:
        taken = accepted(answers.confidence, below)
        counts = (len(taken), int(taken.sum()), int(answers.right[taken].sum()))
        return cls(below, *counts, Curve.of(answers.confidence, answers.right))

    def figures(self) -> dict[str, Any]:
        """Figures for JSON, in percent but for counts and AURC; those of no image are None."""
        some = self.accepted > 0
        return {
            "below": self.below,
            "images": self.images,
            "accepted": self.accepted,
            "right": self.right,
            "coverage": 100 * self.accepted / self.images,
            "coverage_interval_wilson": wilson_interval(self.accepted, self.images),
            "accuracy": 100 * self.right / self.accepted if some else None,
            "accuracy_interval_wilson": wilson_interval(self.right, self.accepted) if some else None,
            "aurc": self.curve.aurc,
            "aurc_perfect": self.curve.perfect,
            "aurc_random": self.curve.random,
        }
