"""Measure the speed of main.py and its parts against bare loops, torchvision and timm, in one table.

    python scripts/lab/benchmark.py                              # everything this machine can run
    python scripts/lab/benchmark.py --only start-up decode       # parts of it
    python scripts/lab/benchmark.py --mnist DIR --cifar10 DIR --images DIR --timm-train PATH/train.py

The two sides of a row are measured alternately, round by round; the row's ratio is the median of the rounds' ratios.
Writes benchmark.csv to --output. Slow imports are inside the functions, so that --help and mistakes are answered at
once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.command_line import ToolParser, make_folder, run_tool, seconds, whole
from utils.config.groups.run import RunSettings
from utils.config.settings import UserError
from utils.runtime.cpu import SPINS, threads_per_process
from utils.runtime.process import RankInfo

if TYPE_CHECKING:
    from scripts.lab.benchmarks.measure import Match, Row, Setup

NAME = "lab/benchmark.py"
PARTS = {
    "loop": "main.py against the bare loop, torchvision's MNIST and timm's train.py",
    "decode": "JPEG files on one core",
    "start-up": "--help, a mistake, the first training step",
    "resnet50-fp16": "on a GPU: resnet50 in fp16, images in memory, against the bare loop and timm's train.py",
    "resnet50-bf16": "in bf16",
    "resnet50-compiled": "in fp16, compiled",
    "vit-small-bf16": "on a GPU: ViT-S/16 in bf16, in the same way",
    "resident": "on a GPU: resnet18 on CIFAR-10 in its memory, against the bare loop",
    "jpeg-resnet18": "on a GPU: JPEG files decoded by the CPU and by the GPU, against images in memory",
    "jpeg-resnet50": "the same with resnet50",
}
ON_CPU = ("loop", "decode", "start-up")


def main(argv: list[str]) -> int:
    """Run the tool and return its exit code."""
    # For the measured commands: main.py sets how long its threads spin; the others use the system's default.
    environ = {name: value for name, value in os.environ.items() if (name, value) != ("GOMP_SPINCOUNT", SPINS)}
    own = read_flags(argv)
    if own.tiny:
        environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling would take longest of all
    from utils.runtime.distributed import Distributed

    with Distributed(RankInfo(), RunSettings(device=own.device)) as distributed, TemporaryDirectory() as scratch:
        from scripts.lab.benchmarks.measure import Setup

        setup = Setup(
            seconds=own.seconds,
            threads=threads_per_process(1),
            device=distributed.device,
            scratch=Path(scratch),
            environ=environ,
            on_cpu=own.device != "cuda",
            mnist=own.mnist,
            cifar10=own.cifar10,
            images=own.images,
            timm_train=own.timm_train,
            tiny=own.tiny,
        )
        return benchmark(own, setup)


# -------------------------------------------------------------------------------------------- flags


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=False)
    parts = "; ".join(f"{name}: {text}" for name, text in PARTS.items())
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, metavar="PART", help=f"{parts} [all that this machine can run]"
    )
    parser.add_argument("--rounds", type=whole(1, 1000), default=3, metavar="N", help="measurements of each side [3]")
    parser.add_argument("--seconds", type=seconds, default=2.0, metavar="X", help="about how long one takes [2]")
    parser.add_argument(
        "--output", default="benchmarks/all", metavar="DIR", help="folder for the results [benchmarks/all]"
    )
    parser.add_argument("--mnist", metavar="DIR", help="MNIST's idx files [random images of its shape]")
    parser.add_argument("--cifar10", metavar="DIR", help="CIFAR-10 as for main.py [random images of its shape]")
    parser.add_argument(
        "--images", metavar="DIR", help="JPEG files in class folders below train/ and val/ [cut from two photographs]"
    )
    parser.add_argument("--timm-train", metavar="PATH", help="timm's train.py, for the rows against it")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="CPU rows, GPU rows [both]")
    parser.add_argument(
        "--tiny", action="store_true", help="so little work that the figures mean nothing, to see that everything runs"
    )
    parser.add_argument("--fail-below-target", action="store_true", help="exit code 1 when a row misses its target")
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
    if not own.output.strip() or "\0" in own.output:
        mistakes.append("--output must not be empty or contain a NUL character")
    if mistakes:
        raise UserError(*mistakes)
    return own


# ---------------------------------------------------------------------------------------- benchmark


def benchmark(own: argparse.Namespace, setup: Setup) -> int:
    """Measure all parts, print each row when measured, and write the table to a folder. Returns the exit code."""
    from scripts.common.output import write_csv
    from scripts.lab.benchmarks import rows as shown

    folder = make_folder(own.output)
    machine = shown.machine(setup.threads, setup.device)
    made_up = [f"--{name}" for name in ("mnist", "cifar10", "images") if getattr(own, name) is None]
    how = f"Rounds: {own.rounds}, about {own.seconds:g} s a measurement"
    how += f"; generated images where {', '.join(made_up)} is not given" * bool(made_up)
    print(f"{machine}\n{how}\n\n{shown.header()}", flush=True)
    rows: list[Row] = []
    began = time.perf_counter()
    for part, match in matches(own.only, setup):
        if isinstance(match, str):
            print(match, flush=True)
            continue
        new = measure(part, match, own.rounds)
        rows += new
        print("\n".join(map(shown.line, new)), flush=True)
        about = {"rounds": own.rounds, "seconds": own.seconds, "machine": machine}
        write_csv(folder / "benchmark.csv", shown.csv_rows(rows, about))
    if not rows:
        raise UserError("nothing could be measured; see the lines above")
    missed = sum(row.missed for row in rows)
    failed = sum(bool(row.failure) for row in rows)
    print(
        "\nRatio: median of the rounds' own ratios, ours / the other; of seconds the difference, ours - the other. "
        f"Min - max: of the rounds.\nTargets missed: {missed} of {sum(row.target is not None for row in rows)}"
        f"{f', not measured: {failed} rows' * bool(failed)}; {time.perf_counter() - began:.0f} s. "
        f"File: {folder / 'benchmark.csv'}"
    )
    return 1 if failed or (missed and own.fail_below_target) else 0


def matches(only: Sequence[str] | None, setup: Setup) -> Iterator[tuple[str, Match | str]]:
    """Yield the name of each chosen part, in the order of ``PARTS``, with one of its matches or why it is skipped."""
    from scripts.lab.benchmarks import decode, gpu, loop, start_up

    parts: dict[str, Callable[[Setup], Iterator[Any]]] = {
        "loop": loop.training,
        "decode": decode.decode,
        "start-up": start_up.start_up,
        "resnet50-fp16": partial(gpu.in_memory, arch="resnet50", amp="fp16"),
        "resnet50-bf16": partial(gpu.in_memory, arch="resnet50", amp="bf16"),
        "resnet50-compiled": partial(gpu.in_memory, arch="resnet50", amp="fp16", compiled=True),
        "vit-small-bf16": partial(gpu.in_memory, arch="vit_small_patch16_224", amp="bf16"),
        "resident": gpu.resident,
        "jpeg-resnet18": partial(gpu.jpeg, arch="resnet18"),
        "jpeg-resnet50": partial(gpu.jpeg, arch="resnet50"),
    }
    for part in PARTS:
        if only is None or part in only:
            if reason := unfit(part, setup):
                if only is not None:
                    yield part, f"{part} is skipped: {reason}"
            else:
                yield from ((part, match) for match in parts[part](setup))


def unfit(part: str, setup: Setup) -> str:
    """Reason why ``part`` cannot be measured with ``setup``; '' if it can."""
    if part not in ON_CPU:
        return "" if setup.on_gpu or setup.tiny else "it needs a GPU"
    return "" if setup.on_cpu else "it measures the CPU, and --device cuda was given"


def measure(part: str, match: Match, rounds: int) -> list[Row]:
    """Measure one match and return its rows, with a progress bar on a terminal."""
    from tqdm import tqdm

    from scripts.lab.benchmarks.measure import play

    total = rounds * (1 + sum(rival.measure is not None for rival in match.rivals))
    with tqdm(total=total, desc=match.what, leave=False, dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:
        return play(part, match, rounds, bar.update)


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
