"""Parameter groups: all parameters of a group have the same learning rate and weight decay."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from utils.config.groups.optimisation import OptimisationSettings, scale_of
from utils.config.settings import UserError
from utils.config.spelling import or_nearest
from utils.optim.head import head_parameters

CONTAINERS = nn.Sequential | nn.ModuleList | nn.ModuleDict


class Rate(NamedTuple):
    """A learning rate, ``scale`` times the schedule's. ``name``: the name in logs of the parameters that have it."""

    name: str
    scale: float


def parameter_groups(
    settings: OptimisationSettings, model: nn.Module, only: Iterable[nn.Parameter] | None = None
) -> list[dict[str, Any]]:
    """The trainable parameters of ``model``, or those among ``only``, in groups for an optimizer.

    With one learning rate there is one group, or two: with and without weight decay. Weight decay spares the parameters
    that ``weight_decay_except`` names and, without ``decay_norm_bias``, norms and biases: the parameters of at most one
    dimension, and those that a timm network lists in ``no_weight_decay()``, such as a position embedding (timm's
    convention). If learning rates differ (``rates``), each has such groups of its own, with its ``lr_scale`` and
    ``name``. Raises ``UserError`` for a name that no parameter has.
    """
    wanted = {parameter for parameter in (model.parameters() if only is None else only) if parameter.requires_grad}
    exempt = _without_decay(settings, model)
    rate_of = rates(settings, model)
    usual = settings.weight_decay
    groups: dict[tuple[Rate | None, float], dict[str, Any]] = {}
    if rate_of is None:
        groups[None, usual] = {"params": [], "weight_decay": usual}  # the first, whichever parameter comes first
    for name, parameter in model.named_parameters():
        if parameter not in wanted:
            continue
        rate = rate_of[name] if rate_of is not None else None
        decay = 0.0 if name in exempt else usual
        own = {"lr_scale": rate.scale, "name": rate.name} if rate is not None else {}
        groups.setdefault((rate, decay), {"params": [], "weight_decay": decay, **own})["params"].append(parameter)
    return [group for group in groups.values() if group["params"]] or [*groups.values()]


def _without_decay(settings: OptimisationSettings, model: nn.Module) -> set[str]:
    """Names of the parameters without weight decay. Raises ``UserError`` for a pattern that matches none."""
    named = dict(model.named_parameters())
    exempt = set()
    for pattern in settings.weight_decay_except or ():
        fitting = fnmatch.filter(named, pattern)
        if not fitting:
            raise UserError(f"--weight-decay-except {pattern}: no parameter has this name; {_hint(pattern, [*named])}")
        exempt.update(fitting)
    if not settings.decay_norm_bias:
        exempt.update(name for name, parameter in named.items() if parameter.ndim <= 1)
        of_timm = getattr(model, "no_weight_decay", tuple)
        for pattern in of_timm():
            exempt.update(fnmatch.filter(named, pattern))
    return exempt


def rates(settings: OptimisationSettings, model: nn.Module) -> dict[str, Rate] | None:
    """Each parameter's rate, by parameter name; None if all have the schedule's."""
    if settings.backbone_lr_scale is not None:
        head = head_parameters(model)
        backbone = Rate("backbone", settings.backbone_lr_scale)
        return {name: Rate("head", 1.0) if name in head else backbone for name, _ in model.named_parameters()}
    if settings.lr_scale is not None:
        return _scaled_by_name(settings.lr_scale, [name for name, _ in model.named_parameters()])
    if settings.layer_decay is None:
        return None
    layers = layer_numbers(model)
    last = max(layers.values())
    return {name: Rate(f"layer_{n}", settings.layer_decay ** (last - n)) for name, n in layers.items()}


def _scaled_by_name(scales: Sequence[str], names: Sequence[str]) -> dict[str, Rate]:
    """The rates that ``--lr-scale`` gives the parameters ``names``. Raises ``UserError`` for an unused pattern."""
    wanted = [scale_of(text) for text in scales]
    found: dict[str, Rate] = {}
    for name in names:
        fitting = (pair for pair in wanted if fnmatch.fnmatchcase(name, pair[0]))
        pattern, factor = next(fitting, ("others", 1.0))
        found[name] = Rate(pattern, factor)
    used = {rate.name for rate in found.values()}
    for pattern, factor in wanted:
        if pattern not in used:
            hint = _hint(pattern, names)
            raise UserError(f"--lr-scale {pattern}={factor:g}: no parameter is left that has this name; {hint}")
    return found


def _hint(pattern: str, names: Sequence[str]) -> str:
    return or_nearest(pattern, names, f"some are {', '.join(names[:6])}", cutoff=0.3)


def lr_scales(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, float]:
    """Scale of each named rate, lowest first; empty if all parameters have the schedule's rate.

    The groups of a user's own optimizer may have names without a scale.
    """
    groups = [group for each in optimizers for group in each.param_groups]
    named = [group for group in groups if "name" in group and "lr_scale" in group]
    return dict(sorted({group["name"]: group["lr_scale"] for group in named}.items(), key=lambda item: item[1]))


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Number of each parameter's layer, from 0 at the input, by parameter name.

    Layer-wise decay (Clark et al., ELECTRA, 2020; Bao et al., BEiT, 2021) is defined over layers. A timm network says
    itself what its layers are (``group_matcher``). In other networks they are blocks, in order of definition: the parts
    of the network, after taking apart nested containers and any part that holds more than half of all parameters. A
    part without matrices or filters (a norm), or a parameter beside the parts (a class token), belongs to the layer
    before it, or to the first.
    """
    matcher = getattr(model, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        numbers = group_parameters(model, matcher(coarse=False), reverse=True)
    else:
        numbers = {name: n for n, names in enumerate(_blocks(model)) for name in names}
    last = max(numbers.values())
    return {name: numbers.get(name, last) for name, _ in model.named_parameters()}


def _blocks(model: nn.Module) -> list[list[str]]:
    """Names of each block's parameters; see ``layer_numbers``."""
    half = sum(parameter.numel() for parameter in model.parameters()) / 2
    before: list[str] = []  # parameters beside the first block
    blocks: list[list[str]] = []

    def visit(prefix: str, module: nn.Module) -> None:
        parameters = list(module.parameters())
        divided = isinstance(module, CONTAINERS) or sum(parameter.numel() for parameter in parameters) > half
        if divided and any(True for _ in module.children()):
            (blocks[-1] if blocks else before).extend(prefix + name for name, _ in module.named_parameters("", False))
            for name, child in module.named_children():
                visit(f"{prefix}{name}.", child)
            return
        if not blocks or any(parameter.ndim > 1 for parameter in parameters):
            blocks.append([])
        blocks[-1].extend(prefix + name for name, _ in module.named_parameters())

    visit("", model)
    blocks[0] += before
    return [names for names in blocks if names]
