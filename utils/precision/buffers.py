"""A copy of a network's buffers from before a step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import nn


class BufferCopy:
    """Remembers the buffers of ``model`` (batch-norm statistics) and puts them back.

    A forward pass that overflows makes batch norm's running statistics infinite, and no later step
    repairs that: skipping a step must restore them. Buffers are copied in one call per data type.
    """

    def __init__(self, model: nn.Module) -> None:
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in model.buffers():
            groups.setdefault(buffer.dtype, []).append(buffer)
        self._live = list(groups.values())
        self._copies = [[buffer.clone() for buffer in buffers] for buffers in self._live]
        pairs = zip(chain(*self._live), chain(*self._copies), strict=True)
        self._copy_of = {id(live): copied for live, copied in pairs}

    @property
    def copy_of(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Gives the copy of a buffer of the network, and any other tensor itself; None if there are no buffers."""
        return (lambda tensor: self._copy_of.get(id(tensor), tensor)) if self._copy_of else None

    def remember(self) -> None:
        """Copy all buffers."""
        for copies, live in zip(self._copies, self._live, strict=True):
            torch._foreach_copy_(copies, live)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copied buffers."""
        for copies, live in zip(self._copies, self._live, strict=True):
            torch._foreach_copy_(live, copies)

    @torch.no_grad()
    def restore_where(self, flag: torch.Tensor) -> None:
        """Restore the copied buffers if ``flag``, a tensor (), is not 0; the host does not read it.

        All of a data type are selected at once, as one vector: a few launches, however many layers there are.
        """
        for copies, live in zip(self._copies, self._live, strict=True):
            before, after = (torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in (copies, live))
            chosen = torch.where(flag != 0, before, after).split([tensor.numel() for tensor in live])
            torch._foreach_copy_(live, [part.view(own.shape) for part, own in zip(chosen, live, strict=True)])
