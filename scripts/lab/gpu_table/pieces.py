"""The pieces of the table, in their order: what each needs, how long it takes, and how it is measured."""

from __future__ import annotations

import csv
import shutil
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import util
from pathlib import Path

from scripts.lab.gpu_table import trainings
from scripts.lab.gpu_table.job import ROOT, Job, PieceFailure
from scripts.lab.gpu_table.lines import RATIO, Line, benchmark_lines
from utils.record.provenance import cores

TESTS = ROOT / "tests"
PUBLISHED_SPEED_UP = 2.44  # of the AMP recipe's workload on an RTX 2060: 8.063 s in float32, 3.298 s with autocast


@dataclass(frozen=True)
class Piece:
    """A piece. ``seconds``: about how long it takes on an H100-class GPU.

    ``needs``: flags without which it is left out. ``only_gpu``: it cannot be tried out on a CPU. ``resumes``: one that
    was cut goes on where it was, so it may begin with little time left.
    """

    name: str
    what: str
    seconds: int
    measure: Callable[[Job], list[Line]]
    needs: tuple[str, ...] = ()
    only_gpu: bool = False
    resumes: bool = False


# -------------------------------------------------------------------------------------- GPU tests


def gpu_tests(job: Job) -> list[Line]:
    """The tests that need a GPU. Only their files are imported: others may need packages that are not here."""
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    report = job.folder / "logs" / "tests.xml"
    # Most of them start processes, which use a core each and little of the GPU.
    at_once = ("-n", min(8, max(1, cores() // 2))) if util.find_spec("xdist") and not job.own.tiny else ()
    flags = ("-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}", *at_once)
    job.run("-m", "pytest", *flags, *files, codes=(0, 1))
    return test_lines(report)


def test_lines(report: Path) -> list[Line]:
    """How many tests of a JUnit file failed, and which."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    failed = [(case, why) for case in cases for why in (*case.iter("failure"), *case.iter("error"))]
    if len(skipped) == len(cases):
        return [Line("tests that need a GPU", note=f"all {len(cases)} skipped")]
    what = f"tests that need a GPU, {len(cases)} in all, {len(skipped)} skipped: failures"
    count = float(len(failed))
    lines = [Line(what, "", "", count, None, count, aim=0.0, at_least=False)]
    return lines + [Line(f"failed: {case.get('name')}", note=(why.get("message") or "")[:120]) for case, why in failed]


# ------------------------------------------------------------------------------- a step's precision


def mixed_precision(job: Job) -> list[Line]:
    """The workload of PyTorch's AMP recipe in each format, and twice as wide with a batch eight times as large.

    A datacenter GPU is done with the published one before the host has launched the next kernels, so that its ratios
    say more of the host; the larger one fills the GPU.
    """
    published = ("--rounds", 2 * job.own.rounds)
    larger = ("--width", 8192, "--batch-size", 4096, "--steps", 10, "--rounds", job.own.rounds, "--no-memory")
    if job.own.tiny:
        tiny = ("--layers", 2, "--batch-size", 8, "--steps", 2, "--rounds", 1, "--no-memory")
        published = ("--width", 32, *tiny)
        larger = ("--width", 64, *tiny)
    lines = mlp_lines(job, "amp", "MLP of PyTorch's AMP recipe", published, PUBLISHED_SPEED_UP)
    return lines + mlp_lines(job, "amp-larger", "the same, 8192 wide, batch 4096", larger, None)


def mlp_lines(job: Job, folder: str, name: str, size: Sequence[object], aim: float | None) -> list[Line]:
    """The MLP of ``size``, flags of benchmark_amp.py, in each format against float32; ``aim`` is for fp16."""
    out = fresh(job.folder / folder)
    job.run("scripts/lab/benchmark_amp.py", "--device", job.device, "--output", out, *size)
    full, *others = read_csv(out / "amp.csv")
    lines = []
    for row in others:
        what = f"{name}, {row['format']}"
        if row["failure"]:
            lines.append(Line(what, note=row["failure"]))
            continue
        its_aim = aim if row["format"] == "fp16" else None
        times = (float(row["ms_per_step"]), float(full["ms_per_step"]))
        lines.append(
            Line(f"{what}: speed-up", "ms a step", "fp32", *times, float(row["speed_up"]), kind=RATIO, aim=its_aim)
        )
        if row["peak_bytes"]:
            sizes = (float(row["peak_bytes"]) / 1e6, float(full["peak_bytes"]) / 1e6)
            ratio = float(row["memory_ratio"])
            lines.append(Line(f"{what}: peak memory", "MB", "fp32", *sizes, ratio, kind=RATIO))
    return lines


def accounting(job: Job) -> list[Line]:
    """What main.py's training step adds to a bare loop on one batch."""
    out = fresh(job.folder / "accounting")
    size = ("--rounds", 4 * job.own.rounds)
    if job.own.tiny:
        size = ("--arch", "conv2", "--image-size", 8, "--batch-size", 8, "--steps", 2, "--rounds", 1)
    flags = ("--accounting", "--ema-decay", 0.999, "--device", job.device, "--output", out)
    job.run("scripts/lab/benchmark_amp.py", *flags, *size)
    rows = read_csv(out / "accounting.csv")
    names = {"training_step": "main.py's training step", "average": "the same with a moving average"}
    lines = []
    for column, what in names.items():
        ours, bare = (statistics.median(float(row[f"{name}_ms"]) for row in rows) for name in (column, "bare"))
        ratios = [float(row[f"{column}_ratio"]) for row in rows]
        ratio = statistics.median(ratios)
        about = (f"{what}, resnet18, 32 pixels, batch 128", "ms a step", "bare loop")
        lines.append(Line(*about, ours, bare, ratio, min(ratios), max(ratios), RATIO))
    return lines


# ------------------------------------------------------------------------------------------- speed


def benchmark(job: Job, part: str, rounds_fewer: int = 0) -> list[Line]:
    """A part of benchmark.py."""
    own = job.own
    out = fresh(job.folder / "benchmarks" / part)
    rounds = 1 if own.tiny else max(1, own.rounds - rounds_fewer)
    flags = ["--device", job.device, "--rounds", rounds, "--seconds", own.seconds, "--output", out]
    flags += ["--tiny"] * own.tiny
    for flag, value in (("--cifar10", own.cifar10), ("--images", own.imagenette), ("--timm-train", own.timm_train)):
        flags += [flag, value] if value else []
    job.run("scripts/lab/benchmark.py", "--only", part, *flags, codes=(0, 1))
    lines = benchmark_lines(out / "benchmark.csv")
    if all(line.note for line in lines):
        raise PieceFailure(lines[0].note)
    if part != "resident" and part != "jpeg-resnet18" and not own.timm_train:
        lines.append(Line("timm's train.py", note="left out: --timm-train is not given"))
    return lines


def fresh(folder: Path) -> Path:
    """``folder``, without what an earlier attempt left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def read_csv(path: Path) -> Sequence[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------------------- all pieces

PIECES = (
    Piece("tests", "the tests that need a GPU", 100, gpu_tests),
    Piece("amp", "PyTorch's AMP recipe in each number format", 70, mixed_precision),
    Piece("accounting", "what main.py's step adds to a bare loop", 50, accounting),
    Piece(
        "resnet50-fp16",
        "resnet50 at 224 pixels in fp16 against a bare loop and timm",
        215,
        partial(benchmark, part="resnet50-fp16"),
    ),
    Piece("resnet50-bf16", "the same in bf16", 215, partial(benchmark, part="resnet50-bf16")),
    Piece("resnet50-compiled", "the same in fp16, compiled", 300, partial(benchmark, part="resnet50-compiled")),
    Piece("resident", "resnet18 on resident CIFAR-10 against a bare loop", 150, partial(benchmark, part="resident")),
    Piece("fast", "CIFAR-10 to 94 %, five seeds", 110, trainings.fast, ("cifar10",), resumes=True),
    Piece(
        "airbench",
        "airbench's own script on the same images",
        200,
        trainings.airbench,
        ("cifar10", "airbench"),
        only_gpu=True,
    ),
    Piece(
        "resnet18-short",
        "resnet18 on CIFAR-10 to 95.28 %, three seeds",
        300,
        trainings.short,
        ("cifar10",),
        resumes=True,
    ),
    Piece(
        "jpeg-resnet18",
        "resnet18 from JPEG files, decoded by CPU and GPU",
        150,
        partial(benchmark, part="jpeg-resnet18", rounds_fewer=1),
        ("imagenette",),
    ),
    Piece(
        "jpeg-resnet50",
        "resnet50 from JPEG files, decoded by CPU and GPU",
        210,
        partial(benchmark, part="jpeg-resnet50", rounds_fewer=1),
        ("imagenette",),
    ),
    Piece(
        "imagenette",
        "resnet50 on Imagenette, the whole recipe",
        240,
        trainings.imagenette,
        ("imagenette",),
        resumes=True,
    ),
)
