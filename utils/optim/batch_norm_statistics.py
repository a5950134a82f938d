"""Batch-norm statistics for averaged weights, which the network was never trained with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from utils.runtime.devices import exact_device
from utils.runtime.distributed import Distributed
from utils.runtime.sharding import idle_pass, release


@torch.no_grad()
def recompute(
    model: nn.Module,
    loader: Any,
    epoch: int,
    steps: int,
    distributed: Distributed,
    autocast: AbstractContextManager,
    between: Callable[[], None],
) -> None:
    """Set ``model``'s batch-norm statistics to the mean and variance over the samples of ``epoch``'s first ``steps``.

    ``loader``: a ``TrainLoader``. Each layer normalises by the statistics of the current pass; mean and unbiased
    variance are pooled over all passes (PreciseBN: Wu and Johnson, Rethinking "Batch" in BatchNorm, 2021, section 3).
    Everything else is in evaluation mode, without dropout, as when the statistics are used. The ranks take turns, but
    neither the passes nor the order of their summation depends on the number of ranks, so any number gives the same
    bits. Every rank calls ``between`` after each round of passes. A layer keeps its statistics if it is not called, if
    the network keeps it in evaluation mode, or if the new ones are not finite.
    """
    layers = layers_with_statistics(model)
    if not layers or not steps:
        return
    model.eval()
    sums = _Sums(layers, distributed.device)
    total, batches = loader.shared_out(epoch, steps)
    for _ in range(0, total, distributed.world_size):
        batch = next(batches, None)  # in the last round some ranks have none and add nothing
        if batch is not None:
            with sums.watching(), autocast:
                model(batch.images)
        else:
            with autocast:
                idle_pass(model, loader.image_shape, distributed.device)
        for row in distributed.all_gather(sums.take()):
            sums.total += row
        between()
    sums.pool()
    release(model)


def layers_with_statistics(model: nn.Module) -> list[_BatchNorm]:
    """The batch-norm layers that gather running statistics when ``model`` trains. Leaves ``model`` in training mode."""
    model.train()
    layers = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return [layer for layer in layers if layer.training and layer.running_mean is not None]


class _Sums:
    """Count, sum and sum of squares of the ``layers``' inputs, by channel: float64 (3, channels of all layers).

    ``total``: over all passes so far.
    """

    def __init__(self, layers: list[_BatchNorm], device: torch.device) -> None:
        self.layers = layers
        self.sizes = [layer.num_features for layer in layers]
        self.total = torch.zeros(3, sum(self.sizes), dtype=torch.float64, device=exact_device(device))
        self._row = torch.zeros_like(self.total)
        self._of_layer = dict(zip(layers, self._row.split(self.sizes, dim=1), strict=True))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which layers normalise by the batch, as without running statistics, and add up their inputs."""
        kept = [(layer, layer.running_mean, layer.running_var) for layer in self.layers]
        hooks = [layer.register_forward_pre_hook(self._add) for layer in self.layers]
        for layer in self.layers:
            layer.running_mean = layer.running_var = None
        try:
            yield
        finally:
            for layer, mean, variance in kept:
                layer.running_mean = mean
                layer.running_var = variance
            for hook in hooks:
                hook.remove()

    def _add(self, layer: _BatchNorm, inputs: tuple[torch.Tensor, ...]) -> None:
        values = inputs[0]
        row = self._of_layer[layer]
        count = values.numel() // layer.num_features
        mean, variance = torch.zeros(2, layer.num_features, device=values.device)
        # The kernels of batch norm itself: several times as fast as torch.var_mean.
        functional.batch_norm(values, mean, variance, training=True, momentum=1.0)
        mean = mean.to(row)
        variance = variance.to(row)
        row += torch.stack([torch.full_like(mean, count), count * mean, (count - 1) * variance + count * mean**2])

    def take(self) -> torch.Tensor:
        """Return the sums of the last pass, float64 (3, channels of all layers), and reset them to zero."""
        row = self._row.clone()
        self._row.zero_()
        return row

    def pool(self) -> None:
        """Set each layer's statistics to those over all passes, where these are finite."""
        for layer, (count, summed, squares) in zip(self.layers, self.total.split(self.sizes, dim=1), strict=True):
            mean = summed / count
            variance = ((squares - count * mean**2) / (count - 1)).clamp(min=0)
            assert layer.running_mean is not None and layer.running_var is not None  # in layers with statistics
            mean = mean.to(layer.running_mean.dtype)
            variance = variance.to(layer.running_var.dtype)
            sound = mean.isfinite() & variance.isfinite()
            layer.running_mean.copy_(torch.where(sound, mean, layer.running_mean))
            layer.running_var.copy_(torch.where(sound, variance, layer.running_var))
