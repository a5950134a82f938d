"""Pieces that train a recipe with several seeds, and airbench's own script beside CIFAR-10's fast one."""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.common.runs import RunResult, counts_for, read_run, run_folders
from scripts.lab.gpu_table.job import Job, PieceFailure
from scripts.lab.gpu_table.lines import RATIO, Line, figure
from utils.config import arguments

CIFAR_IMAGES = 50_000
AIRBENCH_RUNS = 5
MANY_RUNS = re.compile(r"for run in range\(\d+\)")
AIRBENCH = "cifar10/airbench"
SHORT = "cifar10/resnet18_short"
IMAGENETTE = "imagenette/resnet50"
TINY = {
    AIRBENCH: ("--global-batch-size", 8),
    SHORT: ("--global-batch-size", 8, "--arch", "fc"),
    IMAGENETTE: ("--global-batch-size", 8, "--arch", "fc", "--image-size", 8, "--workers", 0, "--warmup-epochs", 0),
}


def trained(job: Job, recipe: str, seeds: int, data: str) -> list[RunResult]:
    """The finished runs of ``recipe``, which sweep.py makes or completes; their folders are those of the table."""
    seeds = 1 if job.own.tiny else seeds
    job.run(
        "scripts/sweep.py",
        recipe,
        "--seeds",
        seeds,
        "--output",
        sweep_folder(job, recipe),
        "--datapath",
        data,
        "--device",
        job.device,
        *flags(job, recipe),
    )
    return finished(job, recipe, data)


def flags(job: Job, recipe: str) -> tuple[object, ...]:
    """What is not as in the recipe."""
    return ("--epochs", 1, "--amp", "off", *TINY[recipe]) if job.own.tiny else ()


def sweep_folder(job: Job, recipe: str) -> Path:
    return job.folder / "sweeps" / recipe.replace("/", "_")


def finished(job: Job, recipe: str, data: str) -> list[RunResult]:
    """The finished runs that have the settings of ``recipe`` as it is now, the newest of each seed, by seed."""
    runs = filter(None, map(read_run, run_folders(sweep_folder(job, recipe) / "runs")))
    wanted = arguments.parse(["--config", recipe, "--datapath", data, *map(str, flags(job, recipe))])
    by_seed = {run.seed: run for run in sorted(runs, key=lambda run: run.folder.name) if counts_for(run.args, wanted)}
    return [by_seed[seed] for seed in sorted(by_seed)]


def has_recipe(recipe: str) -> bool:
    return (arguments.CONFIGS / f"{recipe}.yaml").is_file()


# ------------------------------------------------------------------------------------------- recipes


def fast(job: Job) -> list[Line]:
    """CIFAR-10 fast, five seeds: does it reach 94 %, and in how many seconds?"""
    if not has_recipe(AIRBENCH):
        return [Line("CIFAR-10 fast", note=f"left out: there is no recipe {AIRBENCH}")]
    runs = trained(job, AIRBENCH, 5, job.own.cifar10)
    return [
        figure(f"{AIRBENCH}, {len(runs)} seed(s): top-1", "%", [run.top1 for run in runs], 94.0),
        figure(f"{AIRBENCH}: all epochs with validation", "s", [run.seconds for run in runs]),
        figure(f"{AIRBENCH}: as airbench's clock counts", "s", [clocked_seconds(run) for run in runs]),
    ]


def short(job: Job) -> list[Line]:
    """ResNet-18 on CIFAR-10 in 60 epochs, three seeds."""
    return recipe_lines(SHORT, trained(job, SHORT, 3, job.own.cifar10), 95.28)


def imagenette(job: Job) -> list[Line]:
    """ResNet-50 on Imagenette's JPEG files, one seed of the whole recipe."""
    return recipe_lines(IMAGENETTE, trained(job, IMAGENETTE, 1, job.own.imagenette), None)


def recipe_lines(recipe: str, runs: Sequence[RunResult], aim: float | None) -> list[Line]:
    return [
        figure(f"{recipe}, {len(runs)} seed(s): top-1", "%", [run.top1 for run in runs], aim),
        figure(f"{recipe}: all epochs with validation", "s", [run.seconds for run in runs]),
    ]


def clocked_seconds(run: RunResult) -> float:
    """What airbench's clock would count: training and the last validation, warmed up.

    Its clock stops for the validations within, and a run before has compiled and chosen algorithms. So the first epoch
    counts as the median of the others.
    """
    with open(run.folder / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    batch = run.args.data.global_batch_size
    training = [
        min(CIFAR_IMAGES, batch * (now - before)) / float(row["images_per_second"])
        for row, before, now in zip(rows, [0, *steps], steps, strict=False)
    ]
    validation = max(0.0, float(rows[-1]["seconds"]) - training[-1])
    warm = training[1:] or training
    return sum(training[1:]) + statistics.median(warm) + validation


# ------------------------------------------------------------------------------------------ airbench


def airbench(job: Job) -> list[Line]:
    """airbench's script on the same images, a few of its runs, beside those of the fast recipe."""
    script = Path(job.own.airbench)
    text, replaced = MANY_RUNS.subn(f"for run in range({AIRBENCH_RUNS})", script.read_text(encoding="utf-8"))
    if replaced != 1:
        raise PieceFailure(f"--airbench {script}: has no 'for run in range(N)', so its runs cannot be limited")
    place = job.scratch / "airbench"
    write_images(job.own.cifar10, place / "cifar10")
    (place / script.name).write_text(text, encoding="utf-8")
    job.run(place / script.name, cwd=place)
    top1, seconds = zip(*table_rows(job.log.read_text(encoding="utf-8", errors="replace")), strict=True)
    lines = [
        figure(f"{script.name}, {len(top1)} run(s): top-1", "%", [100 * value for value in top1]),
        figure(f"{script.name}: its clock", "s", seconds),
    ]
    ours = [clocked_seconds(run) for run in finished(job, AIRBENCH, job.own.cifar10)]
    if not ours:
        return [*lines, Line(f"{AIRBENCH} beside it", note="left out: the piece 'fast' has no runs")]
    a = statistics.median(ours)
    b = statistics.median(seconds)
    lines.append(Line(f"{AIRBENCH} beside it", "s", script.name, a, b, a / b, kind=RATIO, aim=1.0, at_least=False))
    return lines


def write_images(datapath: str, folder: Path) -> None:
    """CIFAR-10 as airbench stores it: train.pt and test.pt with uint8 images (n, 32, 32, 3), labels and classes."""
    import torch

    from utils.data.datasets import get_data
    from utils.data.loaders import loaders
    from utils.runtime.distributed import Distributed, RankInfo

    flags = ["--dataname", "cifar10", "--datapath", datapath, "--loader", "resident", "--device", "cpu"]
    args = arguments.parse(flags)
    data = get_data(args.data, torch.device("cpu"))
    train, validation, _ = loaders(data, args, Distributed(RankInfo(), args.run), channels_last=False)
    folder.mkdir(parents=True)
    for name, source in (("train", train.source), ("test", validation.source)):
        images = source.pixels.permute(0, 2, 3, 1).contiguous()
        torch.save({"images": images, "labels": source.labels, "classes": list(data.classes)}, folder / f"{name}.pt")


def table_rows(log: str) -> Iterator[tuple[float, float]]:
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
