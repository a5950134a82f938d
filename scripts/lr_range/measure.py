"""Range test: training steps at a learning rate that grows until the loss diverges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from utils.loop.stop_signals import TrainingFailure
from utils.record.curves import StepRecord
from utils.train_validation import TraVal

SMOOTHING = 0.9  # weight of the past in the running mean of the loss
DIVERGED = 4.0  # multiple of the lowest smoothed loss, as in fastai's finder
FIRST_STEPS = 5  # whose losses depend on the initial weights, whatever the rate


@dataclass(frozen=True)
class Ramp:
    """Learning rate of step k of ``steps``, from ``start`` to ``end`` by equal factors (Smith, 2017)."""

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        return self.start * (self.end / self.start) ** (step / max(1, self.steps - 1))

    def at(self, epoch: int, updates: int, drops: int) -> float:
        """Learning rate of step ``updates`` in any ``epoch``: each step has its own, even with --lr-per-epoch."""
        return self(updates)


class RangePoint(NamedTuple):
    """An optimizer step: its learning rate, its mean loss, and the running mean of the losses so far."""

    lr: float
    loss: float
    smoothed: float


@dataclass
class RangeTest:
    """Steps of a range test. ``diverged``: the learning rate at which the loss diverged, None if it did not."""

    points: list[RangePoint] = field(default_factory=list)
    diverged: float | None = None
    _mean: float = 0.0

    def add(self, lr: float, loss: float) -> None:
        """Add a step with its loss, and the running mean of losses, corrected for its start at 0; notice divergence."""
        if not math.isfinite(loss):
            self.diverged = lr
            return
        self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * loss
        smoothed = self._mean / (1 - SMOOTHING ** (len(self.points) + 1))
        self.points.append(RangePoint(lr, loss, smoothed))
        if len(self.points) > FIRST_STEPS and smoothed > DIVERGED * min(point.smoothed for point in self.points):
            self.diverged = lr


def run(traval: TraVal, ramp: Ramp, show: Callable[[RangePoint], None]) -> RangeTest:
    """Train with the rates of ``ramp``, which is ``traval``'s lr policy, until its end or until the loss diverges.

    ``show`` is called after each step. A step skipped by the loss scaler is repeated at the same rate, as in training;
    more consecutive skips than --max-skipped-steps count as divergence.
    """
    test = RangeTest()
    progress = traval.progress
    traval.network.train()
    for passes in _steps(traval):
        skipped = progress.skipped_steps
        _set_peak(traval, ramp(progress.updates))
        try:
            traval.training_step(passes)
            traval.collect()
        except TrainingFailure:  # a gradient is not finite, and there is no scaler
            test.diverged = ramp(progress.updates)
            break
        if progress.skipped_in_row > traval.args.precision.max_skipped_steps:
            test.diverged = ramp(progress.updates)
        elif progress.skipped_steps == skipped:
            last = StepRecord.of(progress.last_step)
            test.add(last.lr, last.loss)
            show(test.points[-1])
        if test.diverged is not None or progress.updates >= ramp.steps:
            break
    return test


def _set_peak(traval: TraVal, lr: float) -> None:
    """Let timm's corrected weight decay, by lr^2 / peak, take ``lr`` for the peak, as in a training with this --lr."""
    for optimizer in traval.optimizers:
        optimizer.defaults["lr"] = lr  # the peak for timm before 1.0.31
        for group in optimizer.param_groups:
            if "max_lr_snapshot" in group:
                group["max_lr_snapshot"] = lr


def _steps(traval: TraVal) -> Iterator[Iterator[Any]]:
    """Yield each step as an iterator over its forward passes' batches, over as many epochs as needed."""
    while True:
        batches = traval.train_loader.batches(traval.progress.epoch)
        for _, passes in itertools.groupby(batches, key=lambda batch: batch.number):
            yield passes
        traval.progress.finish_epoch()
