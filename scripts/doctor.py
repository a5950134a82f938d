"""Why is training slow here, and what should be changed? Measured with the settings that main.py would use.

    python scripts/doctor.py                                                # the digits
    python scripts/doctor.py --dataname folder --datapath my_data --arch resnet50 --amp bf16

Times loader, computation and both, names what limits the speed, tries other settings and recommends those that help;
measures the memory of a training step and the largest batch that fits. Writes nothing without --output.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, make_folder, run_tool, say, seconds
from scripts.common.output import write_csv, write_text
from scripts.common.trained import settings_and_point
from utils.config.settings import Settings
from utils.runtime.process import RankInfo

if TYPE_CHECKING:
    import torch
    from torch import nn

    from components import Components
    from scripts.tuning.advice import Advice, Change, PartSpeeds
    from scripts.tuning.diagnosis import Memory
    from scripts.tuning.measure import TrainingSetup
    from utils.checkpoint.resume import ResumePoint
    from utils.data.data_set import Data
    from utils.data.loaders import TrainLoader
    from utils.runtime.distributed import Distributed
    from utils.train_validation import TraVal

NAME = "doctor.py"
SECONDS = 3.0


def main(argv: list[str]) -> int:
    own, flags = build_parser().parse_known_args(argv)
    args = settings(flags, told=(lambda line: None) if own.memory_of else say)
    from utils.runtime.distributed import Distributed

    with Distributed(RankInfo(), args.run, args.precision.tf32) as distributed:
        if own.memory_of:
            return print_memory(own.memory_of, args, distributed)
        from utils.loop.stop_signals import TrainingFailure

        try:
            return examine(own, args, flags, distributed)
        except TrainingFailure as error:
            print(f"{NAME}: {error}", file=sys.stderr)
            return 1


def examine(own: argparse.Namespace, args: Settings, flags: list[str], distributed: Distributed) -> int:
    """Measure, try changes, print the report and return the exit code."""
    from scripts.tuning.diagnosis import csv_rows, report
    from scripts.tuning.trials import begin

    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores are tried, too
    folder = make_folder(own.output) if own.output else None
    found = measure(own, args, flags, distributed)
    begin("memory")
    memory = memory_on_gpu(own, found, distributed) if found.peak else memory_in_child(own, found.args, flags)
    text = report(found.header, found.measured, found.advice, memory, args.data.batch_size, found.step_images)
    print(text)
    if folder is not None:
        save(folder, text, list(csv_rows(found.measured, found.advice, memory)))
    return 0


class Measured(NamedTuple):
    """What was measured, and what the search for the largest batch needs, without the networks, which take memory.

    ``args``: the settings with what the run measured for itself. ``peak``: bytes allocated and reserved in a step, on a
    GPU. ``loader``: kept because its resident images take memory of the GPU in training, too.
    """

    header: str
    measured: PartSpeeds
    advice: Advice
    step_images: int
    args: Settings
    peak: tuple[int, int] | None
    data: Data
    criterion: nn.Module
    loader: TrainLoader


def measure(own: argparse.Namespace, args: Settings, flags: list[str], distributed: Distributed) -> Measured:
    """Measure the parts of training, and try changes."""
    import torch

    from components import build
    from scripts.tuning.measure import TrainingSetup
    from scripts.tuning.trials import Trials, begin, hardware_of
    from scripts.tuning.trials import examine as examine_parts
    from utils.run import Run

    begin("data, network and optimizer")
    run = Run(args, distributed)
    components = build(run)
    header = describe(run.args, components, distributed)
    traval = build_traval(run.args, components, distributed)
    epochs = itertools.count(components.train_loader.full_size_epoch)
    now = TrainingSetup(run.args, components.train_loader, traval, epochs, torch.get_num_threads())
    measured, peak = examine_parts(now, own.seconds)
    variant = partial(build_variant, flags, components, distributed)
    trials = Trials(now, variant, measured, own.seconds)
    advice = trials.advise(hardware_of(now, components.data, own.try_compile))
    torch.set_num_threads(now.threads)
    return Measured(
        header=header,
        measured=measured,
        advice=advice,
        step_images=now.step_images,
        args=now.args,
        peak=peak,
        data=components.data,
        criterion=components.criterion,
        loader=components.train_loader,
    )


# -------------------------------------------------------------------------------------------- flags


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=True)
    parser.add_argument(
        "--seconds",
        type=seconds,
        default=SECONDS,
        metavar="X",
        help=f"time for each part, about [{SECONDS:g}]",
    )
    parser.add_argument("--try-compile", action="store_true", help="try --compile on a CPU too, where it takes long")
    parser.add_argument(
        "--no-largest-batch", dest="largest_batch", action="store_false", help="do not look for the largest batch"
    )
    parser.add_argument("--output", metavar="DIR", help="folder for doctor.txt and doctor.csv [none are written]")
    parser.add_argument("--memory-of", type=json.loads, help=argparse.SUPPRESS)  # for memory_in_child
    return parser


def settings(flags: Sequence[str], told: Callable[[str], None] = lambda line: None) -> Settings:
    """Training settings for a fresh network; from a run to resume, only the settings are used.

    Where --freeze holds layers back in some epochs only, nothing is frozen, and ``told`` gets a line about it.
    """
    args, resume_point = settings_and_point(flags, required=False)
    of_run: dict[str, Any] = {"resume": None, "max_steps": None}
    end = args.model.unfreeze_epoch
    if args.model.freeze_epoch or (end and end < args.optimisation.epochs):
        told("measured are the epochs in which --freeze holds nothing back: they take the most time and memory")
        of_run |= {"freeze": None, "freeze_epoch": None, "unfreeze_epoch": None}
    return args.with_values(**of_run, **view_for_weights(args, resume_point), pretrained=False, weights=None)


def view_for_weights(args: Settings, resume_point: ResumePoint | None) -> dict[str, Any]:
    """Settings of size and resizing that pretrained or loaded weights imply, for a fresh network, too; else {}."""
    if resume_point is None and not args.model.pretrained and not args.model.weights:
        return {}
    from models.prepare import known_preprocessing, read_weights
    from utils.data.preprocessing import resolve

    known = known_preprocessing(args, resume_point, None if resume_point is not None else read_weights(args.model))
    shown, _ = resolve(args.data, known)
    return {name: getattr(shown, name) for name in ("image_size", "val_image_size", "interpolation")}


# ----------------------------------------------------------------------------------------- building


def build_traval(args: Settings, components: Components, distributed: Distributed) -> TraVal:
    """Build main.py's ``TraVal``, with a learning rate that hardly changes the weights."""
    from components import build_traval as build_as_main
    from scripts.tuning.measure import LR
    from utils.config.groups.optimisation import OptimisationSettings
    from utils.optim.lr_policy import LRPolicy
    from utils.run import Run

    policy = LRPolicy(OptimisationSettings(lr=LR, lr_policy="constant"), 1)
    return build_as_main(Run(args, distributed), components._replace(lr_policy=policy))


def measured_values(args: Settings, now: Settings) -> dict[str, Any]:
    """Values that ``args`` leave to be measured, by name, as they were measured for the settings ``now``."""
    values = now.values()
    return {name: values[name] for name in args.unmeasured()}


def build_variant(
    flags: list[str],
    components: Components,
    distributed: Distributed,
    before: TrainingSetup,
    changes: tuple[Change, ...],
) -> TrainingSetup:
    """Build the set-up that all ``changes`` to ``flags`` give; ``before`` is the set-up without the last of them.

    Whatever the last change does not affect is shared with ``before``.
    """
    from models.prepare import prepare_network
    from scripts.tuning.trials import stand_in
    from utils.data.loaders import loaders, sample_plan
    from utils.optim.build import build_optimizer_parts

    change = changes[-1]
    if change.threads:
        return dataclasses.replace(before, threads=change.threads)
    data = components.data
    args = settings([*flags, *itertools.chain.from_iterable(change.flags for change in changes)])
    args = args.with_values(**measured_values(args, before.args))
    if change.part == "loader":
        loader = loaders(
            stand_in(data) if "resident" in change.flags else data,
            args,
            distributed,
            channels_last=before.loader.transform.channels_last,
        )[0]
        return dataclasses.replace(before, args=args, loader=loader)
    network = prepare_network(args, data, distributed.device, None, None)
    loader = copy.copy(before.loader)
    loader.plan = sample_plan(data.train, args, 0, 1)
    if loader.transform.channels_last != network.channels_last:
        loader.transform = dataclasses.replace(loader.transform, channels_last=network.channels_last)
    parts = build_optimizer_parts(args, network.model, network.freezing, distributed)
    components = components._replace(network=network, train_loader=loader, **parts._asdict())
    return dataclasses.replace(before, args=args, loader=loader, traval=build_traval(args, components, distributed))


# ------------------------------------------------------------------------------------------- memory


def memory_on_gpu(own: argparse.Namespace, found: Measured, distributed: Distributed) -> Memory:
    """Memory of the timed steps, and the largest batch, found by trying."""
    import torch

    from scripts.tuning.advice import largest_batch
    from scripts.tuning.diagnosis import Memory
    from scripts.tuning.memory import FitsOnGpu

    assert found.peak is not None  # on a GPU
    allocated, reserved = found.peak
    meaning = f"max_memory_allocated, with the resident images if any; {reserved / 1e6:,.0f} MB reserved"
    free = f"{torch.cuda.get_device_name()}, {torch.cuda.mem_get_info()[1] / 1e9:,.0f} GB"
    if not own.largest_batch:
        return Memory(allocated, meaning, None, free)
    train = training_on_random(found.args, found.data, found.criterion, distributed)
    largest = largest_batch(FitsOnGpu(train, own.seconds), found.args.data.batch_size, found.loader.plan.num_samples)
    return Memory(allocated, meaning, largest, free)


def memory_in_child(own: argparse.Namespace, now: Settings, flags: list[str]) -> Memory:
    """Memory of a step and the largest batch, from a separate process in which nothing else takes memory."""
    from scripts.common.timing import PEAK_RESET
    from scripts.tuning.advice import Largest
    from scripts.tuning.diagnosis import Memory
    from scripts.tuning.memory import CPU_MEMORY_SHARE, available_bytes

    room = int(CPU_MEMORY_SHARE * available_bytes())
    task = {
        "measured": measured_values(settings(flags), now),
        "room": room,
        "seconds": own.seconds,
        "largest": own.largest_batch,
    }
    command = [sys.executable, str(Path(__file__).resolve()), *flags, "--memory-of", json.dumps(task)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    figures: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        figures |= json.loads(line) if line.startswith('{"') else {}
    meaning = "growth of a process's largest resident size over building and training"
    if not os.access(PEAK_RESET, os.W_OK):
        meaning += ", at least: this system does not let that size start anew"
    place = f"{room / 1e9:,.1f} GB, {100 * CPU_MEMORY_SHARE:.0f} % of what is available"
    largest = Largest(**figures["largest"]) if "largest" in figures else None
    return Memory(figures.get("step_bytes"), meaning, largest, place, failure_of(done))


def failure_of(done: subprocess.CompletedProcess[str]) -> str:
    """Reason why a process failed; '' if it did not."""
    if done.returncode == -signal.SIGKILL:
        return "the process was killed, most likely because memory ran out"
    if done.returncode < 0:
        return f"the process was ended by signal {-done.returncode}"
    last = (done.stderr.splitlines() or ["no reason given"])[-1]
    return f"the process ended with code {done.returncode}: {last}" if done.returncode else ""


def print_memory(task: dict[str, Any], args: Settings, distributed: Distributed) -> int:
    """Measure and print the figures for memory_in_child; return the exit code."""
    from models.training_loss import build_loss
    from scripts.tuning.advice import largest_batch
    from scripts.tuning.memory import FitsOnCpu
    from utils.data.loaders import sample_plan
    from utils.run import Run

    run = Run(args.with_values(**task["measured"]), distributed)
    data = run.images.to_train_on(args.data, None).shown_to(None, args.data)
    args = run.args.of_several_labels() if data.multilabel else run.args
    train = training_on_random(args, data, build_loss(args, data, distributed.device, None, run.warn), distributed)
    room = FitsOnCpu(train, task["room"], task["seconds"])
    size = args.data.batch_size
    room(size)
    print(json.dumps({"step_bytes": room.grown[size]}), flush=True)  # at once: the search may end this process
    if task["largest"]:
        samples = sample_plan(data.train, args, 0, 1).num_samples
        print(json.dumps({"largest": dataclasses.asdict(largest_batch(room, size, samples))}))
    return 0


def training_on_random(
    args: Settings, data: Data, criterion: torch.nn.Module, distributed: Distributed
) -> Callable[[int], float]:
    """A function that trains a fresh network on a given number of random images and returns the seconds per step."""
    from components import Components
    from models.prepare import prepare_network
    from scripts.tuning.memory import no_loader, train_on_random
    from utils.optim.build import build_optimizer_parts

    # Compiling again for each batch size would take longer than the whole search.
    args = args.with_values(compile=False)

    def train(size: int) -> float:
        network = prepare_network(args, data, distributed.device, None, None)
        loader = no_loader(data.image_shape)
        components = Components(
            **build_optimizer_parts(args, network.model, network.freezing, distributed)._asdict(),
            network=network,
            data=data,
            train_loader=loader,
            validation_loader=None,
            loader_choice="",
            lr_policy=None,
            criterion=criterion,
        )
        traval = build_traval(args, components, distributed)
        return train_on_random(traval, size, len(data.classes), network.channels_last)

    return train


# ------------------------------------------------------------------------------------------- output


def describe(args: Settings, components: Components, distributed: Distributed) -> str:
    """Header of the report: network, data and device."""
    import torch

    from scripts.common.timing import device_name
    from utils.precision.amp import resolve_amp

    return (
        f"{device_name(distributed.device)}, torch {torch.__version__}\n"
        f"{args.model.arch} on {args.data.dataname}, images {'x'.join(map(str, components.train_loader.image_shape))}, "
        f"batch {args.data.batch_size} x {args.optimisation.accumulate}, "
        f"mixed precision {resolve_amp(args.precision, distributed.device)}\nloader {components.loader_choice}"
    )


def save(folder: Path, text: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write ``doctor.txt`` and ``doctor.csv``."""
    write_text(folder / "doctor.txt", text + "\n")
    write_csv(folder / "doctor.csv", rows)
    print(f"Files: {folder / 'doctor.txt'}, {folder / 'doctor.csv'}")


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
