"""Files: written whole or not at all, flushed to the disk, told apart by their digests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def whole_file(
    path: Path, mode: str = "wb", *, partial: Path | None = None, durable: bool = False, **options: Any
) -> Iterator[IO[Any]]:
    """Context that gives a file to write; if the block ends without an error, the file gets the name ``path``.

    ``partial``: the file's name until then; the default is safe if only one process writes in the folder. ``durable``:
    the file survives a power cut. ``options`` are those of ``open``. Raises ``OSError``.
    """
    partial = partial or path.with_name(f".{path.name}.tmp")
    try:
        with open(partial, mode, **options) as file:
            yield file
        if durable:
            sync(partial)
        os.replace(partial, path)
        if durable:
            sync(path.parent)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file's content, or files created or renamed in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
