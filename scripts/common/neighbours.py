"""Nearest neighbours among features: votes on an image's class, and near duplicates across splits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scripts.common.features import Features
from utils.data.sample_plan import evenly_spaced

NEIGHBOURS = 20
TEMPERATURE = 0.07
ROWS = 2048  # images whose neighbours are found together
ALIKE = 0.95  # minimum correlation of two copies' thumbnails
NEARER = 0.4  # a copy's distance from its original over that of images which look alike
NEAREST = 10  # a copy is among this many nearest neighbours, in features (of those unlike it) and in thumbnails


def unit(values: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1, float32 (n, d); a row of zeros stays unchanged."""
    wide = values.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.divide(wide, lengths, out=np.zeros_like(wide), where=lengths > 0).astype(np.float32)


def nearest(among: np.ndarray, of: np.ndarray | None, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the ``count`` rows of ``among``, float32 (n, d) of length 1, that are nearest to each row of ``of`` (m, d).

    Returns their indices, int64 (m, k), and cosines, float32 (m, k), nearest first, ties in index order. k is below
    ``count`` only if there are fewer rows. Without ``of``, finds the neighbours of each row of ``among``, except the
    row itself.
    """
    alone = of is None
    of = among if alone else of
    count = min(count, len(among) - alone)
    places = []
    cosines = []
    for start in range(0, len(of), ROWS):
        near = of[start : start + ROWS] @ among.T
        if alone:
            rows = np.arange(len(near))
            near[rows, start + rows] = -np.inf
        found = np.sort(np.argpartition(-near, count - 1, axis=1)[:, :count], axis=1)
        order = np.argsort(-np.take_along_axis(near, found, 1), axis=1, kind="stable")
        found = np.take_along_axis(found, order, 1)
        places.append(found)
        cosines.append(np.take_along_axis(near, found, 1))
    return np.concatenate(places), np.concatenate(cosines)


def votes(places: np.ndarray, cosines: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Shares of the classes among neighbours, float64 (m, classes); a neighbour weighs exp(cosine / 0.07).

    As in Wu et al., Unsupervised feature learning via non-parametric instance discrimination, 2018, and in DINO.
    ``places`` and ``cosines`` (m, k) come from ``nearest`` among images with ``labels``, int64 (n,), or int8 (n,
    classes) of a multi-label data set. A share is then taken among the neighbours whose label is known, and 0 if there
    are none.
    """
    weights = np.exp((cosines.astype(np.float64) - cosines.max(1, keepdims=True)) / TEMPERATURE)
    if labels.ndim > 1:
        shown, known = (np.einsum("mk,mkc->mc", weights, cells) for cells in (labels[places] == 1, labels[places] >= 0))
        return np.divide(shown, known, out=np.zeros_like(shown), where=known > 0)
    shares = np.zeros((len(places), classes))
    np.add.at(shares, (np.arange(len(places))[:, None], labels[places]), weights)
    return shares / shares.sum(1, keepdims=True)


class Duplicate(NamedTuple):
    """Two near-duplicate images: their indices in two splits, cosine of features, correlation of thumbnails."""

    first: int
    second: int
    cosine: float
    likeness: float


def likeness_of_copies(first: Features) -> float:
    """Minimum correlation of copies' thumbnails: ``ALIKE``, or more in a data set whose images all look alike.

    In the second case a copy is at most ``NEARER`` times as far from its original as the median image is from its tenth
    nearest neighbour, in the distance sqrt(2 - 2 x correlation), so that digits, which differ in few pixels, are not
    all copies. The tenth, since in a split that holds copies of its own images the nearest ones are these copies. The
    median is over at most ``ROWS`` images.
    """
    if len(first) < 2:
        return ALIKE
    looks = _centred(first.thumbnails)
    rows = evenly_spaced(len(looks), ROWS)
    near = looks[rows] @ looks.T
    near[np.arange(len(rows)), rows] = -np.inf  # not the image itself
    place = len(looks) - min(NEAREST, len(looks) - 1)
    near.partition(place, axis=1)
    return max(ALIKE, 1 - NEARER**2 * (1 - float(np.median(near[:, place]))))


def near_duplicates(first: Features, second: Features) -> list[Duplicate]:
    """Images of ``second`` that nearly equal one of ``first``, each paired with its most similar one; best pairs first.

    The two grey 16 x 16 thumbnails, one of them perhaps mirrored, correlate by at least ``likeness_of_copies``, and in
    features fewer than ten images lie nearer to either of the two, not counting those whose thumbnails correlate as
    much, such as further frames of a burst. Thumbnails alone would pair two plain skies, features alone two images of a
    class that the network has learned well.
    """
    own = unit(first.features)
    other = unit(second.features)
    looks, shown = ([_centred(one.thumbnails), _centred(_mirrored(one.thumbnails))] for one in (first, second))
    least = likeness_of_copies(first) - 1e-6  # products of identical thumbnails are rounded to a little below 1
    limits = _tenth_of_unlike(other, shown[0], own, looks, least), _tenth_of_unlike(own, looks[0], other, shown, least)
    best: dict[int, Duplicate] = {}
    for thumbnails in shown:
        places, likenesses = nearest(looks[0], thumbnails, NEAREST)
        for place, rank in np.argwhere(likenesses >= least).tolist():
            match = int(places[place, rank])
            cosine = float(own[match] @ other[place])
            if cosine >= max(limits[0][match], limits[1][place]) - 1e-6:  # where features are equal, none is nearer
                found = Duplicate(match, place, cosine, float(likenesses[place, rank]))
                best[place] = max(best.get(place, found), found, key=lambda one: (one.likeness, one.cosine))
    return sorted(best.values(), key=lambda one: (-one.likeness, -one.cosine, one.second))


def _tenth_of_unlike(
    among: np.ndarray, looks: np.ndarray, of: np.ndarray, looks_of: list[np.ndarray], least: float
) -> np.ndarray:
    """For each row of features ``of``, float32 (m,): its tenth-highest cosine with unlike rows of ``among``.

    Unlike are images whose centred thumbnails ``looks`` correlate by less than ``least`` with each of ``looks_of``.
    -inf if there are fewer than ten.
    """
    if len(among) < NEAREST:
        return np.full(len(of), -np.inf)
    tenths = []
    for start in range(0, len(of), ROWS):
        near = of[start : start + ROWS] @ among.T
        for shown in looks_of:
            near[shown[start : start + ROWS] @ looks.T >= least] = -np.inf
        near.partition(len(among) - NEAREST, axis=1)
        tenths.append(near[:, -NEAREST].copy())  # a view would keep all of ``near``
    return np.concatenate(tenths)


def _centred(thumbnails: np.ndarray) -> np.ndarray:
    """Thumbnails of mean 0 and length 1, so products are correlations; a plain one becomes zeros, similar to none."""
    centred = thumbnails - thumbnails.mean(1, keepdims=True, dtype=np.float64)
    centred[np.abs(centred).max(1) < 1e-4] = 0
    return unit(centred)


def _mirrored(thumbnails: np.ndarray) -> np.ndarray:
    side = round(thumbnails.shape[1] ** 0.5)
    return thumbnails.reshape(-1, side, side)[:, :, ::-1].reshape(len(thumbnails), -1)
