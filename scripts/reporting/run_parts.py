"""Parts of the page about the runs themselves: metrics, settings and differences, first batches, environment."""

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
from utils.config.arguments import OPTIONS, in_yaml
from utils.config.field import CHECKPOINT
from utils.config.spelling import counted

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
UNCHOSEN = ("default", "")  # origins of settings that nobody chose for the run
DERIVED = re.compile(r"batch-size x \d+$")
OF_NO_INTEREST = {"output", "name", "progress", "print-freq"}  # differences that mean nothing
BATCH_BYTES = 900_000  # for all first batches together
MOST_BATCHES = 4
MOST_IN_LEGEND = 4  # differing settings; with more, the runs' names say it as well
LARGEST_SQUARE_PIXELS = 310  # a picture's width: up to here the page at least doubles it and keeps pixels square


class ShownMetric(NamedTuple):
    """A metric to show: name, value as text with a space before its unit, and small print."""

    name: str
    value: str
    small: str


def shown(value: float, unit: str = "") -> str:
    """``value`` as text with its unit, with as many digits as are worth reading."""
    if not math.isfinite(value):
        return UNKNOWN
    return f"{value:.2f} {unit}" if unit else f"{value:.4f}"


def duration(seconds: float) -> str:
    """A time as text in its largest fitting unit: '4.6 s', '12.3 min', '3.1 h'."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def recorded(run: RunRecord) -> list[ShownMetric]:
    """The last epoch's metrics, from metrics.csv."""
    of = f"recorded, epoch {run.last('epoch'):.0f}" if math.isfinite(run.last("epoch")) else "recorded"
    few_classes = all(value == 100 for value in run.epochs.get("val_top5", ()) if math.isfinite(value))
    return [
        ShownMetric(name, shown(run.last(column), unit), of)
        for name, column, unit in RECORDED
        if math.isfinite(run.last(column)) and not (column == "val_top5" and few_classes)
    ]


def of_training(run: RunRecord) -> list[ShownMetric]:
    """Best epoch, training time and speed of a run."""
    made = []
    for name, column in (("Highest top-1", "val_top1"), ("Highest mAP", "val_map")):
        values = run.of_best(column)
        if np.isfinite(values).any():
            best = int(np.nanargmax(values))
            epoch = f"epoch {run.epochs['epoch'][best]:.0f} of {run.last('epoch'):.0f}"
            made.append(ShownMetric(name, shown(float(values[best]), "%"), epoch))
    seconds = [value for value in run.epochs.get("seconds", ()) if math.isfinite(value)]
    if seconds:
        made.append(ShownMetric("Training time", duration(sum(seconds)), counted(len(seconds), "epoch")))
    if math.isfinite(run.last("images_per_second")):
        made.append(ShownMetric("Speed", f"{run.last('images_per_second'):,.0f}", "images/s, last epoch"))
    return made


def all_figures(run: RunRecord, predicted: list[ShownMetric] | None) -> list[ShownMetric]:
    """All metrics of a run; the small print of its top-1 or mAP says so if the result is doubtful."""
    figures = (predicted or recorded(run)) + of_training(run)
    if not run.doubts:
        return figures
    main = {"Top-1", "mAP"}
    return [one._replace(small=f"doubtful; {one.small}") if one.name in main else one for one in figures]


def runs_table(runs: Sequence[RunRecord], predicted: Mapping[int, list[ShownMetric]]) -> dict[str, Any]:
    """Columns, and a row of values with small print for each run. Small print equal for all runs is in the head."""
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
    """A setting and its group; each run's value, and whether it was chosen; the origin of the first run's value."""

    name: str
    group: str
    cells: list[tuple[str, bool]]
    origin: str


def differing_settings(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Settings that differ between runs (of one run: from the defaults), and all settings; None if there are none."""
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
    cells = [(value.value or UNKNOWN, _is_chosen(name, value)) for value in values]
    return SettingRow(name, group, cells, values[0].origin)


def differing(runs: Sequence[RunRecord]) -> list[str]:
    """Names of the settings in which the runs differ, except those without influence, such as --output."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if name not in OF_NO_INTEREST and len({run.value(name) for run in runs}) > 1]


def legend(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Legend group of each run and its name in the group, made of the chosen settings that differ.

    Runs of a group agree in all these settings except the one with the most values, such as the seed of a sweep;
    repetitions are numbered. If no group would have several runs, each run has its own name and no group.
    """
    chosen = [
        name
        for name in differing(runs)
        if any(name in run.settings and _is_chosen(name, run.settings[name]) for run in runs)
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


def _is_chosen(name: str, setting: Setting) -> bool:
    """True if somebody chose the setting. A checkpoint does not say it: there, what differs from the default counts."""
    if setting.origin == CHECKPOINT:
        option = OPTIONS.get(name.replace("-", "_"))
        return option is None or setting.value != in_yaml(option.default)
    return setting.origin not in UNCHOSEN and not DERIVED.match(setting.origin)


def first_batches(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """First augmented batch as the runs logged it, shown once for all that saw the same one; None if there is none."""
    seen: dict[bytes, list[int]] = {}
    for number, run in enumerate(runs):
        if run.first_batch:
            seen.setdefault(run.first_batch, []).append(number)
    kept = list(seen.items())[:MOST_BATCHES]
    cards = []
    for content, numbers in kept:
        try:
            uri, width = picture_uri(content, BATCH_BYTES // len(kept))
        except (OSError, ValueError, SyntaxError) as error:  # Pillow raises SyntaxError for some damaged files
            runs[numbers[0]].missing.append(f"First batch: cannot be read ({' '.join(str(error).split())[:100]})")
            continue
        cards.append({"uri": uri, "fine": width > LARGEST_SQUARE_PIXELS, "runs": numbers})
    words = "What the network saw in its first step, after augmentation."
    words += f" The first {MOST_BATCHES} different ones." if len(seen) > MOST_BATCHES else ""
    return {"words": words, "cards": cards} if cards else None


def environment(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Command, versions, machine, commit and folder of each run; '' if unknown."""
    return [
        {what.capitalize(): run.header.get(what, "") for what in ("command", "versions", "machine", "commit")}
        | {"Folder": os.path.abspath(run.folder) if run.folder else ""}
        for run in runs
    ]
