"""Stop signals: heard by any process, obeyed by all at the same optimizer step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType, TracebackType

from utils.runtime.console import INTERRUPTED
from utils.runtime.distributed import Distributed

TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: stopped with a checkpoint; the same command with --resume auto goes on
POLL_SECONDS = 0.5  # between two questions to the other processes whether one of them was told to stop


class Stopped(Exception):
    """Training was told to stop and has saved its state; the message says where."""

    def __init__(self, told: signal.Signals, where: str) -> None:
        self.exit_code = INTERRUPTED if told == signal.SIGINT else TRY_AGAIN
        super().__init__(f"stopped by {told.name} {where}; --resume auto continues")


class StoppedAtOnce(BaseException):
    """A stop signal came where nothing is under way that would have to be saved."""

    def __init__(self, told: int, when: str = "before or after training") -> None:
        self.exit_code = INTERRUPTED if told == signal.SIGINT else TRY_AGAIN
        super().__init__(f"stopped by {signal.Signals(told).name} {when}; --resume auto continues")


class StopSignals:
    """As a context manager: SIGTERM and SIGUSR1 raise ``StoppedAtOnce``, within ``held`` they and SIGINT are noted.

    A second SIGINT raises ``KeyboardInterrupt`` there too, for a person who does not want to wait; any other signal
    after the first one changes nothing.

    ``end_at_once`` is for a process that ends when this does. It is called, with the exception, for a stop before
    ``held``: an import that an exception breaks off may pass it on as an ``ImportError``, or go on without what it
    wanted to import. And since the end of a process takes a while, the signals are ignored from then on, for its exit
    code is decided.
    """

    HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, end_at_once: Callable[[BaseException], None] | None = None) -> None:
        self.received = 0
        self._end_at_once = end_at_once
        self._begun = self._holding = self._over = False
        self._before: dict[int, object] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around training, which asks for ``received`` where it can stop."""
        self._begun = self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def __enter__(self) -> StopSignals:
        for number in self.HANDLED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's & has a process ignore Ctrl-C; that stays so
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over = True
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._end_at_once else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            return
        if number == signal.SIGINT and (not self._holding or self.received == number):
            self._raise(KeyboardInterrupt())
        first, self.received = not self.received, self.received or number
        if first and not self._holding:
            self._raise(StoppedAtOnce(number))

    def _raise(self, stop: BaseException) -> None:
        if self._end_at_once and not self._begun:
            self._end_at_once(stop)
        raise stop


class StopConsensus:
    """What one process has met becomes known to all of them, at the same point of the program.

    Every process calls ``poll`` at the same points: between two steps, between two rounds of validation batches. With
    several processes only some of the calls exchange anything, about one in ``POLL_SECONDS``: how many are passed over
    is worked out from what all of them know, so that all of them pass over the same ones.
    """

    def __init__(self, distributed: Distributed, signals: StopSignals | None = None) -> None:
        self.distributed, self.signals = distributed, signals or StopSignals()
        self.begin()

    def begin(self) -> None:
        """To be called where the points come at another pace than before."""
        self._calls, self._interval, self._asked = 0, 1, monotonic()

    def poll(self, failed: bool = False) -> tuple[signal.Signals | None, bool]:
        """A stop signal that some process has received, if any, and whether one of them has ``failed``."""
        received = self.signals.received
        if self.distributed.world_size == 1:
            return signal.Signals(received) if received else None, failed
        self._calls += 1
        if self._calls < self._interval:
            return None, False
        seconds = (monotonic() - self._asked) / self._calls
        number, any_failed, slowest = self.distributed.all_reduce_max([received, failed, seconds])
        within = int(POLL_SECONDS / max(slowest, 1e-6))
        self._calls, self._interval, self._asked = 0, min(2 * self._interval, max(1, within)), monotonic()
        return signal.Signals(int(number)) if number else None, bool(any_failed)
