"""Examination: measure the parts of training with the present settings, then try other settings one by one."""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from scripts.common.command_line import say
from scripts.common.timing import failure_of, unsupported
from scripts.tuning.advice import (
    Advice,
    Change,
    Hardware,
    Interleaved,
    PartSpeeds,
    TriedChange,
    advice_of,
    changes,
    limit,
    part_of,
    to_measure_again,
)
from scripts.tuning.measure import (
    TrainingSetup,
    busy_share,
    interleaved_speeds,
    loader_split,
    spread,
    step_shares,
    windows_of,
)
from utils.config.image_size import sides
from utils.config.settings import UserError
from utils.data.data_set import Data
from utils.data.formats.readers import MemoryImages
from utils.data.loaders import RESIDENT_MEMORY_SHARE, shown_otherwise_resident
from utils.loop.stop_signals import TrainingFailure
from utils.precision.amp import resolve_amp
from utils.runtime.cpu import cores_per_process, has_bf16_units
from utils.runtime.devices import memory_bytes

SHARES_STEPS = 10
# pairs of windows, in the first measurement and in the loop
FIRST_PAIRS = 2
PAIRS = 4
STAND_IN_IMAGES = 512  # random images, in place of a resident data set that is not decoded yet

# Builds a set-up with the last of the changes added to the others.
Variant = Callable[[TrainingSetup, tuple[Change, ...]], TrainingSetup]


def begin(what: str) -> None:
    """Say what is measured next."""
    say(f"measuring: {what}")


def examine(subject: TrainingSetup, seconds: float) -> tuple[PartSpeeds, tuple[int, int] | None]:
    """Measure the loader alone, computing alone, and both together, each for about ``seconds``.

    Returns the speeds and, on a GPU, the peak bytes allocated and reserved in a step, otherwise None.
    """
    begin("loader alone")
    loader = spread(windows_of(subject.measure_loader, seconds))
    split = loader_split(subject, seconds / 4)
    begin("compute alone")
    gpu = subject.device.type == "cuda"
    peak = None
    if gpu:
        torch.cuda.reset_peak_memory_stats(subject.device)
    compute = spread(windows_of(subject.measure_compute, seconds))
    if gpu:
        peak = torch.cuda.max_memory_allocated(subject.device), torch.cuda.max_memory_reserved(subject.device)
    step_seconds = subject.step_images / compute.median
    shares = step_shares(subject, max(1, min(SHARES_STEPS, round(seconds / 2 / step_seconds))))
    busy = busy_share(subject, step_seconds) if gpu else None
    begin("both together")
    loop = windows_of(subject.measure_loop, seconds)
    waits = statistics.median(100 * window.waited / window.seconds for window in loop)
    return PartSpeeds(loader, compute, spread(loop), waits, split, shares, subject.workers, gpu, busy), peak


def hardware_of(subject: TrainingSetup, data: Data, try_compile: bool) -> Hardware:
    """Facts that decide which changes make sense for ``subject``."""
    args = subject.args
    device = subject.device
    transform = subject.loader.transform
    gpu = device.type == "cuda"
    amp = resolve_amp(args.precision, device)
    formats = {name: unsupported(name, device) or "" for name in ("bf16", "fp16", "off") if name != amp}
    if not gpu:
        emulated = ["fp16"] if has_bf16_units() else ["fp16", "bf16"]  # a step may take a minute
        formats |= {name: "emulated on this CPU" for name in emulated if name in formats}
    size = data.spec.image_size if data.spec.fixed_size else data.image_size
    return Hardware(
        gpu=gpu,
        cores=cores_per_process(1),
        threads=subject.threads,
        workers=subject.workers,
        batch_size=args.data.batch_size,
        samples=subject.loader.plan.num_samples,
        resident_bytes=(len(data.train) + len(data.validation))
        * data.preprocessing.channels
        * math.prod(sides(size))
        * data.train.dtype.itemsize,
        resident_room=RESIDENT_MEMORY_SHARE * memory_bytes(device),
        same_images=shown_otherwise_resident(args, data.spec) is None,
        convolutions=any(isinstance(module, nn.Conv2d) for module in subject.traval.model.modules()),
        channels_last=transform.channels_last,
        formats=formats,
        compiled=args.model.compile,
        try_compile=try_compile,
    )


def stand_in(data: Data) -> Data:
    """A data set of random pixels in memory, as large as ``data``: the speed of reading does not depend on content."""
    size = data.spec.image_size if data.spec.fixed_size else data.image_size
    shape = (STAND_IN_IMAGES, data.preprocessing.channels, *sides(size))
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8).to(data.train.dtype)
    train, validation = (MemoryImages(pixels, images.labels) for images in (data.train, data.validation))
    return dataclasses.replace(data, train=train, validation=validation)


@dataclass
class Trials:
    """Trials of changes to the set-up ``now``, whose parts have the speeds ``measured``.

    ``variant``: builds a changed set-up. ``seconds``: approximate time per measurement.
    """

    now: TrainingSetup
    variant: Variant
    measured: PartSpeeds
    seconds: float

    def advise(self, place: Hardware) -> Advice:
        """Try all changes, measure the promising ones again in the real loop, then all that help together.

        The second measurement includes the changes already found to help: faster computation only shows once the loader
        keeps up.
        """
        trials = [self._first(change) for change in changes(place)]
        best = self.now
        helped = []
        for trial in to_measure_again(trials, limit(self.measured)):
            begin(f"interleaved with the settings before: {trial.change.label}")
            after = self._again(trial, best, tuple(other.change for other in helped))
            if trial.helps:
                best = after
                helped = [*helped, trial]
        together = None
        if len(helped) > 1:
            begin("all that help together, interleaved with the present settings")
            together = self._in_the_loop(self.now, best)
        return advice_of(trials, helped, together)

    def _first(self, change: Change) -> TriedChange:
        """Measure the speed of the affected part alone, alternating with and without the change."""
        trial = TriedChange(change, failure=change.not_tried and f"not tried: {change.not_tried}")
        if trial.failure:
            return trial
        begin(change.label)
        _forget_others(self.now.device)
        try:
            subject = self.variant(self.now, (change,))
            parts = [getattr(one, f"measure_{change.part}") for one in (self.now, subject)]
            trial.alone = interleaved_speeds(*parts, self.seconds / 2, FIRST_PAIRS)
        except (UserError, RuntimeError) as error:
            trial.failure = why_impossible(error)
        return trial

    def _again(self, trial: TriedChange, before: TrainingSetup, present: tuple[Change, ...]) -> TrainingSetup:
        """Measure the loop with and without the trial's change; return the set-up with it, ``before`` after a failure.

        ``before`` is the set-up with the changes ``present``, to which the trial's is added. A gain in a part that is
        no bottleneck would contradict the parts' own measurements, so it is measured twice.
        """
        after = before
        limiting = part_of(limit(self.measured))
        trial.doubts = self.measured.varied
        _forget_others(before.device)
        try:
            after = self.variant(before, (*present, trial.change))
            trial.loops.append(self._in_the_loop(before, after))
            if trial.helps and limiting not in (None, trial.change.part):
                trial.loops.append(self._in_the_loop(before, after))
        except (UserError, RuntimeError) as error:
            trial.failure = why_impossible(error)
        return after

    def _in_the_loop(self, before: TrainingSetup, after: TrainingSetup) -> Interleaved:
        return interleaved_speeds(before.measure_loop, after.measure_loop, 2 * self.seconds, PAIRS)


def why_impossible(error: Exception) -> str:
    """Short reason why a change is impossible; raises ``error`` if the change is not the cause."""
    if isinstance(error, UserError):
        return f"impossible: {error.mistakes[0]}"
    reason = "the gradient is not finite" if isinstance(error, TrainingFailure) else failure_of(error, compiled=True)
    if not reason:
        raise error
    return reason


def _forget_others(device: torch.device) -> None:
    """Free memory and worker processes of the set-ups already measured."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
