"""timm's Muon with few launches: matrices of one shape, and small ones of one height, are orthogonalised together."""

from __future__ import annotations

import inspect
from typing import Any

import timm.optim
import torch
from timm.optim.muon import (
    _COEFFICIENTS,
    _is_suitable_for_muon,
    get_lr_scale,
    resolve_ns_coefficients,
    zeropower_via_newtonschulz,
)
from torch import nn
from torch.nn import functional

from utils.runtime.cpu import has_bf16_units

SMALL = 2**22  # elements of matrices that are padded to one width: below it, a launch per width takes longer than zeros
LEAST_NORM = 1e-12  # so that zeros stay zeros


class Muon(timm.optim.Muon):
    """timm's Muon (same arithmetic and state), but a step handles matrices of equal height together.

    On a GPU a step of a small network otherwise takes longer to launch than to compute. timm itself steps parameters
    that it does not treat as one flat matrix or that are sharded. On a CPU, matrices are orthogonalised one by one;
    batched products may be split differently across threads. With units for bfloat16 this gives timm's bits; without
    them, products are in float32, which is several times as fast as emulation. On a GPU results may differ by bfloat16
    rounding.
    """

    @property
    def can_be_recorded(self) -> bool:
        """True if a step uses no number from the host that changes from step to step, except learning rates.

        For weights that are no matrices, timm's AdamW counts the steps on the host.
        """
        return all(self._is_matrix(parameter, group) for group in self.param_groups for parameter in group["params"])

    def begin_state(self) -> None:
        """Make what timm makes in the first step of each matrix that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                is_new = parameter.grad is not None and "use_muon" not in self.state[parameter]
                if is_new and self._is_matrix(parameter, group):
                    self.state[parameter] |= {"use_muon": True, "momentum_buffer": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self) -> None:  # no step of ours takes a closure
        self.begin_state()
        gradients: dict[nn.Parameter, torch.Tensor | None] = {}
        for group in self.param_groups:
            together = [parameter for parameter in group["params"] if self._is_flat(parameter, group)]
            if together:
                self._step_together(together, group)
                gradients |= {parameter: parameter.grad for parameter in together}
        for parameter in gradients:
            parameter.grad = None  # timm leaves out parameters without a gradient
        inspect.unwrap(timm.optim.Muon.step)(self)  # without the hooks, which this step calls
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def _is_matrix(self, parameter: nn.Parameter, group: dict[str, Any]) -> bool:
        """True if timm, which decides this in the first step, takes the parameter for Muon and as one flat matrix."""
        is_flat = (group["algo"], group["conv_mode"]) == ("muon", "flatten")
        return is_flat and bool(group["use_muon"] if "use_muon" in group else _is_suitable_for_muon(parameter))

    def _is_flat(self, parameter: nn.Parameter, group: dict[str, Any]) -> bool:
        return (
            parameter.grad is not None
            and self.state[parameter].get("use_muon", False)
            and group["algo"] == "muon"
            and group["conv_mode"] == "flatten"
            and not hasattr(parameter, "to_local")
        )

    def _step_together(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]  # all have one
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        momentum = group["momentum"]
        if group["weight_decay"]:
            torch._foreach_mul_([*parameters], 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(momenta, gradients, 1.0 - momentum)
        wanted = torch._foreach_lerp(gradients, momenta, momentum) if group["nesterov"] else momenta
        shapes: dict[Any, list[tuple[nn.Parameter, torch.Tensor]]] = {}
        for parameter, direction in zip(parameters, wanted, strict=True):
            alike = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            shapes.setdefault(alike, []).append((parameter, direction))
        moves: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}  # by the factor of the steps
        directions = [[direction for _, direction in pairs] for pairs in shapes.values()]
        on_cpu = parameters[0].device.type == "cpu"
        updates = orthogonalised(directions, group, together=not on_cpu)
        for pairs, update in zip(shapes.values(), updates, strict=True):
            own = [parameter for parameter, _ in pairs]
            scale = get_lr_scale(update.shape, group["adjust_lr_fn"]) if group["adjust_lr_fn"] else 1.0
            factor = -group["lr"] * scale
            # In the parameters' own dtype and memory format, which one operation for all of them needs.
            steps = torch.empty_strided(
                (len(own), *own[0].shape), (own[0].numel(), *own[0].stride()), dtype=own[0].dtype, device=own[0].device
            ).copy_(update.unflatten(2, own[0].shape[1:]))
            if isinstance(factor, torch.Tensor):
                steps = steps.mul_(factor)
                factor = 1
            moved, by = moves.setdefault(factor, ([], []))
            moved += own
            by += steps.unbind()
        for factor, (moved, by) in moves.items():
            if not on_cpu and factor != 1:  # rounded like a product with a factor on the device, as a graph needs it
                torch._foreach_mul_(by, factor)
                factor = 1
            torch._foreach_add_(moved, by, alpha=factor)


def orthogonalised(shapes: list[list[torch.Tensor]], group: dict[str, Any], together: bool) -> list[torch.Tensor]:
    """Approximate the nearest orthogonal matrices to tensors (out, ...).

    Returns, for each shape, (k, out, rest) for its k tensors, in bfloat16, or in float32 on a CPU that would emulate
    it. ``shapes``: the tensors of each shape. ``together``: in batched products. Columns of zeros stay zeros and change
    no others, so narrower matrices are padded to the widest of their height, unless that makes many elements.
    """
    emulated = shapes[0][0].device.type == "cpu" and not has_bf16_units()

    def of(matrices: torch.Tensor) -> torch.Tensor:
        return zeropower_via_newtonschulz(
            matrices,
            group["ns_steps"],
            resolve_ns_coefficients(group["ns_coefficients"], _COEFFICIENTS),
            eps=group["eps"],
            safety_factor=group["safety_factor"],
            dtype=torch.float32 if emulated else torch.bfloat16,
            scale_eps=group["scale_eps"],
        )

    if not together:
        return [torch.stack([of(tensor.flatten(1)) for tensor in tensors]) for tensors in shapes]
    stacks = [(torch.stack(own) if len(own) > 1 else own[0][None]).flatten(2) for own in shapes]
    by_height: dict[int, list[int]] = {}
    for place, stack in enumerate(stacks):
        by_height.setdefault(stack.shape[1], []).append(place)
    updates: dict[int, torch.Tensor] = {}
    for height, alike in by_height.items():
        width = max(stacks[place].shape[2] for place in alike)
        is_small = sum(len(stacks[place]) for place in alike) * height * width <= SMALL
        for places in [alike] if is_small else [[place] for place in alike]:
            parts = [stacks[place] for place in places]
            if len(parts) > 1:
                parts = [functional.pad(p, (0, width - p.shape[2])) if p.shape[2] < width else p for p in parts]
            made = of(torch.cat(parts) if len(parts) > 1 else parts[0]).split([*map(len, parts)])
            updates |= {place: own[..., : stacks[place].shape[2]] for place, own in zip(places, made, strict=True)}
    return [updates[place] for place in range(len(stacks))]


@torch.no_grad()
def keep_norms(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Scale each matrix or filter bank (out, ...) that has a gradient to the norm sqrt(out); zeros stay as they are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        return
    factors = torch._foreach_norm(parameters)
    torch._foreach_clamp_min_(factors, LEAST_NORM)
    torch._foreach_reciprocal_(factors)
    torch._foreach_mul_(factors, [len(parameter) ** 0.5 for parameter in parameters])
    torch._foreach_mul_(parameters, factors)
