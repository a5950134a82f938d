"""Gradient penalty: the norm of the loss's gradient as a second loss."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.linalg import vector_norm
from torch.nn.attention import SDPBackend, sdpa_kernel

from utils.config.settings import UserError
from utils.config.spelling import reason_of


def twice_differentiable(needed: bool) -> AbstractContextManager:
    """Context of a forward pass; if ``needed``, avoids fused attention, which has no second derivative."""
    return sdpa_kernel(SDPBackend.MATH) if needed else nullcontext()


def refuse_without_second_derivative(model: nn.Module, image_shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ``UserError`` if the gradient of ``model``'s outputs cannot be differentiated, as tried out on a copy."""
    model = copy.deepcopy(model)
    try:
        with twice_differentiable(True):
            output = model(torch.zeros(2, *image_shape, device=device))
        loss = output.square().sum()  # not linear: with a linear one, the last layer's gradient would be a constant
        gradient_norm(loss, model.parameters(), torch.amp.GradScaler(device.type, enabled=False)).backward()
    except RuntimeError as error:
        operation = re.search(r"aten::\w+", str(error))
        reason = operation.group() if operation else reason_of(error)
        raise UserError(
            f"--grad-penalty: the network has an operation without a second derivative ({reason}); remove the flag or "
            "choose another --arch"
        ) from error


def gradient_norm(loss: torch.Tensor, parameters: Iterable[nn.Parameter], scaler: torch.amp.GradScaler) -> torch.Tensor:
    """The norm of the gradient of ``loss`` (a scalar) with respect to ``parameters``: differentiable, shape ().

    The gradient is that of the scaled loss, which does not underflow in half precision, unscaled before the norm
    (PyTorch's automatic mixed precision examples, "Gradient penalty"). The host never reads the scale. Parameters that
    the loss does not depend on count as zero.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    scaled = torch.autograd.grad(scaler.scale(loss), wanted, create_graph=True, allow_unused=True)
    one = torch.ones((), device=loss.device)
    inverse = one / scaler.scale(one)
    return vector_norm(torch.stack([vector_norm(g * inverse) for g in scaled if g is not None]))
