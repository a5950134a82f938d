"""SIGTERM as an exception, for tools that have something to put in order before they end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(Exception):
    """SIGTERM came."""


@contextmanager
def termination_raises(error: type[BaseException] = Terminated) -> Iterator[None]:
    """Within the block SIGTERM raises ``error``; after it, what held before holds again.

    A handler that stayed would be inherited by every process forked later, which then could not be ended by SIGTERM.
    """

    def end(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
