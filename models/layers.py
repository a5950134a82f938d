"""Changes to the way in which a library's layers compute: ``--blur-pool`` and ``--grad-checkpointing``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from utils.config.settings import UserError

FEWEST_CHANNELS = 16  # the first convolution sees the image as it is


def blur_before_strides(model: nn.Module) -> None:
    """Make strided convolutions of at least 16 input channels read blurred maps; each then has a filter ``blur``.

    Taking every second pixel aliases, so that a shift by one pixel changes the output (Zhang, Making convolutional
    networks shift-invariant again, 2019). The filter is [1 2 1] in both directions, divided by 16, with zeros around
    the maps, in front of the convolution, as in FFCV's training program (Leclerc et al., 2023). Names of parameters
    stay as they are.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and max(layer.stride) > 1 and layer.in_channels >= FEWEST_CHANNELS:
            # A subclass rather than a wrapped method, which would stay bound to this module in a deep copy.
            layer.__class__ = type(type(layer).__name__, (_Blurred, type(layer)), {})
            layer.register_buffer("blur", _filter(layer), persistent=False)


def _filter(layer: nn.Conv2d) -> torch.Tensor:
    row = torch.tensor([1.0, 2.0, 1.0])
    return (row[:, None] * row / 16).expand(layer.in_channels, 1, 3, 3).contiguous().to(layer.weight)


class _Blurred(nn.Module):
    """Mix-in for a convolution's class, which blurs its input."""

    blur: torch.Tensor
    in_channels: int

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        blurred = functional.conv2d(images, self.blur.to(images.dtype), padding=1, groups=self.in_channels)
        return super().forward(blurred)


def checkpoint_gradients(arch: str, model: nn.Module) -> None:
    """Make ``model`` keep only its blocks' inputs (Chen et al., Training deep nets with sublinear memory, 2016).

    timm knows the blocks of its networks. Gradients stay the same, and so do batch norms' statistics: the second
    forward pass of a batch does not count. Raises ``UserError`` for a network that does not support it.
    """
    try:
        turn_on: Any = model.set_grad_checkpointing
        turn_on(True)
    except (AttributeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"--grad-checkpointing: {arch} cannot; networks of timm such as timm/resnet50 or timm/convnext_tiny can"
        ) from error
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            layer.__class__ = type(type(layer).__name__, (_CountsOnce, type(layer)), {})


class _CountsOnce(nn.Module):
    """Mix-in for a batch norm's class: a forward pass within a backward pass leaves its statistics as they are."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.training or torch._C._current_graph_task_id() == -1:
            return super().forward(*args, **kwargs)
        own = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        self._buffers.update({name: buffer.clone() for name, buffer in own.items()})
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._buffers.update(own)
