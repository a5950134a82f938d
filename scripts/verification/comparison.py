"""Two runs' files compared bit for bit."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field
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


@dataclass
class RunComparison:
    """``what`` was compared in ``count`` values; ``differences``: a text for each entry that is not equal."""

    what: str
    count: int = 0
    differences: list[str] = field(default_factory=list)

    def compare(self, expected: dict[str, Any], found: dict[str, Any]) -> None:
        """Add two tables of entries: tensors, arrays, or plain values."""
        self.count += sum(map(_size, (found | expected).values()))
        for name, value in expected.items():
            if name not in found:
                self.differences.append(f"{name} is missing in the killed run")
            elif difference := unequal(value, found[name]):
                self.differences.append(f"{name}: {difference}")
        self.differences += [f"{name} is only in the killed run" for name in found if name not in expected]


def compare_runs(straight: WatchedRun, killed: WatchedRun, free_settings: Iterable[str] = ()) -> list[RunComparison]:
    """Compare everything that two finished runs leave, except clock readings. ``free_settings`` may differ."""
    left = straight.run_folder()
    right = killed.run_folder()
    free = {*OF_THE_CALL, *free_settings}
    return [
        *(_table(name, checkpoint(left / name, free), checkpoint(right / name, free)) for name in _checkpoints(left)),
        _table("metrics.csv", rows(left), rows(right)),
        _table("class_metrics.csv", rows(left, "class_metrics.csv"), rows(right, "class_metrics.csv")),
        _table("metrics.npz", curves(left), curves(right)),
        _table("TensorBoard", points(left), points(right)),
        compare_steps(straight, killed),
    ]


def _table(what: str, expected: dict[str, Any], found: dict[str, Any]) -> RunComparison:
    made = RunComparison(what)
    made.compare(expected, found)
    return made


def _checkpoints(run: Path) -> list[str]:
    """final.pt and best.pt; a run that --max-steps cut early has no best."""
    names = ["checkpoints/final.pt", "checkpoints/best.pt"]
    return [name for name in names if name.endswith("final.pt") or (run / name).is_file()]


def checkpoint(path: Path, free_settings: Iterable[str] = ()) -> dict[str, Any]:
    """A checkpoint as {"model/0.weight": leaf}, without clocks; empty when there is none."""
    if not path.is_file():
        return {}
    state = load(path)
    state.pop(CONTENTS, None)  # a list of the entries' names and kinds: what differs there differs in an entry
    kept = {name: value for name, value in state["settings"].items() if name not in free_settings}
    return {path: leaf for path, leaf in _flat({**state, "settings": kept}) if path not in CLOCKS}


def _flat(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
        return
    for key, item in items:
        yield from _flat(item, f"{path}/{key}" if path else str(key))


def rows(run: Path, name: str = "metrics.csv") -> dict[str, str]:
    """metrics.csv, or the file ``name``, as {"row 1 val_loss": text}, without clocks."""
    path = run / name
    path = path if path.is_file() else Path("/dev/null")
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return {
            f"row {number} {name}": value
            for number, row in enumerate(csv.DictReader(file), 1)
            for name, value in row.items()
            if name not in CLOCKS
        }


def curves(run: Path) -> dict[str, np.ndarray]:
    """metrics.npz as {"loss": float64 (steps,)}."""
    if not (run / "metrics.npz").is_file():
        return {}
    with np.load(run / "metrics.npz") as content:
        return {name: content[name] for name in content.files}


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


def compare_steps(straight: WatchedRun, killed: WatchedRun) -> RunComparison:
    """Sample numbers and bytes of every execution of every step on every rank."""
    made = RunComparison("samples and images")
    for rank in range(straight.ranks):
        expected = {line.step: line.content for line in records.lines(straight.records, rank)}
        executed = records.lines(killed.records, rank)
        made.count += len(executed)
        made.differences += [
            f"step {line.step} on rank {rank}: other samples or images"
            for line in executed
            if line.content != expected.get(line.step)
        ]
        missing = expected.keys() - {line.step for line in executed}
        made.differences += [f"step {step} on rank {rank}: was not trained" for step in sorted(missing)]
    return made


def unequal(value: Any, other: Any) -> str:
    """How two entries differ in any bit, in a few words; empty when they do not."""
    value, other = (torch.from_numpy(item) if isinstance(item, np.ndarray) else item for item in (value, other))
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return "" if _exact(value) == _exact(other) else f"{_short(other)} instead of {_short(value)}"
    if (value.dtype, value.shape) != (other.dtype, other.shape):
        kinds = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (other, value)]
        return " instead of ".join(kinds)
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (value, other))
    if torch.equal(left, right):
        return ""
    gap = (value.double() - other.double()).abs()
    wrong = (left != right).reshape(max(value.numel(), 1), -1).any(1).sum()
    return f"{wrong} of {value.numel()} numbers, by up to {gap.max():.3g}"


def _size(value: Any) -> int:
    """How many values an entry holds."""
    return value.numel() if isinstance(value, torch.Tensor) else value.size if isinstance(value, np.ndarray) else 1


def _exact(value: Any) -> str:
    return repr(value)  # distinguishes 0.0 from -0.0 and 1 from 1.0, and a NaN equals a NaN


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
