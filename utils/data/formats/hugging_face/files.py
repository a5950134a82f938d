"""Finds and opens data sets of Hugging Face's library ``datasets`` on disk; nothing is fetched."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from utils.config.settings import UserError
from utils.data.formats.class_folders import TRAINING_FOLDERS, VALIDATION_FOLDERS
from utils.data.progress_log import Log

SAVED = "state.json"  # by which a folder that ``save_to_disk`` wrote is recognised
ENDING = ".parquet"
CONVERTED = "arrow"  # in the folder for what is kept of a data set
NAMES = (*TRAINING_FOLDERS, *VALIDATION_FOLDERS)
_PART = re.compile(r"(.+)-\d+-of-\d+")  # how the Hub names the parts of a split


class Found(NamedTuple):
    """The files of one split: a folder that ``save_to_disk`` wrote, or parquet files."""

    name: str
    saved: Path | None
    parquet: tuple[Path, ...] = ()


def library() -> ModuleType:
    """The library. Raises ``UserError`` with the line that installs it."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"--dataname hf needs the library datasets ({error}): python -m pip install -r requirements-tools.txt"
        ) from error
    datasets.disable_progress_bars()  # each process would show its own
    return datasets


def find(root: Path) -> dict[str, Found]:
    """The splits in ``root`` by their names in lower case; empty if there are none. Raises ``UserError``.

    Parquet files belong to the split that their name or folder begins with, as those of the Hub do; if none names one,
    all are for training.
    """
    if (root / SAVED).is_file():
        return {"train": Found("train", root)}
    # Unlike Path.is_file, os.path.isfile passes over folders that cannot be read, such as a disk's lost+found.
    saved = {path.name.lower(): Found(path.name, path) for path in _folders(root) if os.path.isfile(path / SAVED)}
    return saved or _parquet(root)


def _folders(root: Path) -> list[Path]:
    with os.scandir(root) as entries:
        return sorted(Path(entry) for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _parquet(root: Path) -> dict[str, Found]:
    files: dict[str, list[Path]] = {}
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(ENDING) and not name.startswith("."):
                files.setdefault(_split_of(Path(folder, name).relative_to(root)), []).append(Path(folder, name))
    if set(files) == {""}:
        files = {"train": files[""]}
    files.pop("", None)
    for split, paths in files.items():
        folders = sorted({path.parent for path in paths})
        if len(folders) > 1:
            raise UserError(
                f"--datapath {root}: parquet files of {split} lie in {folders[0]} and in {folders[1]}: several data "
                "sets, or versions of one; give the folder of one"
            )
    return {split: Found(split, None, tuple(paths)) for split, paths in files.items()}


def _split_of(path: Path) -> str:
    """The split that a file, or the nearest folder above it, is named after; '' for none.

    The Hub's names say the split in full: train_extra-00000-of-00001.parquet is a part of train_extra, not of train.
    """
    for part in (path.stem, *(parent.name for parent in path.parents)):
        first = re.split(r"[^a-z]", part.lower())[0]
        if first in NAMES:
            whole = _PART.match(part.lower())
            return whole[1] if whole else first
    return ""


def read_features(found: Found) -> Any:
    """The columns of a split and their kinds, a ``datasets.Features``; reads no row. Raises ``UserError``."""
    datasets = library()
    with _told(found):
        if found.saved is not None:
            return datasets.load_from_disk(str(found.saved)).features
        import pyarrow.parquet

        return datasets.Features.from_arrow_schema(pyarrow.parquet.read_schema(found.parquet[0]))


def read_split(found: Found, columns: list[str], folder: Path, log: Log) -> Any:
    """Columns of a split by name, a ``datasets.Dataset`` that maps its files into memory. Raises ``UserError``.

    The rows of parquet files cannot be read singly: they are once converted to Arrow files in ``folder``, by one of the
    processes that want them.
    """
    datasets = library()
    with _told(found):
        if found.saved is not None:
            return datasets.load_from_disk(str(found.saved), keep_in_memory=False).select_columns(columns)
        looks = [path.stat() for path in found.parquet]
        size = sum(look.st_size for look in looks)
        # The library takes files for those that it has converted if their times alone are the same.
        seen = hashlib.sha256(" ".join(f"{look.st_size} {look.st_mtime_ns}" for look in looks).encode()).hexdigest()
        place = folder / CONVERTED / seen[:16]
        log(f"{found.name}: {len(found.parquet)} parquet file(s) ({size / 1e6:,.0f} MB) as Arrow files in {place}")
        return datasets.Dataset.from_parquet([*map(str, found.parquet)], cache_dir=str(place), columns=columns)


@contextmanager
def _told(found: Found) -> Iterator[None]:
    """Turn what the library raises into a ``UserError``."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # pyarrow's and the library's errors have no common base
        where = found.saved or found.parquet[0]
        reason = " ".join(str(error.__cause__ or error).split())[:200] or type(error).__name__
        raise UserError(
            f"--datapath: {where} cannot be read by the library datasets ({reason}); make it again, or see that there "
            "is room for its Arrow files (--cache-dir)"
        ) from error
