"""SIGTERM as an exception, for tools that have something to put in order before they end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

TERMINATED = 128 + signal.SIGTERM  # the exit code that shells show for a process that SIGTERM has ended


class Terminated(BaseException):
    """SIGTERM came. No ``Exception``: what is made of a damaged image, say, must not be made of it."""


@contextmanager
def termination_raises(error: type[BaseException] = Terminated) -> Iterator[None]:
    """Within the block the first SIGTERM raises ``error`` and a second one ends the process; then all is as before.

    A process that is forked within the block is ended by the first.
    """
    process = os.getpid()

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != process:
            signal.raise_signal(signal.SIGTERM)
        raise error

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
