"""Compare the files of two runs bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.verification import training_marks
from scripts.verification.runs import WatchedRun
from utils.checkpoint.checkpoint import load
from utils.checkpoint.inventory import CONTENTS, parts
from utils.record.run_folder import read_table

OF_THE_CALL = ("output", "resume")  # settings of this call only: what to do and where
CLOCKS = ("seconds", "images_per_second", "progress/epoch_seconds")


def compare_runs(
    straight: WatchedRun, killed: Iterable[WatchedRun], free_settings: Iterable[str] = ()
) -> dict[str, tuple[int, list[str]]]:
    """By file, the number of values compared, and a line for each entry that differs.

    Compares everything that finished runs leave, except clock readings and settings in ``free_settings``.
    """
    expected, *found = (contents(run, {*OF_THE_CALL, *free_settings}) for run in (straight, *killed))
    files = dict.fromkeys(chain(expected, *found))
    return {what: compare(*(tables.get(what, {}) for tables in (expected, *found))) for what in files}


def compare(expected: dict[str, Any], *several: dict[str, Any]) -> tuple[int, list[str]]:
    """Number of values in tables of entries (tensors or plain values); lines on differences from ``expected``."""
    count = 0
    differences = []
    for found in several:
        for name in expected | found:
            count += max(_size(expected.get(name)), _size(found.get(name)))
            if name not in found:
                differences.append(f"{name} is missing in the killed run")
            elif name not in expected:
                differences.append(f"{name} is only in the killed run")
            elif difference := unequal(expected[name], found[name]):
                differences.append(f"{name}: {difference}")
    return count, differences


def contents(run: WatchedRun, free_settings: set[str]) -> dict[str, dict[str, Any]]:
    """Files that a finished run has left, as tables of entries, by file name."""
    folder = run.run_folder
    readers = {
        "checkpoints/final.pt": lambda path: checkpoint(path, free_settings),
        "checkpoints/best.pt": lambda path: checkpoint(path, free_settings),
        "metrics.csv": rows,
        "class_metrics.csv": rows,
        "metrics.npz": lambda path: {name: torch.from_numpy(curve) for name, curve in np.load(path).items()},
    }
    tables = {name: read(folder / name) for name, read in readers.items() if (folder / name).is_file()}
    return tables | {"TensorBoard": points(folder), "samples and images": steps(run.folder)}


def checkpoint(path: Path, free_settings: set[str]) -> dict[str, Any]:
    """A checkpoint as {"model/0.weight": tensor or plain value}, without clocks and ``free_settings``."""
    state = load(path)
    state.pop(CONTENTS, None)  # a list of the entries' names and kinds: what differs there differs in an entry
    free = {*CLOCKS, *(f"settings/{name}" for name in free_settings)}
    leaves = [(name, leaf) for name, leaf in parts(state) if not (isinstance(leaf, dict | list | tuple) and leaf)]
    return {name: leaf for name, leaf in reversed(leaves) if name not in free}  # ``parts`` gives the last first


def rows(path: Path) -> dict[str, str]:
    """A CSV file as {"row 1 val_loss": text}, without clocks."""
    return {
        f"row {number} {name}": value
        for number, row in enumerate(read_table(path, "surrogateescape")[0], 1)
        for name, value in row.items()
        if name not in CLOCKS
    }


def points(run: Path) -> dict[str, list[float]]:
    """TensorBoard's scalars as {"Loss/Test at step 23": values}, without speeds; more than one value is a fault."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    board.Reload()
    found: dict[str, list[float]] = {}
    for tag in board.Tags()["scalars"]:
        if not tag.startswith("Speed/"):
            for event in board.Scalars(tag):
                found.setdefault(f"{tag} at step {event.step}", []).append(event.value)
    return found


def steps(folder: Path) -> dict[str, tuple[str, ...]]:
    """CRCs of what each step was given, over all starts of a run: {"step 3 on rank 0": a CRC for each execution}."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(folder.glob("start_*/rank*.txt")):
        for mark in training_marks.read(path):
            if mark.point == "before_update":
                name = f"step {mark.done + 1} on rank {path.stem.removeprefix('rank')}"
                found[name] = (*found.get(name, ()), mark.crc)
    return found


def unequal(value: Any, other: Any) -> str:
    """Text on how two entries differ in any bit; '' if they do not."""
    if isinstance(value, tuple) and isinstance(other, tuple):  # of ``steps``
        return "" if {*value} == {*other} else "other samples or images"
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        # repr distinguishes 0.0 from -0.0 and 1 from 1.0, and a NaN equals a NaN
        return "" if repr(value) == repr(other) else f"{other!s:.40} instead of {value!s:.40}"
    if (value.dtype, value.shape) != (other.dtype, other.shape):
        return " instead of ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (other, value))
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (value, other))
    if torch.equal(left, right):
        return ""
    gap = (value.double() - other.double()).abs()
    wrong = (left != right).reshape(max(value.numel(), 1), -1).any(1).sum()
    return f"{wrong} of {value.numel()} numbers, by up to {gap.max():.3g}"


def _size(value: Any) -> int:
    """Number of values that an entry holds."""
    return value.numel() if isinstance(value, torch.Tensor) else len(value) if isinstance(value, tuple) else 1
