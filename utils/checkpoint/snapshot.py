"""Copies of a state, to be written while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from utils.runtime.devices import runs_ahead


class Snapshot:
    """Copies nested dicts and lists of tensors into CPU memory, which it reuses for the next copy.

    From a GPU the copies are enqueued behind the running work, into pinned memory: the host does not wait for them,
    and later steps, which follow on the same stream, cannot change what is copied.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str | int, ...], torch.Tensor] = {}

    def take(self, state: Any) -> tuple[Any, Callable[[], None]]:
        """Copy ``state``; return the copy, valid until the next call, and a function that waits until it is complete.

        Tensors that share memory share it in the copy too.
        """
        seen: dict[tuple[Any, ...], torch.Tensor] = {}
        copy = self._copy(state, (), seen)
        devices = {device for device, *_ in seen if runs_ahead(device)}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]

        def complete() -> None:
            for event in events:
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
            kept = torch.empty_like(like, device="cpu", pin_memory=runs_ahead(like.device))
            self._kept[path] = kept
        return kept
