"""Measure the speed of main.py and its parts against bare loops, torchvision and timm.

    python scripts/lab/benchmark.py --mnist DIR --cifar10 DIR --timm-train PATH/train.py    # all this machine can run
    python scripts/lab/benchmark.py --only start-up decode                                  # parts of it

The two sides of a row are measured alternately, round by round; the row's ratio is the median of the rounds' ratios.
Writes benchmark.csv to --output.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.command_line import ToolParser, make_folder, refuse, run_tool, seconds, table, whole
from scripts.common.output import write_csv
from utils.config.groups.run import RunSettings
from utils.config.settings import UserError
from utils.runtime.cpu import SPINS, threads_per_process
from utils.runtime.process import RankInfo

NAME = "lab/benchmark.py"
# By name: what is compared, the module in benchmarks/, its function, and the function's arguments.
PARTS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "loop": ("main.py against the bare loop, torchvision's MNIST and timm's train.py", "cpu", "loop", {}),
    "decode": ("JPEG files on one core", "cpu", "decode", {}),
    "start-up": ("--help, a mistake, the first training step", "cpu", "start_up", {}),
    "resnet50-fp16": (
        "on a GPU: resnet50 in fp16, images in memory, against the bare loop and timm's train.py",
        "gpu",
        "in_memory",
        {"arch": "resnet50", "amp": "fp16"},
    ),
    "resnet50-bf16": ("in bf16", "gpu", "in_memory", {"arch": "resnet50", "amp": "bf16"}),
    "resnet50-compiled": (
        "in fp16, compiled",
        "gpu",
        "in_memory",
        {"arch": "resnet50", "amp": "fp16", "compiled": True},
    ),
    "vit-small-bf16": (
        "on a GPU: ViT-S/16 in bf16, in the same way",
        "gpu",
        "in_memory",
        {"arch": "vit_small_patch16_224", "amp": "bf16"},
    ),
    "resident": ("on a GPU: resnet18 on CIFAR-10 in its memory, against the bare loop", "gpu", "resident", {}),
    "jpeg-resnet18": (
        "on a GPU: JPEG files decoded by the CPU and by the GPU, against images in memory",
        "gpu",
        "jpeg",
        {"arch": "resnet18"},
    ),
    "jpeg-resnet50": ("the same with resnet50", "gpu", "jpeg", {"arch": "resnet50"}),
}


def main(argv: list[str]) -> int:
    # For the measured commands: main.py sets how long its threads spin; the others use the system's default.
    environ = {name: value for name, value in os.environ.items() if (name, value) != ("GOMP_SPINCOUNT", SPINS)}
    own = read_flags(argv)
    own.threads = threads_per_process(1)
    own.environ = environ | {"OMP_NUM_THREADS": str(own.threads)}
    if own.tiny:
        own.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling would take longest of all
    import torch

    from utils.record.provenance import machine
    from utils.runtime.distributed import Distributed

    with Distributed(RankInfo(), RunSettings(device=own.device)) as distributed, TemporaryDirectory() as scratch:
        own.on_cpu = own.device != "cuda"
        own.device = distributed.device.type
        own.scratch = Path(scratch)
        return benchmark(own, f"{machine(distributed)}, {own.threads} thread(s) a side, torch {torch.__version__}")


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=False)
    parts = "; ".join(f"{name}: {text}" for name, (text, *_) in PARTS.items())
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, metavar="PART", help=f"{parts} [all that this machine can run]"
    )
    parser.add_argument("--rounds", type=whole(1, 1000), default=3, metavar="N", help="measurements of each side [3]")
    parser.add_argument("--seconds", type=seconds, default=2.0, metavar="X", help="about how long one takes [2]")
    parser.add_argument(
        "--output", default="benchmarks/all", metavar="DIR", help="folder for the results [benchmarks/all]"
    )
    parser.add_argument("--mnist", metavar="DIR", help="MNIST's unpacked idx files")
    parser.add_argument("--cifar10", metavar="DIR", help="CIFAR-10 as for main.py [random images of its shape]")
    parser.add_argument("--images", metavar="DIR", help="JPEG files in class folders below train/ and val/")
    parser.add_argument("--timm-train", metavar="PATH", help="timm's train.py, for the rows against it")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="CPU rows, GPU rows [both]")
    parser.add_argument(
        "--tiny", action="store_true", help="so little work that the figures mean nothing, to see that everything runs"
    )
    return parser


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Read and check the flags. Raises ``UserError`` with all mistakes."""
    own = build_parser().parse_args(argv)
    mistakes = []
    for name in ("mnist", "cifar10", "images"):
        folder = getattr(own, name)
        if folder is not None and not os.path.isdir(folder):
            mistakes.append(f"--{name} {folder}: no such folder")
    if own.timm_train is not None and not os.path.isfile(own.timm_train):
        mistakes.append(f"--timm-train {own.timm_train}: no such file; give the path of timm's train.py")
    refuse(mistakes)
    return own


def benchmark(own: argparse.Namespace, machine: str) -> int:
    """Measure all parts, print each part's rows when measured, and write them to a folder. Returns the exit code."""
    from scripts.lab.benchmarks.lines import HEADERS
    from scripts.lab.benchmarks.measure import play

    folder = make_folder(own.output)
    print(f"{machine}\nRounds: {own.rounds}, about {own.seconds:g} s a measurement", flush=True)
    about = {"rounds": own.rounds, "seconds": own.seconds, "machine": machine}
    rows: list[dict[str, Any]] = []
    for part in own.only or PARTS:
        if reason := unfit(part, own):
            print(f"{part} is skipped: {reason}")
            continue
        _, module, function, arguments = PARTS[part]
        shown = []
        for match in getattr(import_module(f"scripts.lab.benchmarks.{module}"), function)(own, **arguments):
            if isinstance(match, str):
                print(match, flush=True)
                continue
            lines = play(match, own.rounds)
            shown += [line.cells() for line in lines]
            rows += [{"part": part} | line._asdict() | about for line in lines]
            write_csv(folder / "benchmark.csv", rows)
        if shown:
            print(f"\n{table(HEADERS, shown)}\n", flush=True)
    if not rows:
        raise UserError("nothing could be measured; see the lines above")
    print(
        "Ratio: median of the rounds' own ratios, ours / the other; of seconds the difference, ours - the other. "
        f"Min - max: of the rounds. File: {folder / 'benchmark.csv'}"
    )
    return 1 if any(row["result"] is None for row in rows) else 0


def unfit(part: str, own: argparse.Namespace) -> str:
    """Reason why ``part`` cannot be measured; '' if it can."""
    if PARTS[part][1] == "gpu":
        return "" if own.device == "cuda" or own.tiny else "it needs a GPU"
    return "" if own.on_cpu else "it measures the CPU, and --device cuda was given"


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
