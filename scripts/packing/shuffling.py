"""How well an order of training shuffles, compared with an ordinary shuffle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Shuffling(NamedTuple):
    """Two figures, 1 for an ordinary shuffle and larger for a worse one.

    ``labels``: how far the labels of a batch are from those of all images: Pearson's chi square over its degrees of
    freedom, mean of all batches. ``mates``: how often two images that share a batch share one in the next epoch again.
    """

    labels: float
    mates: float


def shuffling_of(epochs: Sequence[np.ndarray], labels: np.ndarray, batch_size: int) -> Shuffling:
    """The figures of consecutive ``epochs``, the samples of each in order: int64 (n,). ``labels``: int64 (n,)."""
    spread = np.mean([_label_spread(labels[order], batch_size) for order in epochs])
    mates = np.mean([_mates(*pair, batch_size) for pair in pairwise(epochs)])
    return Shuffling(float(spread), float(mates))


def _label_spread(labels: np.ndarray, batch_size: int) -> float:
    count = len(labels)
    present, labels = np.unique(labels, return_inverse=True)
    batches = count // batch_size
    cells = np.arange(batches * batch_size) // batch_size * len(present) + labels[: batches * batch_size]
    counts = np.bincount(cells, minlength=batches * len(present)).reshape(batches, -1)
    expected = batch_size * np.bincount(labels) / count
    chi_square = ((counts - expected) ** 2 / expected).sum(1).mean()
    without_replacement = (count - batch_size) / (count - 1)  # the variance of a draw that puts nothing back
    return chi_square / ((len(present) - 1) * without_replacement)


def _mates(first: np.ndarray, second: np.ndarray, batch_size: int) -> float:
    count = len(first)
    batch_of = np.empty(count, dtype=np.int64)
    batch_of[second] = np.arange(count) // batch_size
    cells = np.arange(count) // batch_size * (batch_of.max() + 1) + batch_of[first]
    _, together = np.unique(cells, return_counts=True)
    sizes = np.bincount(np.arange(count) // batch_size)
    pairs = (sizes * (sizes - 1) / 2).sum()
    return float((together * (together - 1) / 2).sum() / (pairs * pairs / (count * (count - 1) / 2)))
