"""Several labels an image, as tables write them: a list in a cell, or a column for each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MISSING = -1
# What a cell of a class's own column may hold.
CELLS = {
    **dict.fromkeys(("1", "1.0", "true", "yes", "t", "y", "+"), 1),
    **dict.fromkeys(("0", "0.0", "false", "no", "f", "n", "-"), 0),
    **dict.fromkeys(("", "-1", "-1.0", "nan"), MISSING),
}


class LabelLists(NamedTuple):
    """Labels of n images: ``values`` (m,), numbers or names, and of which image each is, ``rows`` int64 (m,).

    ``known``: bool (n,), False for an image of which no label is known, unlike one that shows none of the classes.
    """

    values: np.ndarray
    rows: np.ndarray
    known: np.ndarray

    @classmethod
    def split(cls, cells: Sequence[str | None], separator: str) -> LabelLists:
        """Split names between separators. An empty text is unknown, a separator alone is none of the classes."""
        lists = [[name for part in (cell or "").split(separator) if (name := part.strip())] for cell in cells]
        values = np.array([name for names in lists for name in names], dtype=object)
        rows = np.repeat(np.arange(len(lists)), [len(names) for names in lists])
        return cls(values, rows, np.array([bool((cell or "").strip()) for cell in cells], dtype=bool))

    @classmethod
    def of_arrow(cls, cells: Any) -> LabelLists:
        """Labels of a ``pyarrow.ChunkedArray`` of lists of whole numbers or texts. A missing list is unknown."""
        import pyarrow
        import pyarrow.compute as compute

        lengths = compute.fill_null(compute.list_value_length(cells), 0).to_numpy()
        values = compute.list_flatten(cells)
        text = pyarrow.types.is_string(values.type) or pyarrow.types.is_large_string(values.type)
        values = np.array(values.to_pylist(), dtype=object) if text else values.to_numpy().astype(np.int64)
        return cls(values, np.repeat(np.arange(len(lengths)), lengths), compute.is_valid(cells).to_numpy())

    def matrix(self, numbers: np.ndarray, classes: int) -> np.ndarray:
        """int8 (n, classes) of 1, 0 and -1, missing; ``numbers``: the class of each of ``values``."""
        labels = np.where(self.known[:, None], np.int8(0), np.int8(MISSING)).repeat(classes, axis=1)
        labels[self.rows, numbers] = 1
        return labels


def of_column(cells: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The labels that a class's own column holds, int8 (n,) of 1, 0 and -1, missing; and the rows that hold none."""
    words = {cell: CELLS.get(str(cell if cell is not None else "").strip().lower()) for cell in set(cells)}
    found = [words[cell] for cell in cells]
    wrong = np.array([row for row, label in enumerate(found) if label is None], dtype=np.int64)
    return np.array([MISSING if label is None else label for label in found], dtype=np.int8), wrong
