"""The main figures of runs: those of a validation for the report, else those that the runs recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from scripts.reporting.run_record import RunRecord

UNKNOWN = "\u2013"
RECORDED = (
    ("Top-1", "val_top1", "%"),
    ("Top-5", "val_top5", "%"),
    ("Loss", "val_loss", ""),
    ("Macro F1", "val_macro_f1", "%"),
    ("Calibration error", "val_ece", "%"),
)


class ShownMetric(NamedTuple):
    """A name, a value as text with its unit after a space, and what else one must know."""

    name: str
    value: str
    small: str


def shown(value: float, unit: str = "") -> str:
    """A figure with its unit, in as many digits as are worth reading."""
    if not math.isfinite(value):
        return UNKNOWN
    return f"{value:.2f} {unit}" if unit else f"{value:.4f}"


def duration(seconds: float) -> str:
    """A time in its largest fitting unit: '4.6 s', '12.3 min', '3.1 h'."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def recorded(run: RunRecord) -> list[ShownMetric]:
    """The last epoch's figures, as metrics.csv has them."""
    of = f"recorded, epoch {run.last('epoch'):.0f}" if math.isfinite(run.last("epoch")) else "recorded"
    few_classes = all(value == 100 for value in run.epochs.get("val_top5", ()))
    return [
        ShownMetric(name, shown(run.last(column), unit), of)
        for name, column, unit in RECORDED
        if math.isfinite(run.last(column)) and not (column == "val_top5" and few_classes)
    ]


def of_training(run: RunRecord) -> list[ShownMetric]:
    """Best epoch, time and speed of a run."""
    made = []
    top1 = run.epochs.get("val_top1", ())
    if np.isfinite(top1).any():
        best = int(np.nanargmax(top1))
        epoch = f"epoch {run.epochs['epoch'][best]:.0f} of {len(top1)}"
        made.append(ShownMetric("Best top-1", shown(float(top1[best]), "%"), epoch))
    seconds = [value for value in run.epochs.get("seconds", ()) if math.isfinite(value)]
    if seconds:
        epochs = f"{len(seconds)} epoch{'s' * (len(seconds) > 1)}"
        made.append(ShownMetric("Training time", duration(sum(seconds)), epochs))
    if math.isfinite(run.last("images_per_second")):
        made.append(ShownMetric("Speed", f"{run.last('images_per_second'):,.0f}", "images/s, last epoch"))
    return made


def all_figures(run: RunRecord, predicted: list[ShownMetric] | None) -> list[ShownMetric]:
    """A run's figures; the small print of its top-1 says where that is no result."""
    figures = (predicted or recorded(run)) + of_training(run)
    if not run.doubts:
        return figures
    return [one._replace(small=f"doubtful; {one.small}") if one.name == "Top-1" else one for one in figures]


def runs_table(runs: Sequence[RunRecord], predicted: Mapping[int, list[ShownMetric]]) -> dict[str, Any]:
    """Columns and a row a run, as values with their small print. What is said of every run alike stands in the head."""
    found = [all_figures(run, predicted.get(number)) for number, run in enumerate(runs)]
    rows = [{figure.name: figure for figure in figures} for figures in found]
    names = list(dict.fromkeys(name for row in rows for name in row))
    smalls = {name: {row[name].small for row in rows if name in row} for name in names}
    shared = {name: next(iter(texts)) if len(texts) == 1 else "" for name, texts in smalls.items()}
    cells = [[row.get(name, ShownMetric(name, UNKNOWN, "")) for name in names] for row in rows]
    return {
        "columns": [(name, shared[name]) for name in names],
        "rows": [[(one.value, "" if shared[one.name] else one.small) for one in row] for row in cells],
    }
