"""What measured rounds show: figures, the table's cells and a CSV file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from scripts.common.timing import WARM_UP_STEPS, Spread, ratios
from scripts.lab.benchmarks.steps import CPU_MEMORY_STEPS, Result


class Figures(NamedTuple):
    """A row's figures: milliseconds a step, images a second, bytes, and ratios against the first row; None: unknown."""

    ms: Spread | None = None
    images_per_second: float | None = None
    speed_up: float | None = None
    peak_bytes: int | None = None
    memory_ratio: float | None = None


def figures(result: Result, first: Result, batch_size: int) -> Figures:
    """What a table says of ``result``; a speed-up of 2 means half the first row's time."""
    if result.failure:
        return Figures()
    ms = Spread.of([1000 * seconds for seconds in result.seconds])
    peak = result.peak_bytes
    base = first.peak_bytes
    return Figures(
        ms=ms,
        images_per_second=1000 * batch_size / ms.median,
        speed_up=None if first.failure else ratios(first.seconds, result.seconds).median,
        peak_bytes=peak,
        memory_ratio=peak / base if peak is not None and base and not first.failure else None,
    )


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


# ---------------------------------------------------------------------------------- table and files


def cells(results: Sequence[Result], shown: Sequence[Figures], memory: bool) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of text for a table; the last two columns hold memory and are there only with it."""
    headers = ["format", "ms a step", "min - max", "images/s", "speed-up", "peak MB", "memory"]
    rows = []
    for result, figures in zip(results, shown, strict=True):
        if figures.ms is None:
            row = [result.failure, "", "", "", "", ""]
        else:
            row = [
                f"{figures.ms.median:,.2f}",
                f"{figures.ms.low:,.2f} - {figures.ms.high:,.2f}",
                f"{figures.images_per_second:,.0f}",
                _or_dash(figures.speed_up, "{:.2f}x"),
                _or_dash(figures.peak_bytes, "{:,.1f}", 1e-6),
                _or_dash(figures.memory_ratio, "{:.2f}x"),
            ]
        rows.append([result.row.label, *row])
    width = len(headers) if memory else len(headers) - 2
    return headers[:width], [row[:width] for row in rows]


def _or_dash(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else form.format(value * unit)


def csv_rows(header: dict[str, Any], results: Sequence[Result], shown: Sequence[Figures]) -> list[dict[str, Any]]:
    """A dict a row for ``write_csv``: milliseconds, bytes and ratios unrounded; None where there is nothing."""
    rows = []
    for result, figures in zip(results, shown, strict=True):
        ms = figures.ms or (None, None, None)
        rows.append(
            {
                "format": result.row.format,
                "channels_last": result.row.channels_last,
                "compiled": result.row.compiled,
                "ms_per_step": ms[0],
                "ms_min": ms[1],
                "ms_max": ms[2],
                "images_per_second": figures.images_per_second,
                "speed_up": figures.speed_up,
                "peak_bytes": figures.peak_bytes,
                "memory_ratio": figures.memory_ratio,
                "failure": result.failure,
                **header,
            }
        )
    return rows
