"""Verdicts on steps: whether a step moved the weights. Flags on the device decide; the host learns it a step later."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from utils.optim.clipping import Measured
from utils.optim.freezing import has_trainable
from utils.optim.held import Held, held
from utils.precision.buffers import BufferCopy
from utils.runtime.devices import runs_ahead


class Gradient(NamedTuple):
    """The result of a step's passes: the gradient's norm and the loss scale, tensors (), and the norms of its parts."""

    norm: torch.Tensor
    scale: torch.Tensor
    measured: Measured


class Verdict(NamedTuple):
    """The outcome of a step. ``held``: for each optimizer, whether its gradient kept it from moving."""

    gradient: Gradient
    held: list[bool]

    @property
    def moved(self) -> int:
        """Number of optimizers that moved their weights."""
        return self.held.count(False)

    def held_names(self, optimizers: Iterable[Held]) -> list[str]:
        """Class names of the optimizers that did not move."""
        return [type(own.optimizer).__name__ for own, was_held in zip(optimizers, self.held, strict=True) if was_held]


class Mailbox:
    """Numbers on their way to the host: ``send`` does not wait; ``read`` waits for what was launched before ``send``.

    On a GPU they are copied into pinned memory, and an event tells when they have arrived: what was launched after
    ``send`` goes on computing while the host reads.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if runs_ahead(device) else None
        self._numbers = torch.empty(0)

    def send(self, numbers: torch.Tensor) -> None:
        """Start to copy ``numbers`` (n,); earlier ones must have been read."""
        if self._event is None:
            self._numbers = numbers
            return
        if self._numbers.shape != numbers.shape:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._event.record()

    def read(self) -> list[float]:
        """Wait for the numbers that were sent last and return them."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


class Verdicts:
    """Holds ``optimizers`` still in steps without a finite gradient, and tells the host about it when asked.

    The attribute ``optimizers``: wrappers of the given ones that have anything to train now; a scaler must unscale and
    step the wrappers in their place.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], scaler: torch.amp.GradScaler, device: torch.device
    ) -> None:
        self.optimizers = [held(optimizer, device) for optimizer in optimizers if has_trainable(optimizer)]
        self.is_pending = False
        self._scaled = scaler.is_enabled()
        self._mailbox = Mailbox(device)
        self._on_host = all(optimizer.reads_flag for optimizer in self.optimizers)

    def hold_unless_finite(self, norm: torch.Tensor) -> None:
        """Set the flag that holds the optimizers still if ``norm`` is not finite, unless a scaler does that."""
        if self._scaled:
            return
        flag = not math.isfinite(norm.item()) if self._on_host else (norm - norm).ne_(0).float()  # inf - inf is NaN
        for optimizer in self.optimizers:
            optimizer.found_inf = flag

    def put_back(self, buffers: BufferCopy) -> torch.Tensor | None:
        """Undo, after a step, what its passes did to ``buffers``, if all optimizers were held.

        Returns the optimizers' flags, (optimizers,), not 0 where held; None if the host has read them already.
        """
        if self._on_host:
            if all(optimizer.was_held for optimizer in self.optimizers):
                buffers.restore()
            return None
        of_each = [optimizer.flag for optimizer in self.optimizers]
        flags = torch.stack(of_each) if len(of_each) > 1 else of_each[0].view(1)
        buffers.restore_where(flags.all() if len(of_each) > 1 else of_each[0])
        return flags

    def send(self, flags: torch.Tensor | None, gradient: Gradient) -> None:
        """Send ``flags``, which ``put_back`` returned, to the host; keep ``gradient`` for the verdict from ``read``."""
        if flags is not None:
            self._mailbox.send(flags)
        self._gradient = gradient
        self.is_pending = True

    def read(self) -> Verdict:
        """The verdict on the latest step given to ``send``. Waits for that step, not for later work on the device."""
        self.is_pending = False
        if self._on_host:
            were_held = [optimizer.was_held for optimizer in self.optimizers]
        else:
            were_held = [*map(bool, self._mailbox.read())]
        for optimizer, was_held in zip(self.optimizers, were_held, strict=True):
            optimizer.settle(was_held)
        return Verdict(self._gradient, were_held)
