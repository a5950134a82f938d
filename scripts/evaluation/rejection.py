"""Answers accepted by their confidence: how many, and how often right, for one threshold and for all.

There is one threshold for all classes: if probabilities are calibrated, no other rule that rejects as many answers is
right more often (Chow, On optimum recognition error and reject tradeoff, 1970), and a threshold for each class would be
chosen on few images.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from scripts.common.answers import Answers
from scripts.common.trained import accepted
from scripts.common.uncertainty import of_groups, wilson_interval


class Curve(NamedTuple):
    """Coverage and accuracy, float64 (k,) each, with each of the k distinct confidences as threshold, highest first.

    ``aurc``: area under the curve of risk (the share of wrong answers among the accepted) over coverage, which is the
    mean risk of the n most confident answers over all n (Geifman et al., Bias-reduced uncertainty estimation for deep
    neural classifiers, 2019). Equal confidences count as the mean over all their orders. ``perfect``: the same area if
    all right answers came first; ``random``: in random order.
    """

    coverage: np.ndarray
    accuracy: np.ndarray
    aurc: float
    perfect: float
    random: float

    @classmethod
    def of(cls, confidence: np.ndarray, right: np.ndarray) -> Curve:
        """Curve for each image's confidence, float (n,), and whether its answer is right, bool (n,); NaN comes last."""
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
    """Outcome of --reject-below ``below``: how many of ``images`` are ``accepted``, and of these answered ``right``.

    Wilson's intervals of both shares are in percent; that of the accuracy is None if no image is accepted. ``remarks``:
    of how many groups each interval is, as text.
    """

    below: float
    images: int
    accepted: int
    right: int
    coverage_interval: tuple[float, float]
    accuracy_interval: tuple[float, float] | None
    curve: Curve
    remarks: tuple[str, str] = ("", "")

    @classmethod
    def of(cls, answers: Answers, below: float) -> Rejection:
        taken = accepted(answers.confidence, below)
        right = answers.right[taken]
        groups = answers.groups
        of_accepted = None if groups is None else groups[taken]
        return cls(
            below,
            len(taken),
            len(right),
            int(right.sum()),
            wilson_interval(taken, groups),
            wilson_interval(right, of_accepted) if len(right) else None,
            Curve.of(answers.confidence, answers.right),
            (of_groups(groups), of_groups(of_accepted)),
        )

    def figures(self) -> dict[str, Any]:
        """Results for JSON, in percent except for counts and AURC; accuracy is None if no image is accepted."""
        return {
            "below": self.below,
            "images": self.images,
            "accepted": self.accepted,
            "right": self.right,
            "coverage": 100 * self.accepted / self.images,
            "coverage_interval_wilson": self.coverage_interval,
            "accuracy": 100 * self.right / self.accepted if self.accepted else None,
            "accuracy_interval_wilson": self.accuracy_interval,
            "aurc": self.curve.aurc,
            "aurc_perfect": self.curve.perfect,
            "aurc_random": self.curve.random,
        }
