"""Work that must not delay training: its input is copied at once, a thread does the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class BackgroundTask:
    """One thread at a time. ``wait`` raises the thread's error again in the thread that calls it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, function: Callable[[], None]) -> None:
        """Run ``function`` in a thread; call ``wait`` for the one before first."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(function,), name="background")
        self._thread.start()  # not a daemon: the interpreter lets it finish before it ends

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            self._error = error

    @property
    def failed(self) -> bool:
        """Whether there is an error that ``wait`` has not raised yet. Does not wait."""
        return self._error is not None

    def wait(self) -> None:
        """Return when the thread has ended; raises what the function raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error


class Snapshot:
    """Copies nested dicts and lists of tensors into CPU memory, which it reuses for the next copy.

    From a GPU the copies are enqueued behind the running work, into pinned memory: the host does not wait for them,
    and later steps, which follow on the same stream, cannot change what is copied.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str | int, ...], torch.Tensor] = {}

    def take(self, state: Any) -> tuple[Any, Callable[[], None]]:
        """The copy, valid until the next call, and a function that returns when it is complete.

        Tensors that share memory share it in the copy too.
        """
        events: dict[torch.device, torch.cuda.Event] = {}
        seen: dict[tuple[Any, ...], torch.Tensor] = {}
        copy = self._copy(state, (), seen)
        for device in {key[0] for key in seen if key[0].type == "cuda"}:
            events[device] = torch.cuda.current_stream(device).record_event()

        def complete() -> None:
            for event in events.values():
                event.synchronize()

        return copy, complete

    def _copy(self, value: Any, path: tuple[str | int, ...], seen: dict[tuple[Any, ...], torch.Tensor]) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(item, (*path, key), seen) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(item, (*path, number), seen) for number, item in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        memory = value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride()
        if memory not in seen:
            seen[memory] = self._place(path, value).copy_(value, non_blocking=True)
        return seen[memory]

    def _place(self, path: tuple[str | int, ...], like: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(path)
        if kept is None or (kept.dtype, kept.shape, kept.stride()) != (like.dtype, like.shape, like.stride()):
            kept = torch.empty_like(like, device="cpu", pin_memory=like.device.type == "cuda")
            self._kept[path] = kept
        return kept
