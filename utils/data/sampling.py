"""The samples of an epoch, where that is not each one exactly once: pure functions of (seed, epoch).

``SamplePlan`` cuts an epoch into steps. A sample that an epoch holds several times has a different copy number each
time, and its random numbers depend on (seed, epoch, sample, copy).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from utils.config.settings import Settings, UserError
from utils.data.formats.readers import ImageFiles, Images
from utils.data.formats.shards.members import Members
from utils.data.formats.shards.window import WindowedOrder
from utils.data.sample_plan import hashed, permutation

BALANCE_STREAM = 40
MOST_CLASSES = 20  # whose images a plan counts one by one


@dataclass(frozen=True, eq=False)
class Sampling:
    """The samples of each epoch, and their order.

    ``available``: int64 (n,), the numbers of the samples to choose from. By default, each occurs once an epoch.

    ``repeats`` R: an epoch keeps its length n and holds the first n / R of its random order R times each (Hoffer et
    al., Augment your batch, 2020; Berman et al., MultiGrain, 2019). The copies of a sample are neighbours in the order,
    and so in the same step, except at its ends: as timm's ``RepeatAugSampler`` and the ``RASampler`` of torchvision's
    references deal them out, which both round n down to a multiple of 256 as well.

    ``labels``: int64 (n,), the classes of ``available``, to hold each class equally often. An epoch of k classes has
    floor(n / k) samples of each. Each class goes through a random order of all its samples before the next one begins,
    across epochs, so none of a large class is left out for good, and those of a small one are seen equally often.
    """

    seed: int
    available: np.ndarray
    repeats: int = 1
    labels: np.ndarray | None = None

    @property
    def num_samples(self) -> int:
        """The length of an epoch."""
        return len(self.available) if self.labels is None else len(self._classes) * self._of_each_class

    def epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The samples in order and which copy each is: int64 (num_samples,) each. None: all are the first."""
        order = permutation(self.num_samples, self.seed, epoch)
        if self.labels is not None:
            samples, copies = self._balanced(epoch)
            return samples[order], copies[order]
        if self.repeats > 1:
            places = np.arange(self.num_samples)
            return self.available[order[places // self.repeats]], places % self.repeats
        return self.available[order], None

    def describe(self, labels: np.ndarray, classes: tuple[str, ...]) -> str:
        """What an epoch consists of, and which of the training images, with these ``labels``, it chooses from."""
        total = len(labels)
        if len(self.available) == total:
            return str(self)
        counts = np.bincount(labels[self.available], minlength=len(classes)).tolist()
        each = f", {min(counts):,} to {max(counts):,} a class"
        if len(counts) <= MOST_CLASSES:
            each = ": " + ", ".join(f"{count:,} {name}" for name, count in zip(classes, counts, strict=True))
        return f"{self}; of {len(self.available):,} of the {total:,} training images{each}"

    def __str__(self) -> str:
        if self.labels is not None:
            return f"{self._of_each_class:,} images of each class an epoch, not each image exactly once"
        if self.repeats > 1:
            return f"{-(-self.num_samples // self.repeats):,} images an epoch, {self.repeats} times each, not each once"
        return "each image once an epoch"

    @cached_property
    def _classes(self) -> list[np.ndarray]:
        """The samples of each class that has any."""
        order = np.argsort(self.labels, kind="stable")
        _, firsts = np.unique(self.labels[order], return_index=True)
        return np.split(self.available[order], firsts[1:])

    @property
    def _of_each_class(self) -> int:
        return len(self.available) // len(self._classes)

    def _balanced(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        count = self._of_each_class
        places = np.arange(epoch * count, (epoch + 1) * count)  # of an endless order of each class
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


def build_sampling(images: Images, args: Settings) -> Sampling | WindowedOrder | None:
    """The sampling that the settings ask for, for these training images; None: each once an epoch, fully shuffled."""
    labels = images.labels
    if args.data.shard_window is not None:
        if not (isinstance(images, ImageFiles) and isinstance(images.paths, Members)):
            raise UserError("--shard-window: the training images do not lie in shards; remove it")
        available = first_samples(len(labels), args)
        shards = images.paths.shards.astype(np.int64)
        labels = labels.cpu().numpy()
        return WindowedOrder(args.run.seed, shards, args.data.shard_window, available, labels)
    repeats = args.augmentation.repeated_augmentation
    balanced = args.data.balanced_sampler
    if repeats == 1 and not balanced and args.data.train_samples is None:
        return None
    available = first_samples(len(labels), args)
    return Sampling(args.run.seed, available, repeats, labels.cpu().numpy()[available] if balanced else None)


def first_samples(count: int, args: Settings) -> np.ndarray:
    """The samples of ``count`` to train on: the first ``--train-samples`` in epoch 0's order, sorted, int64 (n,)."""
    wanted = args.data.train_samples
    if wanted is None:
        return np.arange(count)
    if wanted > count:
        raise UserError(f"--train-samples {wanted:,}: there are {count:,} training images")
    return np.sort(permutation(count, args.run.seed, 0)[:wanted])
