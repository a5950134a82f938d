"""Lines of the GPU table, read from what the commands of a piece leave in their folder."""

from __future__ import annotations

import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from scripts.common.runs import reach
from scripts.lab.benchmarks.lines import PERCENT, RATE, RUN_SECONDS, SECONDS, Line, read_csv

PUBLISHED_SPEED_UP = 2.44  # the AMP recipe's workload on an RTX 2060: 8.063 s in float32, 3.298 s with autocast
BUSY_AIM = 1.1  # largest ratio of a step's time to the GPU's own work in it
CIFAR_IMAGES = 50_000


def figure(what: str, unit: str, values: Sequence[float], aim: float | None = None) -> Line:
    """Line of several runs' own figures: mean, smallest and largest."""
    mean = statistics.fmean(values)
    return Line(what, unit, "", mean, None, mean, min(values), max(values), aim)


def tests(out: Path) -> list[Line]:
    """Lines with the number of failed tests in the JUnit file, and one for each failed test."""
    cases = list(ElementTree.parse(out / "tests.xml").getroot().iter("testcase"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    failed = [(case, why) for case in cases for why in (*case.iter("failure"), *case.iter("error"))]
    if skipped == len(cases):
        return [Line("tests that need a GPU", note=f"all {skipped} skipped")]
    what = f"tests that need a GPU, {len(cases)} in all, {skipped} skipped: failures"
    lines = [Line(what, ours=float(len(failed)), result=float(len(failed)), aim=0.0)]
    return lines + [Line(f"failed: {case.get('name')}", note=(why.get("message") or "")[:120]) for case, why in failed]


def amp(out: Path) -> list[Line]:
    """Lines that compare each half-precision format, and CUDA graphs, with float32, for two MLPs.

    The first MLP is that of PyTorch's AMP recipe as published, the second a larger one.
    """
    lines = []
    for folder, name, aim in (
        ("published", "MLP of PyTorch's AMP recipe", PUBLISHED_SPEED_UP),
        ("larger", "the same, 8192 wide, batch 4096", None),
    ):
        fp32, *others = read_csv(out / folder / "amp.csv")
        for row in others:
            what = f"{name}, {row['format']}"
            if row["failure"]:
                lines.append(Line(what, note=row["failure"]))
                continue
            rates = (float(row["images_per_second"]), float(fp32["images_per_second"]))
            its_aim = aim if row["format"].startswith("fp16") else None
            lines.append(Line(what, RATE, "fp32", *rates, float(row["speed_up"]), aim=its_aim))
    return lines


def accounting(out: Path) -> list[Line]:
    """Lines about what main.py's training step adds to a bare loop on one batch, and how busy it keeps the GPU."""
    from scripts.common.timing import ratios

    rows = read_csv(out / "accounting.csv")
    bare = [float(row["ms"]) for row in rows if row["step"] == rows[0]["step"]]
    lines = []
    for step in dict.fromkeys(row["step"] for row in rows[len(bare) :]):
        its = [row for row in rows if row["step"] == step]
        ms = [float(row["ms"]) for row in its]
        others = {rows[0]["step"]: bare}
        if its[0]["busy_ms"]:
            others["the GPU's work in it"] = [float(row["busy_ms"]) for row in its]
        for against, values in others.items():
            aim = BUSY_AIM if values is not bare and "average" not in step else None
            figures = (statistics.median(ms), statistics.median(values), *ratios(ms, values))
            lines.append(Line(f"{step}, resnet18, 32 pixels", "ms a step", against, *figures, aim))
    return lines


def benchmark(out: Path) -> list[Line]:
    """Lines from the rows of benchmark.py's CSV file."""
    lines = []
    for row in read_csv(out / "benchmark.csv"):
        names = ("ours", "other", "result", "low", "high", "aim")
        figures = (float(row[name]) if row[name] else None for name in names)
        lines.append(Line(row["what"], row["unit"], row["against"], *figures, row["note"]))
    if all(line.result is None for line in lines):
        raise ValueError(lines[0].note)
    return lines


def recipe(out: Path, name: str, aim: float | None = None, clocked: bool = False) -> list[Line]:
    """Lines about top-1 and seconds of the runs in sweep.csv. ``clocked``: also the seconds by airbench's clock."""
    rows = read_csv(out / "sweep.csv")
    top1 = [float(row["val_top1"]) for row in rows]
    interval = f", its mean within {reach(top1):.2f} (95 %)" if len(top1) > 1 else ""
    lines = [
        figure(f"{name}, {len(rows)} seed(s): top-1{interval}", PERCENT, top1, aim),
        figure(f"{name}: all epochs with validation", SECONDS, [float(row["seconds"]) for row in rows]),
    ]
    if clocked:
        warm, cold = zip(*(clocked_seconds(out / row["folder"]) for row in rows), strict=True)
        lines.append(figure(f"{name}: as airbench's clock counts", SECONDS, warm))
        lines.append(figure(f"{name}: warm-up beside it, in the first epoch", SECONDS, cold))
    return lines


def clocked_seconds(folder: Path) -> tuple[float, float]:
    """Seconds of a warmed-up run as airbench's clock would count them, and the seconds of the warm-up.

    The clock counts training and the last validation but no earlier one, after a separate run has compiled the network
    and chosen algorithms. So the first epoch's training counts as the median of the others; what the epoch took beyond
    that, and beyond its validation if it had one, is the warm-up. (Its images per second leave out its first step.)
    """
    rows = read_csv(folder / "metrics.csv")
    training = [CIFAR_IMAGES / float(row["images_per_second"]) for row in rows]
    validation = max(0.0, float(rows[-1]["seconds"]) - training[-1])
    warm = statistics.median(training[1:] or training)
    validated = validation if rows[0].get("val_count") else 0.0
    return sum(training[1:]) + warm + validation, float(rows[0]["seconds"]) - warm - validated


def airbench(out: Path, script: str, aim: float | None = None) -> list[Line]:
    """Lines about ``script``, from cifar10-airbench or derived from it, and our speed compared with it.

    Our speed is that of the runs of the pieces 'fast' and 'fast-graphs', as airbench's clock counts.
    """
    log = (out / "log.txt").read_text(encoding="utf-8", errors="replace")
    (_, cold), *runs = airbench_runs(log)  # the first run is a warm-up, whatever its name
    top1, seconds = zip(*runs, strict=True)
    lines = [
        figure(f"{script}, {len(top1)} run(s): top-1", PERCENT, [100 * value for value in top1]),
        figure(f"{script}: its clock", SECONDS, seconds),
        figure(f"{script}: its first run, which compiles and warms up", SECONDS, [cold]),
    ]
    theirs = statistics.median(seconds)
    for piece in ("fast", "fast-graphs"):
        what = f"cifar10/airbench beside it, piece '{piece}'"
        sweep = out.parent / piece / "sweep.csv"
        if sweep.exists():
            ours = statistics.median(clocked_seconds(sweep.parent / row["folder"])[0] for row in read_csv(sweep))
            lines.append(Line(what, RUN_SECONDS, script, ours, theirs, ours / theirs, aim=aim))
        else:
            lines.append(Line(what, note=f"left out: the piece '{piece}' has no runs"))
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
