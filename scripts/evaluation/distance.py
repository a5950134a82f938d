"""Distances of features from those of the training images, and how well they tell other images from the data set's."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from models.confidence import Distance
from scripts.common.predictions import Predictions
from utils.config.settings import UserError

MOST_FITTED = 50_000  # training images, drawn at random
LARGEST = 128 * 2**20  # bytes of a distance that a checkpoint keeps
LEAST_VARIANCE = float(
    torch.finfo(torch.float32).eps
)  # of the largest: less is rounding, or a feature that is not used
TRUE_POSITIVE_RATE = 0.95


def fit_distance(features: torch.Tensor, labels: torch.Tensor) -> Distance:
    """The distance of training images with these ``features`` (n, d), of the classes ``labels`` (n,).

    The covariance is that of all images around the means of their classes, divided by n, inverted where it is not 0. A
    class without images has no mean, and no image is near it. Images with several labels, ``labels`` (n, classes), are
    in no class apart from others: all have one mean. Raises ``UserError`` if the features do not vary.
    """
    finite = features.isfinite().all(1)
    values = features[finite].double()
    one = labels if labels.ndim == 1 else torch.zeros(len(labels), dtype=torch.int64)
    _, groups, counts = one[finite].unique(return_inverse=True, return_counts=True)
    mean = values.mean(0).float()  # as it is kept
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
    """Success of a score in telling the data set's own images from others, in percent.

    ``auroc``: the chance that an image of the set is scored above one of the others. ``false_positives``: the share of
    the others that is taken for the set's at the threshold which takes 95 % of the set's, or the next more, for such.
    """

    auroc: float
    false_positives: float

    @classmethod
    def of(cls, own: np.ndarray, others: np.ndarray) -> Separation:
        """The separation by scores, float (n,) and (m,), higher for the set's own; the lowest where they are NaN."""
        from sklearn.metrics import roc_auc_score, roc_curve

        scores = np.concatenate([own, others])
        known = np.unique(scores[~np.isnan(scores)])
        ranks = np.where(np.isnan(scores), -1, np.searchsorted(known, scores))  # scikit-learn takes no infinity
        is_own = np.arange(len(scores)) < len(own)
        false, true, _ = roc_curve(is_own, ranks, drop_intermediate=False)
        at_rate = int(np.argmax(true >= TRUE_POSITIVE_RATE))
        return cls(100 * float(roc_auc_score(is_own, ranks)), 100 * float(false[at_rate]))


class Others(NamedTuple):
    """The images of ``folder``, which are of no class, beside the set's own. Scores are float (n,), own and others.

    ``own_are_fitted_on``: so many of the set's own are among the images that the distance is fitted on.
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
        """Separations by score."""
        farther, confidences = self.distances, self.confidences
        return {"distance": Separation.of(-farther[0], -farther[1]), "confidence": Separation.of(*confidences)}

    def figures(self) -> dict[str, Any]:
        """Figures for JSON."""
        own, others = self.distances
        return {
            "folder": self.folder,
            "images": len(others),
            "own_images": len(own),
            "distance_fitted_on": self.distance.fitted_on,
            "distance_of_95_percent": self.distance.usual,
            **{name: one._asdict() for name, one in self.separations.items()},
        }
