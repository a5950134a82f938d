"""A line about long work whenever nothing else has been printed for a while, so that nobody takes it for dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from utils.runtime import console

SILENCE_SECONDS = 30  # the longest time without a line
SHORT_SECONDS = 5  # shorter work gets no line: a slow start is no reason to name the work that begins then


class Heartbeat:
    """Context of work: gives ``log`` the line ``words()`` after this process was silent for ``SILENCE_SECONDS``.

    A separate thread does so, even while a step takes minutes or data does not arrive. The thread must read no tensor
    and enter no collective, so ``words`` may use only what the host knows.
    """

    def __init__(self, words: Callable[[], str], log: Callable[[str], None]) -> None:
        self.words = words
        self.log = log
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        speaks_from = time.monotonic() + min(SHORT_SECONDS, SILENCE_SECONDS)
        while not self._ended.wait(due := max(SILENCE_SECONDS - console.silence(), speaks_from - time.monotonic())):
            if due <= 0:
                console.note_line()
                with suppress(OSError):  # a full disk: the main thread meets it, too
                    self.log(self.words())
