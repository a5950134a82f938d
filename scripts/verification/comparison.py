"""Two runs' files compared bit for bit."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.verification import records
from scripts.verification.runs import WatchedRun
from utils.checkpoint.checkpoint import load
from utils.checkpoint.inventory import CONTENTS

OF_THE_CALL = ("output", "resume")  # settings of this call only: what to do and where
CLOCKS = ("seconds", "images_per_second", "progress/epoch_seconds")


def compare_runs(
    straight: WatchedRun, killed: WatchedRun, free_settings: Iterable[str] = ()
) -> dict[str, tuple[int, list[str]]]:
    """Number of values compared, by file, and a line for each entry that differs.

    Everything that two finished runs leave, except clock readings. ``free_settings`` may differ.
    """
    expected, found = (contents(run, {*OF_THE_CALL, *free_settings}) for run in (straight, killed))
    return {what: compare(expected[what], found.get(what, {})) for what in expected}


def compare(expected: dict[str, Any], found: dict[str, Any]) -> tuple[int, list[str]]:
    """The number of values in two tables of entries (tensors, arrays or plain values), and what differs."""
    count = sum(max(_size(expected.get(name)), _size(found.get(name))) for name in expected | found)
    differences = []
    for name, value in expected.items():
        if name not in found:
            differences.append(f"{name} is missing in the killed run")
        elif difference := unequal(value, found[name]):
            differences.append(f"{name}: {difference}")
    return count, differences + [f"{name} is only in the killed run" for name in found if name not in expected]


def contents(run: WatchedRun, free_settings: set[str]) -> dict[str, dict[str, Any]]:
    """Files that a finished run has left, as tables of entries."""
    folder = run.run_folder()
    names = ["checkpoints/final.pt", "checkpoints/best.pt"]  # a run that --max-steps cut early has no best
    tables = {name: checkpoint(folder / name, free_settings) for name in names if (folder / name).is_file()}
    tables |= {name: rows(folder / name) for name in ("metrics.csv", "class_metrics.csv")}
    return tables | {
        "metrics.npz": curves(folder / "metrics.npz"),
        "TensorBoard": points(folder),
        "samples and images": steps(run),
    }


def checkpoint(path: Path, free_settings: set[str]) -> dict[str, Any]:
    """A checkpoint as {"model/0.weight": leaf}, without clocks."""
    state = load(path)
    state.pop(CONTENTS, None)  # a list of the entries' names and kinds: what differs there differs in an entry
    for name in free_settings & state["settings"].keys():
        del state["settings"][name]
    return {path: leaf for path, leaf in _flat(state) if path not in CLOCKS}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict | list):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _flat(item, f"{path}/{key}" if path else str(key))


def rows(path: Path) -> dict[str, str]:
    """A CSV file as {"row 1 val_loss": text}, without clocks; empty when there is none."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape") if path.is_file() else ""
    return {
        f"row {number} {name}": value
        for number, row in enumerate(csv.DictReader(text.splitlines(keepends=True)), 1)
        for name, value in row.items()
        if name not in CLOCKS
    }


def curves(path: Path) -> dict[str, np.ndarray]:
    """metrics.npz as {"loss": float64 (steps,)}."""
    return dict(np.load(path)) if path.is_file() else {}


def points(run: Path) -> dict[str, list[float]]:
    """TensorBoard's scalars as {"Loss/Test at step 23": values}, without speeds. A second value is one too many."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    board.Reload()
    found: dict[str, list[float]] = {}
    for tag in board.Tags()["scalars"]:
        if not tag.startswith("Speed/"):
            for event in board.Scalars(tag):
                found.setdefault(f"{tag} at step {event.step}", []).append(event.value)
    return found


def steps(run: WatchedRun) -> dict[str, tuple[str, ...]]:
    """Sample numbers and bytes as {"step 3 on rank 0": those of each of its executions}."""
    found: dict[str, tuple[str, ...]] = {}
    for rank in range(run.ranks):
        for line in records.lines(run.records, rank):
            name = f"step {line.step} on rank {rank}"
            found[name] = (*found.get(name, ()), line.content)
    return found


def unequal(value: Any, other: Any) -> str:
    """Difference of two entries in any bit, in a few words; empty when they do not."""
    if isinstance(value, tuple):  # of ``steps``
        return "" if {*value} == {*other} else "other samples or images"
    value, other = (torch.from_numpy(item) if isinstance(item, np.ndarray) else item for item in (value, other))
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
    if isinstance(value, tuple):
        return len(value)
    return torch.as_tensor(value).numel() if isinstance(value, torch.Tensor | np.ndarray) else 1
