"""Exponential moving average of the weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

Pairs = dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]]  # the average's tensors and the model's


class MovingAverage:
    """``module``, a copy of ``model`` whose weights follow the model's: average = d x average + (1 - d) x weights.

    Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992. d is ``decay``, and in the n-th
    update, n from 0, at most (1 + n) / (10 + n), as in TensorFlow's ``ExponentialMovingAverage``: with the full decay
    from the beginning, the average would consist of initial weights for some 1 / (1 - decay) updates.

    Running statistics (buffers named ``running_*``) are averaged like the weights. They lag behind what the averaged
    weights need, so recompute those of batch norm before using the average (``utils/optim/batch_norm_statistics.py``).
    All other buffers are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module, self.decay = copy.deepcopy(model), decay
        self._averaged: Pairs = {}
        self._copied: Pairs = {}
        pairs = zip(_tensors(self.module), _tensors(model), strict=True)
        for (own, averaged), (models, _) in pairs:
            ours, theirs = (self._averaged if averaged else self._copied).setdefault(own.dtype, ([], []))
            ours.append(own)
            theirs.append(models)

    def decay_of(self, updates: int) -> float:
        """The decay of the update that follows ``updates`` others."""
        return min(self.decay, (1 + updates) / (10 + updates))

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Follow the model's weights, which have moved; ``updates``: the number of earlier calls."""
        for averages, models in self._averaged.values():
            torch._foreach_lerp_(averages, models, 1 - self.decay_of(updates))
        for copies, models in self._copied.values():
            torch._foreach_copy_(copies, models)

    def state(self) -> dict[str, Any]:
        """For a checkpoint, with clean parameter names."""
        return {"model": self.module.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` gave."""
        self.module.load_state_dict(state["model"])


def build_ema(model: nn.Module, decay: float | None) -> MovingAverage | None:
    """A moving average of ``model``'s weights, or None without a decay."""
    return None if decay is None else MovingAverage(model, decay)


def _tensors(model: nn.Module) -> list[tuple[torch.Tensor, bool]]:
    """Parameters and buffers, and for each whether it is averaged rather than copied."""
    tensors = [(parameter, parameter.is_floating_point()) for parameter in model.parameters()]
    for name, buffer in model.named_buffers():
        is_statistic = name.rpartition(".")[2].startswith("running_")
        tensors.append((buffer, is_statistic and buffer.is_floating_point()))
    return tensors
