"""Images that are no file of their own, such as those in a shard; everything that reads an image takes them too."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from typing import BinaryIO

RAW = b"\x93NUMPY"  # how a .npy file begins: uint8 pixels (height, width) or (height, width, 3), not compressed


class Stored(str, ABC):
    """The name of an image inside something larger; it stands wherever a path does."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Text that changes when the image does."""

    @abstractmethod
    def content(self) -> bytes:
        """The image file's bytes. Raises ``OSError`` if they cannot be read or are damaged."""


class NamedBytes(io.BytesIO):
    """A file's content in memory; ``str`` gives its name, for messages."""

    def __init__(self, name: str, content: bytes) -> None:
        super().__init__(content)
        self.name = str(name)

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__  # in Pillow's messages


def opened(path: str | BinaryIO) -> str | BinaryIO:
    """``path`` itself, or the content of one that is ``Stored``, so that several readers read it once.

    Raises ``OSError``.
    """
    return NamedBytes(path, path.content()) if isinstance(path, Stored) else path


def version_of(path: str) -> str:
    """Text that changes when the image file at ``path`` does, for what is kept of it. Nothing of the file is read.

    Size and time alone do not tell files apart that change places; inode and time of change do.
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
