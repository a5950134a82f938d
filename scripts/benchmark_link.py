"""How well do two machines share a training over a slow network? Measured in two network namespaces of this machine.

    sudo python scripts/benchmark_link.py                          # ResNet-18 at 32 pixels over 1 Gbit/s and 1 ms
    sudo python scripts/benchmark_link.py --only ddp bf16 --rounds 5 --mbit 10000 --delay-ms 0.1
    sudo python scripts/benchmark_link.py --batch-size 64 --image-size 64 --arch resnet50

Each machine has half of the cores. Scaling efficiency: images a second of both, divided by twice those of one alone, of
the same round; the median of the rounds and their range. What two trainings that exchange nothing reach at the same
time is the most that can be expected here. Needs root, and ip and tc of iproute2. Installs nothing, leaves nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, number, run_tool, table, whole
from scripts.common.termination import termination_raises

if TYPE_CHECKING:
    from scripts.links.training import Lab, Speed

NAME = "benchmark_link.py"
# What is measured over the slow link: its name, what it is, and the flags of main.py.
WAYS = {
    "ddp": ("gradients in float32", ()),
    "bucket-100": ("the same, in one piece", ("--bucket-mb", "100")),
    "bucket-5": ("the same, in pieces of 5 MiB", ("--bucket-mb", "5")),
    "bf16": ("gradients in bf16", ("--grad-compression", "bf16")),
    "bf16-bucket-5": ("the same, in pieces of 5 MiB", ("--grad-compression", "bf16", "--bucket-mb", "5")),
    "local-8": ("local SGD, averaged every 8 steps", ("--local-sgd-steps", "8")),
    "local-32": ("local SGD, averaged every 32 steps", ("--local-sgd-steps", "32")),
}
ALONE, APART, FREE = "one machine alone", "two, exchanging nothing", "gradients in float32, link not limited"
WARM_UP, CYCLE = 8, 32  # steps; timed are whole cycles of local SGD


def main(argv: list[str]) -> int:
    """Run the tool. Returns its exit code."""
    own = build_parser().parse_args(argv)
    from scripts.links.network import Network
    from scripts.links.training import Lab

    with termination_raises(KeyboardInterrupt), Network() as network:  # the namespaces must not outlive this process
        flags = ["--arch", own.arch, "--image-size", str(own.image_size)]
        lab = Lab(network, flags, own.batch_size, WARM_UP, CYCLE * own.cycles)
        limits = network.throttle(own.mbit, own.delay_ms)
        link = network.measure()
        print(
            f"Link: {limits}; measured: {link.mbit:,.0f} Mbit/s, {link.ms:.2f} ms for a byte to go and come back\n"
            f"{own.arch} at {own.image_size} pixels, batch {own.batch_size} on each of 2 machines of "
            f"{len(lab.cores[0])} core(s); {own.rounds} rounds of {lab.steps} steps after {WARM_UP}",
            flush=True,
        )
        rounds = [measure(own, lab, number) for number in range(own.rounds)]
    print(table(["over the link", "images/s", "efficiency", "min - max", "MB a step"], rows(rounds)))
    return 0


# -------------------------------------------------------------------------------------------- flags


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=False)
    ways = "; ".join(f"{name}: {text}" for name, (text, _) in WAYS.items())
    parser.add_argument("--only", nargs="+", choices=WAYS, metavar="WAY", help=f"{ways} [all]")
    parser.add_argument("--mbit", type=number(0.01, 1e6), default=1000.0, metavar="X", help="Mbit/s each way [1000]")
    parser.add_argument(
        "--delay-ms", type=number(0.001, 10_000), default=1.0, metavar="X",
        help="milliseconds that a packet takes each way [1]",
    )  # fmt: skip
    parser.add_argument("--arch", default="resnet18", metavar="NAME", help="network [resnet18]")
    parser.add_argument("--image-size", type=whole(1, 8192), default=32, metavar="N", help="pixels [32]")
    parser.add_argument("--batch-size", type=whole(1, 2**20), default=16, metavar="N", help="of each machine [16]")
    parser.add_argument(
        "--cycles", type=whole(1, 1000), default=1, metavar="N", help=f"timed steps of a measurement, x {CYCLE} [1]"
    )
    parser.add_argument("--rounds", type=whole(1, 1000), default=3, metavar="N", help="measurements of each way [3]")
    return parser


# ------------------------------------------------------------------------------------------ measure


def measure(own: argparse.Namespace, lab: Lab, number: int) -> dict[str, Speed]:
    """One round: each way once, in the opposite order in every second round; a line for each as it comes."""
    ways: list[tuple[str, Callable[[], Speed]]] = [(ALONE, lab.alone), (APART, lab.apart)]
    ways.append((FREE, partial(unlimited, own, lab)))
    chosen = [name for name in WAYS if own.only is None or name in own.only]
    ways += [(f"{name}: {WAYS[name][0]}", partial(lab.together, *WAYS[name][1])) for name in chosen]
    speeds = {}
    for title, way in ways if number % 2 == 0 else reversed(ways):
        speeds[title] = way()
        print(f"round {number + 1}  {title}  {speeds[title].images:.2f} images/s", file=sys.stderr, flush=True)
    return {title: speeds[title] for title, _ in ways}


def unlimited(own: argparse.Namespace, lab: Lab) -> Speed:
    """Plain training over the link without its limits."""
    lab.network.free()
    try:
        return lab.together()
    finally:
        lab.network.throttle(own.mbit, own.delay_ms)


def rows(rounds: Sequence[dict[str, Speed]]) -> list[list[str]]:
    """The table: a row for each way."""
    import statistics

    cells = []
    for title in rounds[0]:
        images = statistics.median(speeds[title].images for speeds in rounds)
        shares = [speeds[title].images / (2 * speeds[ALONE].images) for speeds in rounds]
        efficiency = ["-", "-"]
        if title != ALONE:
            efficiency = [f"{statistics.median(shares):.2f}", f"{min(shares):.2f} - {max(shares):.2f}"]
        sent = statistics.median(speeds[title].sent for speeds in rounds)
        cells.append([title, f"{images:.1f}", *efficiency, f"{sent / 1e6:.1f}" if sent > 1e4 else "-"])
    return cells


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
