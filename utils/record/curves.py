"""``metrics.npz``: the numbers of every step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.runtime.files import whole_file


class StepRecord(NamedTuple):
    """Figures of an optimizer step, accuracies in percent.

    For multi-label data, ``top1`` is the micro F1 and ``top5`` NaN.
    """

    step: int
    epoch: int
    loss: float
    top1: float
    top5: float
    lr: float
    gradient_norm: float
    loss_scale: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> StepRecord:
        """Record of ``numbers``, as ``Progress.last_step`` holds them."""
        step, epoch, *rest = numbers
        return cls(int(step), int(epoch), *rest)


CURVES = StepRecord._fields
WHOLE = "metrics.npz"


class Curves:
    """A row of ``CURVES`` per step, float64 (steps, len(CURVES)). ``write`` saves all of them in ``metrics.npz``."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / WHOLE
        self._blocks: list[np.ndarray] = []
        self._changed = False

    def add(self, rows: Sequence[Sequence[float]]) -> None:
        """Add rows of ``CURVES``, one for each further step."""
        self._blocks.append(np.array(rows, dtype=np.float64).reshape(-1, len(CURVES)))
        self._changed = True

    def write(self) -> None:
        """Bring ``metrics.npz`` up to date."""
        if not self._changed:
            return
        self._blocks = [np.concatenate(self._blocks)]
        with whole_file(self._path) as file:
            arrays: dict[str, Any] = named(self._blocks[0])
            np.savez(file, **arrays)
        self._changed = False

    def restore(self, rows: np.ndarray | None, steps: int) -> int:
        """Load ``rows``, the result of ``read`` (None without a file), up to step ``steps``; return their number.

        Later rows are dropped from the disk as well, since their steps will be repeated.
        """
        self._blocks = [np.empty((0, len(CURVES))) if rows is None else rows[rows[:, 0] <= steps]]
        self._changed = True
        self.write()
        return len(self._blocks[0])


def read(path: Path) -> np.ndarray:
    """Read the rows of a ``metrics.npz``. If it is damaged, any exception of zipfile or NumPy passes through."""
    with np.load(path, allow_pickle=False) as content:
        columns = dict(content)
    if "micro_f1" in columns:
        columns |= {"top1": columns["micro_f1"], "top5": np.full_like(columns["micro_f1"], np.nan)}
    return np.stack([columns[name].astype(np.float64) for name in CURVES], axis=1)


def named(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Columns of ``rows`` by name; for multi-label data, a micro F1 replaces top-1 and top-5."""
    columns = dict(zip(CURVES, rows.T, strict=True))
    if len(rows) and np.isnan(columns["top5"]).all():
        del columns["top5"]
        columns["micro_f1"] = columns.pop("top1")
    return columns
