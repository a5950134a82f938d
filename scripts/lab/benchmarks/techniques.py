"""Cost of a technique: main.py's own step, loading or validation with its flags against the same without them.

The two sides are built as main.py builds them and measured alternately, a round at a time.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from components import build, build_traval
from scripts.common.timing import Spread, interleaved, timed
from scripts.lab.benchmarks.catalogue import STEP, VALIDATION, Technique
from utils.checkpoint.checkpoint import Checkpointer
from utils.config import arguments
from utils.loop.stop_signals import StopSignals
from utils.record.run_folder import RunFolder
from utils.run import Run
from utils.runtime.distributed import Distributed, RankInfo
from utils.train_validation import TraVal

PREFETCHED = 4  # at most this many batches of each worker are ready


def cost(base: Sequence[str], technique: Technique, what: str, rounds: int, units: int) -> Spread:
    """Ratio of the seconds with ``technique`` to those without, on top of the flags ``base``.

    ``units``: steps or batches a round. The median of the rounds' own ratios with the borders of their middle half: of
    many short rounds a few are always disturbed.
    """
    without = technique.base.split()
    with ExitStack() as stack:
        sides = {True: [*without, *technique.flags.split()], False: without}
        measures = {used: stack.enter_context(side([*base, *flags], what, units)) for used, flags in sides.items()}
        seconds, _ = interleaved(measures, rounds)
    gc.collect()
    ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
    low, median, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else 3 * ratios
    return Spread(median, low, high)


@contextmanager
def side(flags: Sequence[str], what: str, units: int) -> Iterator[Callable[[], float]]:
    """A context in which main.py's training under ``flags`` can be measured: seconds of a step, batch or image."""
    args = arguments.parse(list(flags))
    with TemporaryDirectory() as folder, Distributed(RankInfo(), args.run) as distributed:
        run = Run(args, distributed, run_folder=RunFolder(Path(folder)))
        components = build(run)
        traval = build_traval(run, components, Checkpointer(Path(folder), is_main=False), StopSignals(), None)
        if what == VALIDATION:
            images = len(components.data.validation)
            yield lambda: timed(lambda: traval.validation(0, report=False), distributed.device)[0] / images
            return
        work = _steps(traval) if what == STEP else _batches(traval)
        # what the workers have made ready while the other side was measured is not timed
        untimed = 1 if what == STEP else 1 + PREFETCHED * args.data.workers

        def measure() -> float:
            for _ in range(untimed):
                next(work)
            return timed(lambda: [next(work) for _ in range(units)], distributed.device)[0] / units

        measure()  # memory, threads and caches
        yield measure


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
