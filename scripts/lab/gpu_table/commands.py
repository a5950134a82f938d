"""The pieces of the GPU table as data: which commands measure each, and how its lines are read from what they leave."""

from __future__ import annotations

import csv
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

TESTS = Path(__file__).resolve().parents[3] / "tests"
PUBLISHED_SPEED_UP = 2.44  # of the AMP recipe's workload on an RTX 2060: 8.063 s in float32, 3.298 s with autocast
CIFAR_IMAGES = 50_000
RATIO = "ratio"
FIGURE = "figure"


class PieceFailure(RuntimeError):
    """A piece gave no figures; the message is one line."""


@dataclass(frozen=True)
class Line:
    """A line. ``result``: ours / other (``RATIO``), or ours (``FIGURE``).

    ``low`` and ``high``: its smallest and largest round, run or seed. ``aim``: what ``result`` has to be ``at_least``,
    or otherwise at most; None: it is only reported. ``note``: why there are no figures, or what to know of them.
    """

    what: str
    unit: str = ""
    against: str = ""
    ours: float | None = None
    other: float | None = None
    result: float | None = None
    low: float | None = None
    high: float | None = None
    kind: str = FIGURE
    aim: float | None = None
    at_least: bool = True
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None without an aim or a result."""
        if self.aim is None or self.result is None:
            return None
        return self.result >= self.aim if self.at_least else self.result <= self.aim


@dataclass(frozen=True)
class Piece:
    """A piece. ``seconds``: about how long it takes on an H100-class GPU.

    ``commands``: of Python; ``{name}`` stands for a value of ``gpu_results.py``'s, and a word whose value was not given
    is left out. ``tiny``: flags that follow on a CPU; None: the piece needs a GPU. ``lines(out)``: reads what the
    commands left in the folder ``out``. ``may_fail``: exit code 1 has figures too. ``needs``: flags without which the
    piece is left out. ``resumes``: one that was cut goes on where it was, so it may begin with little time left.
    """

    name: str
    what: str
    seconds: int
    commands: tuple[str, ...]
    lines: Callable[[Path], list[Line]]
    tiny: str | None = ""
    needs: tuple[str, ...] = ()
    may_fail: bool = False
    resumes: bool = False


def figure(what: str, unit: str, values: Sequence[float], aim: float | None = None) -> Line:
    """The line of several runs' own figures: their mean, smallest and largest."""
    mean = statistics.fmean(values)
    return Line(what, unit, "", mean, None, mean, min(values), max(values), FIGURE, aim)


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------- what the commands leave


def test_lines(out: Path) -> list[Line]:
    """How many tests of the JUnit file failed, and which."""
    cases = list(ElementTree.parse(out / "tests.xml").getroot().iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    failed = [(case, why) for case in cases for why in (*case.iter("failure"), *case.iter("error"))]
    if len(skipped) == len(cases):
        return [Line("tests that need a GPU", note=f"all {len(cases)} skipped")]
    what = f"tests that need a GPU, {len(cases)} in all, {len(skipped)} skipped: failures"
    count = float(len(failed))
    lines = [Line(what, ours=count, result=count, aim=0.0, at_least=False)]
    return lines + [Line(f"failed: {case.get('name')}", note=(why.get("message") or "")[:120]) for case, why in failed]


def amp_lines(out: Path) -> list[Line]:
    """The AMP recipe's MLP in each format against float32, as published and eight times as large."""
    lines = []
    for folder, name, aim in (
        ("published", "MLP of PyTorch's AMP recipe", PUBLISHED_SPEED_UP),
        ("larger", "the same, 8192 wide, batch 4096", None),
    ):
        full, *others = read_csv(out / folder / "amp.csv")
        for row in others:
            what = f"{name}, {row['format']}"
            if row["failure"]:
                lines.append(Line(what, note=row["failure"]))
                continue
            times = (float(row["ms_per_step"]), float(full["ms_per_step"]))
            its_aim = aim if row["format"] == "fp16" else None
            about = (f"{what}: speed-up", "ms a step", "fp32")
            lines.append(Line(*about, *times, float(row["speed_up"]), kind=RATIO, aim=its_aim))
            if row["peak_bytes"]:
                sizes = (float(row["peak_bytes"]) / 1e6, float(full["peak_bytes"]) / 1e6)
                ratio = float(row["memory_ratio"])
                lines.append(Line(f"{what}: peak memory", "MB", "fp32", *sizes, ratio, kind=RATIO))
    return lines


def accounting_lines(out: Path) -> list[Line]:
    """What main.py's training step adds to a bare loop on one batch."""
    rows = read_csv(out / "accounting.csv")
    lines = []
    for column, what in {"training_step": "training step", "average": "training step with a moving average"}.items():
        ours, bare = (statistics.median(float(row[f"{name}_ms"]) for row in rows) for name in (column, "bare"))
        ratios = [float(row[f"{column}_ratio"]) for row in rows]
        about = (f"main.py's {what}, resnet18, 32 pixels, batch 128", "ms a step", "bare loop")
        lines.append(Line(*about, ours, bare, statistics.median(ratios), min(ratios), max(ratios), RATIO))
    return lines


def benchmark_lines(out: Path) -> list[Line]:
    """The rows of benchmark.py's CSV file."""
    lines = []
    for row in read_csv(out / "benchmark.csv"):
        numbers = ("ours", "other", "result", "result_min", "result_max", "target")
        *figures, aim = (float(row[name]) if row[name] else None for name in numbers)
        about = (row["what"], row["unit"], row["against"])
        at_least = row["unit"] == "images/s"
        lines.append(Line(*about, *figures, row["result_is"], aim, at_least, row["failure"]))
    if all(line.note for line in lines):
        raise PieceFailure(lines[0].note)
    return lines


def recipe_lines(out: Path, recipe: str, aim: float | None = None, clocked: bool = False) -> list[Line]:
    """Top-1 and seconds of the runs in sweep.csv. ``clocked``: the seconds by airbench's clock too."""
    rows = read_csv(out / "sweep.csv")
    top1 = [float(row["val_top1"]) for row in rows]
    lines = [
        figure(f"{recipe}, {len(rows)} seed(s): top-1", "%", top1, aim),
        figure(f"{recipe}: all epochs with validation", "s", [float(row["seconds"]) for row in rows]),
    ]
    if clocked:
        seconds = [clocked_seconds(out / row["folder"]) for row in rows]
        lines.append(figure(f"{recipe}: as airbench's clock counts", "s", seconds))
    return lines


def clocked_seconds(folder: Path) -> float:
    """What airbench's clock would count of a run: training and the last validation, warmed up.

    Its clock stops for the validations within, and a run before has compiled and chosen algorithms. So the first epoch
    counts as the median of the others.
    """
    rows = read_csv(folder / "metrics.csv")
    training = [CIFAR_IMAGES / float(row["images_per_second"]) for row in rows]
    validation = max(0.0, float(rows[-1]["seconds"]) - training[-1])
    warm = training[1:] or training
    return sum(training[1:]) + statistics.median(warm) + validation


def airbench_lines(out: Path) -> list[Line]:
    """airbench's runs, and beside them those of the piece 'fast'."""
    log = (out / "log.txt").read_text(encoding="utf-8", errors="replace")
    top1, seconds = zip(*airbench_runs(log), strict=True)
    lines = [
        figure(f"airbench, {len(top1)} run(s): top-1", "%", [100 * value for value in top1]),
        figure("airbench: its clock", "s", seconds),
    ]
    what = "cifar10/airbench beside it"
    sweep = out.parent / "fast" / "sweep.csv"
    if not sweep.exists():
        return [*lines, Line(what, note="left out: the piece 'fast' has no runs")]
    ours = statistics.median(clocked_seconds(sweep.parent / row["folder"]) for row in read_csv(sweep))
    theirs = statistics.median(seconds)
    ratio = ours / theirs
    return [*lines, Line(what, "s", "airbench", ours, theirs, ratio, kind=RATIO, aim=1.0, at_least=False)]


def airbench_runs(log: str) -> Iterator[tuple[float, float]]:
    """Top-1 (a share) and seconds of each of airbench's runs but the warm-up, from the table that it prints.

    A run's name stands in its first row alone; its last row has 'eval' for the epoch.
    """
    names: list[str] = []
    run = ""
    for text in log.splitlines():
        cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
        if "tta_val_acc" in cells:
            names = cells
        elif names and len(cells) == len(names):
            row = dict(zip(names, cells, strict=True))
            run = row["run"] or run
            if row["epoch"] == "eval" and run != "warmup":
                yield float(row["tta_val_acc"]), float(row[names[-1]])


# ---------------------------------------------------------------------------------------- all pieces

AMP = "scripts/lab/benchmark_amp.py --device {device}"
BENCHMARK = (
    "scripts/lab/benchmark.py --device {device} --output {out} --seconds {seconds} --cifar10={cifar10} "
    "--images={imagenette} --timm-train={timm_train} --rounds "
)
TINY_MLP = "--width 32 --layers 2 --batch-size 8 --steps 2 --rounds 1 --no-memory"
TINY_RUN = "--seeds 1 --epochs 1 --amp off --global-batch-size 8 --train-samples 16 --max-val-batches 1"


def speed(part: str, what: str, seconds: int, rounds: str = "{rounds}", needs: tuple[str, ...] = ()) -> Piece:
    """A part of benchmark.py."""
    command = f"{BENCHMARK}{rounds} --only {part}"
    return Piece(part, what, seconds, (command,), benchmark_lines, "--tiny --rounds 1", needs, may_fail=True)


def training(name: str, what: str, seconds: int, recipe: str, tiny: str = "", **aims: object) -> Piece:
    """A recipe with several seeds."""
    recipe, seeds, data = recipe.split()
    command = f"scripts/sweep.py {recipe} --seeds {seeds} --datapath {{{data}}} --device {{device}} --output {{out}}"
    lines = partial(recipe_lines, recipe=recipe, **aims)
    return Piece(name, what, seconds, (command,), lines, f"{TINY_RUN} {tiny}", (data,), resumes=True)


PIECES = (
    Piece(
        "tests",
        "the tests that need a GPU",
        100,
        ("-m pytest -m gpu -p no:cacheprovider --junitxml={out}/tests.xml {gpu_tests}",),
        test_lines,
        may_fail=True,
    ),
    Piece(
        # A datacenter GPU is done with the published size before the host has launched the next kernels, so that its
        # ratios say more of the host; the larger one fills the GPU.
        "amp",
        "PyTorch's AMP recipe in each dtype",
        70,
        (
            f"{AMP} --output {{out}}/published --rounds {{twice}}",
            f"{AMP} --output {{out}}/larger --rounds {{rounds}} --width 8192 --batch-size 4096 --steps 10 --no-memory",
        ),
        amp_lines,
        TINY_MLP,
    ),
    Piece(
        "accounting",
        "what main.py's step adds to a bare loop",
        50,
        (f"{AMP} --output {{out}} --accounting --ema-decay 0.999 --rounds {{four_times}}",),
        accounting_lines,
        "--arch conv2 --image-size 8 --batch-size 8 --steps 2 --rounds 1",
    ),
    speed("resnet50-fp16", "resnet50 at 224 pixels in fp16 against a bare loop, timm, and itself as graphs", 290),
    speed("resnet50-bf16", "the same in bf16", 290),
    speed("resnet50-compiled", "the same in fp16, compiled", 400),
    speed("resident", "resnet18 on resident CIFAR-10 against a bare loop and itself as graphs", 225),
    training("fast", "CIFAR-10 to 94 %, five seeds", 110, "cifar10/airbench 5 cifar10", aim=94.0, clocked=True),
    Piece(
        "airbench",
        "airbench's own script on the same images",
        200,
        ("scripts/lab/gpu_table/airbench.py {airbench} {cifar10} {out}",),
        airbench_lines,
        None,
        ("cifar10", "airbench"),
    ),
    training(
        "resnet18-short",
        "resnet18 on CIFAR-10 to 95.28 %, three seeds",
        300,
        "cifar10/resnet18_short 3 cifar10",
        "--arch fc",
        aim=95.28,
    ),
    speed("jpeg-resnet18", "resnet18 from JPEG files, decoded by CPU and GPU", 150, "{fewer}", ("imagenette",)),
    speed("jpeg-resnet50", "resnet50 from JPEG files, decoded by CPU and GPU", 210, "{fewer}", ("imagenette",)),
    training(
        "imagenette",
        "resnet50 on Imagenette, the whole recipe",
        240,
        "imagenette/resnet50 1 imagenette",
        "--arch fc --image-size 8 --workers 0 --warmup-epochs 0",
    ),
)
