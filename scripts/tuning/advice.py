"""Conclusions from measured speeds: which part limits training, which changes to try, which of them help.

Plain functions of numbers: ``measure.py`` and ``memory.py`` measure, ``report.py`` writes the report.
All speeds are in images a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scripts.common.timing import Spread

GAIN = 1.05  # a change that gives less is not recommended
EQUAL = 1.2  # parts whose speeds differ by less limit training equally
SHARED = 0.8  # of the slower part's speed: slower together than this, loader and network compete for something
BUSY = 0.7  # a GPU that computes for less of a step's time waits for the processor that launches its work

# What can limit training, in the words of the verdict.
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
    """Training with the present settings.

    ``loader``, ``compute`` and ``together``: each part alone and the real loop. ``wait_percent``: of the loop's time,
    waiting for data. ``split``: seconds an image takes in 'decode' (or 'read', where images are resident),
    'augmentation' and 'copy', each in one process. ``shares``: of a step's time, by 'forward', 'backward' and
    'optimizer'. ``workers``: processes that read, None where images are resident. ``gpu``: whether one computes;
    ``busy``: the share of a step's time in which it does, None if unknown.
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
        """Variation of the loop's speed: the highest over the lowest."""
        return self.together.high / self.together.low

    @property
    def costs(self) -> dict[str, float]:
        """Seconds an image costs the loader by part, reading shared out over the workers."""
        return {
            name: cost / max(1, self.workers or 1) if name == "decode" else cost for name, cost in self.split.items()
        }


def limit(measured: PartSpeeds) -> str:
    """A key of ``LIMITS``, from the parts alone and the loop.

    If the loop is nearly as fast as its slower part, that part limits; within the loader, the part that takes longest.
    Otherwise one has to wait for the other, and it matters little which is slower alone.
    """
    loader = measured.loader.median
    compute = measured.compute.median
    overlap = measured.gpu and measured.workers
    if not overlap and measured.together.median < SHARED * min(loader, compute):
        return _in_each_others_way(measured)
    if loader * EQUAL < compute:
        return max(measured.costs, key=measured.costs.get)
    if loader < compute * EQUAL:
        return "both"
    return "launch" if measured.busy is not None and measured.busy < BUSY else "compute"


def part_of(limited_by: str) -> str | None:
    """The part of training, 'loader' or 'compute', that a key of ``LIMITS`` is about; None for both of them."""
    if limited_by in ("both", "cores", "turns"):
        return None
    return "compute" if limited_by in ("compute", "launch") else "loader"


def _in_each_others_way(measured: PartSpeeds) -> str:
    return "cores" if measured.workers and not measured.gpu else "turns"


# ------------------------------------------------------------------------------------------ changes


@dataclass(frozen=True)
class Change:
    """Something to try. ``part`` is what it is about, 'loader' or 'compute'; of a ``group`` at most one is taken.

    ``flags`` go onto the command line; ``threads`` is OMP_NUM_THREADS instead. ``caution``: what else it changes.
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
        """Flags as the user would write them."""
        return " ".join(self.flags) or f"OMP_NUM_THREADS={self.threads}"


@dataclass(frozen=True)
class Hardware:
    """Facts that decide which changes make sense.

    ``cores``: those available to this process. ``threads``: of the network on a CPU. ``workers``: None where images are
    resident. ``resident_bytes``: what the data set takes in memory, ``resident_room`` what it may take;
    ``same_images``: whether training shows the same pixels of resident images. ``formats``: the other ``--amp``
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
    """Changes worth a trial, and others with the reason why not; in the order of the report."""
    return [*_loader_changes(place), *_compute_changes(place)]


def ladder(workers: int, cores: int) -> list[int]:
    """Numbers of worker processes to try: of 0, 1, 2, 4 ..., the cores and twice as many, those not far below now."""
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
    """Two speeds measured interleaved, and the median of the rounds' own ratios of the second to the first."""

    before: Spread
    after: Spread
    ratio: float

    @property
    def varied(self) -> float:
        """Variation of either speed meanwhile: the highest over the lowest."""
        return max(side.high / side.low for side in (self.before, self.after))


@dataclass
class TriedChange:
    """A change and what it gave.

    ``alone``: the speed of its part alone, interleaved with that part now. ``loops``: the real loop's, interleaved with
    the settings before the change; none if its part alone did not become faster. ``doubts``: how much the loop's speed
    had varied before, which a gain must exceed too. ``failure``: why there is no measurement.
    """

    change: Change
    alone: Interleaved | None = None
    loops: list[Interleaved] = field(default_factory=list)
    doubts: float = 1.0
    failure: str = ""

    @property
    def promises(self) -> bool:
        """True if its part alone became faster by more than 5 %."""
        return not self.failure and self.alone is not None and self.alone.ratio > GAIN

    @property
    def gains(self) -> bool:
        """True if the loop became faster by more than 5 %, each time it was measured."""
        return self.promises and bool(self.loops) and all(pair.ratio > GAIN for pair in self.loops)

    @property
    def varied(self) -> float:
        """Variation of the loop's speed, before or meanwhile."""
        return max(self.doubts, *(pair.varied for pair in self.loops), 1.0)

    @property
    def is_certain(self) -> bool:
        """True if each gain in the loop is larger than what speeds varied by."""
        return all(pair.ratio > self.varied for pair in self.loops)

    @property
    def helps(self) -> bool:
        """True if it is recommended."""
        return self.gains and self.is_certain


def to_measure_again(trials: Sequence[TriedChange], limited_by: str) -> list[TriedChange]:
    """The best promising trial of each group, those about the limiting part first."""
    best: dict[str, TriedChange] = {}
    for trial in trials:
        if trial.promises and (
            trial.change.group not in best or trial.alone.ratio > best[trial.change.group].alone.ratio
        ):
            best[trial.change.group] = trial
    first = part_of(limited_by) or "loader"
    return sorted(best.values(), key=lambda trial: (trial.change.part != first, -trial.alone.ratio))


@dataclass(frozen=True)
class Advice:
    """Trials, the changes ``taken`` as advice, and the loop's speed without and with them, interleaved.

    Without advice ``gain`` is None.
    """

    trials: list[TriedChange]
    taken: list[Change] = field(default_factory=list)
    gain: Interleaved | None = None


def advice_of(trials: list[TriedChange], helped: Sequence[TriedChange], together: Interleaved | None = None) -> Advice:
    """The advice after those that ``helped``, in the order in which they came on top of each other.

    ``together``: the loop's speed without and with all of them. If that is no certain gain, only the first is advised,
    which was measured against the present settings.
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
    """A larger batch is not tried; the message says why."""


@dataclass(frozen=True)
class Largest:
    """The largest batch that fits, 0 if none; ``reason``: why nothing larger was tried, '' if that does not fit."""

    size: int
    reason: str = ""


def largest_batch(
    fits: Callable[[int], bool], start: int, cap: int, cap_reason: str, tolerance: float = 0.0
) -> Largest:
    """The largest batch up to ``cap`` for which ``fits`` is true: doubled (or halved) from ``start``, then bisected.

    The bisection ends when the largest that fits and the smallest that does not are within ``tolerance`` times the
    former of each other; 0 finds exactly the largest. ``fits`` may raise ``StopSearch``.
    """
    good = 0
    bad = cap + 1
    size = min(start, cap)
    try:
        while good < bad - 1 and bad - good > max(1, tolerance * good):
            if fits(size):
                good = size
            else:
                bad = size
            size = min(2 * good, cap) if bad > cap else (good + bad) // 2
    except StopSearch as stop:
        return Largest(good, str(stop))
    return Largest(good, cap_reason if good == cap else "")
