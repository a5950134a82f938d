"""A hint for a folder that holds no data set that can be read, from what it does hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from utils.data.formats.class_folders import (
    LOOKED_AT,
    TRAINING_FOLDERS,
    VALIDATION_FOLDERS,
    find_splits,
    holds_images,
    printable,
    validation_folder,
    visible,
)
from utils.data.formats.listing import is_image
from utils.data.formats.readers import OWN_FILES

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".7z", ".rar")
SETS_BY_FOLDER = {own.folder: name for name, own in OWN_FILES.items()}
SHOWN = 3  # names in a hint


def hint(root: Path, name: str, evaluate: bool = False) -> str:
    """A hint at what ``root`` holds instead of data set ``name``, and what to do; empty if unclear.

    ``evaluate``: the set was to be evaluated.
    """
    entries = sorted(islice(visible(root), LOOKED_AT))
    folders = [path for path in entries if path.is_dir()]
    if root.resolve().name.lower() in (*TRAINING_FOLDERS, *VALIDATION_FOLDERS) and find_splits(root.resolve().parent):
        return f"it is one of two splits: use --datapath {root.parent if root.name not in ('', '.', '..') else '..'}"
    if validation := validation_folder(root):
        return f"it holds {validation.name}/ and no train/: add it (only --evaluate needs none)"
    if inner := [folder for folder in folders if find_splits(folder)]:
        splits = [path for folder in inner for path in find_splits(folder)]
        return f"it holds {_names(root, splits)}: use --datapath {inner[0]}"
    if named := [path for path in folders if SETS_BY_FOLDER.get(path.name, name) != name]:
        return f"it holds {_names(root, named)}/: use --dataname {SETS_BY_FOLDER[named[0].name]}"
    if classes := [folder for folder in folders if holds_images(folder)]:
        own = "add --val-split 0.1" if name == "folder" else "put such folders into train/ and val/"
        return f"it holds {_names(root, classes, '/')}: {own}"
    for folder in folders:
        if classes := [path for path in sorted(visible(folder)) if path.is_dir() and holds_images(path)]:
            share = "" if evaluate else " --val-split 0.1"
            return f"it holds {_names(root, classes, '/')}: use --datapath {folder}{share}"
    if loose := [path for path in entries if is_image(path.name)]:
        return f"it holds {_names(root, loose)}: put each class's images into a folder of the class's name"
    if packed := [path for path in entries if path.name.lower().endswith(ARCHIVES)]:
        return f"it holds {_names(root, packed)}: unpack it first"
    return ""


def _names(root: Path, paths: Sequence[Path], mark: str = "") -> str:
    more = ", ..." if len(paths) > SHOWN else ""
    return ", ".join(printable(os.path.relpath(path, root)) + mark for path in paths[:SHOWN]) + more
