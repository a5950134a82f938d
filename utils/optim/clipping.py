"""Gradient clipping: by norm, by value, or adaptive. Gradients must be unscaled first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from utils.config.groups.optimisation import OptimisationSettings
from utils.optim.head import output_layers
from utils.optim.held import Held
from utils.runtime.sharding import is_sharded, local

# For each part of a gradient, the parameters that have one and their norms before clipping, tensors ().
Measured = list[tuple[list[nn.Parameter], Sequence[torch.Tensor]]]


class GradientClipper:
    """Measures the gradient's norm and clips the gradient as the settings say.

    By norm (Pascanu et al., On the difficulty of training recurrent neural networks, 2013): a gradient with a larger
    norm is scaled down to that norm. By value: each element is clamped. Adaptive: see ``clip_adaptively``; output
    layers are not clipped, as in the paper.

    ``each_skips``: True if a scaler skips each of ``optimizers`` whose part of the gradient is not finite. The norm is
    then that of the other parts, which are used for the step, or of all parts if none is finite. An overflow in one
    part does not affect another. Otherwise the gradient has only one part.

    If ``model`` is sharded, each process holds a part of each gradient; ``over_ranks`` turns the norm of this process's
    part, a tensor (), into the norm of the whole.
    """

    def __init__(
        self,
        settings: OptimisationSettings,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer | Held],
        each_skips: bool,
        over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._over_ranks = over_ranks if is_sharded(model) else None
        self.norm = settings.clip_grad_norm
        self.value = settings.clip_grad_value
        self.share = settings.clip_grad_agc
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self._names)
        owned = [{p for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
        self._parts = [[p for p in self.parameters if p in own] for own in owned] if each_skips else [self.parameters]
        last = {p for layer in output_layers(model) for p in layer.parameters()} if self.share else set()
        self._adaptive = [parameter for parameter in self.parameters if parameter not in last]
        self.measured: Measured = []

    def __call__(self) -> torch.Tensor:
        """Clip the gradients in place; return their norm before clipping, a tensor ()."""
        # nn.utils.get_total_norm without its sorting by devices and types, which took as long as the norms themselves.
        present = [[parameter for parameter in part if parameter.grad is not None] for part in self._parts]
        own: Sequence[Sequence[Any]] = present
        if self._over_ranks is not None:  # stand-ins, whose ``grad`` is this process's part of a sharded gradient
            own = [[SimpleNamespace(grad=local(p.grad)) for p in part if p.grad is not None] for part in present]
        measured = [torch._foreach_norm([holder.grad for holder in part]) for part in own]
        self.measured = [*zip(present, measured, strict=True)]
        totals = [torch.linalg.vector_norm(torch.stack(norms)) for norms in measured]
        norm, limited = _over_finite(totals if self._over_ranks is None else [*map(self._over_ranks, totals)])
        if self.norm is not None:
            for part, limit in zip(own, limited, strict=True):
                nn.utils.clip_grads_with_norm_(part, self.norm, limit)
        elif self.value is not None:
            nn.utils.clip_grad_value_([holder for part in own for holder in part], self.value)
        elif self.share is not None:
            clip_adaptively(self._adaptive, self.share)
        return norm

    def overflowed(self, measured: Measured) -> list[str]:
        """The names of parameters whose gradient was not finite before clipping. A synchronisation point."""
        names = [self._names[parameter] for part, _ in measured for parameter in part]
        norms = [norm for _, norms in measured for norm in norms]
        finite = torch.isfinite(torch.stack(norms)).tolist()
        return [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]


def _over_finite(norms: list[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """The norm over all parts whose norm is finite, a tensor (), and the norm to clip each part by.

    A part without a finite norm is clipped by infinity, that is, to zero: usually its optimizer skips the step anyway,
    and if only the norm overflowed, the gradient is too large to step with. The host reads nothing.
    """
    if len(norms) == 1:
        return norms[0], norms
    each = torch.stack(norms)
    unbounded = each - each != 0  # infinity and NaN give NaN here
    over_finite = torch.linalg.vector_norm(each.masked_fill(unbounded, 0))
    norm = torch.where(unbounded.all(), torch.linalg.vector_norm(each), over_finite)
    return norm, norm.expand(len(norms)).masked_fill(unbounded, math.inf).unbind()


@torch.no_grad()
def clip_adaptively(parameters: Iterable[nn.Parameter], share: float) -> None:
    """Scale each unit's gradient down to at most ``share`` times the norm of its weights, taken as at least 0.001.

    Brock et al., High-performance large-scale image recognition without normalization, 2021, equation 3. A unit is a
    row of a matrix, a filter, or a whole vector. Gives the same bits as ``timm.utils.adaptive_clip_grad``, which takes
    eleven operations per parameter; this takes three per matrix or filter bank, one per vector, and a few for all
    together.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if not parameters:
        return
    parameters.sort(key=lambda parameter: parameter.ndim <= 1)  # as _unit_norms orders them
    limits = _unit_norms([p.detach() for p in parameters]).clamp_(min=1e-3).mul_(share)
    gradients = [p.grad for p in parameters if p.grad is not None]
    sizes = _unit_norms(gradients)
    factors = torch.where(sizes < limits, 1.0, limits / sizes.clamp_(min=1e-6))
    of_each = factors.split([len(p) if p.ndim > 1 else 1 for p in parameters])
    shaped = [f.view(-1, *[1] * (p.ndim - 1)) if p.ndim else f[0] for f, p in zip(of_each, parameters, strict=True)]
    torch._foreach_mul_(gradients, shaped)


def _unit_norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norms (units,) of all units: first those of tensors with several dimensions, then those of vectors."""
    norms = [torch.linalg.vector_norm(t, dim=tuple(range(1, t.ndim))) for t in tensors if t.ndim > 1]
    vectors = [t for t in tensors if t.ndim <= 1]
    if vectors:
        norms.append(torch.stack(torch._foreach_norm(vectors)))
    return torch.cat(norms)


def describe(settings: OptimisationSettings) -> str:
    """Describe the limits of the gradient; 'none' without any."""
    limits = {"norm": settings.clip_grad_norm, "value": settings.clip_grad_value, "adaptive": settings.clip_grad_agc}
    return ", ".join(f"{name} {limit:g}" for name, limit in limits.items() if limit) or "none"
