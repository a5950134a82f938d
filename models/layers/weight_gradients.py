"""Weight gradients of 3x3 convolutions as nine matrix products: ``--matmul-weight-grad``.

Libraries are tuned for inference. In bfloat16 on a CPU the gradient of a convolution's weights may take several times
as long as its forward pass, although both are as many multiplications; the same gradient as matrix products over
shifted images does not.
"""

from __future__ import annotations

import copy
import difflib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from utils.config.settings import Settings, UserError
from utils.precision.amp import autocast
from utils.precision.choice import in_layout_of
from utils.runtime.distributed import Distributed

ENOUGH = 0.95  # of the library's time
ROUNDS = 3
MOST_IMAGES = 512


def use_matrix_products(model: nn.Module, names: Sequence[str]) -> None:
    """Make the layers ``names`` of ``model`` compute the gradients of their weights as matrix products.

    Names of parameters stay as they are. Raises ``UserError`` for a layer that is no 3x3 convolution of stride 1 with
    as many zeros around the images.
    """
    modules = dict(model.named_modules())
    fitting = [name for name, module in modules.items() if takes_products(module)]
    for name in names:
        if name not in fitting:
            near = difflib.get_close_matches(name, fitting, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise UserError(f"--matmul-weight-grad {name}: no 3x3 convolution of stride 1 has this name{hint}")
        # A subclass rather than a wrapped method, which would stay bound to this module in a deep copy.
        module = modules[name]
        module.__class__ = type(type(module).__name__, (MatrixProductConv, type(module)), {})


def takes_products(module: nn.Module) -> bool:
    """Whether ``use_matrix_products`` knows how to compute the gradient of this layer."""
    return (
        isinstance(module, nn.Conv2d)
        and (module.kernel_size, module.stride, module.dilation) == ((3, 3), (1, 1), (1, 1))
        and (module.padding, module.padding_mode, module.groups) == ((1, 1), "zeros", 1)
    )


def weight_gradient(images: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient (o, c, 3, 3) of the filters, for ``images`` (n, c, h, w) and the outputs' ``gradient`` (n, o, h, w).

    Both are laid out pixel by pixel with a margin of zeros, so that moving by a row or column is an offset, and each of
    the nine products takes its operands as they lie.
    """
    width = images.shape[3]
    channels = images.shape[1]
    filters = gradient.shape[1]
    pixels = functional.pad(images.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1)).reshape(-1, channels)
    of_pixels = functional.pad(gradient.permute(0, 2, 3, 1), (0, 0, 0, 2, 0, 2)).reshape(-1, filters)
    found = gradient.new_empty(3, 3, filters, channels)
    for row in range(3):
        for column in range(3):
            offset = row * (width + 2) + column
            torch.mm(of_pixels[: len(pixels) - offset].T, pixels[offset:], out=found[row, column])
    return found.permute(2, 3, 0, 1)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(images, weight)
        return functional.conv2d(images, weight, bias, padding=1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        of_images = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_images, _, _ = torch.ops.aten.convolution_backward(
                gradient, images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]
            )
        if ctx.needs_input_grad[1]:
            of_weight = weight_gradient(images, gradient)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum((0, 2, 3))
        return of_images, of_weight, of_bias


class MatrixProductConv:
    """Mixed into a convolution's class."""

    def _conv_forward(self, images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        kind = images.device.type
        if torch.is_autocast_enabled(kind):  # which knows functions of torch, but not this one
            dtype = torch.get_autocast_dtype(kind)
            images = images.to(dtype)
            weight = weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            return _Convolution.apply(images, weight, bias)


# --------------------------------------------------------------------------------- chosen by measurement


def with_chosen_layers(
    args: Settings, model: nn.Module, image_shape: tuple[int, int, int], distributed: Distributed
) -> tuple[Settings, str]:
    """The settings with layers in place of ``auto``, the same on all ranks, and a line for the log.

    Images are float32 (n, *image_shape). The line is empty if there was nothing to choose.
    """
    if "matmul_weight_grad" not in args.unmeasured():
        return args, ""
    device = distributed.device
    if device.type != "cpu":
        return args.with_values(matmul_weight_grad=None), "--matmul-weight-grad auto: none, as this is no CPU"
    images = in_layout_of(model, torch.zeros(min(args.data.batch_size, MOST_IMAGES), *image_shape))
    context = autocast(args.precision, device)
    names = distributed.run_on_rank0(lambda: chosen_layers(model, images, context))
    text = f"{', '.join(names) or 'none'} (measured)"
    return args.with_values(matmul_weight_grad=names or None), f"--matmul-weight-grad auto: {text}"


def chosen_layers(model: nn.Module, images: torch.Tensor, autocast: torch.autocast) -> tuple[str, ...]:
    """The layers whose weight gradients matrix products give faster than the library for ``images``."""
    model = copy.deepcopy(model).train()
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, module in model.named_modules():
        if takes_products(module):
            module.register_forward_hook(lambda _, given, out, name=name: seen.update({name: (given[0], out)}))
    with torch.random.fork_rng(devices=[]), torch.no_grad(), autocast:
        model(images)
    return tuple(name for name, (given, out) in seen.items() if _products_are_faster(given.to(out.dtype), out))


def _products_are_faster(images: torch.Tensor, gradient: torch.Tensor) -> bool:
    shape = (gradient.shape[1], images.shape[1], 3, 3)
    weight = images.new_zeros(shape)

    def library() -> None:
        torch.ops.aten.convolution_backward(
            gradient, images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
        )

    times: tuple[list[float], list[float]] = ([], [])
    for number in range(1 + ROUNDS):
        for found, compute in zip(times, (library, lambda: weight_gradient(images, gradient)), strict=True):
            began = time.perf_counter()
            compute()
            if number:  # the first call prepares
                found.append(time.perf_counter() - began)
    theirs, ours = map(statistics.median, times)
    return ours < ENOUGH * theirs
