"""Parts of the page about the runs themselves: settings and their differences, first batches, environment."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from scripts.reporting.run_record import RunRecord, Setting
from scripts.reporting.thumbnails import picture_uri
from scripts.reporting.tiles import UNKNOWN

UNCHOSEN = ("default", "checkpoint", "")  # origins of settings that nobody chose for the run
DERIVED = re.compile(r"batch-size x \d+$")
OF_NO_INTEREST = {"output", "name", "progress", "print-freq"}  # differ between runs without meaning
BATCH_BYTES = 900_000  # of all first batches together
MOST_BATCHES = 4
MOST_IN_LEGEND = 4  # settings that differ: of more, the runs' names say it as well
LARGEST_SQUARE_PIXELS = 310  # of a picture's width: up to here the page at least doubles it, and pixels are squares


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
    """For each run its group and what it is called there: both in the settings that were chosen and differ.

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
