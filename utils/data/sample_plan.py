"""The plan of the samples, with their order and random numbers: pure functions of the seed.

The order of epoch e depends on (seed, e) alone; the k-th global batch is a slice of it; each rank takes its part of
that slice; the random numbers of a sample's augmentation, and of its mixing with a neighbour, depend on (seed, epoch,
index) alone, and on the copy where an epoch holds a sample several times. So there is no generator state to save, a
resume at any step is immediate, and neither the number of data workers nor the number of ranks changes which samples a
step sees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BITS = 2**64 - 1
_COPY_BIT = 40  # where a key holds the copy's number; far above all samples' numbers


@dataclass(frozen=True)
class MicroBatch:
    """A rank's part of a forward pass.

    ``indices``: int64, the samples to read. Only the first ``count`` are trained on: a micro-batch of fewer than two is
    padded with the next samples in the epoch's order, because every rank must enter every collective and batch norm
    cannot train on a single image. ``weight``: the factor that turns the mean over ``count`` samples into this
    micro-batch's contribution to the mean over the global batch: averaged over ranks (as DDP does) and summed over
    forward passes, the contributions are exactly that mean. ``ends_step``: the optimizer steps after this micro-batch.
    Once read, ``unreadable`` holds the paths of unreadable images met while reading, ``replaced`` counts those of the
    ``count`` samples for which another image is shown, and ``shown``, int64, are the images shown; None if they are
    ``indices``. ``copies``: int64, which copy of a repeated sample each is, from 0; None if none is repeated.
    """

    epoch: int
    step: int
    indices: np.ndarray
    count: int
    weight: float
    ends_step: bool
    unreadable: tuple[str, ...] = ()
    replaced: int = 0
    copies: np.ndarray | None = None
    shown: np.ndarray | None = None

    @property
    def keys(self) -> np.ndarray:
        """Each sample's key for random numbers, with seed and epoch: int64, different for each copy of a sample.

        A first copy's key is the sample's number.
        """
        return self.indices if self.copies is None else self.indices + (self.copies << _COPY_BIT)


class Epochs(ABC):
    """Epochs that are not simply all samples, shuffled; see utils/data/sampling.py.

    ``available``: int64 (n,), the numbers of the samples to choose from. ``repeats``: how often an epoch holds each.
    """

    available: np.ndarray
    repeats: int = 1

    @property
    def num_samples(self) -> int:
        """The length of an epoch."""
        return len(self.available)

    @abstractmethod
    def epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The samples in order, int64 (num_samples,), and for repeated samples which copy each is.

        The copies are numbered from 0, int64 (num_samples,); None if no sample is repeated.
        """


@dataclass(frozen=True)
class SamplePlan:
    """The training samples of every step: each sample exactly once per epoch, unless ``sampling`` says otherwise.

    ``num_samples`` is the length of an epoch.

    A remainder of at least half a global batch is the last step of an epoch. A smaller remainder and the full batch
    before it become two steps of equal size: a step of few images would have a noisy gradient, at the learning rate of
    a full one, and poor batch-norm statistics. So no step is smaller than half of ``global_batch_size``, unless the
    whole set is. ``drop_last`` leaves the remainder out instead, which holds different samples in each epoch.

    Each step has as few forward passes as possible with at most ``batch_size`` images per rank. ``pairs``: neighbours
    in a step, its samples 2k and 2k + 1, stay in one micro-batch, as do the last three of an odd number, so that they
    can be mixed. An odd ``batch_size`` is then rounded up.

    If samples are repeated, a step begins with the first copies of all its samples, followed by the second copies, and
    so on: neighbours are different samples, and a sample's copies are on different ranks if there are that many.
    """

    num_samples: int
    global_batch_size: int
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    pairs: bool = False
    sampling: Epochs | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        full, remainder = divmod(self.num_samples, self.global_batch_size)
        return full + (remainder > 0 and not self.drop_last)

    @property
    def remainder(self) -> str:
        """Text on an epoch's images that do not fill a global batch; '' if there are none."""
        left_out = self.num_samples - self._start(self.steps_per_epoch)
        if left_out:
            return f"{left_out:,} image(s) of each epoch left out"
        last = range(max(0, self.steps_per_epoch - 2), self.steps_per_epoch)
        sizes = [self._start(step + 1) - self._start(step) for step in last]
        smaller = [f"{size:,}" for size in sizes if size < self.global_batch_size]
        which = "the only step" if len(last) == 1 else ("", "the last step", "the last two steps")[len(smaller)]
        return f"{' and '.join(smaller)} in {which} of an epoch" if smaller else ""

    def order(self, epoch: int) -> np.ndarray:
        """The samples of epoch ``epoch``, a permutation unless ``sampling`` says otherwise: int64 (num_samples,)."""
        return self._epoch(epoch)[0]

    def step_indices(self, epoch: int, step: int) -> np.ndarray:
        """The samples of step ``step`` of an epoch, for all ranks and forward passes: int64."""
        return self.order(epoch)[self._places(epoch, step)]

    def micro_batches(self, epoch: int, step: int) -> list[MicroBatch]:
        """The forward passes of one step on this rank; the last one ends the step."""
        (order, copies) = self._epoch(epoch)
        places = self._places(epoch, step)
        count = len(places)
        places = np.append(places, self._start(step) + count + np.arange(2)) % self.num_samples  # to pad with
        unit = 2 if self.pairs else 1
        most = -(-self.batch_size // unit) * unit
        passes = -(-count // (self.world_size * most))
        bounds = _cut(count, passes * self.world_size, unit)
        micro_batches = []
        for number in range(passes):
            first, end = bounds[number * self.world_size + self.rank :][:2]
            read = places[first : max(end, first + 2)]
            its_copies = None if copies is None else copies[read]
            weight = (end - first) * self.world_size / count
            ends = number == passes - 1
            micro_batches.append(
                MicroBatch(epoch, step, order[read], end - first, weight, ends_step=ends, copies=its_copies)
            )
        return micro_batches

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray | None]:
        return _epoch(self.sampling, self.num_samples, self.seed, epoch)

    def _places(self, epoch: int, step: int) -> np.ndarray:
        """Positions, in the epoch's order, of the samples of ``step``, in the order of their use: int64."""
        begin = self._start(step)
        places = np.arange(begin, self._start(step + 1))
        if self.sampling is None or self.sampling.repeats == 1:
            return places
        copies = self._epoch(epoch)[1]
        assert copies is not None  # of samples that are repeated
        return begin + np.argsort(copies[places], kind="stable")

    def _start(self, step: int) -> int:
        """Position in an epoch's order where ``step`` begins; for the step after the last, where the last one ends."""
        size = self.global_batch_size
        steps = self.steps_per_epoch
        remainder = 0 if self.drop_last else self.num_samples % size
        if step == steps - 1 and steps > 1 and 0 < 2 * remainder < size:
            return (step - 1) * size + (size + remainder + 1) // 2
        return step * size if step < steps or self.drop_last else self.num_samples


def _cut(count: int, parts: int, unit: int) -> list[int]:
    """The bounds that cut ``count`` samples into ``parts`` of nearly equal size: [0, ..., count].

    Bounds lie between units of ``unit`` samples; the last unit includes the samples left over.
    """
    units = max(1, count // unit)
    size, larger = divmod(units, parts)  # the first ``larger`` parts have one unit more
    bounds = [part * size + min(part, larger) for part in range(parts + 1)]
    return [unit * bound if bound < units else count for bound in bounds]


@lru_cache(maxsize=2)
def _epoch(sampling: Epochs | None, count: int, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray | None]:
    samples, copies = (permutation(count, seed, epoch), None) if sampling is None else sampling.epoch(epoch)
    for values in (samples, copies):
        if values is not None:
            values.flags.writeable = False
    return samples, copies


def permutation(count: int, *key: int) -> np.ndarray:
    """A random order of 0 to ``count`` - 1: int64, a function of ``key``, one or two 64-bit numbers, alone."""
    # Philox is counter-based: the key alone determines its stream, on every platform and NumPy version.
    return np.random.Generator(np.random.Philox(key=key)).permutation(count).astype(np.int64)


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """Up to ``most`` of the numbers from 0 to ``count`` - 1, evenly spaced from the first to the last: int64."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


def sample_uniforms(seed: int, epoch: int, indices: np.ndarray, stream: int, count: int) -> np.ndarray:
    """Random numbers in [0, 1): float32, shape (len(indices), count).

    Each row depends on (seed, epoch, index, stream) alone. Uses SplitMix64 (Steele, Lea, Flood: Fast splittable
    pseudorandom number generators, OOPSLA 2014) as a hash, vectorised over rows.
    """
    key = np.uint64(hashed(seed, epoch, stream))
    rows = mixed(np.asarray(indices).astype(np.uint64) ^ key)
    counters = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN  # modulo 2^64: numpy's arrays wrap silently
    bits = mixed(rows[:, None] + counters[None, :])
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of one step's randomness, such as dropout, on one rank: a non-negative 63-bit number."""
    return hashed(seed, step, rank) >> 1


def hashed(*numbers: int) -> int:
    """Hash ``numbers``, one after the other, into 64 bits, by ``mixed`` in Python's integers (fast for one hash)."""
    key = 0
    for number in numbers:
        key = ((key ^ number) + 0x9E3779B97F4A7C15) & _BITS
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _BITS
        key ^= key >> 31
    return key


def mixed(value: np.ndarray) -> np.ndarray:
    """SplitMix64's output function; uint64 in and out."""
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
