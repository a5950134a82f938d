"""``metrics.npz``: the numbers of every step."""

from __future__ import annotations

import zlib
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
REST = ".metrics.rows"
NUMBER = np.dtype("<f8")
SEALED_BYTES = NUMBER.itemsize * len(CURVES) + 4


class Curves:
    """A row of ``CURVES`` per step, float64 (steps, len(CURVES)). ``write`` saves all of them in ``metrics.npz``.

    The longer the run, the longer ``write`` takes. ``append``, for checkpoints between two steps, is always fast: it
    adds the new rows, each with its CRC-32, to the file ``.metrics.rows``, which keeps them until the next ``write``.
    """

    def __init__(self, folder: Path) -> None:
        self._whole = folder / WHOLE
        self._rest = folder / REST
        self._blocks: list[np.ndarray] = []
        self._appended = 0  # blocks
        self._changed = False

    def add(self, rows: Sequence[Sequence[float]]) -> None:
        """Add rows of ``CURVES``, one for each further step."""
        self._blocks.append(np.array(rows, dtype=NUMBER).reshape(-1, len(CURVES)))
        self._changed = True

    def append(self) -> None:
        """Save the rows added since the last save to disk."""
        blocks = self._blocks[self._appended :]
        if blocks:
            with open(self._rest, "ab") as file:
                file.write(b"".join(_sealed(row) for block in blocks for row in block))
            self._appended = len(self._blocks)

    def write(self) -> None:
        """Bring ``metrics.npz`` up to date."""
        if not self._changed:
            return
        self._blocks = [np.concatenate(self._blocks)]
        with whole_file(self._whole) as file:
            arrays: dict[str, Any] = named(self._blocks[0])
            np.savez(file, **arrays)
        self._rest.unlink(missing_ok=True)  # a kill before leaves rows twice, which ``restore`` handles
        self._appended = 1
        self._changed = False

    def restore(self, whole: np.ndarray | None, steps: int) -> int:
        """Load the rows up to step ``steps``; return their number.

        They are ``whole``, the result of ``read`` (None without a file), and the rows that ``append`` has saved since.
        """
        whole = np.empty((0, len(CURVES))) if whole is None else whole
        rows = np.concatenate([whole, self._read_rest(after=whole[:, 0].max(initial=0))])
        self._blocks = [rows[rows[:, 0] <= steps]]
        self._changed = True
        self.write()  # also drops later rows from the disk, since their steps will be repeated
        return len(self._blocks[0])

    def _read_rest(self, after: float) -> np.ndarray:
        """Rows saved by ``append`` that follow step ``after`` without a gap, before any row that a kill has cut off."""
        content = self._rest.read_bytes() if self._rest.is_file() else b""
        rows: list[np.ndarray] = []
        for start in range(0, len(content), SEALED_BYTES):
            sealed = content[start : start + SEALED_BYTES]
            row = np.frombuffer(sealed, NUMBER, len(CURVES)) if len(sealed) == SEALED_BYTES else None
            if row is None or _sealed(row) != sealed:
                break
            if row[0] == after + len(rows) + 1:
                rows.append(row)
        return np.array(rows, dtype=NUMBER).reshape(-1, len(CURVES))


def _sealed(row: np.ndarray) -> bytes:
    content = row.tobytes()
    return content + zlib.crc32(content).to_bytes(4, "little")


def read(path: Path) -> np.ndarray:
    """Read the rows of a ``metrics.npz``. If it is damaged, any exception of zipfile or NumPy passes through."""
    with np.load(path, allow_pickle=False) as content:
        columns = dict(content)
    if "micro_f1" in columns:
        columns |= {"top1": columns["micro_f1"], "top5": np.full_like(columns["micro_f1"], np.nan)}
    return np.stack([columns[name].astype(NUMBER) for name in CURVES], axis=1)


def named(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Columns of ``rows`` by name; for multi-label data, a micro F1 replaces top-1 and top-5."""
    columns = dict(zip(CURVES, rows.T, strict=True))
    if len(rows) and np.isnan(columns["top5"]).all():
        del columns["top5"]
        columns["micro_f1"] = columns.pop("top1")
    return columns
