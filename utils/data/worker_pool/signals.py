"""Signals around worker processes: who answers which, and how workers end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import util
from typing import Any

FOR_THE_RUN = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}  # schedulers and terminals send them to all processes
CAN_WAIT = hasattr(signal, "sigtimedwait")  # not on macOS
LOOK_SECONDS = 2.0  # between two checks of a worker that its training process is alive


@contextmanager
def run_signals_blocked() -> Iterator[None]:
    """A process started inside begins with the run's signals blocked; this one answers them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_RUN if CAN_WAIT else set())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_run_signals(training: int, _: int) -> None:
    """In a worker: end with process ``training``, or when it says so, but not on a signal meant for the whole run.

    The training process answers those: it finishes its step, for which it may need another batch, and saves. Here they
    are blocked from the beginning (see ``run_signals_blocked``).
    """
    if not CAN_WAIT:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    if multiprocessing.get_start_method() == "fork" and os.getppid() != training:  # it has ended already
        os._exit(0)
    threading.Thread(target=_end_with, args=(training, os.getppid()), daemon=True).start()


def _end_with(training: int, parent: int) -> None:
    """End this process when its ``parent`` has ended or ``training`` sends SIGTERM, ``DataLoader``'s last resort.

    torch's own watchdog cannot end a worker whose pipe is full, because each worker holds the others' pipe open.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait(FOR_THE_RUN, LOOK_SECONDS)
        if received is not None and received.si_signo == signal.SIGTERM and received.si_pid == training:
            break
    os._exit(0)


@cache
def kill_workers_at_exit() -> None:
    """At this process's end, before multiprocessing sends SIGTERM to the workers that are left and waits for them.

    Another process's SIGTERM may be pending there. The system does not queue a second one, and the worker ignores the
    first: the wait would never end.
    """
    util.Finalize(None, _kill_children, exitpriority=0)


def _kill_children() -> None:
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


class ChildHandler:
    """Answers SIGCHLD. torch's own handler raises an error at arbitrary points, even while a checkpoint is written.

    This one wraps it and raises only while a batch of the worker that ended is waited for. Elsewhere nothing is lost:
    the end is noticed before the next batch.
    """

    def __init__(self) -> None:
        self._torchs: Callable[..., Any] | None = None
        self._worker_ended: Callable[[], bool] | None = None

    def install(self) -> None:
        """To be called once torch has installed its own."""
        if threading.current_thread() is threading.main_thread():  # no other may
            present = signal.getsignal(signal.SIGCHLD)
            if callable(present) and present is not self:
                self._torchs = present
                signal.signal(signal.SIGCHLD, self)

    def __call__(self, number: int, frame: Any) -> None:
        try:
            self._torchs(number, frame)
        except RuntimeError:
            if self._worker_ended is not None and self._worker_ended():
                raise

    @contextmanager
    def raising_if(self, worker_ended: Callable[[], bool]) -> Iterator[None]:
        """Within it, the handler raises if ``worker_ended``."""
        self._worker_ended = worker_ended
        try:
            yield
        finally:
            self._worker_ended = None


child_handler = ChildHandler()
