"""The lines of the table: a figure of ours, the other side's, and the aim."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RATIO = "ratio"
DIFFERENCE = "difference"
FIGURE = "figure"


@dataclass(frozen=True)
class Line:
    """A line. ``result``: ours / other (``RATIO``), ours - other (``DIFFERENCE``), or ours (``FIGURE``).

    ``low`` and ``high``: its smallest and largest round, run or seed. ``aim``: what ``result`` has to be ``at_least``,
    or otherwise at most; None: it is only reported. ``note``: why there are no figures, or what to know of them.
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


def figure(what: str, unit: str, values: Sequence[float], aim: float | None = None, at_least: bool = True) -> Line:
    """The line of several runs' own figures: their mean, smallest and largest."""
    mean = statistics.fmean(values)
    return Line(what, unit, "", mean, None, mean, min(values), max(values), FIGURE, aim, at_least)


def benchmark_lines(path: Path) -> list[Line]:
    """The rows of benchmark.py's CSV file."""
    with open(path, newline="", encoding="utf-8") as file:
        return [_benchmark_line(row) for row in csv.DictReader(file)]


def _benchmark_line(row: dict[str, str]) -> Line:
    def number(name: str) -> float | None:
        return float(row[name]) if row[name] else None

    return Line(
        row["what"],
        row["unit"],
        row["against"],
        number("ours"),
        number("other"),
        number("result"),
        number("result_min"),
        number("result_max"),
        row["result_is"],
        number("target"),
        row["unit"] == "images/s",
        row["failure"],
    )
