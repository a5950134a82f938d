"""Passes of a rank without a batch through a sharded network: the others need its part of the weights."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from utils.data.loaders import Batch
from utils.record.pictures.collector import Collector
from utils.runtime.distributed import Distributed
from utils.runtime.sharding import is_sharded, release


class IdlePasses:
    """Called on a rank without images in a round, which then takes part in the others' pass of ``model``.

    Does nothing unless ``model``, or the network in it, is sharded.
    """

    def __init__(self, model: nn.Module, distributed: Distributed, autocast: AbstractContextManager) -> None:
        self.network = model.network if isinstance(model, Collector) else model  # which must not see these images
        self.sharded = [module for module in model.modules() if is_sharded(module)]
        self.distributed = distributed
        self.autocast = autocast
        self._shape: tuple[int, ...] | None = None

    def begin_round(self, batch: Batch | None) -> None:
        """Tell all ranks the images' shape, once; rank 0 has a batch in the first round."""
        if self.sharded and self._shape is None:
            self._shape = self.distributed.run_on_rank0(lambda: tuple(batch.images.shape[1:]))

    @torch.no_grad()
    def __call__(self) -> None:
        """Take part in the round's pass."""
        if self.sharded:
            with self.autocast:
                self.network(torch.zeros(1, *self._shape, device=self.distributed.device))

    def end(self) -> None:
        """Drop what the last pass has left of whole parameters."""
        for network in self.sharded:
            release(network)
