"""Parts of the page about the runs themselves: settings and their differences, first batches, environment."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from scripts.reporting.markup import Html, element, join, named
from scripts.reporting.run_record import RunRecord, Setting
from scripts.reporting.thumbnails import picture_uri, width_of
from scripts.reporting.tiles import UNKNOWN, scrolling_table, swatch

UNCHOSEN = ("default", "checkpoint", "")  # origins of settings that nobody chose for the run
DERIVED = re.compile(r"batch-size x \d+$")
OF_NO_INTEREST = {"output", "name", "progress", "print-freq"}  # differ between runs without meaning
BATCH_BYTES = 900_000  # of all first batches together
MOST_BATCHES = 4
MOST_IN_LEGEND = 4  # settings that differ: of more, the runs' names say it as well
LARGEST_SQUARE_PIXELS = 310  # of a picture's width: up to here the page at least doubles it, and pixels are squares


def heading(name: str, words: str = "") -> Html:
    """A part's title, and what there is to know about it."""
    return element("div", element("h2", name), element("p", words, class_="soft") if words else None, class_="head")


def settings_part(runs: Sequence[RunRecord]) -> Html | None:
    """What differs between the runs, or of one run what is not the default; then everything, folded."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    if not names:
        return None
    values = {name: [run.settings.get(name, Setting("", "", "")) for run in runs] for name in names}
    if len(runs) == 1:
        interesting = [name for name in names if _is_chosen(values[name][0])]
        words = "What was chosen for this run; everything else has its default."
    else:
        interesting = differing(runs)
        words = "What differs between the runs."
    few = settings_table(interesting, values, runs, grouped=False)
    return join(
        [
            heading("Settings", words),
            few if interesting else element("p", "Nothing.", class_="soft"),
            element(
                "details",
                element("summary", f"All {len(names)} settings"),
                settings_table(names, values, runs, grouped=True),
            ),
        ]
    )


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


def settings_table(
    names: Sequence[str], values: Mapping[str, Sequence[Setting]], runs: Sequence[RunRecord], *, grouped: bool
) -> Html:
    """A row a setting, a column a run; of one run also where each value came from."""
    heads = [element("th", swatch(number), named(run.name), scope="col") for number, run in enumerate(runs)]
    if len(runs) == 1:
        heads = [element("th", "Value", scope="col"), element("th", "From", scope="col")]
    lines = []
    group = ""
    for name in names:
        row = values[name]
        own = next((value.group for value in row if value.group), "")
        if grouped and own != group:
            group = own
            lines.append(element("tr", element("th", group, colspan=len(heads) + 1, scope="rowgroup"), class_="group"))
        cells = [
            element("td", named(value.value or UNKNOWN), class_="value changed" if _is_chosen(value) else "value")
            for value in row
        ]
        if len(runs) == 1:
            cells.append(element("td", row[0].origin, class_="soft"))
        lines.append(element("tr", element("th", name, scope="row"), *cells))
    head = element("tr", element("th", "Setting", scope="col"), *heads)
    return scrolling_table("Settings", head, lines, class_="settings", tall=True)


def first_batches(runs: Sequence[RunRecord]) -> Html | None:
    """The first augmented batch as the runs logged it, once for all that saw the same one."""
    seen: dict[bytes, list[int]] = {}
    for number, run in enumerate(runs):
        if run.first_batch:
            seen.setdefault(run.first_batch, []).append(number)
    kept = list(seen.items())[:MOST_BATCHES]
    cards = []
    for content, numbers in kept:
        try:
            uri = picture_uri(content, BATCH_BYTES // len(kept))
            fine = "fine" if width_of(content) > LARGEST_SQUARE_PIXELS else None
        except (OSError, ValueError, SyntaxError) as error:  # Pillow raises the last one for some damaged files
            runs[numbers[0]].missing.append(f"First batch: cannot be read ({' '.join(str(error).split())[:100]})")
            continue
        names = [element("h3", swatch(number), named(runs[number].name)) for number in numbers if len(runs) > 1]
        picture = element("img", alt="the images of the first training batch", src=uri, class_=fine)
        cards.append(element("div", *names, picture, class_="card batch"))
    if not cards:
        return None
    words = "What the network saw in its first step, after augmentation."
    words += f" The first {MOST_BATCHES} different ones." if len(seen) > MOST_BATCHES else ""
    return join([heading("First training batch", words), element("div", *cards, class_="two")])


def environment(runs: Sequence[RunRecord]) -> Html:
    """Command, versions, machine, commit and folder of each run."""
    cards = []
    for number, run in enumerate(runs):
        facts = {what.capitalize(): run.header.get(what, "") for what in ("command", "versions", "machine", "commit")}
        facts["Folder"] = os.path.abspath(run.folder) if run.folder else ""
        lines = [join([element("dt", what), element("dd", named(value))]) for what, value in facts.items() if value]
        name = element("h3", swatch(number), named(run.name)) if len(runs) > 1 else None
        cards.append(element("div", name, element("dl", *lines, class_="facts"), class_="card"))
    return join([heading("Environment"), element("div", *cards, class_="two")])
