"""``--grad-checkpointing``: activations are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.config.settings import UserError


def checkpoint_gradients(arch: str, model: nn.Module) -> None:
    """Let ``model`` keep only what its blocks begin with (Chen et al., Training deep nets with sublinear memory, 2016).

    timm knows the blocks of its networks. Gradients stay the same, and so do batch norms' statistics: the second
    computation of a batch does not count. Raises ``UserError`` for a network that cannot.
    """
    try:
        model.set_grad_checkpointing(True)
    except (AttributeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"--grad-checkpointing: {arch} cannot; networks of timm such as timm/resnet50 or timm/convnext_tiny can"
        ) from error
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            layer.__class__ = type(type(layer).__name__, (_CountsOnce, type(layer)), {})


class _CountsOnce:
    """Mixed into a batch norm's class: a forward pass within a backward pass leaves its statistics as they are."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.training or torch._C._current_graph_task_id() == -1:
            return super().forward(*args, **kwargs)
        own = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        self._buffers.update({name: buffer.clone() for name, buffer in own.items()})
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._buffers.update(own)
