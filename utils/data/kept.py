"""Files that are made once and kept: the first process that wants one makes it, the others wait for it.

A file gets its name when it is whole. A process that is killed while writing leaves only a ``.partial`` file behind,
and its claim ends with the process.
"""

from __future__ import annotations

import errno
import os
import tempfile
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
    """Context that claims ``path``: of all processes, on all hosts, that claim it, only one at a time is inside.

    Logs ``waiting`` before waiting for another process: check afterwards whether ``path`` is still to be made. Raises
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
    """The lock for ``path``; if ``path`` is a partial file, for the file that it will become."""
    from filelock import FileLock  # here, since most runs find all files made

    stem = path.stem
    if path.suffix == PARTIAL:
        stem = stem.rsplit(".", 1)[0]
    return FileLock(path.with_name(f"{stem}.lock"))


def _acquired(lock: BaseFileLock, timeout: float) -> bool:
    """Take the ``lock`` and return True; False on a file system without locks.

    Raises ``OSError``, for example if another process still holds the lock after ``timeout`` seconds (-1: no limit).
    """
    if not _has_locks(Path(lock.lock_file).parent):  # there filelock would make markers, which outlive a killed process
        return False
    lock.acquire(timeout=timeout)
    return True


def _has_locks(folder: Path) -> bool:
    """Whether the file system of ``folder`` has the locks of flock. Raises ``OSError`` if no file can be made there."""
    import fcntl

    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in WITHOUT_LOCKS
    return True


def _release(lock: BaseFileLock) -> None:
    with suppress(OSError):  # before the release: a process that has it open checks whether it still exists
        os.unlink(lock.lock_file)
    lock.release()


def remove_abandoned(folder: Path) -> None:
    """Remove the partial files that killed processes left in ``folder``: those that no process claims.

    Their names are those of ``whole_file``: others in the user's folder are none of ours.
    """
    for path in folder.glob(f"[!.]*.{'[0-9a-f]' * 32}{PARTIAL}"):
        lock = _lock_of(path)
        with suppress(OSError):
            if _acquired(lock, timeout=0):
                path.unlink(missing_ok=True)
                _release(lock)


@contextmanager
def whole_file(path: Path, reserved: int = 0) -> Iterator[IO[bytes]]:
    """Context that gives a file to write; if the block ends without an error, the file is durably stored as ``path``.

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
    """Write ``content`` to ``path``, completely or not at all. Raises ``OSError``."""
    with whole_file(path) as file:
        file.write(content)
