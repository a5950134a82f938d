"""Results of a sweep: find them in its folder; show them as CSV, as a table of mean and spread, as a picture."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from scripts.common.answers import FIGURES
from scripts.common.output import draw_png, whole_file
from scripts.common.runs import RunResult, counts_for, deviation, doubtful, read_run, run_folders, spread
from scripts.sweeps.grid import Trial
from utils.checkpoint import checkpoint
from utils.checkpoint.fingerprint import same_images
from utils.config import plugins
from utils.config.datasets import SPECS
from utils.data.datasets import get_data
from utils.record.metrics import cut_words

BLUE = "#3b78c3"
GREY = "#555555"


def points_of(results: Mapping[Trial, RunResult]) -> dict[tuple[str, ...], list[RunResult]]:
    """Results of each combination of values, over its seeds."""
    points: dict[tuple[str, ...], list[RunResult]] = {}
    for trial, result in results.items():
        points.setdefault(trial.point, []).append(result)
    return points


def label(point: Sequence[str], runs: Sequence[RunResult]) -> str:
    """Text of a combination of values, and whether its runs validated on only part of the images."""
    return (" ".join(point) or "as the recipe") + cut_words(runs[0].args.data.max_val_batches)


def csv_rows(trials: Sequence[Trial], results: Mapping[Trial, RunResult]) -> list[dict[str, Any]]:
    """One row per finished run, in the order of ``trials``; accuracies in percent.

    ``trained_epochs``: fewer than ``epochs``, which may be among the values, after an early stop. ``max_val_batches``:
    number of validation batches used; empty for all. ``doubts``: why the run's figures say nothing, if so.
    """
    return [
        {
            **{name: value for name, _, value in (setting.partition("=") for setting in trial.point)},
            "seed": trial.seed,
            **({} if trial.fold is None else {"fold": trial.fold}),
            f"val_{result.headline}": f"{result.final:.6g}",
            f"best_{result.headline}": f"{result.best:.6g}",
            "trained_epochs": result.epochs,
            "seconds": f"{result.seconds:.6g}",
            "max_val_batches": result.args.data.max_val_batches,
            "folder": result.folder,
            "doubts": "; ".join(result.doubts),
        }
        for trial in trials
        if (result := results.get(trial)) is not None
    ]


def headers(results: Mapping[Trial, RunResult]) -> tuple[str, ...]:
    """Headers of ``table_rows``."""
    name = in_words(results.values())
    return ("setting", "n", f"final {name}", f"best {name}", "time")


def table_rows(results: Mapping[Trial, RunResult]) -> list[list[str]]:
    """Table rows below ``headers``: mean and standard deviation of each point's final and best metric."""
    rows = []
    for point, runs in points_of(results).items():
        final, best = (spread([getattr(run, name) for run in runs]) for name in ("final", "best"))
        seconds = f"{statistics.fmean(run.seconds for run in runs):.0f} s"
        rows.append([label(point, runs), str(len(runs)), final + doubtful(runs), best, seconds])
    return rows


def in_words(runs: Iterable[RunResult]) -> str:
    """Name, for users, of the headline metric that all ``runs`` share."""
    return FIGURES[next(iter(runs)).headline]


def doubts(results: Mapping[Trial, RunResult]) -> str:
    """One line for each doubtful run, with the reasons; '' if there is none."""
    lines = [f"doubtful: {trial.name}: {'; '.join(run.doubts)}\n" for trial, run in results.items() if run.doubts]
    return "".join(lines)


def draw(path: Path, title: str, results: Mapping[Trial, RunResult]) -> None:
    """Draw each run's final metric as a point, each combination's mean and standard deviation as a bar, into a PNG.

    Points of doubtful runs are hollow.
    """
    from matplotlib.figure import Figure  # without pyplot there is no global state, and Agg is the backend

    points = points_of(results)
    picture = Figure(figsize=(8, 1.6 + 0.45 * len(points)), facecolor="white")
    picture.set_layout_engine("constrained")
    axes = picture.subplots()
    axes.set_title(title, fontsize=10, loc="left")
    for place, runs in enumerate(points.values()):
        values = [run.final for run in runs]
        for run in runs:
            filled = {"markerfacecolor": "none"} if run.doubts else {"markeredgewidth": 0}
            axes.plot(run.final, place, "o", color=BLUE, alpha=0.8, markersize=6, zorder=3, **filled)
        error = deviation(values) if len(values) > 1 else 0.0
        axes.errorbar(statistics.fmean(values), place, xerr=error, fmt="|", color=GREY, capsize=4, markersize=14)
    axes.set_yticks(
        range(len(points)),
        [f"{label(point, runs)}  (n={len(runs)}{doubtful(runs)})" for point, runs in points.items()],
        fontsize=8,
    )
    axes.set_ylim(len(points) - 0.5, -0.5)  # the first combination on top
    axes.set_xlabel(
        f"{in_words(results.values())} at the end of training (%): runs, mean and standard deviation", fontsize=8
    )
    axes.tick_params(axis="x", labelsize=8, labelcolor=GREY)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    with whole_file(path, f"--output {path}") as file:
        draw_png(picture, file, dpi=150)


def finished(runs: Path, trials: Sequence[Trial]) -> dict[Trial, RunResult]:
    """Results of those ``trials`` that have a finished run below ``runs``, with images and plug-ins as they are now."""
    found = {}
    fingerprint = cache(lambda data: get_data(data, torch.device("cpu")).fingerprint)
    for folder in run_folders(runs):
        result = read_run(folder)
        for trial in trials if result else ():
            if trial.seed == result.seed and counts_for(result, trial.args):
                if changed := _changed_since(result, partial(fingerprint, trial.args.data)):
                    print(f"{result.folder} does not count: {changed} have changed since", file=sys.stderr)
                else:
                    found[trial] = result
    return found


def _changed_since(result: RunResult, fingerprint: Callable[[], str]) -> str:
    """What of the user's own has changed since this run, as text; '' if nothing has, or checkpoints are gone."""
    may_change = SPECS[result.args.data.dataname].is_told_by_place
    if not may_change and result.args.run.plugin is None:
        return ""
    newest = checkpoint.newest(result.folder / "checkpoints", lambda _: None)
    if newest is None:
        return ""
    if newest[1].get("plugins", {}) != plugins.digests():  # those that reading the run has loaded
        return "the files of --plugin"
    return "" if not may_change or same_images(newest[1]["fingerprint"], fingerprint()) else "the images"
