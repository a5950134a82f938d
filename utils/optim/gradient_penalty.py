"""Gradient penalty: the norm of the loss's gradient as a loss of its own."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.linalg import vector_norm
from torch.nn.attention import SDPBackend, sdpa_kernel


def twice_differentiable(needed: bool) -> AbstractContextManager:
    """Around a forward pass whose gradient will be differentiated: fused attention has no second derivative."""
    return sdpa_kernel(SDPBackend.MATH) if needed else nullcontext()


def gradient_norm(loss: torch.Tensor, parameters: Iterable[nn.Parameter], scaler: torch.amp.GradScaler) -> torch.Tensor:
    """The norm of the gradient of ``loss`` (a scalar) with respect to ``parameters``: differentiable, shape ().

    The gradient is taken of the scaled loss, so that in half precision it does not underflow on its way, and
    unscaled before the norm (PyTorch's automatic mixed precision examples, "Gradient penalty"). The scale is
    never read by the host. Parameters that the loss does not depend on count as zero.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    scaled = torch.autograd.grad(scaler.scale(loss), wanted, create_graph=True, allow_unused=True)
    one = torch.ones((), device=loss.device)
    inverse = one / scaler.scale(one)
    return vector_norm(torch.stack([vector_norm(g * inverse) for g in scaled if g is not None]))
