"""The paths of millions of files in two arrays."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from utils.data.images.stored import ImagePaths

NUL = b"\0"  # the one byte that no path contains


class FilePaths(ImagePaths):
    """An immutable sequence of the paths of files below the folder ``tree``.

    ``names``: uint8 (bytes,), the paths below ``tree``, joined by zero bytes. ``ends``: int64 (n,), where each path
    ends. A list of Python strings would take three times the memory, and more in every worker process: reading a string
    changes its reference count, which copies the page that the processes have shared. The arrays are never written to.
    """

    def __init__(self, tree: str | os.PathLike[str], names: np.ndarray, ends: np.ndarray) -> None:
        self._tree = os.fsencode(os.path.join(tree, ""))
        self.names = names
        self.ends = ends

    @classmethod
    def joined(cls, tree: str | os.PathLike[str], names: bytes) -> FilePaths:
        """Make the sequence from ``names``, the paths below ``tree`` joined by zero bytes."""
        array = np.frombuffer(names, dtype=np.uint8)
        ends = np.append(np.flatnonzero(array == 0), len(array)) if names else np.empty(0)
        return cls(tree, array, ends.astype(np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]  # no slices; ``take`` selects
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        begin = self.ends[place - 1] + 1 if place else 0
        return os.fsdecode(self._tree + self.names[begin : self.ends[place]].tobytes())

    def __iter__(self) -> Iterator[str]:
        return (os.fsdecode(self._tree + name) for name in self.below())

    def below(self) -> list[bytes]:
        """The paths relative to the tree, in order."""
        return self.names.tobytes().split(NUL) if len(self) else []

    def take(self, places: np.ndarray) -> FilePaths:
        names = self.below()
        return self.joined(os.fsdecode(self._tree), NUL.join([names[place] for place in places.tolist()]))

    @property
    def in_one_level(self) -> bool:
        """True if all files lie directly in the tree's folders, none deeper."""
        return np.count_nonzero(self.names == ord("/")) == len(self)  # each path has at least one

    @property
    def identity(self) -> bytes:
        """The last two parts of each path, folder and file name; the paths are joined by zero bytes."""
        if self.in_one_level:
            return self.names.tobytes()
        return NUL.join([b"/".join(name.split(b"/")[-2:]) for name in self.below()])
