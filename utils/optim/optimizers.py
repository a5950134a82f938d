"""Optimizers by name: torch's sgd, adam and adamw, and all of timm's."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import nn

from utils.settings import OptimisationSettings, UserError

_TORCH = ("sgd", "adam", "adamw")


def build_optimizer(settings: OptimisationSettings, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that ``settings`` name over the trainable parameters of ``model``.

    Raises ``UserError`` for an unknown name, or one that needs a package that is not installed.
    """
    mistake = unknown_optimizer(settings.optimizer)
    if mistake:
        raise UserError(mistake)
    groups = parameter_groups(model, settings.weight_decay, settings.decay_norm_bias)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov)
    if settings.optimizer in _TORCH:
        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.optimizer](groups, lr=settings.lr)
    import timm.optim

    if timm.optim.get_optimizer_info(settings.optimizer).second_order:
        raise UserError(f"--optimizer {settings.optimizer}: needs second derivatives, which are not computed here")
    try:
        return timm.optim.create_optimizer_v2(
            groups, opt=settings.optimizer, lr=settings.lr, weight_decay=0.0, momentum=settings.momentum
        )
    except Exception as error:  # a missing package or GPU, reported in as many ways as there are optimizers
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--optimizer {settings.optimizer}: cannot be made ({reason})") from error


def parameter_groups(model: nn.Module, weight_decay: float, decay_norm_bias: bool) -> list[dict[str, Any]]:
    """All trainable parameters in one group, or in two: with decay, and norms and biases without.

    A norm's or bias's parameter is one of at most one dimension, the convention of timm and big_vision.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if decay_norm_bias or weight_decay == 0:
        return [{"params": parameters, "weight_decay": weight_decay}]
    parts = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [part for part in parts if part["params"]]


def unknown_optimizer(name: str) -> str | None:
    """What to tell the user when there is no optimizer ``name``; else None."""
    if name in _TORCH:
        return None
    import timm.optim

    known = timm.optim.list_optimizers()
    if name in known:
        return None
    near = difflib.get_close_matches(name.lower(), dict.fromkeys((*_TORCH, *known)), n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"some are {', '.join((*_TORCH, 'lamb', 'lion'))}"
    return f"--optimizer '{name[:60]}': neither torch nor timm has it; {hint}"
