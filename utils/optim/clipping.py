"""Gradient clipping: by norm, by value, or adaptive. Gradients must be unscaled before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from utils.config.settings import OptimisationSettings


class GradientClipper:
    """Measures the gradient's norm and clips as the settings say.

    By norm (Pascanu et al., On the difficulty of training recurrent neural networks, 2013): the whole
    gradient is scaled to at most that norm. By value: each number is clamped. Adaptive: see ``clip_adaptively``;
    the layers that make the logits are left alone, as in the paper.

    ``each_skips``: a scaler leaves out each of ``optimizers`` whose part of the gradient is not finite. The norm is
    then that of the other parts, the gradient that is stepped with, and an overflow in one part changes nothing in
    another. Without it the gradient is one.
    """

    def __init__(
        self,
        settings: OptimisationSettings,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        each_skips: bool,
    ) -> None:
        self.norm, self.value, self.share = settings.clip_grad_norm, settings.clip_grad_value, settings.clip_grad_agc
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self._names)
        parts = [{p for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
        self._parts = [[p for p in self.parameters if p in part] for part in parts] if each_skips else [self.parameters]
        last = {p for layer in output_layers(model) for p in layer.parameters()} if self.share else set()
        self._adaptive = [parameter for parameter in self.parameters if parameter not in last]
        # Of each part the parameters with a gradient, and the norms of these before they were clipped.
        self._measured: list[tuple[list[nn.Parameter], Sequence[torch.Tensor]]] = []

    def __call__(self) -> torch.Tensor:
        """Clip the gradients in place; gives the norm before of what is stepped with, a tensor () on the device.

        It is not finite when no part of the gradient is.
        """
        # nn.utils.get_total_norm without its sorting by devices and types, which took as long as the norms themselves.
        parts = [[parameter for parameter in part if parameter.grad is not None] for part in self._parts]
        self._measured = [(part, torch._foreach_norm([parameter.grad for parameter in part])) for part in parts]
        norm, limited = _over_finite([torch.linalg.vector_norm(torch.stack(norms)) for _, norms in self._measured])
        if self.norm is not None:
            for part, measured in zip(parts, limited, strict=True):
                nn.utils.clip_grads_with_norm_(part, self.norm, measured)
        elif self.value is not None:
            nn.utils.clip_grad_value_(self.parameters, self.value)
        elif self.share is not None:
            clip_adaptively(self._adaptive, self.share)
        return norm

    def overflowed(self) -> list[str]:
        """The names of the parameters whose gradient was not finite before it was clipped. A synchronisation point."""
        names = [self._names[parameter] for part, _ in self._measured for parameter in part]
        norms = [norm for _, norms in self._measured for norm in norms]
        finite = torch.isfinite(torch.stack(norms)).tolist()
        return [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]


def _over_finite(norms: list[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """The norm over the finite ones of ``norms``, each that of a part; and the norm that each part is clipped by.

    A part without a finite norm is clipped by infinity, which leaves nothing of it: as a rule its optimizer is left out
    anyway, and where only the norm overflowed, its gradient is too large to step with. Nothing is read by the host.
    """
    if len(norms) == 1:
        return norms[0], norms
    each = torch.stack(norms)
    finite = torch.isfinite(each)
    over_finite = torch.linalg.vector_norm(torch.where(finite, each, 0))
    norm = torch.where(finite.any(), over_finite, torch.linalg.vector_norm(each))
    return norm, torch.where(finite, norm, math.inf).unbind()


@torch.no_grad()
def clip_adaptively(parameters: Iterable[nn.Parameter], share: float) -> None:
    """Scale the gradient of each unit to at most ``share`` of its weights' norm, which counts as at least 0.001.

    Brock et al., High-performance large-scale image recognition without normalization, 2021, equation 3. A unit is
    a row of a matrix, a filter, or a whole vector. To the bit what ``timm.utils.adaptive_clip_grad`` gives; that takes
    eleven operations a parameter, this one three a weight, one a vector, and a few for all of them together.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if not parameters:
        return
    parameters.sort(key=lambda parameter: parameter.ndim <= 1)  # as _unit_norms orders them
    limits = _unit_norms([p.detach() for p in parameters]).clamp_(min=1e-3).mul_(share)
    sizes = _unit_norms([p.grad for p in parameters])
    factors = torch.where(sizes < limits, 1.0, limits / sizes.clamp_(min=1e-6))
    of_each = factors.split([len(p) if p.ndim > 1 else 1 for p in parameters])
    shaped = [f.view(-1, *[1] * (p.ndim - 1)) if p.ndim else f[0] for f, p in zip(of_each, parameters, strict=True)]
    torch._foreach_mul_([p.grad for p in parameters], shaped)


def _unit_norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norms of all units, () each: of those with several dimensions first, then of the vectors."""
    norms = [torch.linalg.vector_norm(t, dim=tuple(range(1, t.ndim))) for t in tensors if t.ndim > 1]
    vectors = [t for t in tensors if t.ndim <= 1]
    if vectors:
        norms.append(torch.stack(torch._foreach_norm(vectors)))
    return torch.cat(norms)


def output_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that make the logits, one a head.

    timm's networks name their classifier, which may be several heads (distillation, several branches) or hold a hidden
    layer before the last; of other networks it is the last linear layer or convolution.
    """
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else ()
    heads = classifier if isinstance(classifier, tuple | list) else (classifier,)
    layers = [layer for head in heads for layer in _linear(head)]
    if not layers:
        return _linear(model)[-1:]
    return [layer for layer in layers if len(layer.weight) == len(layers[-1].weight)]


def _linear(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
