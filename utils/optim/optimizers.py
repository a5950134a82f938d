"""Optimizers by name: torch's sgd, adam and adamw, Muon beside AdamW, and all of timm's."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from utils.config.settings import OptimisationSettings, UserError
from utils.optim.clipping import output_layers

_TORCH = ("sgd", "adam", "adamw")


def build_optimizer(
    settings: OptimisationSettings, model: nn.Module
) -> torch.optim.Optimizer | tuple[torch.optim.Optimizer, ...]:
    """The optimizer, or for ``muon`` the two, that ``settings`` name over the trainable parameters of ``model``.

    Raises ``UserError`` for an unknown name, or one that needs a package that is not installed.
    """
    mistake = unknown_optimizer(settings.optimizer)
    if mistake:
        raise UserError(mistake)
    if settings.optimizer == "muon":
        return _muon(settings, model)
    groups = parameter_groups(model.parameters(), settings.weight_decay, settings.decay_norm_bias)
    if settings.optimizer == "sgd":
        return _fused(torch.optim.SGD, groups, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov)
    if settings.optimizer in _TORCH:
        return _fused(
            {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.optimizer], groups, lr=settings.lr
        )
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


def _muon(settings: OptimisationSettings, model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for hidden matrices and convolution filters, AdamW for the last layer, norms, biases and embeddings.

    Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024; filters are taken as matrices
    (out, in x height x width). Updates are scaled to the size of AdamW's (Liu et al., Muon is scalable for LLM
    training, 2025), so one learning rate and one weight decay serve both.
    """
    import timm.optim

    matrices = _hidden_matrices(model)
    if not matrices:
        raise UserError(f"--optimizer muon: {type(model).__name__} has no hidden matrix or filter; use adamw")
    taken = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    groups = parameter_groups(others, settings.weight_decay, settings.decay_norm_bias)
    return (
        timm.optim.Muon(matrices, lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"),
        _fused(torch.optim.AdamW, groups, lr=settings.lr, betas=(0.9, 0.95)),
    )


def _fused(kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """The optimizer as one kernel over all parameters: of torch's three ways the fastest on CPU and GPU."""
    optimizer = kind(groups, fused=True, **options)
    # Fused optimizers let the scaler's flag skip the step inside the kernel, unknown to the host. Each skipped step
    # is told here, so the scaler shall read its flag and leave the step out itself, as with any other optimizer.
    optimizer._step_supports_amp_scaling = False
    return optimizer


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trainable weights of all linear layers and convolutions but those that make the logits."""
    last = output_layers(model)
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    layers = [module for module in model.modules() if isinstance(module, kinds) and module not in last]
    return [layer.weight for layer in layers if layer.weight.requires_grad]


def parameter_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float, decay_norm_bias: bool
) -> list[dict[str, Any]]:
    """The trainable ones of ``parameters`` in one group, or in two: with decay, and norms and biases without.

    A norm's or bias's parameter is one of at most one dimension, the convention of timm and big_vision.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if decay_norm_bias or weight_decay == 0:
        return [{"params": parameters, "weight_decay": weight_decay}]
    parts = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [part for part in parts if part["params"]]


def has_momentum(name: str) -> bool:
    """Whether the optimizer ``name`` makes use of ``--momentum``."""
    if name in (*_TORCH, "muon"):
        return name == "sgd"
    import timm.optim

    return timm.optim.get_optimizer_info(name).has_momentum


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
