"""Schedule-free optimizers: an average of the weights takes the place of a learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]


class ScheduleFreeSGD(torch.optim.Optimizer):
    """SGD without a schedule: Defazio et al., The road less scheduled, 2024, algorithm 1 with z as the base sequence.

    The parameters are y, where gradients are computed. The state holds z, which takes the steps, and x, their average
    and the weights to use:

        z <- z - lr x (gradient + weight_decay x y)
        x <- (1 - c) x + c z
        y <- (1 - momentum) z + momentum x

    c is the step's weight divided by the sum of all weights so far; a step's weight is the square of the highest rate
    so far, so that warm-up steps count less. The authors' package holds x and y in the same tensors and converts them
    in place before and after validation, which changes the last digits; here nothing is converted.

    Each group counts its own steps, from the first in which any of its parameters has a gradient. Parameters without a
    gradient stay as they are.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float) -> None:
        counts = {"steps": 0, "lr_max": 0.0, "weight_sum": 0.0}
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, **counts})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no step of ours takes a closure
        """Take a step with all parameters that have a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step(group, parameters)

    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {"z": parameter.detach().clone(), "x": parameter.detach().clone()}
        z, x = ([self.state[parameter][name] for parameter in parameters] for name in "zx")
        group["steps"] += 1
        group["lr_max"] = max(group["lr_max"], group["lr"])
        weight = group["lr_max"] ** 2
        group["weight_sum"] += weight
        directions = self._directions(parameters, group["steps"])
        if group["weight_decay"]:
            directions = torch._foreach_add(directions, parameters, alpha=group["weight_decay"])
        torch._foreach_add_(z, directions, alpha=-group["lr"])
        torch._foreach_lerp_(x, z, weight / (group["weight_sum"] or 1.0))  # the square of a tiny rate may be 0
        torch._foreach_copy_(parameters, z)
        torch._foreach_lerp_(parameters, x, group["momentum"])

    def _directions(self, parameters: list[torch.Tensor], steps: int) -> Tensors:
        """Directions that the learning rate multiplies. ``steps``: the number of steps, including this one."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]  # all have one


class ScheduleFreeAdamW(ScheduleFreeSGD):
    """Schedule-free steps along gradients divided by the root of their averaged squares, bias-corrected as in AdamW."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        """``betas``: the momentum, and the decay of the averaged squares."""
        super().__init__(groups, lr, betas[0])
        # not in the groups, where older checkpoints have none
        self.beta2 = betas[1]
        self.eps = eps

    def _directions(self, parameters: list[torch.Tensor], steps: int) -> Tensors:
        gradients = super()._directions(parameters, steps)
        for parameter in parameters:
            if "exp_avg_sq" not in self.state[parameter]:
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
        squares = [self.state[parameter]["exp_avg_sq"] for parameter in parameters]
        torch._foreach_mul_(squares, self.beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - self.beta2)
        roots = torch._foreach_div(squares, 1 - self.beta2**steps)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, self.eps)
        return torch._foreach_div(gradients, roots)
