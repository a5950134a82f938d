"""The table as text, Markdown and JSON, and one archive of all that is worth keeping."""

from __future__ import annotations

import dataclasses
import json
import os
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.lab.gpu_table.lines import DIFFERENCE, RATIO, Line

HEADERS = ("piece", "what", "against", "ours", "the other", "result", "min - max", "aim", "")
FIGURES = ("ours", "the other", "min - max")
ARCHIVE = "gpu_results.tgz"
KEPT = {".json", ".csv", ".txt", ".md", ".yaml", ".xml", ".png"}


def cells(piece: str, line: Line) -> list[str]:
    """A line's text, a column each."""
    what = f"{line.what} ({line.unit})" if line.unit else line.what
    if line.result is None:
        return [piece, what, line.against, "", "", line.note or "nothing measured", "", aim(line), ""]
    other = "" if line.other is None else number(line.other)
    span = "" if line.low is None else f"{outcome(line, line.low)} - {outcome(line, line.high)}"
    met = {True: "met", False: "MISSED", None: ""}[line.met]
    return [piece, what, line.against, number(line.ours), other, outcome(line, line.result), span, aim(line), met]


def number(value: float | None) -> str:
    """A figure with three digits or more."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def outcome(line: Line, value: float) -> str:
    """A ratio as a factor, a difference with its sign, a figure as it is."""
    return f"{value:.3f}x" if line.kind == RATIO else f"{value:+.4g}" if line.kind == DIFFERENCE else number(value)


def aim(line: Line) -> str:
    return "" if line.aim is None else f"{'at least' if line.at_least else 'at most'} {line.aim:g}"


def as_rows(machine: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The table's rows of the pieces' results, which are as in their files; a piece without lines has one.

    The last column also says what was different from ``machine``, the table's, when an earlier call measured a piece.
    """
    rows = []
    for name, result in results.items():
        lines = [Line(**fields) for fields in result["lines"]]
        its_own = result.get("machine", machine)
        other = ", ".join(f"{key} {value}" for key, value in its_own.items() if value != machine.get(key))
        for line in lines or [Line(result["what"], note=result["why"])]:
            *others, last = cells(name, line)
            rows.append([*others, "; ".join(filter(None, (last, other and f"with {other}")))])
    return rows


def as_text(machine: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Aligned columns: words to the left, figures to the right."""
    rows = [list(HEADERS), *as_rows(machine, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = [
        [
            cell.rjust(width) if name in FIGURES else cell.ljust(width)
            for cell, width, name in zip(row, widths, HEADERS, strict=True)
        ]
        for row in rows
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def as_markdown(machine: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> str:
    """A page: the machine and the table."""
    head = "\n".join(f"- {name}: {value}" for name, value in machine.items() if value)
    rows = [HEADERS, ["---"] * len(HEADERS), *as_rows(machine, results)]
    body = "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)
    return f"# GPU results\n\n{head}\n\n{body}\n"


def write(folder: Path, machine: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write table.txt, table.md and results.json, and the archive, each replaced as a whole."""
    replace(folder / "table.txt", as_text(machine, results) + "\n")
    replace(folder / "table.md", as_markdown(machine, results))
    replace(folder / "results.json", as_json({"machine": machine, "pieces": results}))
    pack(folder)


def as_json(content: Any) -> str:
    return json.dumps(content, indent=1, default=dataclasses.asdict) + "\n"


def replace(path: Path, text: str) -> None:
    """Write ``text`` to ``path``; no reader sees half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def pack(folder: Path) -> Path:
    """Put the results, logs and run folders into one archive, without checkpoints and TensorBoard's files."""
    path = folder / ARCHIVE
    temporary = path.with_name(f".{path.name}.tmp")
    with tarfile.open(temporary, "w:gz") as archive:
        for file in _worth_keeping(folder):
            archive.add(file, file.relative_to(folder))
    os.replace(temporary, path)
    return path


def _worth_keeping(folder: Path) -> Iterable[Path]:
    files: Sequence[Path] = sorted(path for path in folder.rglob("*") if path.is_file())
    return (path for path in files if path.suffix in KEPT and "checkpoints" not in path.relative_to(folder).parts)
