"""A windowed order: for places where random reads are dear, it reads a few shards at a time, each from end to end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from utils.data.sample_plan import hashed, permutation

WINDOW_STREAM = 41
SORTED = 3.0  # chi square over its degrees of freedom, which is 1 for mixed shards


@dataclass(frozen=True, eq=False)
class WindowedOrder:
    """Each sample once an epoch, in an order that is a function of (seed, epoch) alone.

    ``shards``: int64 (n,), the shard of each sample. The shards come in a random order, cut into windows of at most
    ``window`` shards, nearly equal in number; the samples of a window come in a random order before those of the next
    one begin. ``available``: int64 (m,), the samples to choose from. With as many shards in a window as there are, the
    order is an ordinary shuffle, though not the same one as without windows. ``labels``, int64 (n,): to tell when the
    shards are sorted by class, which windows cannot mend.
    """

    seed: int
    shards: np.ndarray
    window: int
    available: np.ndarray
    labels: np.ndarray | None = None
    repeats: int = 1

    @property
    def num_samples(self) -> int:
        """The length of an epoch."""
        return len(self.available)

    def epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The samples in order: int64 (num_samples,); all of them are first copies."""
        windows = self.windows(epoch)
        window_of = np.empty(int(self.shards.max()) + 1, dtype=np.int64)
        for number, shards in enumerate(windows):
            window_of[shards] = number
        # A full shuffle, then a stable sort by window: each window keeps the random order that its samples have in it.
        shuffled = self.available[permutation(self.num_samples, hashed(self.seed, WINDOW_STREAM, 1), epoch)]
        return shuffled[np.argsort(window_of[self.shards[shuffled]], kind="stable")], None

    def windows(self, epoch: int) -> list[np.ndarray]:
        """The shards of each window of an epoch, in order: int64 each."""
        present = np.unique(self.shards[self.available])
        order = present[permutation(len(present), hashed(self.seed, WINDOW_STREAM, 0), epoch)]
        return np.array_split(order, -(-len(order) // self.window))

    def __str__(self) -> str:
        count = len(np.unique(self.shards[self.available]))
        text = f"each image once an epoch, shuffled within windows of {min(self.window, count):,} of {count:,} shards"
        excess, share = (1.0, 0.0) if self.labels is None else self.other_classes()
        if excess < SORTED:
            return text
        return (
            f"{text}; but in a window, {100 * share:.0f} % of the images would have to be of other classes to be like "
            "the whole set, which harms training: take more shards at a time, or pack the data set, which mixes it"
        )

    def other_classes(self) -> tuple[float, float]:
        """Distance of a window's classes from those of all images, mean over the windows of epoch 0.

        Pearson's chi square over its degrees of freedom, 1 if the shards are mixed; and the total variation distance,
        the share of the images that would have to be of another class.
        """
        labels = np.unique(self.labels[self.available], return_inverse=True)[1]
        classes = int(labels.max()) + 1
        shares = np.bincount(labels, minlength=classes) / len(labels)
        excesses = []
        distances = []
        for shards in self.windows(0):
            counts = np.bincount(labels[np.isin(self.shards[self.available], shards)], minlength=classes)
            expected = shares * counts.sum()
            excesses.append(((counts - expected) ** 2 / expected).sum() / max(1, classes - 1))
            distances.append(0.5 * np.abs(counts / counts.sum() - shares).sum())
        return float(np.mean(excesses)), float(np.mean(distances))
