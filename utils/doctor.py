"""What follows from measured speeds: which part limits training, which changes to try, which of them help.

Plain functions of numbers; ``doctor_measure.py`` and ``doctor_memory.py`` measure, ``doctor_report.py`` says it.
All speeds are in images a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from utils.precision.benchmark_report import Spread

GAIN = 1.05  # a change that gives less is not recommended
EQUAL = 1.2  # parts whose speeds are closer than this limit training alike
BUSY = 0.7  # a GPU that computes for less of a step's time waits for the processor that launches its work

# What can limit training, as the verdict names it.
LIMITS = {
    "decode": "reading and decoding images",
    "read": "taking images from memory",
    "augmentation": "augmentation",
    "copy": "the copy to the GPU",
    "compute": "compute",
    "launch": "launching work on the GPU",
    "both": "loader and network about equally",
}


@dataclass(frozen=True)
class Measured:
    """Training with the present settings.

    ``loader``, ``compute`` and ``together``: each part alone and the real loop. ``wait_percent``: of the loop's time,
    waiting for data. ``split``: seconds an image takes in 'decode' (or 'read', where images are resident),
    'augmentation' and 'copy', each in one process. ``shares``: of a step's time, by 'forward', 'backward' and
    'optimizer'. ``workers``: processes that read, None where images are resident. ``busy``: the share of a step's
    time in which the GPU computes, None without one.
    """

    loader: Spread
    compute: Spread
    together: Spread
    wait_percent: float
    split: dict[str, float]
    shares: dict[str, float]
    workers: int | None
    busy: float | None = None

    @property
    def costs(self) -> dict[str, float]:
        """Seconds an image costs the loader by part, reading shared out over the workers."""
        return {
            name: cost / max(1, self.workers or 1) if name == "decode" else cost for name, cost in self.split.items()
        }


def limit(measured: Measured) -> str:
    """A key of ``LIMITS``: the slower of loader and compute, and in it the part that takes longest."""
    loader, compute = measured.loader.median, measured.compute.median
    if loader * EQUAL < compute:
        return max(measured.costs, key=measured.costs.get)
    if loader < compute * EQUAL:
        return "both"
    return "launch" if measured.busy is not None and measured.busy < BUSY else "compute"


# ------------------------------------------------------------------------------------------ changes


@dataclass(frozen=True)
class Change:
    """Something to try. ``part`` is what it is about, 'loader' or 'compute'; of a ``group`` one is taken at most.

    ``flags`` go onto the command line; ``threads`` is OMP_NUM_THREADS instead. ``caution``: what else it changes.
    ``not_tried``: why it is not.
    """

    part: str
    group: str
    flags: tuple[str, ...] = ()
    threads: int | None = None
    caution: str = ""
    not_tried: str = ""

    @property
    def label(self) -> str:
        """As a person gives it."""
        return " ".join(self.flags) or f"OMP_NUM_THREADS={self.threads}"


@dataclass(frozen=True)
class Place:
    """What decides which changes make sense here.

    ``cores``: those lent to this process. ``threads``: of the network on a CPU. ``workers``: None where images are
    resident. ``resident_bytes``: what the data set takes in memory, ``resident_room`` what it may take; ``same_crops``:
    whether resident images train on the same pixels. ``formats``: the other ``--amp`` formats, each with the reason
    why it is not worth a trial, or ''.
    """

    gpu: bool
    cores: int
    threads: int
    workers: int | None
    batch_size: int
    samples: int
    resident_bytes: int
    resident_room: float
    same_crops: bool
    convolutions: bool
    channels_last: bool
    formats: dict[str, str]
    compiled: bool
    try_compile: bool


def changes(place: Place) -> list[Change]:
    """What is worth a trial, and what is not with the reason, in the order of the report."""
    return [*_loader_changes(place), *_compute_changes(place)]


def ladder(workers: int, cores: int) -> list[int]:
    """Numbers of worker processes to try: of 0, 1, 2, 4 ..., the cores and twice as many, those not far below now."""
    steps = {0, cores, 2 * cores, *(2**k for k in range(cores.bit_length()) if 2**k < cores)}
    return sorted(count for count in steps - {workers} if count >= min(workers, cores) // 2)


def _loader_changes(place: Place) -> list[Change]:
    if place.workers is None:
        return []
    found = [Change("loader", "loader", ("--workers", str(count))) for count in ladder(place.workers, place.cores)]
    size, room = place.resident_bytes / 1e9, place.resident_room / 1e9
    crops = "" if place.same_crops else "crops are cut from images stored at the network's size"
    reason = "" if size <= room else f"{size:,.1f} GB of images, where {room:,.1f} GB may be taken"
    found.append(Change("loader", "loader", ("--loader", "resident"), caution=crops, not_tried=reason))
    if place.gpu:
        found.append(Change("loader", "decode", ("--decode", "gpu")))
    return found


def _compute_changes(place: Place) -> list[Change]:
    found = []
    if place.convolutions:
        found.append(Change("compute", "channels", ("--channels-last", "off" if place.channels_last else "on")))
    for name, reason in place.formats.items():
        found.append(Change("compute", "amp", ("--amp", name), not_tried=reason))
    small = f"an epoch has {place.samples:,} images" if 2 * place.batch_size > place.samples else ""
    found.append(
        Change(
            "compute", "batch", ("--batch-size", str(2 * place.batch_size)), not_tried=small,
            caution="another global batch: raise --lr with it",
        )
    )  # fmt: skip
    if not place.gpu:
        counts = sorted({max(1, place.cores // 2), place.cores, 1} - {place.threads})
        found += [Change("compute", "threads", threads=count) for count in counts]
    if not place.compiled:
        reason = "" if place.gpu or place.try_compile else "takes long; --try-compile"
        found.append(Change("compute", "compile", ("--compile",), not_tried=reason))
    return found


# ------------------------------------------------------------------------------------------- trials


@dataclass
class Trial:
    """A change and what it gave.

    ``alone``: the speed of its part alone, ``ratio`` to that part now. ``loop_ratio``: how much faster the real loop
    became (from ``before`` to ``loop``), measured again in turns with the settings before it; None where the first
    measurement gave no reason to. ``failure``: why there is nothing.
    """

    change: Change
    alone: Spread | None = None
    ratio: float | None = None
    before: Spread | None = None
    loop: Spread | None = None
    loop_ratio: float | None = None
    failure: str = ""

    @property
    def helps(self) -> bool:
        """Whether it is recommended: it gave more than 5 %, and in the loop again."""
        return self.promises and self.loop_ratio is not None and self.loop_ratio > GAIN

    @property
    def promises(self) -> bool:
        """Whether its part alone became faster by more than 5 %."""
        return not self.failure and self.ratio is not None and self.ratio > GAIN


def to_measure_again(trials: Sequence[Trial], limited_by: str) -> list[Trial]:
    """The best of each group that promises something, those about the limiting part first."""
    best: dict[str, Trial] = {}
    for trial in trials:
        if trial.promises and (trial.change.group not in best or trial.ratio > best[trial.change.group].ratio):
            best[trial.change.group] = trial
    first = "compute" if limited_by in ("compute", "launch") else "loader"
    return sorted(best.values(), key=lambda trial: (trial.change.part != first, -trial.ratio))


@dataclass(frozen=True)
class Advice:
    """All trials, the changes ``taken`` as advice, and the loop's speed ``now`` and ``then`` with them, in turns.

    Without advice ``then`` is None.
    """

    trials: list[Trial]
    taken: list[Change] = field(default_factory=list)
    now: Spread | None = None
    then: Spread | None = None
    ratio: float | None = None


def advice_of(
    trials: list[Trial], helped: Sequence[Trial], together: tuple[Spread, Spread, float] | None = None
) -> Advice:
    """The advice after those that ``helped``, in the order in which they came on top of each other.

    ``together``: the loop's speed without and with all of them, and the ratio. Where that is no gain, the first alone
    is advised, which was measured against the present settings.
    """
    if not helped:
        return Advice(trials)
    if together is not None and together[2] > GAIN:
        return Advice(trials, [trial.change for trial in helped], *together)
    first = helped[0]
    return Advice(trials, [first.change], first.before, first.loop, first.loop_ratio)


# ------------------------------------------------------------------------------------ largest batch


class StopSearch(Exception):
    """A larger batch is not tried; the message says why."""


@dataclass(frozen=True)
class Largest:
    """The largest batch that fits, 0 if none; ``reason``: why nothing larger was tried, '' where that does not fit."""

    size: int
    reason: str = ""


def largest_batch(
    fits: Callable[[int], bool], start: int, cap: int, cap_reason: str, tolerance: float = 0.0
) -> Largest:
    """The largest batch up to ``cap`` for which ``fits`` is true: doubled (or halved) from ``start``, then bisected.

    The bisection ends when the largest that fits and the smallest that does not are within ``tolerance`` times the
    former of each other; 0 finds exactly the largest. ``fits`` may raise ``StopSearch``.
    """
    good, bad, size = 0, cap + 1, min(start, cap)
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
