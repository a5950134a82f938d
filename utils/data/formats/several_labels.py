"""Multi-label data as tables store it: a list of labels in a cell, or a column for each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from utils.config.settings import UserError

MISSING = -1
# Contents that a cell in a class's own column may have.
CELLS = {
    **dict.fromkeys(("1", "1.0", "true", "yes", "t", "y", "+"), 1),
    **dict.fromkeys(("0", "0.0", "false", "no", "f", "n", "-"), 0),
    **dict.fromkeys(("", "-1", "-1.0", "nan"), MISSING),
}


class LabelLists(NamedTuple):
    """Labels of n images: ``values`` (m,), numbers or names, and ``rows``, int64 (m,), the image that each belongs to.

    ``known``: bool (n,), False if the image's labels are unknown; an image that shows none of the classes is known.
    """

    values: np.ndarray
    rows: np.ndarray
    known: np.ndarray

    @classmethod
    def split(cls, cells: Sequence[str | None], separator: str) -> LabelLists:
        """Split cells at ``separator`` into names. Empty cells are unknown; a separator alone means no class at all."""
        lists = [[name for part in (cell or "").split(separator) if (name := part.strip())] for cell in cells]
        values = np.array([name for names in lists for name in names], dtype=object)
        rows = np.repeat(np.arange(len(lists)), [len(names) for names in lists])
        return cls(values, rows, np.array([bool((cell or "").strip()) for cell in cells], dtype=bool))

    @classmethod
    def of_arrow(cls, cells: Any) -> LabelLists:
        """Convert a ``pyarrow.ChunkedArray`` of lists of whole numbers or texts. A missing list is unknown."""
        import pyarrow.compute as compute

        lengths = compute.fill_null(compute.list_value_length(cells), 0).to_numpy()
        values = compute.list_flatten(cells)
        text = is_text(values.type)
        values = np.array(values.to_pylist(), dtype=object) if text else values.to_numpy().astype(np.int64)
        return cls(values, np.repeat(np.arange(len(lengths)), lengths), compute.is_valid(cells).to_numpy())

    @property
    def are_truth_values(self) -> bool:
        """True if the lists seem to say of each class whether it is shown: all known ones are of one length, 0s and 1s.

        One of them must repeat a number, which no list of classes does, or be 1, 0: lists of two classes would be 0, 1.
        """
        lengths = np.bincount(self.rows, minlength=len(self.known))[self.known]
        values = self.values
        if values.dtype == object:
            values = np.array([{"0": 0, "1": 1}.get(value, MISSING) for value in values], dtype=np.int64)
        if not len(lengths) or not lengths[0] or (lengths != lengths[0]).any() or not np.isin(values, (0, 1)).all():
            return False
        shown = np.bincount(self.rows, values, minlength=len(self.known))[self.known]
        falls = lengths[0] == 2 and (values[::2] > values[1::2]).any()
        return bool(falls or ((shown > 1) | (lengths - shown > 1)).any())

    def refuse_truth_values(self, where: str) -> None:
        """Raise ``UserError``, which begins with ``where``, if these are no lists of classes: ``are_truth_values``."""
        if self.are_truth_values:
            size = len(self.values) // self.known.sum()
            raise UserError(
                f"{where} holds {size} zeros and ones, which seem to say for each class whether it is shown; give "
                "lists of the classes shown, or a column for each class (--label-columns)"
            )

    def matrix(self, numbers: np.ndarray, classes: int) -> np.ndarray:
        """Labels as int8 (n, classes): 1 shown, 0 not shown, -1 missing. ``numbers``: (m,), the class of each value."""
        labels = np.where(self.known[:, None], np.int8(0), np.int8(MISSING)).repeat(classes, axis=1)
        labels[self.rows, numbers] = 1
        return labels


def is_text(kind: Any) -> bool:
    """True if cells of the type ``kind``, pyarrow's, hold text."""
    from pyarrow import types

    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def of_column(cells: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Labels of a class, from its own column: int8 (n,), 1, 0, or -1 if missing; and the invalid cells' rows, int64."""
    found = [CELLS.get(str("" if cell is None else cell).strip().lower()) for cell in cells]
    wrong = np.array([row for row, label in enumerate(found) if label is None], dtype=np.int64)
    return np.array([MISSING if label is None else label for label in found], dtype=np.int8), wrong
