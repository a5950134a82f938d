"""The figures of a network's answers: overall, per class, and which classes it takes for which.

scikit-learn computes them; top-1, top-5, loss and calibration error are those of the product's validation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import binom, binomtest
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, precision_recall_fscore_support

from scripts.common.predictions import Predictions
from utils.record.metrics import target_rank

NO_CLASS = -1  # predicted where a logit is NaN: such an answer is wrong
CONFIDENCE = 0.95  # of the intervals
LARGEST_MATRIX = 2000  # classes: 4 million cells


class Confusion(NamedTuple):
    """``count`` images of class ``label`` are taken for class ``predicted``; ``share`` of the class, in percent."""

    label: int
    predicted: int
    count: int
    share: float


@dataclass(frozen=True)
class Figures:
    """What n answers come to. Shares and probabilities of a class are in percent, those of an image between 0 and 1."""

    predictions: Predictions

    # ------------------------------------------------------------------------------------- of an image

    @cached_property
    def labels(self) -> np.ndarray:
        """int64 (n,)."""
        return self.predictions.labels.numpy()

    @cached_property
    def predicted(self) -> np.ndarray:
        """int64 (n,): the class with the largest logit, the first of equal ones; ``NO_CLASS`` if any is NaN."""
        logits = self.predictions.logits
        return torch.where(logits.isnan().any(1), NO_CLASS, logits.argmax(1)).numpy()

    @cached_property
    def right(self) -> np.ndarray:
        """bool (n,)."""
        return self.predicted == self.labels

    @cached_property
    def confidence(self) -> np.ndarray:
        """float32 (n,): the probability of the predicted class."""
        logits = self.predictions.logits
        return (logits.max(1).values - logits.logsumexp(1)).exp().numpy()

    @cached_property
    def label_probability(self) -> np.ndarray:
        """float32 (n,): the probability that the network gives the image's own class."""
        logits = self.predictions.logits
        own = logits.gather(1, self.predictions.labels[:, None])[:, 0]
        return (own - logits.logsumexp(1)).exp().numpy()

    @cached_property
    def rank(self) -> np.ndarray:
        """int64 (n,): how many classes come before the image's own, 0 if the answer is right."""
        return target_rank(self.predictions.logits, self.predictions.labels).numpy()

    # -------------------------------------------------------------------------------------- of a class

    @cached_property
    def by_class(self) -> list[dict[str, Any]]:
        """A row per class, in order: its name, counts, and figures in percent; recall is None without images."""
        names = self.predictions.classes
        every = np.arange(len(names))
        precision, recall, f1, support = precision_recall_fscore_support(
            self.labels, self.predicted, labels=every, zero_division=0
        )
        predicted = np.bincount(self.predicted[self.predicted != NO_CLASS], minlength=len(names))
        right = np.bincount(self.labels[self.right], minlength=len(names))
        return [
            {
                "class": name,
                "images": int(support[n]),
                "predicted": int(predicted[n]),
                "right": int(right[n]),
                "precision": 100 * float(precision[n]),
                "recall": 100 * float(recall[n]) if support[n] else None,
                "f1": 100 * float(f1[n]),
            }
            for n, name in enumerate(names)
        ]

    @cached_property
    def matrix(self) -> np.ndarray | None:
        """int64 (classes, classes): images of the row's class taken for the column's; None if it would be too large."""
        classes = len(self.predictions.classes)
        if classes > LARGEST_MATRIX:
            return None
        return confusion_matrix(self.labels, self.predicted, labels=np.arange(classes))

    @cached_property
    def confusions(self) -> list[Confusion]:
        """Pairs of classes that are taken for each other, the most frequent first."""
        classes = len(self.predictions.classes)
        wrong = ~self.right & (self.predicted != NO_CLASS)
        pairs, counts = np.unique(self.labels[wrong] * classes + self.predicted[wrong], return_counts=True)
        support = np.bincount(self.labels, minlength=classes)
        order = np.argsort(-counts, kind="stable")
        return [
            Confusion(label, predicted, count, 100 * count / int(support[label]))
            for label, predicted, count in zip(
                (pairs[order] // classes).tolist(),
                (pairs[order] % classes).tolist(),
                counts[order].tolist(),
                strict=True,
            )
        ]

    # ----------------------------------------------------------------------------------------- overall

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The figures of all images, in percent but for counts and loss."""
        report = self.predictions.report
        present = sorted({*self.labels.tolist(), *self.predicted.tolist()} - {NO_CLASS})
        macro = precision_recall_fscore_support(
            self.labels, self.predicted, labels=present, average="macro", zero_division=0
        )
        return {
            "images": report.count,
            "top1": report.top1,
            "top1_interval_bootstrap": bootstrap_interval(int(self.right.sum()), report.count),
            "top1_interval_wilson": wilson_interval(int(self.right.sum()), report.count),
            "top5": report.top5,
            "loss": report.loss,
            "macro_precision": 100 * float(macro[0]),
            "macro_recall": 100 * float(macro[1]),
            "macro_f1": 100 * float(macro[2]),
            "balanced_accuracy": 100 * _balanced_accuracy(self.labels, self.predicted),
            "calibration_error": report.by_class.ece,
            "not_a_number": int((self.predicted == NO_CLASS).sum()),
            "infinite": int((~self.predictions.finite).sum() - (self.predicted == NO_CLASS).sum()),
        }


def _balanced_accuracy(labels: np.ndarray, predicted: np.ndarray) -> float:
    """The mean recall of the classes that have images."""
    import warnings

    with warnings.catch_warnings():  # that some predicted classes have no image
        warnings.simplefilter("ignore", UserWarning)
        return float(balanced_accuracy_score(labels, predicted))


def bootstrap_interval(hits: int, count: int) -> tuple[float, float]:
    """The percentile bootstrap's 95 % interval of ``hits`` of ``count``, in percent.

    Of ``count`` images drawn with replacement, the number that is right is binomial: its quantiles are the limits that
    any number of resamples tends to, so none is drawn. (Efron and Tibshirani, An introduction to the bootstrap, 1993.)
    """
    tail = (1 - CONFIDENCE) / 2
    low, high = binom.ppf([tail, 1 - tail], count, hits / count)
    return 100 * float(low) / count, 100 * float(high) / count


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of ``hits`` of ``count``, in percent; unlike the bootstrap's, also where all are right."""
    interval = binomtest(hits, count).proportion_ci(CONFIDENCE, method="wilson")
    return 100 * float(interval.low), 100 * float(interval.high)
