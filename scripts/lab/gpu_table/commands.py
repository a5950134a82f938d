"""The pieces of the GPU table as data: the commands that measure each, and how to read its lines from their files."""

from __future__ import annotations

import csv
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.common.runs import reach

TESTS = Path(__file__).resolve().parents[3] / "tests"
PUBLISHED_SPEED_UP = 2.44  # the AMP recipe's workload on an RTX 2060: 8.063 s in float32, 3.298 s with autocast
BUSY_AIM = 1.1  # largest ratio of a step's time to the GPU's own work in it
CIFAR_IMAGES = 50_000
STEPS = {"training_step": "", "graphs": " as graphs", "average": " with a moving average"}
RATIO = "ratio"
FIGURE = "figure"


class PieceFailure(RuntimeError):
    """A piece gave no figures; the message is one line."""


@dataclass(frozen=True)
class Line:
    """A line of the table. ``result``: ours / other (``RATIO``), or ours (``FIGURE``).

    ``low`` and ``high``: smallest and largest ``result`` of the rounds, runs or seeds. ``aim``: bound of ``result``,
    from below if ``at_least``, otherwise from above; None: only reported. ``note``: why there are no figures, or a
    remark on them.
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
    """A piece of the table. ``seconds``: about how long it takes on an H100-class GPU.

    ``commands``: arguments of Python, with ``{name}`` for a value of ``gpu_results.py``; a word whose value is not
    given is left out. ``tiny``: further flags on a CPU; None: the piece needs a GPU. ``lines(out)``: reads the lines
    from the commands' folder ``out``. ``may_fail``: exit code 1 also gives figures. ``needs``: flags without which the
    piece is left out. ``resumes``: an interrupted piece continues where it stopped, so it may begin with little time
    left.
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
    """Line of several runs' own figures: mean, smallest and largest."""
    mean = statistics.fmean(values)
    return Line(what, unit, "", mean, None, mean, min(values), max(values), FIGURE, aim)


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------- what the commands leave


def test_lines(out: Path) -> list[Line]:
    """Lines with the number of failed tests in the JUnit file, and one for each failed test."""
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
    """Lines that compare each half-precision format, and CUDA graphs, with float32, for two MLPs.

    The first MLP is that of PyTorch's AMP recipe as published, the second a larger one.
    """
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
            its_aim = aim if row["format"].startswith("fp16") else None
            about = (f"{what}: speed-up", "ms a step", "fp32")
            lines.append(Line(*about, *times, float(row["speed_up"]), kind=RATIO, aim=its_aim))
            if row["peak_bytes"]:
                sizes = (float(row["peak_bytes"]) / 1e6, float(full["peak_bytes"]) / 1e6)
                ratio = float(row["memory_ratio"])
                lines.append(Line(f"{what}: peak memory", "MB", "fp32", *sizes, ratio, kind=RATIO))
    return lines


def accounting_lines(out: Path) -> list[Line]:
    """Lines about what main.py's training step adds to a bare loop on one batch, and how busy it keeps the GPU."""
    rows = read_csv(out / "accounting.csv")
    lines = []
    for column, words in STEPS.items():
        if f"{column}_ms" not in rows[0]:  # without a GPU
            continue
        what = f"main.py's training step{words}, resnet18, 32 pixels"
        own = [float(row[f"{column}_ms"]) for row in rows]
        for other in ("bare_ms", f"{column}_busy_ms"):
            if other in rows[0]:
                others = [float(row[other]) for row in rows]
                ratios = [one / another for one, another in zip(own, others, strict=True)]
                about = (what, "ms a step", "bare loop" if other == "bare_ms" else "the GPU's work in it")
                figures = (statistics.median(own), statistics.median(others), statistics.median(ratios))
                aim = BUSY_AIM if other != "bare_ms" and column != "average" else None
                lines.append(Line(*about, *figures, min(ratios), max(ratios), RATIO, aim, at_least=False))
    return lines


def benchmark_lines(out: Path) -> list[Line]:
    """Lines from the rows of benchmark.py's CSV file."""
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
    """Lines about top-1 and seconds of the runs in sweep.csv. ``clocked``: also the seconds by airbench's clock."""
    rows = read_csv(out / "sweep.csv")
    top1 = [float(row["val_top1"]) for row in rows]
    interval = f", its mean within {reach(top1):.2f} (95 %)" if len(top1) > 1 else ""
    lines = [
        figure(f"{recipe}, {len(rows)} seed(s): top-1{interval}", "%", top1, aim),
        figure(f"{recipe}: all epochs with validation", "s", [float(row["seconds"]) for row in rows]),
    ]
    if clocked:
        warm, cold = zip(*(clocked_seconds(out / row["folder"]) for row in rows), strict=True)
        lines.append(figure(f"{recipe}: as airbench's clock counts", "s", warm))
        lines.append(figure(f"{recipe}: warm-up beside it, in the first epoch", "s", cold))
    return lines


def clocked_seconds(folder: Path) -> tuple[float, float]:
    """Seconds of a warmed-up run as airbench's clock would count them, and the seconds of the warm-up.

    The clock counts training and the last validation but no earlier one, after a separate run has compiled the network
    and chosen algorithms. So the first epoch counts as the median of the others; what it took beyond that is the
    warm-up.
    """
    rows = read_csv(folder / "metrics.csv")
    training = [CIFAR_IMAGES / float(row["images_per_second"]) for row in rows]
    validation = max(0.0, float(rows[-1]["seconds"]) - training[-1])
    warm = statistics.median(training[1:] or training)
    return sum(training[1:]) + warm + validation, training[0] - warm


def airbench_lines(out: Path, script: str, aim: float | None = None) -> list[Line]:
    """Lines about ``script``, from cifar10-airbench or derived from it, and our speed compared with it.

    Our speed is that of the runs of the pieces 'fast' and 'fast-graphs', as airbench's clock counts.
    """
    log = (out / "log.txt").read_text(encoding="utf-8", errors="replace")
    (_, cold), *runs = airbench_runs(log)  # the first run is a warm-up, whatever its name
    top1, seconds = zip(*runs, strict=True)
    lines = [
        figure(f"{script}, {len(top1)} run(s): top-1", "%", [100 * value for value in top1]),
        figure(f"{script}: its clock", "s", seconds),
        figure(f"{script}: its first run, which compiles and warms up", "s", [cold]),
    ]
    theirs = statistics.median(seconds)
    for piece in ("fast", "fast-graphs"):
        what = f"cifar10/airbench beside it, piece '{piece}'"
        sweep = out.parent / piece / "sweep.csv"
        if not sweep.exists():
            lines.append(Line(what, note=f"left out: the piece '{piece}' has no runs"))
            continue
        ours = statistics.median(clocked_seconds(sweep.parent / row["folder"])[0] for row in read_csv(sweep))
        lines.append(Line(what, "s", script, ours, theirs, ours / theirs, kind=RATIO, aim=aim, at_least=False))
    return lines


def airbench_runs(log: str) -> list[tuple[float, float]]:
    """Top-1 (0 to 1) and seconds of each of the script's runs, from the last row of each run in the printed table."""
    names: list[str] = []
    runs = []
    for text in log.splitlines():
        cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
        if "tta_val_acc" in cells:
            names = cells
        elif names and len(cells) == len(names):
            row = dict(zip(names, cells, strict=True))
            if row["epoch"] == "eval":
                runs.append((float(row["tta_val_acc"]), float(row[names[-1]])))
    return runs


# ---------------------------------------------------------------------------------------- all pieces

AMP = "scripts/lab/benchmark_amp.py --device {device}"
BENCHMARK = (
    "scripts/lab/benchmark.py --device {device} --output {out} --seconds {seconds} --cifar10={cifar10} "
    "--images={imagenette} --timm-train={timm_train} --rounds "
)
TINY_MLP = "--width 32 --layers 2 --batch-size 8 --steps 2 --rounds 1 --no-memory"
TINY_RUN = "--seeds 1 --epochs 1 --amp off --global-batch-size 8 --train-samples 16 --max-val-batches 1"


def speed(part: str, what: str, seconds: int, rounds: str = "{rounds}", needs: tuple[str, ...] = ()) -> Piece:
    """Piece that runs ``part`` of benchmark.py. ``rounds``: its --rounds; all else as in ``Piece``."""
    command = f"{BENCHMARK}{rounds} --only {part}"
    return Piece(part, what, seconds, (command,), benchmark_lines, "--tiny --rounds 1", needs, may_fail=True)


def training(name: str, what: str, seconds: int, recipe: str, tiny: str = "", **aims: object) -> Piece:
    """Piece that trains a recipe with several seeds. ``recipe``: its name, number of seeds, data flag, more flags.

    ``aims``: further arguments of ``recipe_lines``; all else as in ``Piece``.
    """
    recipe, seeds, data, *more = recipe.split()
    command = f"scripts/sweep.py {recipe} --seeds {seeds} --datapath {{{data}}} --device {{device}} --output {{out}}"
    lines = partial(recipe_lines, recipe=recipe, **aims)
    return Piece(name, what, seconds, (" ".join([command, *more]),), lines, f"{TINY_RUN} {tiny}", (data,), resumes=True)


def rival(name: str, seconds: int, flag: str, script: str, aim: float | None = None) -> Piece:
    """Piece that runs ``script`` of cifar10-airbench, or one derived from it, in the folder given by the flag ``flag``.

    ``seconds``: its usual duration. ``aim``: the bound that the comparison of our runs with it must keep.
    """
    command = f"scripts/lab/gpu_table/airbench.py {{{flag}}}/{script} {{cifar10}} {{out}}"
    lines = partial(airbench_lines, script=script, aim=aim)
    return Piece(name, f"{script} on the same images", seconds, (command,), lines, None, ("cifar10", flag))


# In the order in which a GPU's first minutes are best spent.
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
        # A datacenter GPU finishes the published size before the host has launched the next kernels, so those
        # ratios say more about the host; the larger size fills the GPU.
        "amp",
        "PyTorch's AMP recipe in each dtype, also as a graph",
        140,
        (
            f"{AMP} --output {{out}}/published --rounds {{twice}}",
            f"{AMP} --output {{out}}/larger --rounds {{rounds}} --width 8192 --batch-size 4096 --steps 10 --no-memory",
        ),
        amp_lines,
        TINY_MLP,
    ),
    speed("resnet50-bf16", "resnet50 at 224 pixels in bf16 against a bare loop, timm, and itself as graphs", 290),
    training("fast", "CIFAR-10 to 94 %, 25 seeds", 550, "cifar10/airbench 25 cifar10", aim=94.0, clocked=True),
    rival("airbench94-muon", 300, "airbench", "airbench94_muon.py", aim=1.0),
    training(
        "fast-graphs",
        "the same as graphs, five seeds",
        120,
        "cifar10/airbench 5 cifar10 --cuda-graph auto",
        aim=94.0,
        clocked=True,
    ),
    Piece(
        "accounting",
        "what main.py's step adds to a bare loop, and to the GPU's own work",
        90,
        (f"{AMP} --output {{out}} --accounting --batch-size 512 --ema-decay 0.999 --rounds {{four_times}}",),
        accounting_lines,
        "--arch conv2 --image-size 8 --batch-size 8 --steps 2 --rounds 1",
    ),
    rival("airbench94", 60, "airbench", "legacy/airbench94.py"),
    rival("hiverge", 300, "hiverge", "cifar10_speedrun.py"),
    speed("resnet50-fp16", "as resnet50-bf16, in fp16", 290),
    speed("resnet50-compiled", "the same in fp16, compiled", 400),
    speed("vit-small-bf16", "ViT-S/16 at 224 pixels in bf16 against the same", 250),
    speed("resident", "resnet18 on resident CIFAR-10 against a bare loop and itself as graphs", 225),
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
