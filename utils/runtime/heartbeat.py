"""A line about work that takes long whenever nothing else has been said, so that nobody takes it for dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from utils.runtime import console

SILENCE_SECONDS = 30  # the longest
SHORT_SECONDS = 5  # work that takes no longer is not spoken for: a slow start is no reason to name what begins then


class Heartbeat:
    """Context of work: gives ``log`` the line ``words()`` when this process has said nothing for ``SILENCE_SECONDS``.

    A thread of its own does so, even while a step takes minutes or data does not come. It must read no tensor and enter
    no collective, so ``words`` may use only what the host knows.
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
