"""A logistic probe on features, its strength chosen by folds, and the labels that it doubts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # scikit-learn's C: the larger, the less regularised
FOLDS = 5
SEED = 0  # of the folds
ITERATIONS = 300
MOST = 10_000  # images on which the strength is chosen, drawn at random


@dataclass(frozen=True)
class Probe:
    """A logistic regression on standardised features.

    ``accuracies``: mean over the folds in percent, by strength. ``out_of_fold``: float64 (n, classes), probabilities of
    the images it is fitted on, each from the fold that left it out.
    """

    strength: float
    accuracies: dict[float, float]
    folds: int
    chosen_on: int
    out_of_fold: np.ndarray
    pipeline: Any
    classes: int

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """float64 (n, classes); 0 for a class that it has not seen."""
        return _of_all_classes(self.pipeline, features, self.classes)

    @property
    def at_limit(self) -> bool:
        """The strength is the first or last of those tried, so that one beyond might do better."""
        return self.strength in (STRENGTHS[0], STRENGTHS[-1])


def fit_probe(features: np.ndarray, labels: np.ndarray, classes: int) -> Probe:
    """Fit on ``features`` float32 (n, d) and ``labels`` int64 (n,), the training part alone.

    The strength is that of the highest mean accuracy in stratified folds, of equal ones the smallest. Each fold
    standardises by its own training part.
    """
    from sklearn.pipeline import make_pipeline
    from threadpoolctl import threadpool_limits

    with warnings.catch_warnings(), threadpool_limits(1):  # of products so small, threads wait more than they compute
        warnings.filterwarnings("ignore", message="lbfgs failed to converge")  # without a penalty there is no minimum
        warnings.filterwarnings("ignore", message="The least populated class")
        features = features.astype(np.float64)
        chosen = np.sort(np.random.default_rng(SEED).permutation(len(labels))[:MOST])
        shares, accuracies, folds = _left_out(features[chosen], labels[chosen], classes, STRENGTHS)
        strength = max(STRENGTHS, key=lambda one: accuracies[one])  # of equal ones the first
        out_of_fold = shares[strength]
        if len(chosen) < len(labels):
            out_of_fold = _left_out(features, labels, classes, [strength])[0][strength]
        scaler, regression = _scaler_and_regression()
        pipeline = make_pipeline(scaler, regression.set_params(C=strength)).fit(features, labels)
    return Probe(strength, accuracies, folds, len(chosen), out_of_fold, pipeline, classes)


def _left_out(
    features: np.ndarray, labels: np.ndarray, classes: int, strengths: Sequence[float]
) -> tuple[dict[float, np.ndarray], dict[float, float], int]:
    """By strength: probabilities of each image by the fold that left it out, and the folds' mean accuracy in percent.

    Also the number of folds: five, or as many as the largest class has images.
    """
    from sklearn.model_selection import StratifiedKFold

    folds = StratifiedKFold(max(2, min(FOLDS, np.bincount(labels).max())), shuffle=True, random_state=SEED)
    shares = {strength: np.zeros((len(labels), classes)) for strength in strengths}
    rates: dict[float, list[float]] = {strength: [] for strength in strengths}
    for fitted, left_out in folds.split(features, labels):
        scaler, regression = _scaler_and_regression()
        known = scaler.fit_transform(features[fitted])
        unknown = scaler.transform(features[left_out])
        for strength in strengths:  # each begins with the weights of the one before
            regression.set_params(C=strength).fit(known, labels[fitted])
            shares[strength][left_out] = _of_all_classes(regression, unknown, classes)
            rates[strength].append((shares[strength][left_out].argmax(1) == labels[left_out]).mean())
    means = {strength: 100 * float(np.mean(of_folds)) for strength, of_folds in rates.items()}
    return shares, means, folds.n_splits


def _scaler_and_regression() -> tuple[StandardScaler, LogisticRegression]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    return StandardScaler(), LogisticRegression(max_iter=ITERATIONS, warm_start=True)


def _of_all_classes(probe: Any, features: np.ndarray, classes: int) -> np.ndarray:
    shares = np.zeros((len(features), classes))
    shares[:, probe.classes_] = probe.predict_proba(features)
    return shares


class Doubted(NamedTuple):
    """Images whose label is doubted, the most doubtful first: places int64 (m,), likely classes int64 (m,).

    ``confident``: bool (m,), in the confident joint, too.
    """

    places: np.ndarray
    likely: np.ndarray
    confident: np.ndarray


def doubted(shares: np.ndarray, labels: np.ndarray) -> Doubted:
    """Images for which probabilities ``shares`` (n, classes), made without them, favour another class than their label.

    In order of the label's probability less the largest. These are methods of Northcutt, Jiang and Chuang, Confident
    learning, 2021: the list is theirs by confusion; in the confident joint is an image whose likeliest class, of those
    that reach their mean probability over the images with that label, is not its own label. It misses some wrong
    labels, and fewer of those that it has are right.
    """
    rows = np.arange(len(labels))
    own = shares[rows, labels]
    counts = np.bincount(labels, minlength=shares.shape[1])
    sums = np.bincount(labels, weights=own, minlength=shares.shape[1])
    threshold = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)
    reaching = np.where(shares >= threshold, shares, -1)
    confident = (reaching.max(1) >= 0) & (reaching.argmax(1) != labels)
    likely = shares.argmax(1)
    places = np.flatnonzero(likely != labels)
    places = places[np.argsort(own[places] - shares.max(1)[places], kind="stable")]
    return Doubted(places, likely[places], confident[places])
