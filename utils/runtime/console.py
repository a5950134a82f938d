"""The terminal: Ctrl-C before anything has begun, output that nobody reads any more, a closed terminal.

Import this module before all else, so that it covers slow imports too. Pythons too old for the rest can read it.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any, TextIO

INTERRUPTED = 130  # what shells report for Ctrl-C
OLDEST = (3, 10)  # as in pyproject.toml
ADVICE = (
    "bash scripts/quickstart.sh makes an environment with all that is needed (then: source .venv/bin/activate), or: "
    "python -m pip install -r requirements.txt"
)
GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET)  # from a pipe, terminal and socket whose other end is closed


def begin(program: str) -> None:
    """Prepare this process, whose messages begin with ``program``; end it with exit code 2 if Python is too old.

    Until other handlers take over, Ctrl-C ends the process without a traceback. A closed terminal does not end it; a
    run has its log file.
    """
    refuse_old_python(program)
    outlive_terminal()
    # Not after a shell's &, which makes a process ignore it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: _end(program))


def say_interrupted(program: str) -> None:
    """Let an interrupt that nothing catches, as Ctrl-C during imports, end the process without a traceback."""
    before = sys.excepthook

    def told(kind: Any, error: Any, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            _end(program)
        before(kind, error, trace)

    sys.excepthook = told


def refuse_old_python(program: str) -> None:
    """End the process with exit code 2 and a line if this Python is too old."""
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:2]))
        _say(
            f"{program}: needs Python {'.'.join(map(str, OLDEST))} or newer, and {sys.executable} is {found}; {ADVICE}"
        )
        raise SystemExit(2)


def lacks_package(program: str, error: ImportError) -> int:
    """Print which package is not installed, or is of another version; return the exit code, 2.

    Raises ``error`` again for a module of ours.
    """
    package = (error.name or "").partition(".")[0]
    if package in ("", "components", "main", "models", "scripts", "utils"):
        raise error
    if isinstance(error, ModuleNotFoundError):
        _say(f"{program}: the package {package} is not installed for {sys.executable}; {ADVICE}")
    else:
        _say(f"{program}: another version of {package} is needed than the one for {sys.executable} ({error}); {ADVICE}")
    return 2


def _say(line: str) -> None:
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":  # each machine has packages of its own
        print(line, file=sys.stderr)


def _end(program: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        log_at_once(f"{program}: interrupted")
    os._exit(INTERRUPTED)


def log(line: str) -> None:
    """Print a line on stdout, from any process, before a run has a log."""
    print(line, flush=True)
    note_line()


class _LastLine:
    seconds = time.monotonic()


def note_line() -> None:
    """Note that this process prints something now, for ``silence``."""
    _LastLine.seconds = time.monotonic()


def silence() -> float:
    """Seconds since this process last printed something, or began."""
    return time.monotonic() - _LastLine.seconds


def log_at_once(line: str) -> None:
    """Write a line to stderr from a signal handler, which may have interrupted another write."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def outlive_terminal() -> None:
    """Keep a closed terminal from ending this process: ignore SIGHUP and discard later output."""
    outlive_readers()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def outlive_readers() -> None:
    """Make stdout and stderr accept output even if nobody reads it, for Python and all that it calls.

    Otherwise a training run would end at its next line once ``head`` has read enough, and a tool would lose its exit
    code when Python flushes at the end.
    """
    _open_missing()
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None or stream is getattr(sys, f"__{name}__"):  # otherwise it has been replaced on purpose
            setattr(sys, name, _outliving(stream, number))


def _open_missing() -> None:
    """Open stdin, stdout and stderr if closed: otherwise the next opened file gets their number, and their output."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


class _Outliving(io.FileIO):
    """A stream that becomes /dev/null once its other end is closed."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(data)


def _outliving(stream: TextIO | None, number: int) -> TextIO:
    """A text stream on the file descriptor ``number``, configured like ``stream``, if there is one."""
    raw = _Outliving(number, "w", closefd=False)
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True)
    stream.flush()
    write_through = getattr(stream, "write_through", False)
    return io.TextIOWrapper(
        raw if write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="surrogateescape" if stream.errors == "strict" else stream.errors,  # names of files may be any bytes
        newline="\n",
        line_buffering=bool(stream.line_buffering),
        write_through=write_through,
    )
