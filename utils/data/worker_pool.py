"""Worker processes that read for the training process.

A worker can be killed, mostly by a system that is out of memory, and containers give 64 MB of shared memory by default.
The user can fix both, so both raise ``UserError``; any other error stays what it is.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import connection, util
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from utils.config.settings import UserError, as_user_error
from utils.data.progress_log import ProgressLog
from utils.runtime.cpu import give_back_freed_memory

END_SECONDS = 1.0  # a killed process closes its pipes a little before it has ended
AHEAD = 4  # items that each worker reads ahead
FOR_THE_RUN = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}  # schedulers and terminals send them to all processes
CAN_WAIT = hasattr(signal, "sigtimedwait")  # not on macOS
# As Python itself chose on Linux before 3.14: a process that is not forked imports torch first, and knows no plug-in.
START = "fork" if sys.platform.startswith("linux") else None
LOOK_SECONDS = 2.0  # between two checks of a worker that its training process is alive
MORE_SHARED_MEMORY = (
    "give more (docker run --shm-size 8g), use fewer --workers or a smaller --batch-size, or --workers 0, "
    "which needs none"
)


class WorkerPool:
    """``count`` processes that read items of ``dataset``; with 0, this process reads them.

    Items are handed over unchanged, and arrays do not become tensors: arrays come through a pipe, tensors through
    shared memory (see ``in_shared_memory``). ``pin``: tensors arrive in pinned memory. ``keep``: the processes stay for
    the next ``read``. ``seed``: gives each process random numbers of its own, which only a user's data set may need.
    """

    def __init__(self, dataset: Dataset, count: int, *, pin: bool = False, keep: bool = False, seed: int = 0) -> None:
        self._keys = _Keys()
        self._loader = DataLoader(
            _CatchingUserErrors(dataset),
            batch_size=None,  # a key stands for a batch
            sampler=self._keys,
            num_workers=count,
            collate_fn=_as_it_is,
            pin_memory=pin,
            multiprocessing_context=START if count else None,
            worker_init_fn=partial(_begin_worker, os.getpid()),
            persistent_workers=keep and count > 0,
            prefetch_factor=AHEAD if count else None,
            # its own, so that the number of loaders does not change the run's random numbers
            generator=torch.Generator().manual_seed(seed),
        )
        self._processes: list[multiprocessing.process.BaseProcess] = []
        # Objects that hold the workers' queues must not become garbage together with this pool: the queues would be
        # closed first, and each worker would then wait for 5 s before it is ended.
        self._held: list[Any] = [self._loader]
        weakref.finalize(self, self._held.clear).atexit = False

    def read(self, keys: Iterable[Any]) -> Iterator[Any]:
        """Yield ``dataset[key]`` for each of ``keys``, in order.

        Takes no more of ``keys`` than are read ahead. Raises ``UserError`` if ``dataset`` raises one, without a
        worker's traceback, or if a worker ends.
        """
        self._keys.walk = keys
        for item in self._handed_over() if self._loader.num_workers else self._loader:
            if isinstance(item, UserError):
                try:
                    raise item
                finally:
                    del item  # it refers to this frame, and the frame to the workers: they would end late
            yield item

    def _handed_over(self) -> Iterator[Any]:
        iterator = self._begin()
        self._held[1:] = [iterator]
        try:
            while (item := self._await(lambda: next(iterator, _END))) is not _END:
                yield item
        finally:
            del self._held[1:]

    def _begin(self) -> Iterator[Any]:
        if not self._loader.persistent_workers:
            self._processes = []  # drops those of the previous read
        before = multiprocessing.active_children()
        said = f"--workers {self._loader.num_workers}: processes that read images cannot be started"
        with as_user_error(said, advice="; use fewer, or --workers 0"), signals_for_workers():
            iterator = self._await(lambda: iter(self._loader))  # fails without a process or a semaphore for it
        kill_workers_at_exit()
        started = [process for process in multiprocessing.active_children() if process not in before]
        self._processes = started or self._processes  # none starts if they were kept
        return iterator

    def _await(self, call: Callable[[], Any]) -> Any:
        """Return the result of ``call``, which waits for the workers; raises ``UserError`` if one has ended."""
        self._refuse_ended()
        try:
            return call()
        except (RuntimeError, OSError, EOFError):  # torch's report, or a pipe that lost its other end
            ended = connection.wait([process.sentinel for process in self._processes], END_SECONDS)
            for process in self._processes:
                if process.sentinel in ended:  # closed a moment before the system knows the exit code
                    process.join(END_SECONDS)
            self._refuse_ended()
            raise

    def _refuse_ended(self) -> None:
        """Raise ``UserError`` if a worker has exited, which none does by itself while there are items to read."""
        for process in self._processes:
            if process.exitcode is not None:
                raise UserError(_end_of(process))


def in_chunks(
    work: Dataset, count: int, size: int, what: str, *, workers: int, progress: ProgressLog
) -> Iterator[tuple[range, Any]]:
    """Yield ranges of ``count`` images, ``size`` in each, with the result of ``work`` on each, in order.

    ``work`` runs in at most ``workers`` processes, or with 0 in this one. ``what``: title of the progress.
    """
    chunks = [range(first, min(first + size, count)) for first in range(0, count, size)]
    pool = WorkerPool(work, min(workers, len(chunks)))
    with progress.counting(what, count, "images") as advance:
        for chunk, made in zip(chunks, pool.read(chunks), strict=True):
            yield chunk, made
            advance(len(chunk))


_END = object()


class _Keys:
    """Sampler that yields the keys of the current ``read``; DataLoader keeps this one sampler for all reads."""

    def __init__(self) -> None:
        self.walk: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.walk)


class _CatchingUserErrors(Dataset):
    """Dataset that returns a ``UserError`` of ``dataset`` as an item; DataLoader would bury it in a traceback."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._dataset[key]
        except UserError as error:
            return error


def _as_it_is(item: Any) -> Any:
    return item


def _end_of(process: multiprocessing.process.BaseProcess) -> str:
    """Describe in one line how a worker ended, and what to do."""
    who = f"process {process.pid}, which reads images,"
    code = process.exitcode
    assert code is not None  # it has ended
    if code == -signal.SIGKILL:
        return (
            f"{who} was killed (SIGKILL), by hand or because memory ran out; start again with fewer --workers, "
            "or --workers 0"
        )
    if code == -signal.SIGBUS:
        return f"{who} was killed (SIGBUS), as when shared memory is too small; {MORE_SHARED_MEMORY}"
    how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
    return f"{who} {how}; start again, with --workers 0 when it happens again"


# --------------------------------------------------------------------------------------- shared memory


def shared_bytes(count: int) -> torch.Tensor:
    """Uninitialised uint8 (``count``,); in a worker, in shared memory. Raises ``UserError`` if that is full.

    torch would move a tensor that is not in shared memory there on its way to the training process, in a thread that
    cannot report a lack of room: the training process would wait forever.
    """
    if get_worker_info() is None:
        return torch.empty(count, dtype=torch.uint8)
    try:
        return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(count))
    except RuntimeError as error:  # torch's one line about the system's answer
        raise UserError(
            f"shared memory (/dev/shm) has no room for a batch of {count:,} bytes ({error}); {MORE_SHARED_MEMORY}"
        ) from error


def in_shared_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Copy ``tensor`` into shared memory in a worker, else return it. Raises ``UserError`` as ``shared_bytes`` does."""
    if get_worker_info() is None:
        return tensor
    return shared_bytes(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


# ---------------------------------------------------------------------------------------- signals


@contextmanager
def signals_for_workers() -> Iterator[None]:
    """Context in which new processes start with the run's signals blocked; this process answers them afterwards.

    It also puts back the handler of SIGCHLD that torch replaces: torch's raises an error wherever this process is, even
    while it writes a checkpoint. Without it, the end of a worker is noticed before the next batch or, by DataLoader
    itself, after seconds of waiting for that worker.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_RUN if CAN_WAIT else set())
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(training: int, _: int) -> None:
    """Make a worker end with process ``training``, or at its command, but not on a signal meant for the whole run.

    The training process answers such signals: it finishes its step, for which it may need another batch, and saves. In
    a worker they are blocked from the start (see ``signals_for_workers``).
    """
    give_back_freed_memory()
    if not CAN_WAIT:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    if START == "fork" and os.getppid() != training:  # it has ended already
        os._exit(0)
    threading.Thread(target=_end_with, args=(training, os.getppid()), daemon=True).start()


def _end_with(training: int, parent: int) -> None:
    """End this process when its ``parent`` has ended or process ``training`` sends SIGTERM (DataLoader's last resort).

    torch's own watchdog cannot end a worker whose pipe is full, because each worker holds the others' pipe open.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait(FOR_THE_RUN, LOOK_SECONDS)
        if received is not None and received.si_signo == signal.SIGTERM and received.si_pid == training:
            break
    os._exit(0)


@cache
def kill_workers_at_exit() -> None:
    """Arrange to kill the remaining workers when this process exits, before multiprocessing sends SIGTERM and waits.

    Another process's SIGTERM may be pending in a worker. The system does not queue a second one, and the worker ignores
    the first: the wait would never end.
    """
    util.Finalize(None, _kill_children, exitpriority=0)


def _kill_children() -> None:
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
