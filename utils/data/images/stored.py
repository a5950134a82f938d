"""Images that are not files of their own, such as those in a shard; functions that read images accept them, too."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, BinaryIO

import numpy as np

RAW = b"\x93NUMPY"  # how a .npy file begins: uint8 pixels (height, width) or (height, width, 3), not compressed


class Stored(str):
    """The name of image ``number`` inside something larger, its ``source``; it can be used wherever a path can."""

    source: NumberedImages
    number: int

    @classmethod
    def of(cls, source: NumberedImages, number: int) -> Stored:
        image = cls(source.name_of(number))
        image.source = source
        image.number = number
        return image

    @property
    def version(self) -> str:
        """Text that changes when the image does."""
        return self.source.version_of(self.number)

    def content(self) -> bytes:
        """The image file's bytes. Raises ``OSError`` if they cannot be read or are damaged."""
        return self.source.read(self.number)


class ImagePaths(Sequence[str], ABC):
    """Sequence of the paths of images, or of ``Stored`` names, without slices."""

    @abstractmethod
    def take(self, places: np.ndarray) -> ImagePaths:
        """The images at ``places``, int64 (m,), in that order."""

    @property
    @abstractmethod
    def identity(self) -> bytes:
        """Bytes that are the same for the same images in the same order, wherever they are stored."""


class NumberedImages(ImagePaths):
    """The images of a split called ``name``, as a sequence of ``Stored`` names, each made only when it is asked for.

    ``places``: the images' numbers, int64 (n,), at first those of all images.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.places = np.arange(count)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Stored:  # type: ignore[override]  # no slices; ``take`` selects
        return Stored.of(self, int(self.places[index]))

    def take(self, places: np.ndarray) -> Any:
        taken = copy(self)
        taken.places = self.places[places]
        return taken

    def name_of(self, number: int) -> str:
        """The name of an image in messages, SPLIT[NUMBER] by default."""
        return f"{self.name}[{number}]"

    @abstractmethod
    def read(self, number: int) -> bytes:
        """The bytes of the image file with this ``number``. Raises ``OSError``."""

    @abstractmethod
    def version_of(self, number: int) -> str:
        """Text that changes when the image with this ``number`` does."""


class NamedBytes(io.BytesIO):
    """A file's content in memory; ``str`` gives its name, for messages."""

    def __init__(self, name: str, content: bytes) -> None:
        super().__init__(content)
        self.name = str(name)

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__  # in Pillow's messages


def opened(path: str | BinaryIO) -> str | BinaryIO:
    """Load the content of a ``Stored`` image, so that several readers read it once; return any other ``path`` itself.

    Raises ``OSError``.
    """
    return NamedBytes(path, path.content()) if isinstance(path, Stored) else path


def version_of(path: str) -> str:
    """Text that changes when the image file at ``path`` does, to recognise outdated copies. The file is not read.

    Size and modification time alone may miss that two files were swapped; inode and change time reveal it.
    """
    if isinstance(path, Stored):
        return path.version
    try:
        status = os.stat(path)
    except OSError:  # decoding it reports the error
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def content_of(path: str) -> bytes:
    """The bytes of the image file at ``path``. Raises ``OSError``."""
    if isinstance(path, Stored):
        return path.content()
    with open(path, "rb") as file:
        return file.read()
