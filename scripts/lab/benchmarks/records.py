"""What logging and checkpoints cost, in this process."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from components import build as build_components
from components import build_traval
from scripts.lab.benchmarks import data
from scripts.lab.benchmarks.measure import PERCENT, Match, Rival, Setup
from utils.checkpoint.checkpoint import Checkpointer
from utils.config import arguments
from utils.config.settings import Settings
from utils.record.run_folder import RunFolder
from utils.record.writer import Writer, build_writer
from utils.run import Run
from utils.runtime.distributed import Distributed, RankInfo
from utils.train_validation import TraVal

STEPS_A_CHECKPOINT = 50
ENDLESS = ("--batch-size", "128", "--lr", "0.01", "--epochs", "1000000")


def records(setup: Setup) -> Iterator[Match | str]:
    """The writer's share of an epoch; a checkpoint every 50 steps."""
    with logging_cost(setup, "curves and log", target=3.0) as match:
        yield match
    with logging_cost(setup, "pictures too", "--picture-epochs", "1") as match:
        yield match
    with checkpoint_cost(setup) as match:
        yield match


@contextmanager
def logging_cost(setup: Setup, name: str, *flags: str, target: float | None = None) -> Iterator[Match]:
    """TensorBoard, log.txt, metrics files and a console that is a file, under the smallest network.

    Records are written by the thread that trains, so their cost is the time inside the writer. It is read off the very
    epoch that it is a share of: epochs with and without a writer differ by more, as the machine's pace does.
    """
    folder = data.mnist(setup.mnist, setup.scratch)
    images = ["--dataname", "mnist", "--datapath", str(folder), "--augment", "none"]
    args = arguments.parse([*images, *ENDLESS, "--arch", "fc", "--device", "cpu", *flags])
    with (
        Distributed(RankInfo(), args.run) as distributed,
        TemporaryDirectory(dir=setup.scratch) as run,
        open(Path(run, "console.txt"), "w", encoding="utf-8") as console,
    ):
        writer = TimedWriter(build_writer(True, Path(run), progress=False))
        traval = build(args, distributed, Path(run), writer)

        def measure() -> float:
            writer.seconds = 0.0
            began = time.perf_counter()
            with redirect_stdout(console):
                traval.train(traval.progress.epoch)
                traval.validation(traval.progress.epoch, report=True)
            return 100 * writer.seconds / (time.perf_counter() - began)

        measure()  # warm-up
        yield Match(f"fc on MNIST: {name}, of an epoch", PERCENT, measure, [Rival(target=target)], times=3)
        writer.close()


class TimedWriter:
    """A writer that counts the ``seconds`` spent in its methods."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._writer, name)
        return self._timed(attribute) if callable(attribute) else attribute

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


@contextmanager
def checkpoint_cost(setup: Setup) -> Iterator[Match]:
    """What a checkpoint adds to 50 steps, in percent: seconds of a few steps with one being written and without.

    Copying, waiting and what the writing thread takes from the training: all of it is in the seconds.
    """
    tree = data.cifar10_tree(setup.cifar10, setup.scratch)
    images = ["--dataname", "cifar10", "--datapath", str(tree)]
    args = arguments.parse([*images, *ENDLESS, "--arch", "resnet18", "--device", setup.device.type])
    with Distributed(RankInfo(), args.run) as distributed, TemporaryDirectory(dir=setup.scratch) as run:
        writer = build_writer(True, Path(run), progress=False)
        traval = build(args, distributed, Path(run), writer, Checkpointer(Path(run), True))

        def epoch_seconds(saving: bool) -> float:
            began = time.perf_counter()
            if saving:
                traval.save("last")
            with redirect_stdout(io.StringIO()):
                traval.train(traval.progress.epoch)  # ends with a synchronisation, since it reads the sums
            traval.checkpointer.wait()
            seconds = time.perf_counter() - began
            traval.progress.finish_epoch()
            return seconds

        def measure() -> float:
            without = epoch_seconds(False)
            saving = epoch_seconds(True)
            step = without / traval.train_loader.steps_per_epoch
            return 100 * (saving - without) / (STEPS_A_CHECKPOINT * step)

        measure()  # warm-up
        yield Match("resnet18: a checkpoint every 50 steps", PERCENT, measure, [Rival(target=2.0)])
        writer.close()


def build(
    args: Settings,
    distributed: Distributed,
    folder: Path,
    writer: Writer | TimedWriter,
    checkpointer: Checkpointer | None = None,
) -> TraVal:
    """The training loop as main.py builds it."""
    run = Run(args, distributed, run_folder=RunFolder(folder), writer=writer)
    with redirect_stdout(io.StringIO()):  # lines about the data would break the table
        components = build_components(run)
    return build_traval(run, components, checkpointer)
