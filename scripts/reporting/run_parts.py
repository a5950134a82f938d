"""Parts of the page about the runs themselves: figures, settings and their differences, first batches, environment."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from scripts.reporting.run_record import RunRecord, Setting
from scripts.reporting.thumbnails import picture_uri

UNKNOWN = "\u2013"
RECORDED = (
    ("Top-1", "val_top1", "%"),
    ("Top-5", "val_top5", "%"),
    ("mAP", "val_map", "%"),
    ("Loss", "val_loss", ""),
    ("Macro F1", "val_macro_f1", "%"),
    ("Micro F1", "val_micro_f1", "%"),
    ("AUROC", "val_auroc", "%"),
    ("Calibration error", "val_ece", "%"),
)
UNCHOSEN = ("default", "checkpoint", "")  # origins of settings that nobody chose for the run
DERIVED = re.compile(r"batch-size x \d+$")
OF_NO_INTEREST = {"output", "name", "progress", "print-freq"}  # differ between runs without meaning
BATCH_BYTES = 900_000  # of all first batches together
MOST_BATCHES = 4
MOST_IN_LEGEND = 4  # settings that differ: of more, the runs' names say it as well
LARGEST_SQUARE_PIXELS = 310  # of a picture's width: up to here the page at least doubles it, and pixels are squares


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
    for name, column in (("Best top-1", "val_top1"), ("Best mAP", "val_map")):
        values = run.epochs.get(column, ())
        if np.isfinite(values).any():
            best = int(np.nanargmax(values))
            epoch = f"epoch {run.epochs['epoch'][best]:.0f} of {len(values)}"
            made.append(ShownMetric(name, shown(float(values[best]), "%"), epoch))
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


class SettingRow(NamedTuple):
    """A setting: its group, for each run its value and whether it was chosen, and where the first run's came from."""

    name: str
    group: str
    cells: list[tuple[str, bool]]
    origin: str


def differing_settings(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Settings that differ between the runs, or of one run are not the default, and all of them; None without any."""
    rows = list(map(partial(_setting_row, runs), dict.fromkeys(name for run in runs for name in run.settings)))
    if not rows:
        return None
    if len(runs) == 1:
        few = [row for row in rows if row.cells[0][1]]
        words = "What was chosen for this run; everything else has its default."
    else:
        names = set(differing(runs))
        few = [row for row in rows if row.name in names]
        words = "What differs between the runs."
    return {"words": words, "few": few, "all": rows}


def _setting_row(runs: Sequence[RunRecord], name: str) -> SettingRow:
    values = [run.settings.get(name, Setting("", "", "")) for run in runs]
    group = next((value.group for value in values if value.group), "")
    cells = [(value.value or UNKNOWN, _is_chosen(value)) for value in values]
    return SettingRow(name, group, cells, values[0].origin)


def differing(runs: Sequence[RunRecord]) -> list[str]:
    """The settings in which the runs differ, but for those that mean nothing."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if name not in OF_NO_INTEREST and len({run.value(name) for run in runs}) > 1]


def legend(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Group of each run and its name there: both in the settings that were chosen and differ.

    A group agrees in all of them but the one with the most values, such as the seeds of a sweep; repetitions in it are
    numbered. Where that makes no group of several, each run has its own name, and no group.
    """
    chosen = [
        name for name in differing(runs) if any(name in run.settings and _is_chosen(run.settings[name]) for run in runs)
    ]
    own = [("", run.name) for run in runs]
    if not 0 < len(chosen) <= MOST_IN_LEGEND:
        return own
    last = max(chosen, key=lambda name: (len({run.value(name) for run in runs}), name == "seed"))

    def words(run: RunRecord, names: Sequence[str]) -> str:
        return ", ".join(f"{name} {run.value(name) or UNKNOWN}" for name in names)

    seen: Counter[tuple[str, str]] = Counter()
    made = []
    for run in runs:
        group = words(run, [name for name in chosen if name != last])
        label = words(run, [last])
        seen[group, label] += 1
        made.append((group, f"{label} ({count})" if (count := seen[group, label]) > 1 else label))
    return made if len({group for group, _ in made}) < len(runs) else own


def _is_chosen(setting: Setting) -> bool:
    return setting.origin not in UNCHOSEN and not DERIVED.match(setting.origin)


def first_batches(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """The first augmented batch as the runs logged it, once for all that saw the same one; None without any."""
    seen: dict[bytes, list[int]] = {}
    for number, run in enumerate(runs):
        if run.first_batch:
            seen.setdefault(run.first_batch, []).append(number)
    kept = list(seen.items())[:MOST_BATCHES]
    cards = []
    for content, numbers in kept:
        try:
            uri, width = picture_uri(content, BATCH_BYTES // len(kept))
        except (OSError, ValueError, SyntaxError) as error:  # Pillow raises the last one for some damaged files
            runs[numbers[0]].missing.append(f"First batch: cannot be read ({' '.join(str(error).split())[:100]})")
            continue
        cards.append({"uri": uri, "fine": width > LARGEST_SQUARE_PIXELS, "runs": numbers})
    words = "What the network saw in its first step, after augmentation."
    words += f" The first {MOST_BATCHES} different ones." if len(seen) > MOST_BATCHES else ""
    return {"words": words, "cards": cards} if cards else None


def environment(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Command, versions, machine, commit and folder of each run; '' for what is unknown."""
    return [
        {what.capitalize(): run.header.get(what, "") for what in ("command", "versions", "machine", "commit")}
        | {"Folder": os.path.abspath(run.folder) if run.folder else ""}
        for run in runs
    ]
