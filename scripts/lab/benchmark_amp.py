"""What mixed precision gains on this device: time and memory of a step in each dtype, on a GPU also as a CUDA graph.

    python scripts/lab/benchmark_amp.py                          # the MLP of PyTorch's recipe
    python scripts/lab/benchmark_amp.py --accounting             # what main.py's training step adds to a bare loop
    python scripts/lab/benchmark_amp.py --accounting --ema-decay 0.999     # and a moving average of the weights

Prints a table and writes it as amp.csv (accounting.csv) to --output. For the gain of your own network use doctor.py.
Heavy imports are inside the functions, so that --help and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.command_line import ToolParser, make_folder, run_tool, say, table, whole
from utils.config.groups.run import RunSettings
from utils.config.settings import Settings, UserError, flag_of
from utils.runtime.process import RankInfo

if TYPE_CHECKING:
    import torch
    from torch import nn

    from scripts.common.timing import Spread
    from scripts.lab.benchmarks.steps import Workload
    from utils.runtime.distributed import Distributed

NAME = "lab/benchmark_amp.py"
FORMATS = ("fp32", "tf32", "fp16", "bf16")
ACCOUNTING = "--accounting"
# The flags of each kind of benchmark, with their defaults. A flag of the other kind is a mistake.
KINDS = {
    "the MLP": {"width": 4096, "layers": 3, "batch_size": 512, "steps": 50, "rounds": 3, "only": FORMATS},
    ACCOUNTING: {
        "arch": "resnet18",
        "image_size": 32,
        "batch_size": 128,
        "steps": 50,
        "rounds": 6,
        "amp": None,
        "ema_decay": None,
    },
}
BARE = "bare loop"
OURS = "TraVal.training_step"
GRAPHS = "as CUDA graphs"
AVERAGE = "with a moving average"
COLUMNS = {BARE: "bare", OURS: "training_step", GRAPHS: "graphs", AVERAGE: "average"}
COSTS = {
    OURS: "Accounting costs {}.",
    GRAPHS: "Accounting, with steps as graphs, costs {}.",
    AVERAGE: "Accounting and moving average together cost {}.",
}


def main(argv: list[str]) -> int:
    """Run the tool and return its exit code."""
    own = read_flags(argv)
    from utils.runtime.distributed import Distributed

    with Distributed(RankInfo(), RunSettings(device=own.device)) as distributed:
        return account(own, distributed) if own.accounting else benchmark(own, distributed)


# -------------------------------------------------------------------------------------------- flags


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__.partition("\n")[0], training_flags=False)
    number = {"type": whole(1, 2**24), "metavar": "N"}
    parser.add_argument("--width", **number, help="inputs and outputs of each layer of the MLP [4096]")
    parser.add_argument("--layers", **number, help="linear layers of the MLP [3]")
    parser.add_argument("--batch-size", "-b", **number, help="samples a step [512; with --accounting 128]")
    parser.add_argument("--steps", **number, help="timed steps a round [50]")
    parser.add_argument("--rounds", **number, help="rounds of each row, interleaved [3; with --accounting 6]")
    parser.add_argument("--only", nargs="+", choices=FORMATS, metavar="FORMAT", help=f"of {', '.join(FORMATS)} [all]")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave a GPU's peak memory out")
    parser.add_argument(ACCOUNTING, action="store_true", help="compare main.py's training step with a bare loop")
    parser.add_argument("--arch", "-a", metavar="NAME", help="with --accounting: a network, as for main.py [resnet18]")
    parser.add_argument("--image-size", **number, help="with --accounting: pixels [32]")
    parser.add_argument(
        "--amp", choices=("off", "fp16", "bf16"), help="with --accounting [fp16 on a GPU, off on a CPU]"
    )
    parser.add_argument("--ema-decay", metavar="DECAY", help="with --accounting: measure the moving average too")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute [auto]")
    parser.add_argument(
        "--output", default="benchmarks/amp", metavar="DIR", help="folder of the files [benchmarks/amp]"
    )
    return parser


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Read the flags; which others fit, and their defaults, depends on --accounting.

    Raises ``UserError`` with all flags that do not fit.
    """
    own = build_parser().parse_args(argv)
    kind, other = reversed(KINDS) if own.accounting else KINDS
    foreign = [name for name in KINDS[other].keys() - KINDS[kind].keys() if getattr(own, name) is not None]
    if foreign:
        raise UserError(*(f"{flag_of(name)} goes with {other}, and this measures {kind}" for name in sorted(foreign)))
    for name, default in KINDS[kind].items():
        if getattr(own, name) is None:
            setattr(own, name, default)
    return own


# ---------------------------------------------------------------------------------------- benchmark


def benchmark(own: argparse.Namespace, distributed: Distributed) -> int:
    """Measure all formats, print the table, write it to the output folder and return the exit code."""
    from scripts.common.timing import failure_of, unsupported
    from scripts.lab.benchmarks.steps import GRAPH, HEADERS, cells, csv_row, mlp, time_round
    from utils.loop.step_graph import NotRecorded

    device = distributed.device
    workload = mlp(own.width, own.layers, own.batch_size, own.steps)
    skipped = {name: reason for name in own.only if (reason := unsupported(name, device))}
    formats = [name for name in FORMATS if name in own.only and name not in skipped]
    if not formats:
        raise UserError(*(f"--only {name}: {reason}" for name, reason in skipped.items()))
    if device.type == "cuda":
        formats += [name + GRAPH for name in formats]
    folder = make_folder(own.output)
    about = begin(own, workload.text, device)
    sides = {name: partial(time_round, workload, own.steps, name, device) for name in formats}

    def failed(_: str, error: Exception) -> str:
        return str(error) if isinstance(error, NotRecorded) else failure_of(error, compiled=False)

    rounds, failures = in_rounds(sides, own.rounds, failed)
    first = [] if formats[0] in failures else rounds[formats[0]]
    rows = [csv_row(name, rounds[name], first, own.batch_size, failures.get(name, "")) for name in formats]
    memory = own.memory and device.type == "cuda"
    shown = [cells(row, memory) for row in rows]
    print(table(HEADERS[: len(shown[0])], shown))
    print(f"Time: median of the rounds; speed-up: median of the rounds' own ratios to {formats[0]}.")
    if memory:
        print("Peak memory: the most that all tensors together took during the timed steps (max_memory_allocated).")
    for name, reason in skipped.items():
        print(f"{name} is left out: {reason}.")
    write_rows(folder / "amp.csv", [row | about for row in rows])
    return 0 if len(failures) < len(rows) else 1


def begin(own: argparse.Namespace, what: str, device: torch.device) -> dict[str, Any]:
    """Print the device and the workload; return the CSV columns about them."""
    import torch

    from scripts.common.timing import device_name

    place = device_name(device)
    print(f"{place}, torch {torch.__version__}: {what}, {own.rounds} rounds of {own.steps} steps", flush=True)
    return {"device": place, "torch": torch.__version__, "workload": what, "steps": own.steps}


def in_rounds(sides: dict[str, Callable[[], Any]], rounds: int, *failure_of: Callable[[str, Exception], str]) -> Any:
    """Return the result of ``interleaved`` for ``sides``, and print a line when a round is done."""
    from scripts.common.timing import interleaved

    done = count(1)

    def measured(number: int, _: object) -> None:
        if next(done) % len(sides) == 0:
            say(f"round {number}/{rounds}")

    return interleaved(sides, rounds, measured, *failure_of)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a CSV file and print its path."""
    from scripts.common.output import write_csv

    write_csv(path, rows)
    print(f"File: {path}")


# --------------------------------------------------------------------------------------- accounting


def account(own: argparse.Namespace, distributed: Distributed) -> int:
    """Compare main.py's training step with a bare loop: same weights, same batch, rounds interleaved."""
    from models.build import unknown_arch
    from scripts.common.timing import Spread, busy_seconds, ratios, timed, warm_up
    from scripts.lab.benchmarks.steps import classification

    if mistake := unknown_arch(own.arch):
        raise UserError(mistake)
    device = distributed.device
    args = accounting_settings(own, device)
    workload = classification(own.arch, own.image_size, own.batch_size)
    folder = make_folder(own.output)
    about = begin(own, f"{workload.text}, mixed precision {args.precision.amp}", device)
    sides = loops(args, workload, distributed)
    for run in sides.values():
        warm_up(run, device)
    runs = {name: partial(timed, partial(run, own.steps), device) for name, run in sides.items()}
    seconds, _ = in_rounds(runs, own.rounds)
    ms = {name: [1000 * took / own.steps for took, _ in row] for name, row in seconds.items()}
    spreads = {name: Spread.of(values) for name, values in ms.items()}
    rows = [[name, f"{s.median:,.2f}", f"{s.low:,.2f} - {s.high:,.2f}"] for name, s in spreads.items()]
    print(table(["step", "ms a step", "min - max"], rows))
    for name, words in COSTS.items():
        if name in ms:
            print(words.format(cost(ratios(ms[name], ms[BARE]))))
    print(f"Medians of {own.rounds} ratios to the bare loop's round beside it; sums are read every {own.steps} steps.")
    columns = {f"{COLUMNS[name]}_ms": values for name, values in ms.items()}
    columns |= {f"{COLUMNS[name]}_ratio": [a / b for a, b in zip(ms[name], ms[BARE], strict=True)] for name in ms}
    if device.type == "cuda":
        busy = {name: 1000 * busy_seconds(partial(run, own.steps)) / own.steps for name, run in sides.items()}
        print("\n".join(f"The GPU is busy for {each:,.2f} ms of a step: {name}." for name, each in busy.items()))
        columns |= {f"{COLUMNS[name]}_busy_ms": [each] * own.rounds for name, each in busy.items()}
    pairs = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    write_rows(folder / "accounting.csv", [{"round": n} | pair | about for n, pair in enumerate(pairs, 1)])
    return 0


def cost(ratio: Spread) -> str:
    """Text about what a step costs beyond the bare loop, given the ``ratio`` of their times."""
    median, low, high = (f"{100 * (each - 1):+.2f}" for each in ratio)
    unclear = ratio.low < 1 < ratio.high
    hint = "; rounds disagree on the sign: more of them, or an idle machine, will tell" if unclear else ""
    return f"{median} % ({low} to {high} %){hint}"


def loops(args: Settings, workload: Workload, distributed: Distributed) -> dict[str, Callable[[int], None]]:
    """By side, a function that runs a given number of steps; all sides begin with the same weights."""
    on_gpu = distributed.device.type == "cuda"
    training = workload.start(args.precision, distributed.device, fused=on_gpu or None)
    network = training.network
    without = dataclasses.replace(args, average=dataclasses.replace(args.average, ema_decay=None))
    sides = {
        BARE: training.run,
        OURS: accounted(without, copy.deepcopy(network), *training.batches[0], distributed),
    }
    if on_gpu:
        graphs = dataclasses.replace(without, model=dataclasses.replace(args.model, cuda_graph="auto"))
        sides[GRAPHS] = accounted(graphs, copy.deepcopy(network), *training.batches[0], distributed)
    if args.average.ema_decay is not None:
        sides[AVERAGE] = accounted(args, copy.deepcopy(network), *training.batches[0], distributed)
    return sides


def accounting_settings(own: argparse.Namespace, device: torch.device) -> Settings:
    """Training settings for both sides, with a loss scale at which no healthy network skips a step."""
    from scripts.common.timing import WARM_UP_STEPS
    from utils.config import arguments
    from utils.config.groups.precision import PrecisionSettings
    from utils.precision.amp import resolve_amp

    amp = resolve_amp(PrecisionSettings(amp=own.amp), device)
    line = f"--amp {amp} --init-scale 1024 --device {device.type} --batch-size {own.batch_size}".split()
    line += ["--print-freq", str(max(own.steps, WARM_UP_STEPS))]
    return arguments.parse([*line, *(["--ema-decay", own.ema_decay] if own.ema_decay else [])])


def accounted(
    args: Settings, network: nn.Module, images: torch.Tensor, targets: torch.Tensor, distributed: Distributed
) -> Callable[[int], None]:
    """A function that takes a given number of main.py's training steps on one batch, then reads the sums of metrics."""
    import numpy as np
    import torch

    from scripts.lab.benchmarks.steps import LR
    from utils.data.loaders import Batch
    from utils.optim.ema import build_average
    from utils.precision.amp import build_scaler
    from utils.train_validation import Extras, TraVal

    batch = Batch(images, targets, np.arange(len(images)), 0)
    loader = SimpleNamespace(
        image_shape=tuple(images.shape[1:]),
        replay_step=lambda *_: [batch],  # together with the plan, for a step that is skipped after all
        plan=SimpleNamespace(step_indices=lambda *_: batch.indices),
    )
    traval = TraVal(
        network,
        loader,
        torch.optim.SGD(network.parameters(), lr=LR, momentum=0.9, fused=images.is_cuda or None),
        torch.nn.CrossEntropyLoss(),
        build_scaler(args.precision, distributed.device),
        args,
        None,
        extras=Extras(
            distributed=distributed,
            ema=build_average(network, args.average, args.optimisation.epochs),
        ),
    )

    def run(steps: int) -> None:
        for number in range(steps):
            traval.training_step([dataclasses.replace(batch, number=number)])
            if traval.sums.full:
                traval.collect()
        traval.collect()  # as train() does every --print-freq steps: a synchronisation point

    return run


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
