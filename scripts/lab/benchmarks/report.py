"""Show the rows: lines of a table as they come, a CSV file and a picture."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.common.timing import Spread, device_name
from scripts.lab.benchmarks.measure import SECONDS, Row
from scripts.lab.benchmarks.step_table import GREY

WIDTHS = {"what": 49, "against": 44, "ours": 9, "the other": 9, "ratio": 9, "min - max": 16, "target": 13}
MET = "#3b78c3"
MISSED = "#c8553d"
OPEN = "#7f8c9a"
LEGEND = "Blue: meets its target (orange). Red: misses it. Grey: has none. Dark line: smallest to largest round."


def machine(threads: int, device: torch.device) -> str:
    """CPU, cores, threads, versions and GPU in a line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = device_name(device) if device.type == "cuda" else "no GPU used"
    processor = device_name(torch.device("cpu")).rpartition(",")[0]
    python = platform.python_version()
    return f"{processor}, {cores} cores, {threads} thread(s) a side; {gpu}; torch {torch.__version__}, Python {python}"


# ----------------------------------------------------------------------------------------- the table


def header() -> str:
    """The table's first two lines."""
    return f"{line_of(list(WIDTHS))}\n{line_of(['-' * width for width in WIDTHS.values()])}"


def line(row: Row) -> str:
    """A row of the table, marked at its end if it misses its target."""
    if row.failure:
        return f"{row.what}: failed, {row.failure}"
    cells = [f"{row.what} ({row.unit})", row.against or "-", figure(row.ours.median, row.unit)]
    cells.append(figure(row.other.median, row.unit) if row.other else "-")
    if row.other or row.is_ratio:
        cells += [outcome(row, row.result.median), f"{outcome(row, row.result.low)} - {outcome(row, row.result.high)}"]
    else:  # the figure itself is judged
        cells += ["-", f"{figure(row.result.low, row.unit)} - {figure(row.result.high, row.unit)}"]
    return line_of([*cells, target(row)]) + "  MISSED" * row.missed


def line_of(cells: Sequence[str]) -> str:
    """Cells in the table's columns, the first two aligned left."""
    widths = WIDTHS.values()
    aligned = [c.ljust(w) if n < 2 else c.rjust(w) for n, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join(aligned).rstrip()


def figure(value: float, unit: str) -> str:
    """A measured figure with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if unit == SECONDS or value < 10 else f"{value:.1f}"


def outcome(row: Row, value: float) -> str:
    """A ratio as a factor, a difference with its sign."""
    return f"{value:.2f}x" if row.is_ratio else f"{value:+.2f}"


def target(row: Row) -> str:
    """The row's target in words."""
    return "-" if row.target is None else f"{'at least' if row.is_ratio else 'at most'} {row.target:g}"


# --------------------------------------------------------------------------------------------- files


def csv_rows(rows: Sequence[Row], about: dict[str, Any]) -> list[dict[str, Any]]:
    """A dict per row for ``write_csv``, figures unrounded, None for what is missing."""

    def of(name: str, spread: Spread | None) -> dict[str, float | None]:
        return dict(zip((name, f"{name}_min", f"{name}_max"), spread or (None, None, None), strict=True))

    return [
        {
            "part": row.part,
            "what": row.what,
            "unit": row.unit,
            "against": row.against,
            **of("ours", row.ours),
            **of("other", row.other),
            "result_is": "ratio" if row.is_ratio else "difference" if row.other else "figure",
            **of("result", row.result),
            "target": row.target,
            "missed": row.missed,
            "failure": row.failure,
            **about,
        }
        for row in rows
    ]


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draw the ratios as horizontal bars on a logarithmic axis, each with its spread and target, into a PNG."""
    from matplotlib.figure import Figure  # without pyplot there is no global state, and Agg is the backend

    rows = [row for row in rows if row.is_ratio and row.result]
    picture = Figure(figsize=(10, 1.7 + 0.5 * max(1, len(rows))), dpi=150, facecolor="white")
    picture.set_layout_engine("constrained")
    picture.suptitle(f"{title}\n{LEGEND}", fontsize=9, x=0.01, ha="left")
    axes = picture.subplots()
    for place, row in enumerate(rows):
        _bar(axes, place, row)
    axes.set_yticks(range(len(rows)), [f"{row.what}\nagainst {row.against}" for row in rows], fontsize=8)
    axes.set_ylim(max(1, len(rows)) - 0.4, -0.6)  # the first row on top
    axes.set_xscale("log")
    reach = [value for row in rows for value in (*row.result, row.target or 1.0)] or [1.0]
    # with room for the values
    low = min(0.5, 0.8 * min(reach))
    high = max(2.5, 1.7 * max(reach))
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if low <= tick <= high]
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], fontsize=8, color=GREY)
    axes.xaxis.minorticks_off()
    axes.set_xlabel("images a second, ours / the other", fontsize=8)
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    picture.savefig(temporary, format="png")
    os.replace(temporary, path)


def _bar(axes: Any, place: int, row: Row) -> None:
    """A bar from 1, with the spread, the target and the median's value beside it."""
    median, low, high = row.result
    colour = OPEN if row.target is None else MISSED if row.missed else MET
    axes.barh(place, median - 1, left=1, color=colour, height=0.6)
    axes.plot([low, high], [place, place], color="#222222", linewidth=1.5, solid_capstyle="butt")
    if row.target is not None:
        axes.plot([row.target] * 2, [place - 0.4, place + 0.4], color="#e08a3c", linewidth=2.5)
    axes.annotate(
        f"{median:.2f}x",
        (max(high, row.target or 1, 1), place),
        (6, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=GREY,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )
