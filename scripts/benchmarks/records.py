"""What logging and checkpoints cost, in this process: the training loop with and without them."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

import main
from scripts.benchmarks import data
from scripts.benchmarks.measure import PERCENT, RATE, Match, Measure, Rival, Setup
from utils.checkpoint.checkpoint import Checkpointer
from utils.config import arguments
from utils.config.settings import Settings
from utils.record.run import Run
from utils.record.summary import describe
from utils.record.writer import NullWriter, build_writer
from utils.runtime.distributed import Distributed, RankInfo
from utils.train_validation import TraVal

STEPS_A_CHECKPOINT = 50


def records(setup: Setup) -> Iterator[Match | str]:
    """Epochs with and without a writer; a checkpoint every 50 steps."""
    with logging_cost(setup) as match:
        yield match
    with checkpoint_cost(setup) as match:
        yield match


@contextmanager
def logging_cost(setup: Setup) -> Iterator[Match]:
    """TensorBoard, log.txt, metrics files and a console that is a file, under the smallest network."""
    folder = data.mnist(setup.mnist, setup.scratch)
    args = arguments.parse([
        "--dataname", "mnist", "--datapath", str(folder), "--arch", "fc", "--batch-size", "128", "--augment", "none",
        "--lr", "0.01", "--epochs", "1000000", "--device", "cpu",
    ])  # fmt: skip
    with (
        Distributed(RankInfo(), args.run) as distributed,
        TemporaryDirectory(dir=setup.scratch) as run,
        open(Path(run, "console.txt"), "w", encoding="utf-8") as console,
    ):
        writer = build_writer(True, Path(run), progress=False)
        ours = whole_epoch(build(args, distributed, writer=writer), console)
        without = whole_epoch(build(args, distributed, writer=NullWriter()), console)
        for warm_up in (ours, without):
            warm_up()
        what = "fc on MNIST: epochs that are logged"
        yield Match(what, RATE, ours, [Rival("the same without a writer", {"": without}, 0.97)], times=3)
        writer.close()


def whole_epoch(traval: TraVal, console: TextIO) -> Measure:
    """Images a second of the next epoch, with its validation and its row."""

    def measure() -> float:
        epoch, before = traval.progress.epoch, traval.progress.samples_seen
        began = time.perf_counter()
        with redirect_stdout(console):
            traval.train(epoch)
            traval.validation(epoch, report=True)
        return (traval.progress.samples_seen - before) / (time.perf_counter() - began)

    return measure


@contextmanager
def checkpoint_cost(setup: Setup) -> Iterator[Match]:
    """What a checkpoint adds to 50 steps, in percent: seconds of a few steps with one being written and without.

    Copying, waiting and what the writing thread takes from the training: all of it is in the seconds.
    """
    tree = data.cifar10_tree(setup.cifar10, setup.scratch)
    args = arguments.parse([
        "--dataname", "cifar10", "--datapath", str(tree), "--arch", "resnet18", "--batch-size", "128", "--lr", "0.01",
        "--epochs", "1000000", "--device", setup.device.type,
    ])  # fmt: skip
    with Distributed(RankInfo(), args.run) as distributed, TemporaryDirectory(dir=setup.scratch) as run:
        writer = build_writer(True, Path(run), progress=False)
        traval = build(args, distributed, writer=writer, checkpointer=Checkpointer(Path(run), True))

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
            without, saving = epoch_seconds(False), epoch_seconds(True)
            step = without / traval.train_loader.steps_per_epoch
            return 100 * (saving - without) / (STEPS_A_CHECKPOINT * step)

        measure()  # warm-up
        yield Match("resnet18: a checkpoint every 50 steps", PERCENT, measure, [Rival(target=2.0)])
        writer.close()


def build(
    args: Settings,
    distributed: Distributed,
    *,
    writer: NullWriter | None = None,
    checkpointer: Checkpointer | None = None,
) -> TraVal:
    """The training loop as main.py builds it."""
    with redirect_stdout(io.StringIO()):  # lines about the data would break the table
        components = main.build(Run(args, distributed))
    return TraVal(
        components.model, components.train_loader, components.optimizer, components.criterion, components.scaler, args,
        components.validation_loader, distributed=distributed, lr_policy=components.lr_policy, ema=components.ema,
        writer=writer, checkpointer=checkpointer, description=describe(args, components.data),
    )  # fmt: skip
