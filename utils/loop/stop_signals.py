"""Stop signals: any rank may receive one; all ranks stop at the same optimizer step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any

from utils.runtime.console import INTERRUPTED

if TYPE_CHECKING:
    from utils.runtime.distributed import Distributed

TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: stopped with a checkpoint; the same command with --resume auto goes on
POLL_SECONDS = 0.5  # between two exchanges about whether any rank received a signal


class TrainingFailure(RuntimeError):
    """Training cannot continue; the message names the step, the reason and what to do."""


class Stopped(Exception):
    """Training received a stop signal and has saved its state; the message says at which step."""

    def __init__(self, received: signal.Signals, where: str) -> None:
        self.exit_code = INTERRUPTED if received == signal.SIGINT else TRY_AGAIN
        super().__init__(f"stopped by {received.name} {where}; --resume auto continues")


class StoppedAtOnce(BaseException):
    """A stop signal arrived while there was nothing to save."""

    def __init__(self, received: int, when: str = "before or after training") -> None:
        self.exit_code = INTERRUPTED if received == signal.SIGINT else TRY_AGAIN
        super().__init__(f"stopped by {signal.Signals(received).name} {when}; --resume auto continues")


class StopSignals:
    """Context in which SIGTERM and SIGUSR1 raise ``StoppedAtOnce``; within ``held``, they and SIGINT are only noted.

    Within ``held``, a second SIGINT raises ``KeyboardInterrupt``, for a user who does not want to wait; any other
    signal after the first changes nothing.

    ``end_at_once`` is for a process that ends with this context. It is called with the exception if a signal arrives
    before ``held``: an import that an exception interrupts may raise an ``ImportError`` instead, or continue without
    the module. Once the context ends, the exit code is final, so signals are ignored while the process ends.
    """

    HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, end_at_once: Callable[[BaseException], None] | None = None) -> None:
        self.received = 0
        self._end_at_once = end_at_once
        self._begun = self._holding = self._over = False
        self._before: dict[int, Any] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context of training, which polls ``received`` wherever it can stop."""
        self._begun = self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def __enter__(self) -> StopSignals:
        for number in self.HANDLED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's & makes a process ignore Ctrl-C; keep that
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._end_at_once else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            return
        if number == signal.SIGINT and (not self._holding or self.received == number):
            self._raise(KeyboardInterrupt())
        first = not self.received
        self.received = self.received or number
        if first and not self._holding:
            self._raise(StoppedAtOnce(number))

    def _raise(self, stop: BaseException) -> None:
        if self._end_at_once and not self._begun:
            self._end_at_once(stop)
        raise stop


class StopConsensus:
    """Exchange by which all ranks learn, at the same point of the program, of a signal or failure on any rank.

    Every rank calls ``poll`` at the same points: between two steps, and between two rounds of validation batches. With
    several ranks, only about one call in ``POLL_SECONDS`` exchanges anything. Which calls do so is computed from
    numbers that all ranks share, so all ranks skip the same calls.
    """

    def __init__(self, distributed: Distributed, signals: StopSignals | None) -> None:
        self.distributed = distributed
        self.signals = signals or StopSignals()
        self.begin()

    def begin(self) -> None:
        """Measure the pace of polls anew; call it when polls start to come at another pace."""
        self._calls = 0
        self._interval = 1
        self._asked = monotonic()

    def poll(self, failed: bool = False) -> tuple[signal.Signals | None, bool]:
        """The stop signal that any rank has received, or None, and whether any rank has ``failed``."""
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
