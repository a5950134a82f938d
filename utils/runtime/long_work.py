"""Work that takes some processes much longer than others: the others wait, and still notice a lost process.

A collective waits for ``--timeout`` seconds, which is how a frozen or dead process is noticed; unpacking a data set
may take hours. Around such work, a thread of each process meets the others' threads in short rounds, each with a
time-out. The thread of a working process arrives; that of a frozen or dead one does not.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep

import torch
from torch.distributed import ProcessGroup

from utils.config.settings import UserError
from utils.config.spelling import some

LONGEST_SECONDS = 24 * 3600  # for any work: longer work must be waiting for something that will not happen
FIRST_ROUND_SECONDS, ROUND_SECONDS = 0.01, 0.2  # between two rounds; each pause is twice the one before
WAKE = signal.SIGALRM  # interrupts a system call of the main thread, such as the wait for a file lock
NAMED_RANKS = 3  # in a line


class _Interrupt(BaseException):
    """Raised at an arbitrary point of the main thread when its process must not go on."""


class LongWork:
    """A piece of work, named ``what``, on all processes of ``group``, a separate gloo group. Only for the main thread.

    ``waiting_for``: the ranks that the others wait for, as the end of a line.
    """

    def __init__(self, group: ProcessGroup, what: str) -> None:
        self.group = group
        self.what = what
        self.waiting_for = ""
        self._ended = threading.Event()
        self._all_ended = threading.Event()
        self._error: Exception | None = None
        self._over = False
        self._lock = threading.Lock()

    @contextmanager
    def done(self) -> Iterator[None]:
        """Context of the work: ends when the work has ended on all processes, and only then raises its own error.

        Raises torch.distributed's ``RuntimeError`` as soon as another process is lost, and ``UserError`` on all
        processes after ``LONGEST_SECONDS``. A stop signal ends the context at once.
        """
        before = signal.signal(WAKE, self._interrupt)
        threading.Thread(target=self._meet, args=(threading.get_ident(),), name="long work", daemon=True).start()
        failure = None
        try:
            try:
                yield
            except Exception as error:
                failure = error
            self._ended.set()
            self._all_ended.wait()
        except _Interrupt:
            assert self._error is not None  # what interrupts has set it
            raise self._error from None
        finally:
            with self._lock:
                self._over = True
            signal.signal(WAKE, before)
        if failure is not None:
            raise failure

    def _interrupt(self, *_: object) -> None:
        if not self._over:
            raise _Interrupt

    def _meet(self, main_thread: int) -> None:
        """Run in a thread: exchange between ranks, round by round, who is still at work, until none is.

        If a rank is lost or the work is overdue, interrupt the ``main_thread``.
        """
        try:
            self._rounds()
            self._all_ended.set()
        except (RuntimeError, UserError) as error:
            self._error = error
            with self._lock:
                if not self._over:
                    signal.pthread_kill(main_thread, WAKE)

    def _rounds(self) -> None:
        began = monotonic()
        pause = FIRST_ROUND_SECONDS
        while at_work := self._round(monotonic() - began > LONGEST_SECONDS):
            self.waiting_for = f", waiting for rank {some(map(str, at_work), NAMED_RANKS)}"
            if self._ended.is_set():
                sleep(pause)
            else:
                self._ended.wait(pause)
            pause = min(2 * pause, ROUND_SECONDS)

    def _round(self, overdue: bool) -> list[int]:
        """Exchange states between ranks; return the ranks still at work. ``overdue``: raise ``UserError`` if any is."""
        ranks = torch.distributed.get_world_size(self.group)
        state = torch.zeros(ranks + 1, dtype=torch.int64)
        state[torch.distributed.get_rank(self.group)] = not self._ended.is_set()
        state[ranks] = overdue
        torch.distributed.all_reduce(state, group=self.group)
        at_work = state[:ranks].nonzero().flatten().tolist()
        if at_work and state[ranks]:
            raise UserError(
                f"{self.what}: rank {some(map(str, at_work), NAMED_RANKS)} is not done after "
                f"{LONGEST_SECONDS / 3600:g} hours; find out what it waits for, and start again",
                on_all_ranks=True,
            )
        return at_work
