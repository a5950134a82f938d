"""What a technique costs: main.py's own step, loading or validation with its flags against the same without them.

The two sides are built as main.py builds them and measured alternately, a round at a time.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from components import build, build_traval
from scripts.common.timing import Spread
from scripts.lab.benchmarks.catalogue import STEP, VALIDATION, Technique
from scripts.lab.benchmarks.loading import PREFETCHED
from utils.checkpoint.checkpoint import Checkpointer
from utils.config import arguments
from utils.loop.stop_signals import StopSignals
from utils.record.run_folder import RunFolder
from utils.run import Run
from utils.runtime.distributed import Distributed, RankInfo
from utils.train_validation import TraVal

Seconds = Callable[[], float]


class Cost(NamedTuple):
    """Seconds of a step, batch or validation without and with a technique, and the ratio of the rounds' own.

    Each is a median with the borders of the rounds' middle half: of many short rounds a few are always disturbed.
    """

    without: Spread
    ratio: Spread


def cost(base: Sequence[str], technique: Technique, what: str, rounds: int, units: int) -> Cost:
    """Measure ``technique`` on top of the flags ``base``, ``units`` steps or batches a round."""
    without = technique.base.split()
    with ExitStack() as stack:
        sides = (without, [*without, *technique.flags.split()])
        measures = [stack.enter_context(_Side([*base, *flags], what, units)) for flags in sides]
        seconds: list[list[float]] = [[], []]
        for number in range(rounds):
            for side in (0, 1) if number % 2 else (1, 0):
                seconds[side].append(measures[side]())
    gc.collect()
    return Cost(_middle_half(seconds[0]), _middle_half([a / b for a, b in zip(seconds[1], seconds[0], strict=True)]))


def _middle_half(values: Sequence[float]) -> Spread:
    """The median, the first and the third quartile."""
    low, median, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else 3 * list(values)
    return Spread(median, low, high)


class _Side(AbstractContextManager):
    """main.py's training under ``flags``, ready to be measured."""

    def __init__(self, flags: Sequence[str], what: str, units: int) -> None:
        self.flags = flags
        self.what = what
        self.units = units
        self._stack = ExitStack()

    def __enter__(self) -> Seconds:
        args = arguments.parse(list(self.flags))
        folder = Path(self._stack.enter_context(TemporaryDirectory()))
        distributed = self._stack.enter_context(Distributed(RankInfo(), args.run))
        run = Run(args, distributed, run_folder=RunFolder(folder))
        components = build(run)
        traval = build_traval(run, components, Checkpointer(folder, is_main=False), StopSignals(), None)
        if self.what == VALIDATION:
            return lambda: _timed(lambda: traval.validation(0, report=False)) / len(components.data.validation)
        if self.what == STEP:
            work = _steps(traval)
            untimed = 1
        else:  # what the workers have made ready while the other side was measured is not timed
            work = _batches(traval)
            untimed = 1 + PREFETCHED * args.data.workers

        def measure() -> float:
            for _ in range(untimed):
                next(work)
            return _timed(lambda: [next(work) for _ in range(self.units)]) / self.units

        measure()  # memory, threads and caches
        return measure

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _steps(traval: TraVal) -> Iterator[None]:
    """Training steps without end, with the sums read as seldom as in training."""
    traval.network.train()
    for epoch in itertools.count():
        for _, passes in itertools.groupby(traval.train_loader.batches(epoch), key=lambda batch: batch.number):
            traval.training_step(passes)
            if traval.sums.full:
                traval.collect()
            yield
        traval.collect()


def _batches(traval: TraVal) -> Iterator[None]:
    """Training batches without end, without training."""
    for epoch in itertools.count():
        for _ in traval.train_loader.batches(epoch):
            yield
