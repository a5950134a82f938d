"""Meaning of RUN on the report's command line: a run folder, a checkpoint, or both; and its name on the page."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.common.command_line import each_of
from scripts.common.trained import AUTO, find_run
from utils.config.settings import UserError

MOST_RUNS = 64
RECORDS = ("config.yaml", "metrics.csv", "metrics.npz")
TIME = re.compile(r"^\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_")


@dataclass(frozen=True)
class RunSource:
    """A run to show. ``folder``: the run folder; None for a checkpoint outside of one.

    ``network``: the checkpoint to load; None if the folder holds none.
    """

    folder: Path | None
    network: Path | None
    name: str = ""


def find(texts: Sequence[str]) -> list[RunSource]:
    """The runs that ``texts`` name, each once, in order. Raises ``UserError`` with all texts that name no run."""
    found = list(dict.fromkeys(each_of(_find, texts)))
    if len(found) > MOST_RUNS:
        raise UserError(f"RUN: {len(found)} runs, and a report shows {MOST_RUNS} at most; give fewer")
    return [RunSource(one.folder, one.network, name) for one, name in zip(found, names(found), strict=True)]


def _find(text: str) -> RunSource:
    given = Path(text)
    if text != AUTO and "\0" not in text and _is_run(given) and not any((given / "checkpoints").glob("*.pt")):
        return RunSource(given, None)
    path = find_run(text)
    if path.is_dir():
        folder = path.parent if path.name == "checkpoints" and _is_run(path.parent) else path
        return RunSource(folder, path)
    folder = path.absolute().parent.parent
    inside = path.absolute().parent.name == "checkpoints" and _is_run(folder)
    if not inside:
        return RunSource(None, path)
    return RunSource(folder if path.is_absolute() else Path(os.path.relpath(folder)), path)


def _is_run(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in RECORDS)


def names(sources: Sequence[RunSource]) -> list[str]:
    """Names just long enough to tell the runs apart: without the time, with it, with the file, or the whole path."""
    paths = [(one.folder or one.network).absolute() for one in sources]
    files = [f"/{one.network.name}" if one.network and one.network.is_file() else "" for one in sources]
    above = [""] * len(paths)
    for folders in ([path.parent.parent.name for path in paths], [path.parent.name for path in paths]):
        if len(set(folders)) > 1:  # several data sets or networks
            above = [f"{text}{folder} " for text, folder in zip(above, folders, strict=True)]
    full = [f"{text}{path.name}" for text, path in zip(above, paths, strict=True)]
    short = [f"{text}{TIME.sub('', path.name)}" for text, path in zip(above, paths, strict=True)]
    for candidates in (short, full, [f"{name}{file}" for name, file in zip(full, files, strict=True)]):
        if max(Counter(candidates).values()) == 1:
            return candidates
    return [f"{path}{file}" for path, file in zip(paths, files, strict=True)]
