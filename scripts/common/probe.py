"""Logistic probe on features: its strength, chosen by cross-validation, and the labels that it doubts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from utils.config.settings import UserError
from utils.data.formats.held_out import strata_of
from utils.record.multilabel import MultilabelClasses

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # scikit-learn's C: larger means less regularised
FOLDS = 5
SEED = 0  # seeds the folds
ITERATIONS = 300
MOST = 10_000  # images, drawn at random, on which the strength is chosen


@dataclass(frozen=True)
class Probe:
    """A logistic regression on standardised features; one for each label of multi-label data.

    ``strength``: C, the inverse of the regularisation. ``scores``: by strength, the mean over the folds of top-1
    (multi-label: mean average precision) in percent. ``out_of_fold``: float64 (n, classes), probabilities of the images
    fitted on, each from the fold that left it out.
    """

    strength: float
    scores: dict[float, float]
    folds: int
    chosen_on: int
    out_of_fold: np.ndarray
    scaler: StandardScaler
    regression: LogisticRegression | _OfEachLabel
    classes: int

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Probabilities, float64 (n, classes); 0 for a class not seen in fitting."""
        return _of_all_classes(self.regression, self.scaler.transform(features), self.classes)


def fit_probe(features: np.ndarray, labels: np.ndarray, classes: int, groups: np.ndarray | None = None) -> Probe:
    """Fit a ``Probe`` on training images: ``features``, float32 (n, d); ``labels``, int64 (n,) or int8 (n, classes).

    Chooses the strength with the highest mean score over stratified folds, the smallest if several are equally good.
    All images of a group in ``groups`` (n,) are in one fold. Features are standardised by the images that a fold trains
    on.
    """
    from threadpoolctl import threadpool_limits

    with warnings.catch_warnings(), threadpool_limits(1):  # for such small products, threads mostly wait
        warnings.filterwarnings("ignore", message="lbfgs failed to converge")  # without a penalty there is no minimum
        warnings.filterwarnings("ignore", message="The least populated class")
        features = features.astype(np.float64)
        chosen = np.sort(np.random.default_rng(SEED).permutation(len(labels))[:MOST])
        own = None if groups is None else groups[chosen]
        shares, scores, folds = _left_out(features[chosen], labels[chosen], classes, STRENGTHS, own)
        strength = max(STRENGTHS, key=lambda one: scores[one])  # the first of equal ones
        out_of_fold = shares[strength]
        if len(chosen) < len(labels):
            out_of_fold = _left_out(features, labels, classes, [strength], groups)[0][strength]
        scaler, regression = _scaler_and_regression(labels)
        regression.set_params(C=strength).fit(scaler.fit_transform(features), labels)
    return Probe(strength, scores, folds, len(chosen), out_of_fold, scaler, regression, classes)


def _left_out(
    features: np.ndarray, labels: np.ndarray, classes: int, strengths: Sequence[float], groups: np.ndarray | None
) -> tuple[dict[float, np.ndarray], dict[float, float], int]:
    """Cross-validate each strength. Returns two dicts by strength, and the number of folds.

    The dicts hold the probabilities of each image, (n, classes), from the fold that left it out, and the mean score in
    percent, of the folds that have one. There are five folds, fewer if the largest class has fewer images or if there
    are fewer groups.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    strata = strata_of(labels, FOLDS)
    grouped = groups is not None and len(set(groups)) > 1
    most = np.bincount(strata).max()
    most = min(most, len(set(groups))) if grouped else most
    kind = StratifiedGroupKFold if grouped else StratifiedKFold
    folds = kind(max(2, min(FOLDS, most)), shuffle=True, random_state=SEED)
    parts = [*folds.split(features, strata, groups)] if most > 1 else []
    if labels.ndim == 1 and min((len(np.unique(labels[fitted])) for fitted, _ in parts), default=0) < 2:
        raise UserError(
            "too few training images: whichever fold is left out of the probe, images of two classes must remain"
        )
    shares = {strength: np.zeros((len(labels), classes)) for strength in strengths}
    rates: dict[float, list[float]] = {strength: [] for strength in strengths}
    for fitted, left_out in parts:
        scaler, regression = _scaler_and_regression(labels)
        known = scaler.fit_transform(features[fitted])
        unknown = scaler.transform(features[left_out])
        for strength in strengths:  # each starts from the weights of the previous one
            regression.set_params(C=strength).fit(known, labels[fitted])
            shares[strength][left_out] = _of_all_classes(regression, unknown, classes)
            rates[strength].append(score_of(shares[strength][left_out], labels[left_out]))
    if any(np.isnan(of_folds).all() for of_folds in rates.values()):
        raise UserError("too few training images: none that a fold leaves out has a label, so no probe can be chosen")
    means = {strength: float(np.nanmean(of_folds)) for strength, of_folds in rates.items()}
    return shares, means, folds.n_splits


def score_of(shares: np.ndarray, labels: np.ndarray) -> float:
    """Top-1 of probabilities (n, classes) in percent; for multi-label ``labels``, mean average precision."""
    if labels.ndim > 1:
        return MultilabelClasses.of(shares, labels).map
    return 100 * float((shares.argmax(1) == labels).mean())


def _scaler_and_regression(labels: np.ndarray) -> tuple[StandardScaler, LogisticRegression | _OfEachLabel]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    regression = LogisticRegression(max_iter=ITERATIONS, warm_start=True)
    return StandardScaler(), regression if labels.ndim == 1 else _OfEachLabel(regression, labels.shape[1])


class _OfEachLabel:
    """A copy of ``regression`` for each of ``count`` labels, fitted on the images where that label is known.

    A label known with a single value gets the probability 1 or 0 accordingly; one that is never known gets 0.
    """

    def __init__(self, regression: LogisticRegression, count: int) -> None:
        from sklearn.base import clone

        self.classes_ = np.arange(count)
        self.regressions = [clone(regression) for _ in self.classes_]
        self.values: list[np.ndarray] = []

    def set_params(self, **values: float) -> _OfEachLabel:
        for one in self.regressions:
            one.set_params(**values)
        return self

    def fit(self, features: np.ndarray, labels: np.ndarray) -> _OfEachLabel:
        self.values = [np.unique(column[column >= 0]) for column in labels.T]
        for one, values, column in zip(self.regressions, self.values, labels.T, strict=True):
            if len(values) > 1:
                one.fit(features[column >= 0], column[column >= 0])
        return self

    def predict_proba(self, features: np.ndarray) -> np.ndarray:
        columns = [
            one.predict_proba(features)[:, 1] if len(values) > 1 else np.full(len(features), float(values.sum()))
            for one, values in zip(self.regressions, self.values, strict=True)
        ]
        return np.stack(columns, axis=1)


def _of_all_classes(probe: Any, features: np.ndarray, classes: int) -> np.ndarray:
    shares = np.zeros((len(features), classes))
    shares[:, probe.classes_] = probe.predict_proba(features)
    return shares


class Doubted(NamedTuple):
    """Images whose label is doubted, the most doubtful first: indices int64 (m,), likely classes int64 (m,).

    ``confident``: whether an image is also in the confident joint, bool (m,).
    """

    places: np.ndarray
    likely: np.ndarray
    confident: np.ndarray


def doubted(shares: np.ndarray, labels: np.ndarray) -> Doubted:
    """Find images whose probabilities ``shares`` (n, classes), predicted out of fold, contradict their labels.

    Sorted by the label's probability minus the largest. From Northcutt, Jiang and Chuang, Confident learning, 2021,
    where this list is the method by confusion. An image is in the confident joint if, among the classes whose
    probability reaches its mean over the images with that label, the likeliest is not the image's label. The confident
    joint misses some wrong labels, and fewer of those it lists are truly wrong.
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
