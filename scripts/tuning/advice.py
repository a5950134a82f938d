"""Conclusions from measured speeds: which part limits training, which changes to try, which of them help.

Plain functions of numbers: ``measure.py`` and ``memory.py`` measure, ``diagnosis.py`` writes the report. All speeds are
in images per second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scripts.common.timing import Spread

GAIN = 1.05  # smallest speed-up for which a change is recommended
EQUAL = 1.2  # parts whose speeds differ by a smaller factor limit training equally
SHARED = 0.8  # share of the slower part's speed: if the loop is slower, loader and network compete for something
BUSY = 0.7  # a GPU busy for a smaller share of a step waits for the processor that launches its work
LARGEST_SIZE = 2**16  # images; --batch-size allows more, but no training run needs it
TOLERANCE = 1 / 32  # share of the largest batch: below it, what fits changes from run to run

# What can limit training, as the verdict words it.
LIMITS = {
    "decode": "reading and decoding images",
    "read": "taking images from memory",
    "augmentation": "augmentation",
    "copy": "the copy to the GPU",
    "compute": "compute",
    "launch": "launching work on the GPU",
    "both": "loader and network about equally",
    "cores": "the cores, which loader and network share",
    "turns": "loader and network, which take turns",
}


@dataclass(frozen=True)
class PartSpeeds:
    """Measured speeds of training with the present settings.

    ``loader``, ``compute`` and ``together``: each part alone, and the real loop. ``wait_percent``: percentage of the
    loop's time spent waiting for data. ``split``: seconds per image for 'decode' (or 'read', for resident images),
    'augmentation' and 'copy', each in one process. ``shares``: parts of a step's time, by 'forward', 'backward' and
    'optimizer'. ``workers``: processes that read, None for resident images. ``gpu``: whether a GPU computes; ``busy``:
    share of a step's time for which it does, None if unknown.
    """

    loader: Spread
    compute: Spread
    together: Spread
    wait_percent: float
    split: dict[str, float]
    shares: dict[str, float]
    workers: int | None
    gpu: bool = False
    busy: float | None = None

    @property
    def varied(self) -> float:
        """Variation of the loop's speed: the highest divided by the lowest."""
        return self.together.high / self.together.low

    @property
    def costs(self) -> dict[str, float]:
        """Seconds per image that each part of the loader takes, with reading shared by the workers."""
        return {
            name: cost / max(1, self.workers or 1) if name == "decode" else cost for name, cost in self.split.items()
        }


def limit(measured: PartSpeeds) -> str:
    """The key of ``LIMITS`` that follows from the speeds of the parts alone and of the loop.

    If the loop is nearly as fast as its slower part, that part is the limit; for the loader, its slowest part.
    Otherwise each has to wait for the other, and it matters little which is slower alone. A loop that is slower still
    than parts that take turns was disturbed.
    """
    loader = measured.loader.median
    compute = measured.compute.median
    overlap = measured.gpu and measured.workers
    in_turns = loader * compute / (loader + compute)
    together = measured.together.median
    if not overlap and together < SHARED * min(loader, compute) and (measured.workers or together > SHARED * in_turns):
        return _in_each_others_way(measured)
    if loader * EQUAL < compute:
        return max(measured.costs, key=measured.costs.get)
    if loader < compute * EQUAL:
        return "both"
    return "launch" if measured.busy is not None and measured.busy < BUSY else "compute"


def part_of(limited_by: str) -> str | None:
    """The part of training, 'loader' or 'compute', that a key of ``LIMITS`` concerns; None if it concerns both."""
    if limited_by in ("both", "cores", "turns"):
        return None
    return "compute" if limited_by in ("compute", "launch") else "loader"


def _in_each_others_way(measured: PartSpeeds) -> str:
    return "cores" if measured.workers and not measured.gpu else "turns"


# ------------------------------------------------------------------------------------------ changes


@dataclass(frozen=True)
class Change:
    """A change to try. ``part``: what it affects, 'loader' or 'compute'; at most one change per ``group`` is taken.

    ``flags``: what it adds to the command line; or ``threads``: a value of OMP_NUM_THREADS. ``caution``: side effects.
    ``not_tried``: why it is not tried, or ''.
    """

    part: str
    group: str
    flags: tuple[str, ...] = ()
    threads: int | None = None
    caution: str = ""
    not_tried: str = ""

    @property
    def label(self) -> str:
        """The change as a user would write it."""
        return " ".join(self.flags) or f"OMP_NUM_THREADS={self.threads}"


@dataclass(frozen=True)
class Hardware:
    """Facts that decide which changes make sense.

    ``cores``: available to this process. ``threads``: that the network uses on a CPU. ``workers``: None for resident
    images. ``resident_bytes``: memory that the data set would take; ``resident_room``: memory that it may take;
    ``same_images``: whether training would show the same pixels of resident images. ``formats``: the other ``--amp``
    formats, each with the reason why it is not worth a trial, or ''.
    """

    gpu: bool
    cores: int
    threads: int
    workers: int | None
    batch_size: int
    samples: int
    resident_bytes: int
    resident_room: float
    same_images: bool
    convolutions: bool
    channels_last: bool
    formats: dict[str, str]
    compiled: bool
    try_compile: bool


def changes(place: Hardware) -> list[Change]:
    """Changes worth a trial, and others with the reason why not, in the report's order."""
    return [*_loader_changes(place), *_compute_changes(place)]


def ladder(workers: int, cores: int) -> list[int]:
    """Worker counts to try, among 0, 1, 2, 4 ..., ``cores`` and twice ``cores``; none far below ``workers``."""
    steps = {0, cores, 2 * cores, *(2**k for k in range(cores.bit_length()) if 2**k < cores)}
    return sorted(count for count in steps - {workers} if count >= min(workers, cores) // 2)


def _loader_changes(place: Hardware) -> list[Change]:
    if place.workers is None:
        return []
    found = [Change("loader", "loader", ("--workers", str(count))) for count in ladder(place.workers, place.cores)]
    size = place.resident_bytes / 1e9
    room = place.resident_room / 1e9
    reason = "" if size <= room else f"{size:,.1f} GB of images, where {room:,.1f} GB may be taken"
    reason = reason if place.same_images else "images are made from whole ones in each epoch"
    found.append(Change("loader", "loader", ("--loader", "resident"), not_tried=reason))
    if place.gpu:
        found.append(Change("loader", "decode", ("--decode", "gpu")))
    return found


def _compute_changes(place: Hardware) -> list[Change]:
    found = []
    if place.convolutions:
        found.append(Change("compute", "channels", ("--channels-last", "off" if place.channels_last else "on")))
    for name, reason in place.formats.items():
        found.append(Change("compute", "amp", ("--amp", name), not_tried=reason))
    small = f"an epoch has {place.samples:,} images" if 2 * place.batch_size > place.samples else ""
    found.append(
        Change(
            "compute",
            "batch",
            ("--batch-size", str(2 * place.batch_size)),
            not_tried=small,
            caution="another global batch: raise --lr with it",
        )
    )
    if not place.gpu:
        counts = sorted({max(1, place.cores // 2), place.cores, 1} - {place.threads})
        found += [Change("compute", "threads", threads=count) for count in counts]
    if not place.compiled:
        reason = "" if place.gpu or place.try_compile else "takes long; --try-compile"
        found.append(Change("compute", "compile", ("--compile",), not_tried=reason))
    return found


# ------------------------------------------------------------------------------------------- trials


class Interleaved(NamedTuple):
    """Two speeds measured alternately, and the median over the rounds of the second's ratio to the first."""

    before: Spread
    after: Spread
    ratio: float

    @property
    def varied(self) -> float:
        """Variation of either speed in the measurement, whichever is larger: the highest divided by the lowest."""
        return max(side.high / side.low for side in (self.before, self.after))


@dataclass
class TriedChange:
    """A change and its measured effect.

    ``alone``: speeds of the affected part alone, without and with the change. ``loops``: speeds of the real loop,
    likewise; empty if the part alone did not become faster. ``doubts``: how much the loop's speed varied before the
    trials, which a gain must exceed. ``failure``: why there is no measurement.
    """

    change: Change
    alone: Interleaved | None = None
    loops: list[Interleaved] = field(default_factory=list)
    doubts: float = 1.0
    failure: str = ""

    @property
    def promises(self) -> bool:
        """True if the affected part, measured alone, became over 5 % faster."""
        return not self.failure and self.alone is not None and self.alone.ratio > GAIN

    @property
    def gains(self) -> bool:
        """True if the loop became over 5 % faster each time it was measured."""
        return self.promises and bool(self.loops) and all(pair.ratio > GAIN for pair in self.loops)

    @property
    def varied(self) -> float:
        """Variation of the loop's speed, before or during the measurements."""
        return max(self.doubts, *(pair.varied for pair in self.loops), 1.0)

    @property
    def is_certain(self) -> bool:
        """True if each gain in the loop exceeds the variation of speeds."""
        return all(pair.ratio > self.varied for pair in self.loops)

    @property
    def helps(self) -> bool:
        """True if the change is recommended."""
        return self.gains and self.is_certain


def to_measure_again(trials: Sequence[TriedChange], limited_by: str) -> list[TriedChange]:
    """The best promising trial of each group, those about the limiting part first."""
    best: dict[str, TriedChange] = {}
    for trial in sorted((trial for trial in trials if trial.promises), key=lambda trial: -trial.alone.ratio):
        best.setdefault(trial.change.group, trial)
    first = part_of(limited_by) or "loader"
    return sorted(best.values(), key=lambda trial: (trial.change.part != first, -trial.alone.ratio))


@dataclass(frozen=True)
class Advice:
    """Trials, the changes ``taken`` as advice, and the loop's speed without and with them, measured alternately.

    ``gain`` is None if nothing is advised.
    """

    trials: list[TriedChange]
    taken: list[Change] = field(default_factory=list)
    gain: Interleaved | None = None


def advice_of(trials: list[TriedChange], helped: Sequence[TriedChange], together: Interleaved | None = None) -> Advice:
    """Advice that follows from the trials that ``helped``, each measured on top of those before it.

    ``together``: the loop's speed without and with all of them. If that is no certain gain, only the first change is
    advised, which was measured against the present settings.
    """
    if not helped:
        return Advice(trials)
    if together is not None and together.ratio > max(GAIN, together.varied):
        return Advice(trials, [trial.change for trial in helped], together)
    first = helped[0]
    return Advice(trials, [first.change], first.loops[-1])


def final_limit(measured: PartSpeeds, advice: Advice) -> str:
    """A key of ``LIMITS`` that agrees with the advice: measurements of the loop outweigh those of the parts."""
    what = limit(measured)
    part = part_of(what)
    if advice.taken and part is not None and advice.taken[0].part != part:
        return _in_each_others_way(measured)
    return what


# ------------------------------------------------------------------------------------ largest batch


class StopSearch(Exception):
    """No larger batch is tried; the message says why."""


@dataclass(frozen=True)
class Largest:
    """The largest batch that fits, 0 if none. ``reason``: why none larger was tried, '' if a larger one did not fit."""

    size: int
    reason: str = ""


def largest_batch(fits: Callable[[int], bool], start: int, samples: int, tolerance: float = TOLERANCE) -> Largest:
    """Find the largest batch that ``fits``: double (or halve) it from ``start``, then bisect.

    At most ``samples``, those of an epoch. Stops when the largest batch that fits and the smallest that does not
    differ by at most ``tolerance`` times the former; 0 finds exactly the largest. ``fits`` may raise ``StopSearch``.
    """
    cap = min(samples, LARGEST_SIZE)
    cap_reason = "an epoch has no more images" if cap == samples else f"{cap:,} images are enough for any training"
    good = 0
    bad = cap + 1
    size = min(start, cap)
    try:
        while good < bad - 1 and (bad > cap or bad - good > max(1, tolerance * good)):
            if fits(size):
                good = size
            else:
                bad = size
            size = min(2 * good, cap) if bad > cap else (good + bad) // 2
    except StopSearch as stop:
        return Largest(good, str(stop))
    return Largest(good, cap_reason if good == cap else "")
