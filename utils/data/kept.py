"""One process makes a file that several want: the first one works on a locked temporary file, the others wait.

filelock cannot replace this: its flock is inherited by forked workers, which would keep a killed process's claim.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO

from utils.config.settings import UserError
from utils.data.progress_log import Log

ABANDONED_SECONDS = 24 * 3600  # without locks: age from which a temporary file counts as a dead process's
MISTAKE = b"UserError: "  # prefix of the message that a process leaves for those waiting, for example on a bad image


def claim(path: Path, waiting: str, log: Log, raise_mistakes: bool) -> FileIO | None:
    """The temporary file of ``path``, open and locked. None if another process had claimed it and is done now.

    Logs ``waiting`` before it waits for another process. Raises ``UserError`` if that process failed with one and
    ``raise_mistakes`` is set, ``OSError`` if nothing can be written here.
    """
    import fcntl

    name = path.with_suffix(".partial")
    with ExitStack() as closed_on_return:
        file = closed_on_return.enter_context(open(name, "r+b", buffering=0, opener=_open_or_create))
        locked = try_lock(file)
        if locked is None:
            return open(path.with_suffix(f".{uuid.uuid4().hex}.partial"), "x+b", buffering=0)
        if not locked:
            log(waiting)
            fcntl.lockf(file, fcntl.LOCK_EX)
        if _is_at(file, name):
            closed_on_return.pop_all()
            return file
        left = b""
        with suppress(OSError):  # a network file system may have dropped it
            left = file.read(1 << 16)
        if raise_mistakes and not locked and left.startswith(MISTAKE):
            raise UserError(left[len(MISTAKE) :].decode("utf-8", "surrogateescape"))
    return None


@contextmanager
def held(file: FileIO) -> Iterator[None]:
    """The claim on ``file``, which ends with the block. If the block fails the file is removed.

    A ``UserError`` is left in it, to spare each waiting process the same failure in turn.
    """
    with file:
        try:
            yield
        except BaseException as error:
            with suppress(OSError):
                if isinstance(error, UserError):
                    file.truncate(0)
                    file.seek(0)
                    file.write(MISTAKE + str(error).encode("utf-8", "surrogateescape"))
            with suppress(OSError):
                os.unlink(file.name)
            raise


def _open_or_create(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_CREAT, 0o666)


def try_lock(file: IO[bytes]) -> bool | None:
    """Lock ``file`` until it is closed or the process ends, even by kill -9. False: another process has the lock.

    None on a file system without locks. Worker processes do not inherit a record lock.
    """
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def _is_at(file: FileIO, name: Path) -> bool:
    """Whether ``name`` is still this file: the process that had the lock has neither renamed nor removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name))
    except FileNotFoundError:
        return False


def remove_abandoned(folder: Path, own: Path | None = None) -> None:
    """Remove the temporary files of killed processes: those whose lock is free. ``own``: that of this process."""
    for path in folder.glob("*.partial"):
        if path != own:  # closing a second handle would release the lock
            with suppress(OSError), open(path, "r+b") as file:
                locked = try_lock(file)
                if locked or (locked is None and time.time() - path.stat().st_mtime > ABANDONED_SECONDS):
                    os.unlink(path)
