"""What mixed precision gains on this device: time and memory of a step in each dtype, on a GPU also as a CUDA graph.

    python scripts/lab/benchmark_amp.py                          # the MLP of PyTorch's recipe
    python scripts/lab/benchmark_amp.py --accounting             # what main.py's training step adds to a bare loop
    python scripts/lab/benchmark_amp.py --accounting --ema-decay 0.999     # and a moving average of the weights

Prints a table and writes it as amp.csv (accounting.csv) to --output. For the gain of your own network use doctor.py.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.command_line import ToolParser, make_folder, refuse, run_tool, say, table, whole
from scripts.common.output import write_csv
from utils.config.groups.run import RunSettings
from utils.config.settings import Settings, flag_of
from utils.runtime.process import RankInfo

if TYPE_CHECKING:
    import torch

    from utils.data.loaders import Batch
    from utils.runtime.distributed import Distributed
    from utils.train_validation import TraVal

NAME = "lab/benchmark_amp.py"
ACCOUNTING = "--accounting"
# The flags of each kind of benchmark, with their defaults. A flag of the other kind is a mistake.
KINDS = {
    "the MLP": {"width": 4096, "layers": 3, "batch_size": 512, "rounds": 3},
    ACCOUNTING: {
        "arch": "resnet18",
        "image_size": 32,
        "batch_size": 128,
        "rounds": 6,
        "amp": None,
        "ema_decay": None,
    },
}
BARE = "bare loop"
OURS = "TraVal.training_step"


def main(argv: list[str]) -> int:
    own = read_flags(argv)
    from utils.runtime.distributed import Distributed

    with Distributed(RankInfo(), RunSettings(device=own.device)) as distributed:
        return account(own, distributed) if own.accounting else benchmark(own, distributed.device)


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=False)
    number = {"type": whole(1, 2**24), "metavar": "N"}
    parser.add_argument("--width", **number, help="inputs and outputs of each layer of the MLP [4096]")
    parser.add_argument("--layers", **number, help="linear layers of the MLP [3]")
    parser.add_argument("--batch-size", "-b", **number, help="samples a step [512; with --accounting 128]")
    parser.add_argument("--steps", **number, default=50, help="timed steps a round [50]")
    parser.add_argument("--rounds", **number, help="rounds of each row, interleaved [3; with --accounting 6]")
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
    refuse(f"{flag_of(name)} goes with {other}, and this measures {kind}" for name in sorted(foreign))
    for name, default in KINDS[kind].items():
        if getattr(own, name) is None:
            setattr(own, name, default)
    return own


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

    return interleaved(sides, rounds, lambda number: say(f"round {number}/{rounds}"), *failure_of)


def finish(headers: Sequence[str], cells: Sequence[Sequence[str]], path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of ``cells``, and write ``rows`` to a CSV file."""
    print(table(headers, cells))
    write_csv(path, rows)
    print(f"Medians of the rounds; ratios are medians of the rounds' own. File: {path}")


# ---------------------------------------------------------------------------------------- benchmark


def benchmark(own: argparse.Namespace, device: torch.device) -> int:
    """Measure all formats, print the table, write it to the output folder and return the exit code."""
    from scripts.common.timing import Spread, failure_of, ratios, unsupported
    from scripts.lab.benchmarks.steps import AMP, GRAPH, Round, time_round
    from utils.loop.step_graph import NotRecorded

    folder = make_folder(own.output)
    shape = (own.width, own.layers, own.batch_size)
    about = begin(own, f"MLP of {own.layers} linear layers {own.width}-{own.width}, batch {own.batch_size}", device)
    skipped = {name: reason for name in AMP if (reason := unsupported(name, device))}
    formats = [name for name in AMP if name not in skipped]
    on_gpu = device.type == "cuda"
    formats += [name + GRAPH for name in formats] * on_gpu
    sides = {name: partial(time_round, name, *shape, own.steps, device) for name in formats}

    def failed(_: str, error: Exception) -> str:
        return str(error) if isinstance(error, NotRecorded) else failure_of(error, compiled=False)

    rounds, failures = in_rounds(sides, own.rounds, failed)
    fp32: list[Round] = [] if "fp32" in failures else rounds["fp32"]
    rows = []
    for name in formats:
        seconds = [] if name in failures else [one.seconds for one in rounds[name]]
        ms = Spread.of([1000 * one for one in seconds]) if seconds else (None, None, None)
        peaks = [max(one.peak_bytes for one in some) for some in (rounds[name], fp32) if some and on_gpu and seconds]
        row = {
            "format": name,
            **dict(zip(("ms_per_step", "ms_min", "ms_max"), ms, strict=True)),
            "images_per_second": 1000 * own.batch_size / ms[0] if seconds else None,
            "speed_up": ratios([one.seconds for one in fp32], seconds).median if seconds and fp32 else None,
            "peak_bytes": peaks[0] if peaks else None,
            "memory_ratio": peaks[0] / peaks[1] if len(peaks) == 2 else None,
            "failure": failures.get(name, ""),
        }
        rows.append(row | about)
    headers = ["format", "ms a step", "min - max", "images/s", "speed-up", *["peak MB", "memory"] * on_gpu]
    finish(headers, [cells(row)[: len(headers)] for row in rows], folder / "amp.csv", rows)
    for name, reason in skipped.items():
        print(f"{name} is left out: {reason}.")
    return 0 if len(failures) < len(rows) else 1


def cells(row: dict[str, Any]) -> list[str]:
    """Text cells of a format's row; the last two are about a GPU's memory, the most that all tensors took together."""
    label = row["format"].replace("fp16", "fp16 + scaler")
    if row["failure"]:
        return [label, row["failure"], *[""] * 5]
    values = {**row, "peak_mb": None if row["peak_bytes"] is None else row["peak_bytes"] / 1e6}
    shown = {"images_per_second": "{:,.0f}", "speed_up": "{:.2f}x", "peak_mb": "{:,.1f}", "memory_ratio": "{:.2f}x"}
    figures = ["-" if values[name] is None else form.format(values[name]) for name, form in shown.items()]
    return [label, f"{row['ms_per_step']:,.2f}", f"{row['ms_min']:,.2f} - {row['ms_max']:,.2f}", *figures]


# --------------------------------------------------------------------------------------- accounting


def account(own: argparse.Namespace, distributed: Distributed) -> int:
    """Compare main.py's training step with a bare loop: same weights, same batch, rounds interleaved."""
    from scripts.common.timing import Spread, busy_seconds, ratios, timed, warm_up

    device = distributed.device
    settings = accounting_settings(own, device)
    sides = loops(settings, distributed)
    folder = make_folder(own.output)
    size = f"images 3x{own.image_size}x{own.image_size}, batch {own.batch_size}"
    about = begin(own, f"{own.arch}, {size}, mixed precision {settings[OURS].precision.amp}", device)
    for run in sides.values():
        warm_up(run, device)
    runs = {name: partial(timed, partial(run, own.steps), device) for name, run in sides.items()}
    seconds, _ = in_rounds(runs, own.rounds)
    ms = {name: [1000 * took / own.steps for took, _ in row] for name, row in seconds.items()}
    busy = {}
    if device.type == "cuda":
        busy = {name: 1000 * busy_seconds(partial(run, own.steps)) / own.steps for name, run in sides.items()}
    shown = []
    for name, values in ms.items():
        spread = Spread.of(values)
        cost = [f"{100 * (each - 1):+.2f}" for each in ratios(values, ms[BARE])]
        row = [name, f"{spread.median:,.2f}", f"{spread.low:,.2f} - {spread.high:,.2f}"]
        row.append("" if name == BARE else f"{cost[0]} % ({cost[1]} to {cost[2]} %)")
        shown.append([*row, *([f"{busy[name]:,.2f}"] if busy else [])])
    rows = [
        {"round": number, "step": name, "ms": value, "ratio": value / bare, "busy_ms": busy.get(name)} | about
        for name, values in ms.items()
        for number, (value, bare) in enumerate(zip(values, ms[BARE], strict=True), 1)
    ]
    headers = ["step", "ms a step", "min - max", "beyond the bare loop", *["the GPU is busy"] * bool(busy)]
    finish(headers, shown, folder / "accounting.csv", rows)
    return 0


def accounting_settings(own: argparse.Namespace, device: torch.device) -> dict[str, Settings]:
    """Training settings of each side but the bare loop, with a loss scale at which no healthy network skips a step."""
    from scripts.common.timing import WARM_UP_STEPS
    from utils.config import arguments
    from utils.config.groups.precision import PrecisionSettings
    from utils.precision.amp import resolve_amp

    amp = resolve_amp(PrecisionSettings(amp=own.amp), device)
    line = "--dataname synthetic --lr 0.001 --momentum 0.9 --weight-decay 0 --lr-policy constant"
    line += f" --image-size {own.image_size} --batch-size {own.batch_size} --print-freq {max(own.steps, WARM_UP_STEPS)}"
    line += f" --device {device.type} --amp {amp} --init-scale 1024"
    sides: dict[str, list[str]] = {OURS: []}
    if device.type == "cuda":
        sides["as CUDA graphs"] = ["--cuda-graph", "auto"]
    if own.ema_decay:
        sides["with a moving average"] = ["--ema-decay", own.ema_decay]
    return {name: arguments.parse([f"--arch={own.arch}", *line.split(), *flags]) for name, flags in sides.items()}


def loops(settings: dict[str, Settings], distributed: Distributed) -> dict[str, Callable[[int], None]]:
    """By side, a function that runs a given number of steps; all begin with the same weights and see one batch."""
    import torch

    from components import build, build_traval
    from scripts.lab.benchmarks.steps import Training
    from utils.run import Run

    sides: dict[str, Callable[[int], None]] = {}
    for name, args in settings.items():
        run = Run(args, distributed)
        components = build(run)
        loader = components.train_loader
        (batch,) = loader.replay_step(loader.full_size_epoch, 0)
        if not sides:
            network = copy.deepcopy(components.model)
            torch.backends.cudnn.benchmark = True  # as in main.py's passes; without effect on a CPU
            bare = Training(network, [(batch.images, batch.targets)], args.precision, momentum=0.9, fused=True)
            sides[BARE] = bare.run
        sides[name] = repeated(build_traval(run, components), batch)
    return sides


def repeated(traval: TraVal, batch: Batch) -> Callable[[int], None]:
    """A function that takes a given number of main.py's training steps on one batch, then reads the sums of metrics."""

    def run(steps: int) -> None:
        for _ in range(steps):
            traval.progress.step_in_epoch = 0  # from where a step skipped after all reads its batch again
            traval.training_step([batch])
            if traval.sums.full:
                traval.collect()
        traval.collect()  # as train() does every --print-freq steps: a synchronisation point

    return run


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
