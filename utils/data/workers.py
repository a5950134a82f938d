"""Worker processes that read for the training process: what their end, or too little shared memory, is told as.

A worker can be killed, mostly by a system that is out of memory, and containers give 64 MB of shared memory where
nothing else is said. Both are the user's to mend, so both are a ``UserError``; whatever else goes wrong stays as it is.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import connection, util
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from utils.config.settings import UserError

FOR_THE_RUN = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}  # sent to all its processes by schedulers and terminals
CAN_WAIT = hasattr(signal, "sigtimedwait")  # not on macOS
LOOK_SECONDS = 2.0  # between two looks of a worker for its training process
END_SECONDS = 1.0  # a process that was killed has closed its pipes a little before it has ended
AHEAD = 4  # batches that each worker reads ahead


class Workers:
    """What ``dataset`` gives for each of ``parts``, in order, read by ``count`` processes; 0 reads in place.

    ``parts`` may change between two walks. What is handed over is handed over as it is, without tensors being made of
    arrays: arrays come through a pipe, tensors through shared memory (see ``in_shared_memory``). A ``UserError`` that
    ``dataset`` raises is raised here without a worker's traceback. ``keep``: the processes stay for the next walk.
    """

    def __init__(
        self, dataset: Dataset, parts: list[Any], count: int, *, pin: bool = False, keep: bool = False
    ) -> None:
        self._loader = DataLoader(
            _Reads(dataset),
            batch_size=None,  # the parts are the batches
            sampler=parts,
            num_workers=count,
            collate_fn=_as_it_is,
            pin_memory=pin,
            worker_init_fn=partial(_leave_signals, os.getpid()),
            persistent_workers=keep and count > 0,
            prefetch_factor=AHEAD if count else None,
            generator=torch.Generator(),  # its own: however many loaders there were, the run draws the same numbers
        )
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def __iter__(self) -> Iterator[Any]:
        """Raises ``UserError`` when a worker ends."""
        for read in self._handed_over() if self._loader.num_workers else self._loader:
            if isinstance(read, UserError):
                try:
                    raise read
                finally:
                    del read  # it refers to this frame, and the frame to the workers: they would end late
            yield read

    def _handed_over(self) -> Iterator[Any]:
        iterator = self._begin()
        while (read := self._await(lambda: next(iterator, _END))) is not _END:
            yield read

    def _begin(self) -> Iterator[Any]:
        if not self._loader.persistent_workers:
            self._processes = []  # those of the walk before
        before = multiprocessing.active_children()
        try:
            with _signals_held_back():  # until the workers are ready to leave them
                iterator = self._await(lambda: iter(self._loader))
        except OSError as error:  # no process, or no semaphore in shared memory
            raise UserError(
                f"--workers {self._loader.num_workers}: processes that read images cannot be started "
                f"({error.strerror or error}); use fewer, or --workers 0"
            ) from error
        _child_handler.install()
        _kill_left_workers_at_the_end()
        started = [process for process in multiprocessing.active_children() if process not in before]
        self._processes = started or self._processes  # none is started where they were kept
        return iterator

    def _await(self, call: Callable[[], Any]) -> Any:
        """What ``call`` gives, which waits for the workers."""
        self._refuse_ended()
        try:
            with _child_handler.raising_for(self):
                return call()
        except (RuntimeError, OSError, EOFError):  # torch's report, or what comes of a pipe without another end
            connection.wait([process.sentinel for process in self._processes], END_SECONDS)
            self._refuse_ended()
            raise

    @property
    def ended(self) -> list[multiprocessing.process.BaseProcess]:
        """The workers that have ended, which none does by itself while there is something to read."""
        return [process for process in self._processes if process.exitcode is not None]

    def _refuse_ended(self) -> None:
        if self.ended:
            raise UserError(_end_of(self.ended[0]))


_END = object()


class _Reads(Dataset):
    """A data set whose ``UserError`` is handed over, because DataLoader would bury it in a worker's traceback."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __getitem__(self, part: Any) -> Any:
        try:
            return self._dataset[part]
        except UserError as error:
            return error


def _as_it_is(read: Any) -> Any:
    return read


def _end_of(process: multiprocessing.process.BaseProcess) -> str:
    """How a worker ended and what to do, in one line."""
    who, code = f"process {process.pid}, which reads images,", process.exitcode
    if code == -signal.SIGKILL:
        return (
            f"{who} was killed (SIGKILL), by hand or because memory ran out; start again with fewer --workers, "
            "or --workers 0"
        )
    if code == -signal.SIGBUS:
        return f"{who} was killed (SIGBUS), as when shared memory is too small; {_MORE_SHARED_MEMORY}"
    how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
    return f"{who} {how}; start again, with --workers 0 when it happens again"


# ------------------------------------------------------------------------------------ shared memory

_MORE_SHARED_MEMORY = (
    "give more (docker run --shm-size 8g), use fewer --workers or a smaller --batch-size, or --workers 0, "
    "which needs none"
)


def shared_bytes(count: int) -> torch.Tensor:
    """uint8 (``count``,), not initialised; in a worker in shared memory. Raises ``UserError`` when that is used up.

    A tensor that is not in shared memory would be brought there on its way to the training process by a thread that
    can tell nobody when there is no room: the training process would wait for ever.
    """
    if get_worker_info() is None:
        return torch.empty(count, dtype=torch.uint8)
    try:
        return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(count))
    except RuntimeError as error:  # torch's one line about the system's answer
        raise UserError(
            f"shared memory (/dev/shm) has no room for a batch of {count:,} bytes ({error}); {_MORE_SHARED_MEMORY}"
        ) from error


def in_shared_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A uint8 tensor as it is, in a worker copied into shared memory. Raises ``UserError`` as ``shared_bytes``."""
    if get_worker_info() is None:
        return tensor
    return shared_bytes(tensor.numel()).view(tensor.shape).copy_(tensor)


# ------------------------------------------------------------------------------------------ signals


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """A process that is started inside begins with the run's signals blocked; this one answers them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_RUN if CAN_WAIT else set())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_signals(training: int, _: int) -> None:
    """In a worker: end with process ``training``, or when it says so, but not for a signal meant for the whole run.

    The training process answers those: it finishes its step, for which it may need another batch, and saves. Here they
    are blocked from the beginning (see ``_signals_held_back``).
    """
    if not CAN_WAIT:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    if multiprocessing.get_start_method() == "fork" and os.getppid() != training:  # it has ended already
        os._exit(0)
    threading.Thread(target=_end_with, args=(training, os.getppid()), daemon=True).start()


def _end_with(training: int, parent: int) -> None:
    """End this process when its ``parent`` has ended or ``training`` sends SIGTERM, ``DataLoader``'s last resort.

    torch's own look-out cannot end a worker whose pipe is full, because each worker holds the others' pipe open.
    """
    while os.getppid() == parent:
        found = signal.sigtimedwait(FOR_THE_RUN, LOOK_SECONDS)
        if found is not None and found.si_signo == signal.SIGTERM and found.si_pid == training:
            break
    os._exit(0)


@cache
def _kill_left_workers_at_the_end() -> None:
    """At this process's end, before multiprocessing sends SIGTERM to the workers that are left and waits for them.

    Another process's SIGTERM may be pending there. A second one is not kept beside it, and the worker leaves the first
    one alone: the wait would have no end.
    """
    util.Finalize(None, _kill_children, exitpriority=0)


def _kill_children() -> None:
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


class _ChildHandler:
    """torch's answer to SIGCHLD raises an error wherever the training process stands, be it writing a checkpoint.

    With this around it, it raises where a batch of the worker that ended is waited for. Elsewhere nothing is lost: the
    end is noticed before the next batch.
    """

    def __init__(self) -> None:
        self._torchs: Callable[..., Any] | None = None
        self._waiting: Workers | None = None

    def install(self) -> None:
        """To be called when torch has installed its own."""
        if threading.current_thread() is threading.main_thread():  # no other may
            present = signal.getsignal(signal.SIGCHLD)
            if callable(present) and present is not self:
                self._torchs = present
                signal.signal(signal.SIGCHLD, self)

    def __call__(self, number: int, frame: Any) -> None:
        try:
            self._torchs(number, frame)
        except RuntimeError:
            if self._waiting is not None and self._waiting.ended:
                raise

    @contextmanager
    def raising_for(self, waiting: Workers) -> Iterator[None]:
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = None


_child_handler = _ChildHandler()
