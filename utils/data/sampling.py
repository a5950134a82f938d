"""Epochs that are not simply all samples, shuffled: pure functions of (seed, epoch).

``SamplePlan`` cuts an epoch into steps. If an epoch holds a sample several times, its copies are numbered, and their
random numbers depend on (seed, epoch, sample, copy).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from utils.config.settings import Settings, UserError
from utils.data.formats.readers import Images, class_counts
from utils.data.formats.shards.members import members_of
from utils.data.sample_plan import Epochs, hashed, permutation

BALANCE_STREAM = 40
WINDOW_STREAM = 41
SORTED = 3.0  # chi square over its degrees of freedom from which shards count as sorted; mixed shards have 1
MOST_CLASSES = 20  # for which a plan lists the images of each class


@dataclass(frozen=True, eq=False)
class Sampling(Epochs):
    """The samples of each epoch, and their order.

    ``available``: int64 (n,), the numbers of the samples to choose from. By default, each occurs once per epoch.

    ``repeats`` R: an epoch keeps its length n and holds the first n / R of its random order R times each (Hoffer et
    al., Augment your batch, 2020; Berman et al., MultiGrain, 2019). The copies of a sample are neighbours in the order,
    and so in the same step, except where a step ends. timm's ``RepeatAugSampler`` and the ``RASampler`` of
    torchvision's references deal them out likewise, but round n down to a multiple of 256.

    ``labels``: int64 (n,), the classes of ``available``, to show each class equally often. An epoch of k classes has
    floor(n / k) samples of each. Each class goes through a random order of all its samples before it begins another,
    across epochs, so none of a large class is left out for good, and those of a small one are seen equally often.
    """

    seed: int
    available: np.ndarray
    repeats: int = 1
    labels: np.ndarray | None = None

    @property
    def num_samples(self) -> int:
        return len(self.available) if self.labels is None else len(self._classes) * self._of_each_class

    def epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray | None]:
        order = permutation(self.num_samples, self.seed, epoch)
        if self.labels is not None:
            samples, copies = self._balanced(epoch)
            return samples[order], copies[order]
        if self.repeats > 1:
            places = np.arange(self.num_samples)
            return self.available[order[places // self.repeats]], places % self.repeats
        return self.available[order], None

    def __str__(self) -> str:
        if self.labels is not None:
            return f"{self._of_each_class:,} images of each class an epoch, not each image exactly once"
        if self.repeats > 1:
            return f"{-(-self.num_samples // self.repeats):,} images an epoch, {self.repeats} times each, not each once"
        return "each image once an epoch"

    @cached_property
    def _classes(self) -> list[np.ndarray]:
        """The samples of each class that has any: int64, an array for each."""
        assert self.labels is not None
        order = np.argsort(self.labels, kind="stable")
        _, firsts = np.unique(self.labels[order], return_index=True)
        return np.split(self.available[order], firsts[1:])

    @property
    def _of_each_class(self) -> int:
        return len(self.available) // len(self._classes)

    def _balanced(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        count = self._of_each_class
        places = np.arange(epoch * count, (epoch + 1) * count)  # in each class's endless order
        samples = []
        copies = []
        for number, members in enumerate(self._classes):
            rounds, place = np.divmod(places, len(members))
            orders = [
                members[permutation(len(members), hashed(self.seed, BALANCE_STREAM, number), of_round)]
                for of_round in range(int(rounds[0]), int(rounds[-1]) + 1)
            ]
            samples.append(np.stack(orders)[rounds - rounds[0], place])
            copies.append(rounds - rounds[0])
        return np.concatenate(samples), np.concatenate(copies)


def described(epochs: Epochs, labels: torch.Tensor, classes: tuple[str, ...]) -> str:
    """Text on the content of an epoch and, if not all training images can be in it, on those that can, per class."""
    count = len(epochs.available)
    if count == len(labels):
        return str(epochs)
    counts = class_counts(labels[epochs.available], len(classes)).tolist()
    each = f", {min(counts):,} to {max(counts):,} a class"
    if len(counts) <= MOST_CLASSES:
        each = ": " + ", ".join(f"{count:,} {name}" for name, count in zip(classes, counts, strict=True))
    return f"{epochs}; of {count:,} of the {len(labels):,} training images{each}"


@dataclass(frozen=True, eq=False)
class WindowedOrder(Epochs):
    """Epochs that hold each sample once, shuffled within windows of shards: a function of (seed, epoch) alone.

    ``shards``: int64 (n,), the shard of each sample. The shards come in a random order, cut into windows of at most
    ``window`` shards, nearly equal in number; the samples of a window come in a random order before those of the next
    window begin. ``available``: int64 (m,), the samples to choose from. If one window holds all shards, the order is an
    ordinary shuffle, though not the same one as without windows. ``labels``, int64 (n,): for a warning if the shards
    are sorted by class, which windows cannot make up for.
    """

    seed: int
    shards: np.ndarray
    window: int
    available: np.ndarray
    labels: np.ndarray | None = None

    def epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray | None]:
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
        """Distance of a window's class shares from those of all images, averaged over the windows of epoch 0.

        Returns Pearson's chi square over its degrees of freedom, 1 if the shards are mixed, and the total variation
        distance, the share of a window's images that would have to be of another class.
        """
        assert self.labels is not None
        labels = np.unique(self.labels[self.available], return_inverse=True)[1]
        classes = int(np.max(labels)) + 1
        shares = np.bincount(labels, minlength=classes) / len(labels)
        excesses = []
        distances = []
        for shards in self.windows(0):
            counts = np.bincount(labels[np.isin(self.shards[self.available], shards)], minlength=classes)
            expected = shares * counts.sum()
            excesses.append(((counts - expected) ** 2 / expected).sum() / max(1, classes - 1))
            distances.append(0.5 * np.abs(counts / counts.sum() - shares).sum())
        return float(np.mean(excesses)), float(np.mean(distances))


def build_sampling(images: Images, args: Settings) -> Epochs | None:
    """The sampling of training ``images`` that the settings ask for; None if each comes once per epoch, fully shuffled.

    Raises ``UserError`` for settings that do not suit the images.
    """
    labels = images.labels
    if args.data.shard_window is not None:
        shards = members_of(images, "--shard-window").shards.astype(np.int64)
        available = first_samples(len(labels), args)
        classes = labels.cpu().numpy() if labels.ndim == 1 else None
        return WindowedOrder(args.run.seed, shards, args.data.shard_window, available, classes)
    repeats = args.augmentation.repeated_augmentation
    balanced = args.data.balanced_sampler
    if repeats == 1 and not balanced and args.data.train_samples is None:
        return None
    available = first_samples(len(labels), args)
    return Sampling(args.run.seed, available, repeats, labels.cpu().numpy()[available] if balanced else None)


def first_samples(count: int, args: Settings) -> np.ndarray:
    """Numbers of the samples to train on, of ``count``: the first ``--train-samples`` in epoch 0's order, sorted."""
    wanted = args.data.train_samples
    if wanted is None:
        return np.arange(count)
    if wanted > count:
        raise UserError(f"--train-samples {wanted:,}: there are {count:,} training images")
    return np.sort(permutation(count, args.run.seed, 0)[:wanted])
