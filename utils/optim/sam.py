"""Sharpness-aware minimisation: step with the gradient at the worst weights nearby."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from utils.config.groups.optimisation import OptimisationSettings


class SharpnessAware:
    """Moves the weights uphill for a step's second gradient, and back.

    Foret et al., Sharpness-aware minimization for efficiently improving generalization, 2021: with the gradient g of
    the whole step, the second gradient is taken at w + rho x g / |g|, and applied to w. ``adaptive``: the distance
    is measured relative to each weight, w + rho x w^2 g / |w g| (Kwon et al., ASAM, 2021).
    """

    def __init__(self, settings: OptimisationSettings, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters: list[torch.Tensor] = [*parameters]
        self.rho = settings.sam_rho
        self.adaptive = settings.sam_adaptive
        self._kept = [torch.empty_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def climb(self, scale: torch.Tensor) -> None:
        """Move the weights uphill along their gradients, which are multiplied by ``scale``, a tensor ().

        If the gradient is not finite, all weights become NaN and so does the second gradient; the step is then skipped
        like any step without a finite gradient. The host reads nothing.
        """
        torch._foreach_copy_(self._kept, self.parameters)
        there = [parameter for parameter in self.parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in there if parameter.grad is not None]
        torch._foreach_mul_(gradients, torch.ones_like(scale) / scale)
        if self.adaptive:
            torch._foreach_mul_(gradients, torch._foreach_abs(there))
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if self.adaptive:
            torch._foreach_mul_(gradients, torch._foreach_abs(there))
        distance = self.rho / (norm + 1e-12)  # the constant of the authors' code, for a gradient of zero
        torch._foreach_mul_(gradients, torch.where(torch.isfinite(norm), distance, torch.nan))
        torch._foreach_add_(there, gradients)

    @torch.no_grad()
    def come_back(self) -> None:
        """Restore the weights from before ``climb``, bit for bit."""
        torch._foreach_copy_(self.parameters, self._kept)
