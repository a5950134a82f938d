"""Files that are made once and kept: the first of the processes that want one makes it, the others wait for it.

A file gets its name when it is whole. A process that is killed while it writes leaves no more than a ``.partial`` file,
and its claim ends with it.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from utils.data.progress_log import Log, silent
from utils.runtime import files

if TYPE_CHECKING:
    from filelock import BaseFileLock

PARTIAL = ".partial"
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
WITHOUT_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def claimed(path: Path, waiting: str = "", log: Log = silent) -> Iterator[None]:
    """Claim ``path``: within it, this process alone makes it, of all on all hosts that claim it.

    Logs ``waiting`` before it waits for another one: look again whether there is still something to make. Raises
    ``OSError`` if nothing can be written beside ``path``. On a file system without locks nobody waits.
    """
    lock = _lock_of(path)
    try:
        held = _acquired(lock, timeout=0)
    except TimeoutError:
        log(waiting)
        held = _acquired(lock, timeout=-1)
    try:
        yield
    finally:
        if held:
            _release(lock)


def _lock_of(path: Path) -> BaseFileLock:
    """The claim on ``path``, or on what a partial file is written for."""
    from filelock import FileLock  # here, since most starts find all made

    stem = path.stem
    if path.suffix == PARTIAL:
        stem = stem.rsplit(".", 1)[0]
    return FileLock(path.with_name(f"{stem}.lock"))


def _acquired(lock: BaseFileLock, timeout: float) -> bool:
    """Take the ``lock``; False on a file system without locks. Raises ``OSError``, also after ``timeout`` seconds."""
    try:
        lock.acquire(timeout=timeout)
    except OSError as error:  # filelock's Timeout is one, too
        if error.errno not in WITHOUT_LOCKS:
            raise
        Path(lock.lock_file).unlink(missing_ok=True)
        return False
    return True


def _release(lock: BaseFileLock) -> None:
    from filelock import SoftFileLock

    if not isinstance(lock, SoftFileLock):  # which filelock takes where the file system has no other, and removes
        with suppress(OSError):  # before the release: who has it open already looks again whether it is still there
            os.unlink(lock.lock_file)
    lock.release()


def remove_abandoned(folder: Path) -> None:
    """Remove what killed processes left in a ``folder`` of kept files: partial ones on which there is no claim."""
    for path in folder.glob(f"[!.]*{PARTIAL}"):
        lock = _lock_of(path)
        with suppress(OSError):
            if _acquired(lock, timeout=0):
                path.unlink(missing_ok=True)
                _release(lock)


@contextmanager
def whole_file(path: Path, reserved: int = 0) -> Iterator[IO[bytes]]:
    """A file to write, which bears the name ``path`` once the block has ended well, also after a power cut.

    ``reserved``: bytes for which there must be room now, so that a full disk fails before long work and not after it.
    Raises ``OSError``.
    """
    partial = path.with_name(f"{path.stem}.{uuid.uuid4().hex}{PARTIAL}")
    with files.whole_file(path, partial=partial, durable=True) as file:
        if reserved and hasattr(os, "posix_fallocate"):
            _reserve(file, reserved)
        yield file
        file.truncate()


def _reserve(file: IO[bytes], size: int) -> None:
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno in WITHOUT_ROOM:  # otherwise a file system that cannot reserve
            raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there completely or not at all. Raises ``OSError``."""
    with whole_file(path) as file:
        file.write(content)
