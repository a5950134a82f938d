"""The person at the terminal: Ctrl-C before anything has begun, output that nobody reads any more, a closed terminal.

To be imported before all else: what is imported later, and takes its time, is then covered too.
"""

import errno
import io
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import TextIO

INTERRUPTED = 130  # what shells report for Ctrl-C
GONE = (
    errno.EPIPE,
    errno.EIO,
    errno.ECONNRESET,
)  # a pipe's, terminal's and socket's answer when its other end is closed


def begin(program: str) -> None:
    """Prepare this process; ``program`` begins its lines.

    Ctrl-C ends it without a traceback until other handlers take over. A closed terminal does not end it: SIGHUP is
    ignored, and what is printed is thrown away from then on; a run has its log file.
    """
    outlive_readers()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's & has a process ignore it
        signal.signal(signal.SIGINT, lambda number, frame: _end(program, frame))


def _end(program: str, _: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        log_at_once(f"{program}: interrupted")
    os._exit(INTERRUPTED)


def log_at_once(line: str) -> None:
    """A line on stderr from a signal's handler, which may have broken off another one."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def outlive_readers() -> None:
    """Make stdout and stderr take what is written whether anybody reads it or not, for Python and all it calls.

    Without this a training would end at its next line when ``head`` has read enough, and a tool's exit code would be
    lost when Python flushes at its end.
    """
    _open_missing()
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None or stream is getattr(sys, f"__{name}__"):  # else somebody has put something in its place
            setattr(sys, name, _outliving(stream, number))


def _open_missing() -> None:
    """Open stdin, stdout and stderr where they are closed: the next file would get their number, and their output."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


class _Outliving(io.FileIO):
    """A stream that becomes /dev/null once its other end is closed."""

    def write(self, data: bytes) -> int | None:
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
    """A text stream on the file descriptor ``number``, made as Python made ``stream``, if it did."""
    raw = _Outliving(number, "w", closefd=False)
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True)
    stream.flush()
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding, errors=stream.errors, newline="\n",
        line_buffering=stream.line_buffering, write_through=stream.write_through,
    )  # fmt: skip
