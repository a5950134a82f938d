"""Distance of an image's features from those of the training images, and how well it tells foreign images apart."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from models.confidence import Distance
from scripts.common.predictions import Predictions
from utils.config.settings import UserError

MOST_FITTED = 50_000  # training images, drawn at random
LARGEST = 128 * 2**20  # largest size in bytes of a distance kept in a checkpoint
# Relative to the largest variance: less is rounding, or an unused feature.
LEAST_VARIANCE = torch.finfo(torch.float32).eps
TRUE_POSITIVE_RATE = 0.95


def fit_distance(features: torch.Tensor, labels: torch.Tensor) -> Distance:
    """Fit the Mahalanobis ``Distance``, given the training images' ``features`` (n, d) and ``labels`` (n,).

    The covariance is that of all images around their class means, divided by n; directions without variance are left
    out. A class without images has no mean, so no image is near it. Multi-label images, with ``labels`` (n, classes),
    are not in separate classes: all share one mean. Raises ``UserError`` if the features do not vary.
    """
    finite = features.isfinite().all(1)
    values = features[finite].double()
    one = labels if labels.ndim == 1 else torch.zeros(len(labels), dtype=torch.int64)
    _, groups, counts = one[finite].unique(return_inverse=True, return_counts=True)
    mean = values.mean(0).float()  # as the checkpoint stores it
    values = values - mean.double()
    centres = torch.zeros(len(counts), values.shape[1], dtype=torch.float64).index_add_(0, groups, values)
    centres /= counts[:, None]
    around = values - centres[groups]
    variances, directions = torch.linalg.eigh(around.T @ around / max(1, len(around)))
    kept = variances > LEAST_VARIANCE * variances.amax()
    if not kept.any():
        raise UserError("--distance: the features of training images of one class are all the same")
    whitening = (directions[:, kept] / variances[kept].sqrt()).float()
    return Distance(mean, whitening, (centres @ whitening.double()).float(), len(values), math.nan)


class Separation(NamedTuple):
    """How well a score tells the data set's own images from others, in percent.

    ``auroc``: probability that an own image is scored above another image. ``false_positives``: share of the others
    accepted at the threshold that accepts 95 % of the own images, or the next larger share that a threshold can accept.
    """

    auroc: float
    false_positives: float

    @classmethod
    def of(cls, own: np.ndarray, others: np.ndarray) -> Separation:
        """Measure how well scores, higher for own images, tell own from other images.

        ``own`` and ``others``: the scores of both, float (n,) and (m,). NaN counts as the lowest score.
        """
        from sklearn.metrics import roc_auc_score, roc_curve

        scores = np.concatenate([own, others])
        known = np.unique(scores[~np.isnan(scores)])
        ranks = np.where(np.isnan(scores), -1, np.searchsorted(known, scores))  # scikit-learn accepts no infinity
        is_own = np.arange(len(scores)) < len(own)
        false, true, _ = roc_curve(is_own, ranks, drop_intermediate=False)
        at_rate = int(np.argmax(true >= TRUE_POSITIVE_RATE))
        return cls(100 * float(roc_auc_score(is_own, ranks)), 100 * float(false[at_rate]))


class Others(NamedTuple):
    """Images of ``folder``, which belong to no class, beside the data set's own.

    ``distances`` and ``confidences``: scores of the own and of the other images, float (n,) and (m,).
    ``own_are_fitted_on``: how many of the own images are among those that the distance was fitted on.
    """

    folder: str
    distance: Distance
    distances: tuple[np.ndarray, np.ndarray]
    confidences: tuple[np.ndarray, np.ndarray]
    own_are_fitted_on: int

    @classmethod
    def of(cls, folder: str, distance: Distance, own: Predictions, others: Predictions, fitted: int) -> Others:
        both = (own, others)
        distances = tuple(distance(one.features).numpy() for one in both)
        return cls(folder, distance, distances, tuple(one.confidence for one in both), fitted)

    @property
    def separations(self) -> dict[str, Separation]:
        """How well a score tells the own from the other images, by the score's name: 'distance' or 'confidence'."""
        farther, confidences = self.distances, self.confidences
        return {"distance": Separation.of(-farther[0], -farther[1]), "confidence": Separation.of(*confidences)}

    def figures(self) -> dict[str, Any]:
        """Results as plain values, for JSON."""
        own, others = self.distances
        return {
            "folder": self.folder,
            "images": len(others),
            "own_images": len(own),
            "distance_fitted_on": self.distance.fitted_on,
            "distance_of_95_percent": self.distance.usual,
            **{name: one._asdict() for name, one in self.separations.items()},
        }
