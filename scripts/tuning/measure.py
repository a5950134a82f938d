"""Speeds of the parts of training (loader, computation, both), in windows of steps, to show their spread.

Everything runs through the real loader and ``TraVal.training_step``. The learning rate is tiny: speed does not depend
on it, and training repeatedly on one batch must not make the weights diverge.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from scripts.common.timing import Spread, busy_seconds, interleaved, ratios, synchronise, timed
from scripts.tuning.advice import Interleaved
from utils.config.settings import Settings
from utils.data.loaders import Batch, TrainLoader
from utils.data.sources import StreamSource
from utils.train_validation import TraVal

LR = 1e-6
WINDOWS = 5
FEWEST_WINDOWS = 3
READ_AT_ONCE = 32  # images, when reading is timed in this process
TAKEN_AT_ONCE = 4096  # images in memory, when taking them is timed
PROFILED_STEPS = 5


class Window(NamedTuple):
    """Consecutive steps: number of images, seconds, and how many of these seconds were spent waiting for data."""

    images: int
    seconds: float
    waited: float = 0.0

    @property
    def speed(self) -> float:
        return self.images / self.seconds


Measure = Callable[[int, int], list[Window]]  # (steps per window, windows)


@dataclass(eq=False)
class TrainingSetup:
    """One way to train, ready to be measured.

    ``epochs`` yields the number of the next epoch to read, of those with images of full size; all set-ups share it, so
    that none finds in the file cache what another has just read. ``threads``: number that the network uses on a CPU.
    """

    args: Settings
    loader: TrainLoader
    traval: TraVal
    epochs: Iterator[int]
    threads: int
    _waited: float = field(default=0.0, init=False)
    _images: int = field(default=0, init=False)

    @property
    def device(self) -> torch.device:
        return self.traval.device

    @property
    def workers(self) -> int | None:
        """Number of processes that read images; None for resident images."""
        return self.loader.source.workers if isinstance(self.loader.source, StreamSource) else None

    @cached_property
    def passes(self) -> list[Batch]:
        """Forward passes of an epoch's first step, on the device. No step has more images or larger ones."""
        return self.loader.replay_step(self.loader.full_size_epoch, 0)

    @property
    def step_images(self) -> int:
        """Number of images in ``passes``."""
        return sum(len(batch.targets) for batch in self.passes)

    # ------------------------------------------------------------------------------- measurements

    def measure_loader(self, steps: int, windows: int) -> list[Window]:
        """Time the loader alone, taking batches as fast as they come."""
        return self._go_through(steps, windows, lambda passes: [None for _ in passes])

    def measure_loop(self, steps: int, windows: int) -> list[Window]:
        """Time training as ``TraVal.train`` does it, without its log lines."""
        return self._go_through(steps, windows, self._step)

    def measure_compute(self, steps: int, windows: int) -> list[Window]:
        """Time training steps on one batch that is already on the device."""
        torch.set_num_threads(self.threads)
        passes = self.passes

        def work() -> None:
            for _ in range(steps):
                self.repeat_step(passes)
            self.traval.collect()

        return [Window(steps * self.step_images, timed(work, self.device)[0]) for _ in range(windows)]

    def repeat_step(self, passes: list[Batch]) -> None:
        self._stand_at(0, 0)
        self._step(passes)

    def _step(self, passes: Iterable[Batch]) -> None:
        self.traval.training_step(passes)
        if self.traval.sums.full:
            self.traval.collect()

    def _stand_at(self, epoch: int, step: int) -> None:
        """Set the position in training, from which a step skipped by the loss scaler reads its batches again."""
        self.traval.progress.epoch = epoch
        self.traval.progress.step_in_epoch = step

    def _go_through(self, steps: int, windows: int, work: Callable[[Iterable[Batch]], Any]) -> list[Window]:
        """Do ``work`` on the passes of steps x windows steps, and time it in windows.

        Also takes unmeasured steps: before, as many as the workers start with at once, and one after, because the first
        batch of the next step is fetched during a step, so that each window contains exactly its number of fetches.
        """
        torch.set_num_threads(self.threads)
        before = max(1, self.workers or 0)
        found = []
        for number, passes in enumerate(self._feed(before + steps * windows + 1), 1 - before):
            if number == 1:
                began = self._begin_window()
            work(self._counted(passes))
            if 0 < number <= steps * windows and number % steps == 0:
                self.traval.collect()  # a synchronisation point, as train() has every --print-freq steps
                synchronise(self.device)
                found.append(Window(self._images, time.perf_counter() - began, self._waited))
                began = self._begin_window()
        self.traval.collect()
        return found

    def _begin_window(self) -> float:
        synchronise(self.device)
        self._waited = 0.0
        self._images = 0
        return time.perf_counter()

    def _feed(self, steps: int) -> Iterator[Iterable[Batch]]:
        """Yield the passes of ``steps`` steps.

        The last step always ends an epoch, so that no worker is left reading ahead.
        """
        per_epoch = self.loader.steps_per_epoch
        while steps:
            part = steps % per_epoch or per_epoch
            epoch = next(self.epochs)
            first = per_epoch - part
            self._stand_at(epoch, first)
            batches = self._timed(self.loader.batches(epoch, first))
            for _, passes in itertools.groupby(batches, key=lambda batch: batch.number):
                yield passes
            steps -= part

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self._waited += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def _counted(self, passes: Iterable[Batch]) -> Iterator[Batch]:
        for batch in passes:
            self._images += len(batch.targets)
            yield batch


def windows_of(measure: Measure, seconds: float) -> list[Window]:
    """Windows that take about ``seconds`` together, measured after a warm-up."""
    steps, window_seconds = steps_for(measure, seconds / WINDOWS)
    return measure(steps, max(FEWEST_WINDOWS, min(WINDOWS, round(seconds / window_seconds))))


def steps_for(measure: Measure, seconds: float) -> tuple[int, float]:
    """Number of steps that take about ``seconds``, measured while warming up, and their expected seconds."""
    measure(1, 1)  # compiles, chooses convolution algorithms, starts worker processes
    steps = 1
    while (warm := measure(steps, 1)[0].seconds) < seconds / 4:
        steps *= 2
    wanted = max(1, round(steps * seconds / warm))
    return wanted, wanted * warm / steps


def spread(windows: Iterable[Window]) -> Spread:
    """Spread of the windows' speeds."""
    return Spread.of([window.speed for window in windows])


def interleaved_speeds(before: Measure, after: Measure, seconds: float, pairs: int) -> Interleaved:
    """Speeds of ``before`` and ``after`` in ``pairs`` pairs of windows, and the median of the pairs' ratios.

    ``seconds``: approximate time in all. Measured alternately, so that changes on the machine meanwhile affect both
    sides alike.
    """

    def speed(measure: Measure, steps: int) -> float:
        return measure(steps, 1)[0].speed

    sides = [partial(speed, measure, steps_for(measure, seconds / (2 * pairs))[0]) for measure in (before, after)]
    speeds, _ = interleaved(dict(enumerate(sides)), pairs)
    return Interleaved(Spread.of(speeds[0]), Spread.of(speeds[1]), ratios(speeds[1], speeds[0]).median)


# ---------------------------------------------------------------------------------- inside the parts


def loader_split(subject: TrainingSetup, seconds: float) -> dict[str, float]:
    """Seconds per image in each part of the loader: medians of measurements that take about ``seconds`` in all."""
    measure = _resident_parts if subject.workers is None else _streamed_parts
    ends = time.perf_counter() + seconds
    found = []
    while time.perf_counter() < ends or len(found) < 3:
        found.append(measure(subject))
    return {part: statistics.median(one[part] for one in found[1:]) for part in found[0]}  # the first warms up


def _resident_parts(subject: TrainingSetup) -> dict[str, float]:
    """One measurement of a loader of images in memory, which takes and augments those of many steps together."""
    loader = subject.loader
    epoch = next(subject.epochs)
    steps = range(min(loader.steps_per_epoch, max(1, TAKEN_AT_ONCE // loader.plan.global_batch_size)))
    micro_batches = [one for step in steps for one in loader.plan.micro_batches(epoch, step)]
    count = sum(len(one.indices) for one in micro_batches)
    took, _ = timed(lambda: deque(loader.source.batches(micro_batches), 0), subject.device)
    whole, _ = timed(lambda: deque(loader.prepared(micro_batches), 0), subject.device)
    return {"read": took / count, "augmentation": max(0.0, whole - took) / count}


def _streamed_parts(subject: TrainingSetup) -> dict[str, float]:
    """One measurement of the parts of a loader that reads files."""
    source = subject.loader.source
    device = subject.device
    micro_batch = subject.loader.plan.micro_batches(next(subject.epochs), 0)[0]
    few = micro_batch.indices[:READ_AT_ONCE]
    some = dataclasses.replace(micro_batch, indices=few, count=len(few))
    took, (_, pixels, labels) = timed(partial(source.read, some), device)
    parts = {"decode": took / len(few)}
    rows = torch.arange(len(micro_batch.indices), device=pixels.device) % len(few)  # these images fill the batch
    whole = pixels[rows], labels[rows]
    took, _ = timed(partial(list, subject.loader.prepare([micro_batch], *whole)), device)  # lazy: read in ``timed``
    parts["augmentation"] = took / len(rows)
    if device.type == "cuda":
        pinned = torch.empty(whole[0].shape, dtype=whole[0].dtype, pin_memory=True)
        took, _ = timed(partial(pinned.to, device, non_blocking=True), device)
        parts["copy"] = took / len(rows)
    return parts


def step_shares(subject: TrainingSetup, steps: int) -> dict[str, float]:
    """Shares of a step: 'forward' (with loss), 'backward', 'optimizer' (with scaler, clipping, averages, metrics).

    Empty where graphs may stand for steps, because a graph calls no hooks.
    """
    if subject.traval.launcher is not subject.traval:
        return {}
    marks: list[tuple[str, Any]] = []

    def mark(name: str) -> None:
        if subject.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append((name, event))
        else:
            marks.append((name, time.perf_counter()))

    hooks = subject.traval.hooks
    hooks.after_forward.append(lambda *_: mark("forward"))
    hooks.after_backward.append(lambda *_: mark("backward"))
    try:
        for _ in range(steps):
            mark("begin")
            subject.repeat_step(subject.passes)
            mark("optimizer")
    finally:
        hooks.after_forward.pop()
        hooks.after_backward.pop()
    subject.traval.collect()
    synchronise(subject.device)
    totals = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
    for (_, begun), (name, ended) in itertools.pairwise(marks):
        if name != "begin":
            totals[name] += ended - begun if isinstance(begun, float) else begun.elapsed_time(ended)
    whole = sum(totals.values())
    return {name: value / whole for name, value in totals.items()}


def busy_share(subject: TrainingSetup, step_seconds: float) -> float | None:
    """Share of a step's ``step_seconds`` in which the GPU computes; None if torch's profiler does not show that."""
    busy = busy_seconds(lambda: subject.measure_compute(PROFILED_STEPS, 1))
    return min(1.0, busy / PROFILED_STEPS / step_seconds) if busy else None
