"""Findings about a data set from features: two classifiers, doubtful labels, near duplicates, a map."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from scripts.common.features import Features
from scripts.common.label_answers import intervals_of
from scripts.common.neighbours import NEIGHBOURS, Duplicate, near_duplicates, nearest, unit, votes
from scripts.common.probe import STRENGTHS, Probe, doubted, fit_probe, score_of
from scripts.common.uncertainty import number_of, wilson_interval
from utils.data.sample_plan import evenly_spaced
from utils.record.metrics import Report
from utils.record.multilabel import MultilabelClasses, MultilabelReport

TRAIN = "train"
NAMES = {"train": "training", "val": "validation", "test": "test"}
MAP_IMAGES = 1000  # of the scored split: a map of more takes long and is no clearer
MAP_COMPONENTS = 50  # principal components given to t-SNE
SEED = 0


class Doubt(NamedTuple):
    """A doubted label: the image's index in a split, the label and the likelier answer, with their probabilities.

    ``label`` and ``likely``: indices into ``answers_of``. ``neighbours``: how many of the nearest training images have
    the doubted label. ``confident``: see ``Doubted``.
    """

    split: str
    place: int
    label: int
    likely: int
    own_share: float
    likely_share: float
    neighbours: int
    confident: bool


@dataclass(frozen=True)
class Study:
    """Findings about ``parts``, features by split; ``scored`` is the split whose images are classified.

    ``places`` and ``cosines`` (n, k): the nearest training images of the scored images. ``by_neighbours`` and
    ``by_probe``: class probabilities, float64 (n, classes). ``duplicates``: by pair of splits. ``copied``: whether a
    scored image nearly equals a training image, bool (n,). ``spots``: float64 (m, 2), positions of the scored images
    ``mapped`` on the map.
    """

    parts: Mapping[str, Features]
    scored: str
    places: np.ndarray
    cosines: np.ndarray
    by_neighbours: np.ndarray
    by_probe: np.ndarray
    probe: Probe
    doubts: list[Doubt]
    duplicates: dict[tuple[str, str], list[Duplicate]]
    mapped: np.ndarray
    spots: np.ndarray
    seconds: float
    notes: list[str] = field(default_factory=list)

    @property
    def train(self) -> Features:
        return self.parts[TRAIN]

    @property
    def of_scored(self) -> Features:
        return self.parts[self.scored]

    @property
    def copied(self) -> np.ndarray:
        found = np.zeros(len(self.of_scored), dtype=bool)
        found[[one.second for one in self.duplicates[TRAIN, self.scored]]] = True
        return found

    def doubts_of(self, split: str) -> list[Doubt]:
        """Doubts about the images of a split, the most doubtful first."""
        return [doubt for doubt in self.doubts if doubt.split == split]

    @property
    def several(self) -> bool:
        """True if the data is multi-label."""
        return self.train.labels.ndim > 1

    @property
    def known_labels(self) -> dict[str, int]:
        """Number of known labels, by split."""
        return {split: int((part.labels >= 0).sum()) for split, part in self.parts.items()}

    @property
    def headline(self) -> str:
        """Metric by which classifiers are judged, named as in reports."""
        return (MultilabelReport if self.several else Report).HEADLINE

    def method(self, shares: np.ndarray) -> str:
        """Text about how one of the two classifiers was made; ``shares``: its probabilities."""
        if shares is self.by_neighbours:
            return f"{self.places.shape[1]} nearest training images by cosine, each weighs exp(cosine / 0.07)"
        of = self.probe
        best = of.scores[of.strength]
        is_at_limit = of.strength in (STRENGTHS[0], STRENGTHS[-1])
        limit = ", the end of the range: beyond it may be better" if is_at_limit else ""
        on = f" on {of.chosen_on:,} of them" if of.chosen_on < len(self.train) else ""
        tried = f"{STRENGTHS[0]:g} to {STRENGTHS[-1]:g}"
        whole = ", no group in two of them" if (number_of(self.train.groups) or 0) > 1 else ""
        return (
            f"C {of.strength:g} of {tried}{limit}; chosen by {of.folds} folds of the training images{on}{whole} "
            f"({best:.2f} % there)"
        )


def study(parts: Mapping[str, Features], scored: str, neighbours: int = NEIGHBOURS, its_own: bool = False) -> Study:
    """Study ``parts``, which must include 'train' and ``scored``; the probe is fitted on 'train' only.

    ``its_own``: whether the layers that give the features were trained on the images of 'train'.
    """
    began = time.perf_counter()
    train = parts[TRAIN]
    other = parts[scored]
    classes = len(train.classes)
    units = {split: unit(part.features) for split, part in parts.items()}
    near = {split: nearest(units[TRAIN], None if split == TRAIN else units[split], neighbours) for split in parts}
    places, cosines = near[scored]
    by_vote = votes(places, cosines, train.labels, classes)
    probe = fit_probe(train.features, train.labels, classes, train.groups)
    shares = {split: probe.probabilities(part.features) for split, part in parts.items() if split != TRAIN}
    shares[TRAIN] = probe.out_of_fold
    doubts = []
    for split, part in parts.items():
        doubts += _doubts(part, shares[split], train.labels[near[split][0]])
    mapped = evenly_spaced(len(other), MAP_IMAGES)
    notes = []
    if its_own:
        notes.append(
            "The network was trained on these training images with these labels. It may know wrong ones by heart, so "
            "that fewer of them are doubted; a network trained on other images, or on other folds, doubts more."
        )
    for split, part in parts.items():
        if empty := int((~part.features.any(1)).sum()):
            notes.append(f"{empty:,} {NAMES[split]} images have features that are all 0 and are near to none.")
    return Study(
        parts,
        scored,
        places,
        cosines,
        by_vote,
        shares[scored],
        probe,
        doubts,
        {pair: near_duplicates(*(parts[split] for split in pair)) for pair in combinations(parts, 2)},
        mapped,
        planar_map(units[scored][mapped]),
        time.perf_counter() - began,
        notes,
    )


def _doubts(part: Features, shares: np.ndarray, of_neighbours: np.ndarray) -> list[Doubt]:
    """Doubts about a split, given its probabilities ``shares``; ``of_neighbours`` (n, k): labels of the nearest images.

    In multi-label data, where ``of_neighbours`` is (n, k, classes), each known label is doubted on its own, as a binary
    choice.
    """
    if part.labels.ndim == 1:
        return _doubts_of(
            part.split, np.arange(len(part)), part.labels, shares, of_neighbours, np.arange(shares.shape[1])
        )
    doubts = []
    for label, column in enumerate(part.labels.T):
        known = np.flatnonzero(column >= 0)
        both = np.stack([1 - shares[known, label], shares[known, label]], axis=1)
        answers = np.array([label + shares.shape[1], label])  # answers 'not shown' and 'shown'
        doubts += _doubts_of(
            part.split, known, column[known].astype(np.int64), both, of_neighbours[known, :, label], answers
        )
    return doubts


def _doubts_of(
    split: str, rows: np.ndarray, labels: np.ndarray, shares: np.ndarray, of_neighbours: np.ndarray, answers: np.ndarray
) -> list[Doubt]:
    """Doubts about ``labels`` of the images ``rows`` (n,), given the probabilities ``shares`` (n, answers).

    ``split``: the images' split. ``of_neighbours`` (n, k): labels of the nearest images. ``answers``: for each label,
    its index in ``answers_of``.
    """
    return [
        Doubt(
            split,
            int(rows[place]),
            int(answers[labels[place]]),
            int(answers[likely]),
            float(shares[place, labels[place]]),
            float(shares[place, likely]),
            int((of_neighbours[place] == labels[place]).sum()),
            confident,
        )
        for place, likely, confident in zip(*map(np.ndarray.tolist, doubted(shares, labels)), strict=True)
    ]


def answers_of(part: Features) -> tuple[str, ...]:
    """Names of the possible answers: the classes and, in multi-label data, also 'not' each class."""
    return part.classes if part.labels.ndim == 1 else (*part.classes, *(f"not {name}" for name in part.classes))


def planar_map(units: np.ndarray) -> np.ndarray:
    """Positions, float64 (n, 2), reproducible: scikit-learn's t-SNE of the first 50 principal components.

    For fewer than 10 images, their first two principal components; for images whose features are all equal, zeros.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    if np.ptp(units, axis=0).max() <= np.finfo(units.dtype).eps * np.abs(units).max():
        return np.zeros((len(units), 2))  # at which t-SNE would not end
    few = len(units) < 10
    size = min(2 if few else MAP_COMPONENTS, *units.shape)
    with threadpool_limits(1):
        reduced = PCA(size, random_state=SEED).fit_transform(units.astype(np.float64))
        if few or size < 2:
            return np.pad(reduced, ((0, 0), (0, 2 - size)))
        made = TSNE(2, perplexity=min(30, (len(units) - 1) / 3), init="pca", random_state=SEED).fit_transform(reduced)
    return made.astype(np.float64)


def accuracies(of: Study) -> list[dict[str, Any]]:
    """One row for each of two classifiers: score in percent, interval, and score without images that have a copy."""
    rows = []
    labels, groups = of.of_scored.labels, of.of_scored.groups
    for name, shares in (("nearest neighbours", of.by_neighbours), ("logistic probe", of.by_probe)):
        value = score_of(shares, labels)
        if of.several:
            low, high = intervals_of(MultilabelClasses.of(shares, labels), shares, labels, groups)["map"]
        else:
            low, high = wilson_interval(shares.argmax(1) == labels, groups)
        apart = ~of.copied
        rows.append(
            {
                "classifier": name,
                "value": value,
                "low": low,
                "high": high,
                "without_copies": score_of(shares[apart], labels[apart]) if apart.any() else None,
                "method": of.method(shares),
            }
        )
    return rows


def heads(of: Study) -> tuple[str, str]:
    """Names of the score and of its interval, for tables."""
    return ("mAP", "95 % (bootstrap)") if of.several else ("Top-1", "95 % (Wilson)")
