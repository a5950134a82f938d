"""Work that takes some processes much longer than others: it is waited for, and a lost process is noticed all the same.

A collective waits for ``--timeout`` seconds, so that a process that is frozen or gone is noticed; unpacking a data set
may take hours. Around such work a thread of each process meets the others' threads in short rounds, with a time-out
each. A process that is at work has a thread that comes; a frozen or dead one has none.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import TYPE_CHECKING

from utils.config.settings import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LONGEST_SECONDS = 24 * 3600  # of any work: what is not done by then waits for something that does not come
TELL_SECONDS = 60  # between two lines about who is waited for
FIRST_ROUND_SECONDS, ROUND_SECONDS = 0.01, 0.2  # between two rounds; each pause is twice the one before
WAKE = signal.SIGALRM  # ends a system call of the main thread, the wait for a file's lock for example
NAMED_RANKS = 3  # in a line


class _Interrupt(BaseException):
    """Raised in the main thread, wherever it stands, when its process shall not go on."""


class LongWork:
    """One piece of work on all processes of ``group``, a gloo group of its own. To be made by the main thread.

    ``what`` it is, for ``tell``, which takes a line about who is waited for.
    """

    def __init__(self, group: ProcessGroup, what: str, tell: Callable[[str], None]) -> None:
        self.group, self.what, self.tell = group, what, tell
        self._ended, self._all_ended = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._over = False
        self._lock = threading.Lock()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Around the work: ends when it has ended on all processes.

        What the work raises is raised then, too. ``RuntimeError`` of torch.distributed as soon as another process is
        lost, ``UserError`` on all processes after ``LONGEST_SECONDS``. A stop signal ends it at once.
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
        """The thread: round after round until the work has ended everywhere, or will not."""
        try:
            self._rounds()
            self._all_ended.set()
        except (RuntimeError, UserError) as error:
            self._error = error
            with self._lock:
                if not self._over:
                    signal.pthread_kill(main_thread, WAKE)

    def _rounds(self) -> None:
        began = told = monotonic()
        pause = FIRST_ROUND_SECONDS
        while at_work := self._round(monotonic() - began > LONGEST_SECONDS):
            if monotonic() - told >= TELL_SECONDS:
                told = monotonic()
                self.tell(f"{self.what}: {(told - began) / 60:.0f} min so far, waiting for {_named(at_work)}")
            if self._ended.is_set():
                sleep(pause)
            else:
                self._ended.wait(pause)
            pause = min(2 * pause, ROUND_SECONDS)

    def _round(self, overdue: bool) -> list[int]:
        """The ranks that are still at work."""
        import torch

        ranks = torch.distributed.get_world_size(self.group)
        state = torch.zeros(ranks + 1, dtype=torch.int64)
        state[torch.distributed.get_rank(self.group)] = not self._ended.is_set()
        state[ranks] = overdue
        torch.distributed.all_reduce(state, group=self.group)
        at_work = state[:ranks].nonzero().flatten().tolist()
        if at_work and state[ranks]:
            raise UserError(
                f"{self.what}: {_named(at_work)} is not done after {LONGEST_SECONDS / 3600:g} hours; see what it waits "
                "for, and start again",
                on_all_ranks=True,
            )
        return at_work


def _named(ranks: list[int]) -> str:
    more = f" and {len(ranks) - NAMED_RANKS} more" if len(ranks) > NAMED_RANKS else ""
    return f"rank {', '.join(map(str, ranks[:NAMED_RANKS]))}{more}"
