"""A line of a table of comparisons, as a command measures it and as a file keeps it. Imports nothing heavy."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

RATE = "images/s"
SECONDS = "s"
RUN_SECONDS = "s a run"
PERCENT = "%"
HEADERS = ("what", "against", "ours", "the other", "result", "min - max", "aim", "")


class Line(NamedTuple):
    """A comparison of ours with another, or our own figure.

    ``result``: ours / other, in ``SECONDS`` ours - other, or ours if there is no other. ``low`` and ``high``: smallest
    and largest ``result`` of the rounds, runs or seeds. ``aim``: bound of ``result``, from below for images per second
    and percent, otherwise from above; None: only reported. ``note``: why there are no figures, or a remark on them.
    """

    what: str
    unit: str = ""
    against: str = ""
    ours: float | None = None
    other: float | None = None
    result: float | None = None
    low: float | None = None
    high: float | None = None
    aim: float | None = None
    note: str = ""

    @property
    def at_least(self) -> bool:
        return self.unit in (RATE, PERCENT)

    @property
    def verdict(self) -> str:
        """Whether the aim is met; '' without an aim or a result."""
        if self.aim is None or self.result is None:
            return ""
        return "met" if (self.result >= self.aim if self.at_least else self.result <= self.aim) else "MISSED"

    def cells(self) -> list[str]:
        """Texts of a table row, in the order of ``HEADERS``."""
        results = (self.result, self.low, self.high)
        if self.other is None:
            result, low, high = map(number, results)
        else:
            form = "{:+.2f}" if self.unit == SECONDS else "{:.3f}x"
            result, low, high = ("" if value is None else form.format(value) for value in results)
        return [
            f"{self.what} ({self.unit})" if self.unit else self.what,
            self.against,
            number(self.ours),
            number(self.other),
            result,
            f"{low} - {high}" if low else "",
            "" if self.aim is None else f"{'at least' if self.at_least else 'at most'} {self.aim:g}",
            "; ".join(filter(None, (self.verdict, self.note))),
        ]


def number(value: float | None) -> str:
    """``value`` as text with at least three digits; '' for None."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
