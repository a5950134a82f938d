"""Exponential moving average of the weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def build_ema(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """A moving average of ``model``'s weights, or None without a decay.

    ``average.update_parameters(model)`` after a step sets average = decay x average + (1 - decay) x
    weights (Polyak and Juditsky, 1992); the first call copies. Buffers, batch-norm statistics above
    all, are taken over as they are: they are moving averages already.
    """
    if decay is None:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))


def ema_state(average: AveragedModel) -> dict[str, torch.Tensor | dict[str, torch.Tensor]]:
    """The average's state with clean parameter names, for a checkpoint."""
    return {"model": average.module.state_dict(), "n_averaged": average.n_averaged}


def load_ema_state(average: AveragedModel, state: dict) -> None:
    """Put a state made by ``ema_state`` back."""
    average.module.load_state_dict(state["model"])
    average.n_averaged.copy_(state["n_averaged"])
