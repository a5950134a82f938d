"""One process at what several want made: the first works, with a file locked meanwhile, under another name."""

from __future__ import annotations

import errno
import os
import time
import uuid
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path

from utils.config.settings import UserError
from utils.data.progress_log import Log

ABANDONED_SECONDS = 24 * 3600  # without locks: age from which a temporary file is taken for a dead process's
MISTAKE = b"UserError: "  # begins what a process that met a damaged image leaves to those waiting for it


def claim(path: Path, waiting: str, say: Log, heed_mistakes: bool) -> FileIO | None:
    """The temporary file of ``path``, open and locked. None when another process ended its claim meanwhile.

    ``waiting`` is what ``say`` hears when one has it. Raises ``UserError`` when that process met a mistake of the
    user's and ``heed_mistakes`` is set, ``OSError`` when nothing can be written here.
    """
    import fcntl

    name = path.with_suffix(".partial")
    with ExitStack() as closed_on_return:
        file = closed_on_return.enter_context(open(name, "r+b", buffering=0, opener=_open_or_create))
        locked = _try_lock(file)
        if locked is None:
            return open(path.with_suffix(f".{uuid.uuid4().hex}.partial"), "x+b", buffering=0)
        if not locked:
            say(waiting)
            fcntl.lockf(file, fcntl.LOCK_EX)
        if _is_at(file, name):
            closed_on_return.pop_all()
            return file
        left = b""
        with suppress(OSError):  # a network file system may have dropped it
            left = file.read(1 << 16)
        if heed_mistakes and not locked and left.startswith(MISTAKE):
            raise UserError(left[len(MISTAKE) :].decode("utf-8", "surrogateescape"))
    return None


def _open_or_create(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_CREAT, 0o666)


def _try_lock(file: FileIO) -> bool | None:
    """Lock ``file`` until it is closed, by whatever end, also kill -9. False: another process has the lock.

    None on a file system that knows no locks. Worker processes do not inherit a record lock.
    """
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def _is_at(file: FileIO, name: Path) -> bool:
    """Whether ``name`` is still this file: the process that had it before has neither renamed nor removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name))
    except FileNotFoundError:
        return False


def leave(file: FileIO, error: UserError) -> None:
    """Write the mistake into the temporary file, so that those who wait need not find it once more, in turn."""
    with suppress(OSError):
        file.truncate(0)
        file.seek(0)
        file.write(MISTAKE + str(error).encode("utf-8", "surrogateescape"))


def remove_abandoned(folder: Path, own: Path) -> None:
    """Remove the temporary files of processes that were killed: those whose lock is free."""
    for path in folder.glob("*.partial"):
        if path != own:  # closing a second handle of it would end the lock
            with suppress(OSError), open(path, "r+b") as file:
                locked = _try_lock(file)
                if locked or (locked is None and time.time() - path.stat().st_mtime > ABANDONED_SECONDS):
                    os.unlink(path)
