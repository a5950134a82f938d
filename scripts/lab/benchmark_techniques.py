"""Measure what each technique adds to a training step, to loading JPEG files, or to validation.

    python scripts/lab/benchmark_techniques.py                      # ResNet-18 at 32 pixels; files cut from photographs
    python scripts/lab/benchmark_techniques.py --only mixup cutmix --rounds 31
    python scripts/lab/benchmark_techniques.py --images DIR         # JPEG files in class folders

A row's figure is the median of the rounds' own ratios to the same training without the technique, and the quartiles.
The table stands in docs/benchmarks/cpu.md. The functions do the slow imports, so that --help and mistakes
answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.command_line import ToolParser, run_tool, table, whole
from scripts.lab.benchmarks.catalogue import LOADING, STEP, TECHNIQUES, VALIDATION
from utils.config.settings import UserError

if TYPE_CHECKING:
    from scripts.common.timing import Spread

NAME = "benchmark_techniques.py"
LOADED_BATCHES = 8  # for each step that is measured; loading is quick and uneven


def main(argv: list[str]) -> int:
    """Run the tool. Returns its exit code."""
    own = read_flags(argv)
    from scripts.lab.benchmarks.data import jpeg_tree
    from scripts.lab.benchmarks.techniques import cost

    chosen = [one for one in TECHNIQUES if not own.only or one.name in own.only]
    step = f"--dataname synthetic --arch {own.arch} --image-size {own.image_size} --batch-size {own.batch_size}".split()
    step += ["--device", own.device, "--print-freq", "1000"]
    with TemporaryDirectory() as scratch:
        tree = jpeg_tree(own.images, Path(scratch))
        loading = f"--dataname folder --arch fc --loader stream --batch-size 32 --workers {own.workers}".split()
        loading += ["--datapath", str(tree), "--device", own.device]
        base = {STEP: step, LOADING: loading, VALIDATION: step}
        units = {STEP: own.steps, LOADING: LOADED_BATCHES * own.steps, VALIDATION: 1}
        rows = []
        for number, technique in enumerate(chosen, 1):
            costs = (
                cost(flags, technique, what, own.rounds, units[what]) if what in technique.measured else None
                for what, flags in base.items()
            )
            cells = [technique.name, technique.flags, *map(shown, costs)]
            rows.append(cells)
            print(f"{number}/{len(chosen)}  {'  '.join(cells)}", file=sys.stderr, flush=True)
    print(f"{own.arch} at {own.image_size} pixels, batch {own.batch_size}; {own.rounds} rounds of {own.steps} steps")
    print(f"JPEG: {own.images or 'cut from two photographs'}, {own.workers} workers, the loader alone")
    print(table(["technique", "flags", "a step", "JPEG loading", "validation"], rows))
    return 0


# -------------------------------------------------------------------------------------------- flags


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=False)
    names = [technique.name for technique in TECHNIQUES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"{', '.join(names)} [all]")
    parser.add_argument("--rounds", type=whole(1, 1000), default=15, metavar="N", help="measurements of each side [15]")
    parser.add_argument("--steps", type=whole(1, 10**6), default=1, metavar="N", help="steps of one measurement [1]")
    parser.add_argument("--arch", default="resnet18", metavar="NAME", help="network [resnet18]")
    parser.add_argument("--image-size", type=whole(1, 8192), default=32, metavar="N", help="pixels [32]")
    parser.add_argument("--batch-size", type=whole(1, 2**20), default=128, metavar="N", help="images a step [128]")
    parser.add_argument("--images", metavar="DIR", help="JPEG files in class folders [cut from two photographs]")
    parser.add_argument("--workers", type=whole(0, 1024), default=2, metavar="N", help="data workers for them [2]")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device [auto]")
    return parser


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """The checked flags. Raises ``UserError`` with the first mistake."""
    own = build_parser().parse_args(argv)
    if own.images is not None and not os.path.isdir(own.images):
        raise UserError(f"--images {own.images}: no such folder")
    return own


# -------------------------------------------------------------------------------------------- table


def shown(cost: Spread | None) -> str:
    """Cost of a technique: the median, and the middle half of the rounds."""
    if cost is None:
        return "-"
    median, low, high = (100 * (ratio - 1) for ratio in cost)
    return f"{median:+.0f} % ({low:+.0f} to {high:+.0f})"


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
