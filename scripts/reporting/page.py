"""Page of a report: its parts from the runs' records, filled into the templates, and the data for its scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from scripts.common.output import filled
from scripts.reporting import series
from scripts.reporting.run_parts import (
    ShownMetric,
    all_figures,
    differing_settings,
    environment,
    first_batches,
    legend,
    runs_table,
)
from scripts.reporting.run_record import RunRecord

TEMPLATE = Path(__file__).with_name("template")
SCRIPTS = ("dom.js", "charts.js", "samples.js", "matrix.js", "labels.js", "classes.js", "features.js", "page.js")
MOST_WARNINGS = 20
REPORT = ("Training report", "scripts/report.py")
# Anchor, name and template of each part about features.
FEATURE_PARTS = (
    ("features", "Features", "features.html"),
    ("doubtful", "Doubtful labels", "doubtful.html"),
    ("duplicates", "Near duplicates", "duplicates.html"),
    ("map", "Map", "map.html"),
)


@dataclass
class PageContent:
    """Content of the page. ``data``: its JSON. ``figures``: metrics of the predictions, by the run's index.

    ``checks``: sentences on whether the predictions agree with the runs' records. ``notes``: what is left out.
    ``without_predictions``: why some or all runs lack predictions.
    """

    runs: Sequence[RunRecord]
    data: dict[str, Any]
    figures: dict[int, list[ShownMetric]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    checks: list[tuple[str, bool | None]] = field(default_factory=list)
    without_predictions: str = ""


def render(content: PageContent) -> str:
    """HTML of a whole report."""
    runs = content.runs
    values = {
        "runs": runs,
        "several": len(runs) > 1,
        "settings": differing_settings(runs),
        "batches": first_batches(runs),  # adds to the overview what cannot be shown
        "environment": environment(runs),
    }
    where = f"{len(runs)} runs" if len(runs) > 1 else runs[0].folder or runs[0].name
    return fill(content.data, list(parts(content, values)), title(runs), str(where), **values, **overview(content))


def fill(
    data: dict[str, Any],
    parts: Sequence[tuple[str, str, str]],
    title: str,
    where: str,
    kind: tuple[str, str] = REPORT,
    **values: Any,
) -> str:
    """HTML page of ``parts`` (anchor, name and template of each), filled with ``values``; ``data`` is for its scripts.

    The page's security policy lets the browser run only the page's own script, and load nothing. ``kind``: the name of
    the page, and the program that made it.
    """
    # A folder's name may be no text.
    classes = [[name.encode("utf-8", "replace").decode() for name in names] for names in data["classes"]]
    script = "\n" + "\n".join(_text(name) for name in SCRIPTS) + "\n"
    html = filled(
        TEMPLATE / "page.html",
        **values,
        parts=parts,
        title=title,
        where=where,
        kind=kind[0],
        program=kind[1],
        made_at=time.strftime("%Y-%m-%d %H:%M"),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        style=Markup(_text("style.css")),
        script=Markup(script),
        data=Markup(as_json(data | {"classes": classes})),
    )
    return html.encode("utf-8", "replace").decode("utf-8")  # bytes of a path that are not text become replacement marks


def _text(name: str) -> str:
    return (TEMPLATE / name).read_text(encoding="utf-8")


def as_json(data: Any) -> str:
    """JSON for use in a script element: nothing in it can end the element or begin a comment."""
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def title(runs: Sequence[RunRecord]) -> str:
    """Data sets and networks of all runs."""
    parts = []
    for setting, several in (("dataname", "data sets"), ("arch", "networks")):
        names = list(dict.fromkeys(filter(None, (run.value(setting) for run in runs))))
        parts += [" and ".join(names) if len(names) < 4 else f"{len(names)} {several}"] if names else []
    return " \u00b7 ".join(parts) or runs[0].name


def parts(content: PageContent, values: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield anchor, name and template of each part that has something to show."""
    details = content.data["details"]
    several = bool(details and details[0].get("several"))
    for anchor, name, file, has_something in (
        ("overview", "Overview", "overview.html", True),
        ("curves", "Curves", "curves.html", content.data["charts"]),
        ("samples", "Pictures", "samples.html", details),
        ("confusion", "Confusions", "confusion.html", details and not several),
        ("together", "Together", "together.html", several),
        ("by-class", "Classes", "classes.html", details or content.data["classTable"]),
        ("calibration", "Calibration", "calibration.html", details and not several),
        *((*part, content.data["features"]) for part in FEATURE_PARTS),
        ("settings", "Settings", "settings.html", values["settings"]),
        ("first-batch", "First batch", "first_batch.html", values["batches"]),
        ("environment", "Environment", "environment.html", True),
    ):
        if has_something:
            yield anchor, name, file


def overview(content: PageContent) -> dict[str, Any]:
    """Values for the overview: metrics as tiles (one run) or a table (several), then checks and what is missing."""
    runs = content.runs
    return {
        "tiles": all_figures(runs[0], content.figures.get(0)),
        "table": runs_table(runs, content.figures),
        "checks": checked(content),
        "doubts": grouped([(run.name, line) for run in runs for line in run.doubts], len(runs)),
        "without_predictions": content.without_predictions,
        "missing": [*grouped([(run.name, line) for run in runs for line in run.missing], len(runs)), *content.notes],
        "warnings": first_warnings(line for run in runs for line in run.warnings),
    }


def first_warnings(lines: Iterable[str]) -> list[str]:
    """The first distinct ``lines``, and how many more the logs have."""
    distinct = list(dict.fromkeys(lines))
    more = len(distinct) - MOST_WARNINGS
    return distinct[:MOST_WARNINGS] + ([f"and {more:,} more, which log.txt has"] if more > 0 else [])


def grouped(lines: Sequence[tuple[str, str]], runs: int) -> list[str]:
    """Each distinct text in ``lines``, pairs of a run's name and a text, with the names or number of its runs.

    ``runs``: number of runs on the page; the names are left out if it is 1.
    """
    about: dict[str, list[str]] = {}
    for name, line in lines:
        about.setdefault(line, []).append(name)
    if runs == 1:
        return list(about)
    said = []
    for line, names in about.items():
        if len(names) == runs:
            said.append(f"{line} (all runs)")
        else:
            said.append(f"{line} ({len(names)} of {runs} runs)" if len(names) > 2 else f"{' and '.join(names)}: {line}")
    return said


def checked(content: PageContent) -> list[tuple[str, bool | None]]:
    """The checks, with those that agree merged into one line if there are several."""
    agreeing = [check for check in content.checks if check[1]]
    if len(agreeing) < 2:
        return content.checks
    words = f"{len(agreeing)} networks were validated again for this report, each with a figure that its run recorded."
    return [(words, True), *(check for check in content.checks if not check[1])]


def page_data(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """The page's JSON without predictions: ``details``, ``features``, ``classes`` and ``images`` are empty."""
    return {
        "runs": [
            {"name": run.name, "group": group, "label": label, "axis": series.time_axis(run)}
            for run, (group, label) in zip(runs, legend(runs), strict=True)
        ],
        "charts": series.charts(runs),
        "details": [],
        "features": [],
        "classes": [],
        "images": [],
        "classTable": (runs[0].classes or None) if len(runs) == 1 else None,  # shown if there are no predictions
    }
