"""Rows of the benchmark as lines of a printed table and as a CSV file."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

from scripts.common.timing import Spread, device_name
from scripts.lab.benchmarks.measure import SECONDS, Row

WIDTHS = {"what": 49, "against": 44, "ours": 9, "the other": 9, "ratio": 9, "min - max": 16, "target": 13}


def machine(threads: int, device: torch.device) -> str:
    """Description of CPU, cores, threads, GPU and versions in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = device_name(device) if device.type == "cuda" else "no GPU used"
    processor = device_name(torch.device("cpu")).rpartition(",")[0]
    python = platform.python_version()
    return f"{processor}, {cores} cores, {threads} thread(s) a side; {gpu}; torch {torch.__version__}, Python {python}"


# ----------------------------------------------------------------------------------------- the table


def header() -> str:
    """First two lines of the table."""
    return f"{line_of(list(WIDTHS))}\n{line_of(['-' * width for width in WIDTHS.values()])}"


def line(row: Row) -> str:
    """Table line of ``row``, marked at its end if the target is missed."""
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
    """Cells aligned in the table's columns, the first two to the left."""
    widths = WIDTHS.values()
    aligned = [c.ljust(w) if n < 2 else c.rjust(w) for n, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join(aligned).rstrip()


def figure(value: float, unit: str) -> str:
    """A measured value as text with at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if unit == SECONDS or value < 10 else f"{value:.1f}"


def outcome(row: Row, value: float) -> str:
    """``value``, a result of ``row``, as text: a ratio as a factor ('1.20x'), a difference with its sign ('+1.20')."""
    return f"{value:.2f}x" if row.is_ratio else f"{value:+.2f}"


def target(row: Row) -> str:
    """Text of the row's target, '-' if there is none."""
    return "-" if row.target is None else f"{'at least' if row.is_ratio else 'at most'} {row.target:g}"


# --------------------------------------------------------------------------------------------- files


def csv_rows(rows: Sequence[Row], about: dict[str, Any]) -> list[dict[str, Any]]:
    """Dicts of the rows for ``write_csv``: unrounded figures, None for missing values, and the columns ``about``."""

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
