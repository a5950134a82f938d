"""The page: its parts from the runs' records, and the data for its scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from scripts.reporting import series
from scripts.reporting.markup import Html, element, escaped, join, named
from scripts.reporting.run_parts import environment, first_batches, legend, settings_part
from scripts.reporting.run_record import RunRecord
from scripts.reporting.tiles import Figure, runs_table, tiles

TEMPLATE = Path(__file__).with_name("template")
SCRIPTS = ("dom.js", "charts.js", "samples.js", "matrix.js", "classes.js", "page.js")
MOST_WARNINGS = 20
NO_SCRIPT = "Charts, pictures and the confusion matrix need JavaScript, which is off."


@dataclass
class PageContent:
    """Everything on the page. ``data``: its JSON. ``figures``: those of the predictions, by the run's number.

    ``checks``: whether the predictions agree with what the runs recorded, in words. ``notes``: what is left out.
    ``without_predictions``: why some or all runs have none.
    """

    runs: Sequence[RunRecord]
    data: dict[str, Any]
    figures: dict[int, list[Figure]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    checks: list[tuple[str, bool | None]] = field(default_factory=list)
    without_predictions: str = ""


def render(report: PageContent) -> str:
    """The whole file. Its policy lets the browser run the one script below and load nothing."""
    script = "\n" + "\n".join(template(name) for name in SCRIPTS) + "\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return Template(template("page.html")).substitute(
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        title=escaped(f"{title(report.runs)} \u2013 training report"),
        style=template("style.css"),
        script=script,
        data=as_json(report.data),
        body=body(report),
    )


def template(name: str) -> Html:
    return Html((TEMPLATE / name).read_text(encoding="utf-8"))


def as_json(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it can end the element or begin a comment."""
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def title(runs: Sequence[RunRecord]) -> str:
    """Data set and network of all runs."""
    parts = []
    for setting, several in (("dataname", "data sets"), ("arch", "networks")):
        names = list(dict.fromkeys(filter(None, (run.value(setting) for run in runs))))
        parts += [" and ".join(names) if len(names) < 4 else f"{len(names)} {several}"] if names else []
    return " \u00b7 ".join(parts) or runs[0].name


# --------------------------------------------------------------------------------------------- body


def body(report: PageContent) -> Html:
    """The page's parts, top to bottom."""
    parts = [(anchor, name, part) for anchor, name, part in sections(report) if part]
    links = (element("li", element("a", name, href=f"#{anchor}")) for anchor, name, _ in parts)
    made = (
        f"Made by scripts/report.py on {time.strftime('%Y-%m-%d %H:%M')}. This file needs no other file and no network."
    )
    main = element(
        "main",
        element("noscript", element("p", NO_SCRIPT, class_="note")),
        *(element("section", part, class_="part", id=anchor, aria_label=name) for anchor, name, part in parts),
        element("footer", made),
    )
    return join([header(report), element("nav", element("ul", *links), aria_label="Parts of the report"), main])


def sections(report: PageContent) -> Iterator[tuple[str, str, Html | None]]:
    """Anchor, name and content of each part; None for one with nothing to show."""
    runs = report.runs
    data = report.data
    batches = first_batches(runs)  # names in the overview what it cannot show
    yield "overview", "Overview", overview(report)
    yield "curves", "Curves", template("curves.html") if data["charts"] else None
    yield "samples", "Pictures", template("samples.html") if data["details"] else None
    yield "confusion", "Confusions", template("confusion.html") if data["details"] else None
    yield "by-class", "Classes", template("classes.html") if data["details"] or data["classTable"] else None
    yield "calibration", "Calibration", template("calibration.html") if data["details"] else None
    yield "settings", "Settings", settings_part(runs)
    yield "first-batch", "First batch", batches
    yield "environment", "Environment", environment(runs)


def header(report: PageContent) -> Html:
    runs = report.runs
    where = named(runs[0].folder or runs[0].name) if len(runs) == 1 else f"{len(runs)} runs"
    return element(
        "header",
        element("p", "Training report", class_="label"),
        element("h1", named(title(runs))),
        element("p", where, class_="where"),
        class_="top",
    )


def overview(report: PageContent) -> Html:
    """The main figures: as tiles of one run, as a table of several; then what was checked and what is missing."""
    runs = report.runs
    parts = [tiles(runs[0], report.figures.get(0)) if len(runs) == 1 else runs_table(runs, report.figures)]
    parts += [
        element("p", words, class_="note" if agrees is False else "soft small check")
        for words, agrees in checked(report)
    ]
    doubts = grouped([(run.name, line) for run in runs for line in run.doubts], len(runs))
    parts.append(noted("Doubtful: the network seems to have learned nothing", doubts))
    if report.without_predictions:
        parts.append(element("p", report.without_predictions, class_="note"))
    missing = grouped([(run.name, line) for run in runs for line in run.missing], len(runs))
    parts.append(noted("Missing or left out", [*missing, *report.notes]))
    warnings = list(dict.fromkeys(line for run in runs for line in run.warnings))
    parts.append(noted("Warnings in the log", warnings[:MOST_WARNINGS]))
    return join(parts)


def grouped(lines: Sequence[tuple[str, str]], runs: int) -> list[str]:
    """Lines about some of ``runs`` runs, given by their names, each once, with whom it is about."""
    about: dict[str, list[str]] = {}
    for name, line in lines:
        about.setdefault(line, []).append(name)
    if runs == 1:
        return list(about)
    return [
        f"{line} (all runs)"
        if len(names) == runs
        else f"{line} ({len(names)} of {runs} runs)"
        if len(names) > 2
        else f"{' and '.join(names)}: {line}"
        for line, names in about.items()
    ]


def checked(report: PageContent) -> list[tuple[str, bool | None]]:
    """The checks; those of many runs that agree in one line."""
    agreeing = [check for check in report.checks if check[1]]
    if len(agreeing) < 2:
        return report.checks
    words = f"{len(agreeing)} networks were validated again for this report, each with a top-1 that its run recorded."
    return [(words, True), *(check for check in report.checks if not check[1])]


def noted(name: str, lines: Sequence[str]) -> Html | None:
    """A box with a list; None without a line."""
    items = (element("li", line) for line in lines)
    return element("div", element("b", name), element("ul", *items), class_="note") if lines else None


# --------------------------------------------------------------------------------------------- data


def page_data(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """The page's JSON without predictions: ``details``, ``classes`` and ``images`` are empty."""
    return {
        "runs": [
            {"name": run.name, "group": group, "label": label, "axis": series.time_axis(run)}
            for run, (group, label) in zip(runs, legend(runs), strict=True)
        ],
        "charts": series.charts(runs),
        "details": [],
        "classes": [],
        "images": [],
        "classTable": class_table(runs[0]) if len(runs) == 1 else None,
    }


def class_table(run: RunRecord) -> list[dict[str, Any]] | None:
    """Rows of class_metrics.csv, which stand in where there are no predictions; shares between 0 and 1."""
    return [
        {
            "name": row["class"],
            "number": number,
            "support": int(row["val_count"]),
            "accuracy": _share(row["val_accuracy"]),
            "precision": _share(row.get("val_precision")) or 0,
            "f1": _share(row.get("val_f1")) or 0,
            "pair": None,
        }
        for number, row in enumerate(run.classes)
    ] or None


def _share(percent: str | None) -> float | None:
    value = float(percent or "nan")
    return series.number(value / 100, 5) if math.isfinite(value) else None
