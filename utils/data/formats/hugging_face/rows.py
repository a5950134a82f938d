"""Images in the rows of a table, read by their number."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np

from utils.data.formats.hugging_face.files import library
from utils.data.images.stored import Stored, version_of


class Row(Stored):
    """The image in a row, named SPLIT[NUMBER]."""

    rows: Rows
    number: int

    @property
    def version(self) -> str:
        """Names the table's files and the column, and an image's own file if it lies outside of the table."""
        return f"{self.rows.version}\0{self.number}{self.rows.version_elsewhere(self.number)}"

    def content(self) -> bytes:
        return self.rows.read(self.number)

    def __reduce__(self) -> Any:
        """Across processes goes the number; a table is known to all that were forked from the one that opened it."""
        return _row, (self.rows.key, str(self), self.number)


def _row(key: int, name: str, number: int) -> Row:
    row = Row(name)
    row.rows = _opened[key]
    row.number = number
    return row


_opened: list[Rows] = []


class Rows(Sequence[str]):
    """The images of a split as a sequence of names; each ``Row`` is made when it is asked for.

    ``dataset``: a ``datasets.Dataset`` that maps its files, so that memory does not grow with their number.
    ``places``: which of its rows, int64 (n,); None for all.
    """

    def __init__(self, dataset: Any, column: str, where: str, root: str, places: np.ndarray | None = None) -> None:
        feature = dataset.features[column]
        dataset = dataset.select_columns([column]).with_format(None)  # save_to_disk keeps another one
        if isinstance(feature, library().Image):
            dataset = dataset.cast_column(column, library().Image(decode=False))
        self._dataset = dataset
        self._column = column
        self._where = where
        self._root = root
        self._places = np.arange(len(dataset)) if places is None else places
        self.key = len(_opened)
        _opened.append(self)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Row:
        number = int(self._places[index])
        return _row(self.key, f"{self._where}[{number}]", number)

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def take(self, places: np.ndarray) -> Rows:
        """The rows at ``places``, int64 (m,), in that order."""
        return Rows(self._dataset, self._column, self._where, self._root, self._places[places])

    def read(self, number: int) -> bytes:
        """The image file in row ``number``. Raises ``OSError``."""
        try:
            value = self._dataset[number][self._column]
        except Exception as error:  # pyarrow's errors have no common base
            raise OSError(f"the row cannot be read: {error}") from error
        if isinstance(value, dict):
            path = value.get("path")
            value = value.get("bytes")
            if value is None and path:
                if "://" in path:
                    raise OSError(f"it lies at {path}, and nothing is fetched")
                with open(self._beside(path), "rb") as file:
                    return file.read()
        if not isinstance(value, bytes):
            raise OSError("the row holds no image")
        return value

    def _beside(self, path: str) -> str:
        return os.path.join(self._root, path)

    @cached_property
    def version(self) -> str:
        """Text that changes when the table's files do, and another one for each column."""
        return " ".join([self._column, *(version_of(file["filename"]) for file in self._dataset.cache_files)])

    def version_elsewhere(self, number: int) -> str:
        """Text that changes when the file does in which the image of a row lies; empty for one in the table."""
        path = self._elsewhere.get(number)
        if path is None:
            return ""
        return f"\0{path}\0{version_of(self._beside(path))}"

    @cached_property
    def _elsewhere(self) -> dict[int, str]:
        """The paths of images that do not lie in the table, by the numbers of their rows."""
        import pyarrow
        import pyarrow.compute

        cells = self._cells()
        if not pyarrow.types.is_struct(cells.type) or cells.type.get_field_index("path") < 0:
            return {}
        content, paths = (pyarrow.compute.struct_field(cells, name) for name in ("bytes", "path"))
        outside = pyarrow.compute.and_(pyarrow.compute.is_null(content), pyarrow.compute.is_valid(paths))
        numbers = np.flatnonzero(outside.to_numpy()).tolist()
        return dict(zip(numbers, paths.filter(outside).to_pylist(), strict=True))

    def _cells(self) -> Any:
        """The column, a ``pyarrow.ChunkedArray`` that maps the table's files."""
        return self._dataset.with_format("arrow")[:].column(self._column)

    @cached_property
    def identity(self) -> str:
        """Text that is equal for images of equal sizes in bytes in equal order, wherever they lie.

        It needs no more than where each image begins and ends, and of those outside of the table their files' sizes.
        """
        import pyarrow
        import pyarrow.compute

        cells = self._cells()
        if pyarrow.types.is_struct(cells.type):
            cells = pyarrow.compute.struct_field(cells, "bytes")
        lengths = pyarrow.compute.fill_null(pyarrow.compute.binary_length(cells), 0).to_numpy().astype("<i8")
        for number, path in self._elsewhere.items():
            with suppress(OSError):  # reading it reports the error
                lengths[number] = os.path.getsize(self._beside(path))
        return hashlib.sha256(lengths[self._places].tobytes()).hexdigest()
