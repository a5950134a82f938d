"""What measured rounds show: the rows of a CSV file, and the table's cells made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from scripts.common.timing import WARM_UP_STEPS, Spread, ratios
from scripts.lab.benchmarks.steps import CPU_MEMORY_STEPS, Result

HEADERS = ("format", "ms a step", "min - max", "images/s", "speed-up", "peak MB", "memory")


def csv_row(result: Result, first: Result, batch_size: int) -> dict[str, Any]:
    """What is known of ``result``: milliseconds, bytes, and ratios to the ``first`` row; None where there is nothing.

    A speed-up of 2 means half the first row's time.
    """
    known = not result.failure
    ms = Spread.of([1000 * seconds for seconds in result.seconds]) if known else (None, None, None)
    peak = result.peak_bytes if known else None
    comparable = known and not first.failure
    return {
        "format": result.row.format,
        "channels_last": result.row.channels_last,
        "compiled": result.row.compiled,
        "ms_per_step": ms[0],
        "ms_min": ms[1],
        "ms_max": ms[2],
        "images_per_second": 1000 * batch_size / ms[0] if known else None,
        "speed_up": ratios(first.seconds, result.seconds).median if comparable else None,
        "peak_bytes": peak,
        "memory_ratio": peak / first.peak_bytes if comparable and peak is not None and first.peak_bytes else None,
        "failure": result.failure,
    }


def cells(label: str, row: Mapping[str, Any], memory: bool) -> list[str]:
    """A row of text below ``HEADERS``, whose last two columns hold memory and are there only with it."""
    width = len(HEADERS) if memory else len(HEADERS) - 2
    if row["failure"]:
        return [label, row["failure"], *[""] * (width - 2)]
    shown = {"images_per_second": "{:,.0f}", "speed_up": "{:.2f}x", "peak_mb": "{:,.1f}", "memory_ratio": "{:.2f}x"}
    values = {**row, "peak_mb": None if row["peak_bytes"] is None else row["peak_bytes"] / 1e6}
    figures = ["-" if values[name] is None else form.format(values[name]) for name, form in shown.items()]
    return [label, f"{row['ms_per_step']:,.2f}", f"{row['ms_min']:,.2f} - {row['ms_max']:,.2f}", *figures][:width]


def notes(results: Sequence[Result], device: torch.device, left_out: dict[str, str], *, memory: bool) -> Iterator[str]:
    """The lines under the table: how it was measured, which formats were left out and why."""
    yield f"Time: median of the rounds; speed-up: median of the rounds' own ratios to {results[0].row.label}."
    if memory and device.type == "cuda":
        yield "Peak memory: the most that all tensors together took during the timed steps (max_memory_allocated)."
    elif memory:
        yield (
            "Peak memory: by how much the largest resident size (ru_maxrss) of a separate process grew over building "
            f"and {WARM_UP_STEPS} + {CPU_MEMORY_STEPS} steps."
        )
    for name, reason in left_out.items():
        yield f"{name} is left out: {reason}."
