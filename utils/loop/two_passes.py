"""The forward passes of a step of sharpness-aware minimisation: all of them twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from utils.data.loaders import Batch
from utils.optim.sam import SharpnessAware
from utils.precision.buffers import BufferCopy


class TwoPasses:
    """Gives a step's batches, and gives them again while the weights are uphill (``utils/optim/sam.py``).

    The caller adds up the gradient of the batches that it is given. That of the first round, which ranks and
    accumulation have made the gradient of the whole step, decides where uphill is; what remains is that of the second.
    Batch norm's statistics are those of the first round. Keeps a step's batches on the device.
    """

    def __init__(self, model: nn.Module, sam: SharpnessAware) -> None:
        self.sam = sam
        self._buffers = BufferCopy(model)
        self.is_second = False

    def of(
        self, batches: Iterable[Batch], scale: Callable[[], torch.Tensor], seed: Callable[[], None]
    ) -> Iterator[Batch]:
        """The batches twice. ``scale`` gives the loss scale, a tensor (); ``seed`` seeds the step's dropout."""
        kept = []
        for batch in batches:
            kept.append(batch)
            yield batch
        self.sam.climb(scale())
        for parameter in self.sam.parameters:
            parameter.grad = None
        self._buffers.remember()
        seed()
        self.is_second = True
        yield from kept
        self.is_second = False
        self._buffers.restore()
        self.sam.come_back()
