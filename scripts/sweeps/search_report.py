"""Outcome of a search: a table of its best trials, a picture, and what its figures prove."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from optuna.trial import TrialState

from scripts.common.command_line import table
from scripts.common.output import draw_png, whole_file, write_csv
from scripts.common.runs import RunResult, spread
from scripts.sweeps.grid import Trial
from scripts.sweeps.outcomes import BLUE, GREY, in_words, points_of
from scripts.sweeps.search import EPOCHS, SHOWN, Search, last_value, point_of
from scripts.sweeps.space import Dimension

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS_A_ROW = 3


def show_trials(search: Search, title: str) -> list[str]:
    """Write search.csv and search.png, and print the best trials; return the files' names."""
    rows = search.csv_rows()
    if not rows:
        return []
    write_csv(search.folder / "search.csv", rows)
    draw(search.folder / "search.png", search, title)
    best = search.best(SHOWN)
    cells = [
        [" ".join(point_of(trial)), str(trial.number), f"{trial.value:.4g}", str(trial.user_attrs[EPOCHS])]
        for trial in best
    ]
    states = [trial.state for trial in search.told()]
    counts = ", ".join(
        f"{states.count(state)} {words}"
        for state, words in (
            (TrialState.COMPLETE, "trained"),
            (TrialState.PRUNED, "ended early"),
            (TrialState.FAIL, "failed"),
        )
    )
    print(f"\n{table(['setting', 'trial', search.metric.column, 'epochs'], cells)}")
    print(f"{len(states)} trials: {counts}; {search.metric.column} is of the training images that each held out")
    return ["search.csv", "search.png"]


def verdict(search: Search, results: Mapping[Trial, RunResult], images: int) -> str:
    """Lines about the best setting, on ``images`` validation images that no trial saw; '' until it is retrained.

    With --max-val-batches, the figure is of some of them.
    """
    best = search.best(1)
    runs = points_of(results).get(point_of(best[0])) if best else None
    if not runs:
        return ""
    figure = f"{in_words(runs)} {spread([run.final for run in runs])} over {len(runs)} seed(s)"
    cut = runs[0].args.data.max_val_batches
    which = "the" if cut is None else f"{cut} batch(es) of the"
    some = runs[0].args.data.train_samples
    trained = "all training images" if some is None else f"{some:,} training images (--train-samples)"
    lines = [
        f"Chosen by the search, trial {best[0].number}: {' '.join(point_of(best[0]))}",
        f"It reaches {figure}, trained on {trained}, on {which} {images:,} validation images, which no trial saw",
    ]
    if len(points_of(results)) > 1:
        lines.append("The other rows are for comparison: choosing the best of them would be choosing by these images")
    return "\n".join(lines)


def draw(path: Path, search: Search, title: str) -> None:
    """Draw importances as bars, and the metric over each setting's values, into a PNG.

    Trials that were ended early are hollow, and show the metric of their last epoch.
    """
    from matplotlib.figure import Figure  # without pyplot there is no global state, and Agg is the backend

    importances = search.importances()
    dimensions = search.space.dimensions
    rows = -(-len(dimensions) // PANELS_A_ROW)
    columns = min(PANELS_A_ROW, len(dimensions))
    picture = Figure(figsize=(max(8, 3 * columns), 1.4 + 0.35 * len(dimensions) + 2.6 * rows))
    picture.set_layout_engine("constrained")
    heights = [0.6 + 0.35 * len(dimensions), *[2.6] * rows]
    grid = picture.add_gridspec(1 + rows, columns, height_ratios=heights)
    _bars(picture.add_subplot(grid[0, :]), importances, title)
    for place, dimension in enumerate(dimensions):
        axes = picture.add_subplot(grid[1 + place // columns, place % columns])
        _slice(axes, search, dimension)
        if place % columns == 0:
            axes.set_ylabel(search.metric.column, fontsize=8)
    with whole_file(path, f"--output {path}") as file:
        draw_png(picture, file, dpi=150)


def _bars(axes: Axes, importances: Mapping[str, float], title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    names = sorted(importances, key=importances.get)
    axes.barh(names, [100 * importances[name] for name in names], color=BLUE, height=0.6)
    for name in names:
        axes.annotate(f" {100 * importances[name]:.0f} %", (100 * importances[name], name), va="center", fontsize=8)
    axes.set_xlim(0, 110)
    words = "share of the metric's variance over the ranges that each setting explains alone (%), by fANOVA"
    axes.set_xlabel(words if names else "importances need four trained trials that differ", fontsize=8)
    _plain(axes)
    axes.tick_params(axis="y", length=0)


def _slice(axes: Axes, search: Search, dimension: Dimension) -> None:
    """Draw each trial's metric over the values of one setting."""
    for trial in search.told():
        value = last_value(trial)
        if value is None or dimension.name not in trial.params:
            continue
        x = trial.params[dimension.name]
        x = dimension.choices.index(x) if dimension.choices else x
        trained = trial.state == TrialState.COMPLETE
        style = {"markeredgewidth": 0} if trained else {"markerfacecolor": "none"}
        axes.plot(x, value, "o", color=BLUE, alpha=0.8, markersize=5, **style)
    if dimension.choices:
        axes.set_xticks(np.arange(len(dimension.choices)), dimension.choices)
        axes.set_xlim(-0.5, len(dimension.choices) - 0.5)
    elif dimension.log:
        axes.set_xscale("log")
    axes.set_xlabel(dimension.name, fontsize=8)
    _plain(axes)
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=8, labelcolor=GREY)
    axes.spines[["top", "right"]].set_visible(False)
