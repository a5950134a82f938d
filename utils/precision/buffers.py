"""A copy of a network's buffers from before a step."""

from __future__ import annotations

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

    def remember(self) -> None:
        """Copy all buffers."""
        for copies, live in zip(self._copies, self._live, strict=True):
            torch._foreach_copy_(copies, live)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copied buffers."""
        for copies, live in zip(self._copies, self._live, strict=True):
            torch._foreach_copy_(live, copies)
