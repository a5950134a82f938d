"""Gradient clipping: by norm, by value, or adaptive. Gradients must be unscaled before."""

from __future__ import annotations

import torch
from torch import nn

from utils.settings import OptimisationSettings


class GradientClipper:
    """Measures the whole gradient's norm and clips as the settings say.

    By norm (Pascanu et al., On the difficulty of training recurrent neural networks, 2013): the whole
    gradient is scaled to at most that norm. By value: each number is clamped. Adaptive (Brock et al.,
    High-performance large-scale image recognition without normalization, 2021): the gradient of each unit's
    weights is scaled to at most that share of the weights' norm; the last layer is left alone, as in the paper.
    """

    def __init__(self, settings: OptimisationSettings, model: nn.Module) -> None:
        self.norm, self.value, self.share = settings.clip_grad_norm, settings.clip_grad_value, settings.clip_grad_agc
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        last = {id(parameter) for parameter in last_layer(model).parameters()} if self.share else set()
        self._adaptive = [parameter for parameter in self.parameters if id(parameter) not in last]

    def __call__(self) -> torch.Tensor:
        """Clip the gradients in place; gives the whole gradient's norm before, a tensor () on the device."""
        # nn.utils.get_total_norm without its sorting by devices and types, which took as long as the norms themselves.
        norms = torch._foreach_norm([p.grad for p in self.parameters if p.grad is not None])
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self.norm is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.norm, norm)
        elif self.value is not None:
            nn.utils.clip_grad_value_(self.parameters, self.value)
        elif self.share is not None:
            from timm.utils import adaptive_clip_grad

            adaptive_clip_grad(self._adaptive, self.share)
        return norm


def last_layer(model: nn.Module) -> nn.Module:
    """The layer that makes the logits: the last linear one or convolution."""
    return [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)][-1]
