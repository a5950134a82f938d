"""Autocast and gradient scaler.

fp16 (5 exponent bits) needs the loss scaled up, or small gradients underflow to zero (Micikevicius et
al., Mixed precision training, 2017); bf16 has float32's range and needs none. The scaler always exists,
disabled if it is not needed: there is one training step and no second code path.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from utils.config.field import MEASURED
from utils.config.groups.precision import PrecisionSettings
from utils.config.settings import UserError
from utils.config.spelling import or_nearest
from utils.runtime.devices import scales_losses

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def resolve_amp(settings: PrecisionSettings, device: torch.device) -> str:
    """The format in the settings, or the device's default: 'off', 'fp16' or 'bf16'. Raises ``UserError``.

    The default replaces ``auto`` until ``choice.with_chosen_amp`` has measured.
    """
    if settings.amp == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"--amp bf16: {torch.cuda.get_device_name(device)} has no bfloat16 arithmetic; use --amp fp16")
    chosen = None if settings.amp == MEASURED else settings.amp
    return chosen or ("fp16" if scales_losses(device) else "off")


def build_scaler(settings: PrecisionSettings, device: torch.device) -> torch.amp.GradScaler:
    """Build the gradient scaler. Only fp16 enables it; otherwise it passes everything through unchanged."""
    enabled = resolve_amp(settings, device) == "fp16"
    return Scaler(device.type, init_scale=settings.init_scale, enabled=enabled)


class Scaler(torch.amp.GradScaler):
    """Gradient scaler like torch's, with two launches fewer per optimizer.

    torch copies scale and flag for several devices, but here there is only one.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not gradients or any(
            own.dtype != torch.float32 or own.is_sparse or hasattr(own, "to_local") for own in gradients
        ):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        with torch.no_grad():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
        return {found_inf.device: found_inf}


def autocast(settings: PrecisionSettings, device: torch.device) -> torch.autocast:
    """The context for forward pass and loss, reusable; it does nothing if mixed precision is off."""
    amp = resolve_amp(settings, device)
    return torch.autocast(device.type, dtype=DTYPES.get(amp), enabled=amp != "off")


def keep_in_fp32(model: nn.Module, names: Sequence[str], device: torch.device) -> None:
    """Make the modules ``names`` of ``model`` compute in float32 under autocast; names as in ``named_modules``.

    Their floating-point inputs are cast to float32 and autocast is off inside; the next layer casts their
    float32 output as it needs. Parameter names stay as they are. A call for another device replaces the first.
    Raises ``UserError`` for an unknown name.
    """
    modules = dict(model.named_modules())
    unknown = [name for name in names if not name or name not in modules]
    if unknown:
        hint = or_nearest(unknown[0], modules, f"its parts are {', '.join(name for name, _ in model.named_children())}")
        raise UserError(f"--fp32-layers {' '.join(unknown)}: the network has no such layer; {hint}")
    for name in names:
        module = modules[name]
        # A subclass rather than a wrapped method, which would stay bound to this module in a deep copy.
        if not isinstance(module, _InFloat32):
            module.__class__ = type(type(module).__name__, (_InFloat32, type(module)), {})
        module.autocast_device = device.type


@torch.no_grad()
def never_called(
    model: nn.Module, names: Sequence[str], image_shape: tuple[int, ...], device: torch.device, training: bool
) -> tuple[str, ...]:
    """Find the modules in ``names`` whose ``forward`` is not called in a forward pass of ``model``; tried on a copy.

    ``keep_in_fp32`` has no effect on these: lists of layers, and layers whose weights another layer uses.
    """
    if not names:
        return ()
    model = copy.deepcopy(model)
    alone = not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())  # which waits for other ranks
    model.train(training and alone)
    called = set()
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.add(name))
    model(torch.zeros(2, *image_shape, device=device))  # a batch norm of one pixel needs two images to train
    return tuple(name for name in names if name not in called)


class _InFloat32(nn.Module):
    """Mixin for a module's class: runs ``forward`` without autocast, on float32 inputs."""

    autocast_device: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.autocast_device, enabled=False):
            return super().forward(*map(_full, args), **{name: _full(value) for name, value in kwargs.items()})


def _full(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def describe(settings: PrecisionSettings, device: torch.device) -> str:
    """Describe the dtypes in which a network computes on ``device``."""
    amp = resolve_amp(settings, device)
    if settings.amp == MEASURED and device.type == "cpu":
        return "bf16 or float32, by measurement when the run begins"
    tf32 = f", TF32 {'on' if settings.tf32 else 'off'}" if settings.tf32 is not None and device.type == "cuda" else ""
    if amp == "off":
        default = ", convolutions in TF32 where the GPU has it" if device.type == "cuda" and not tf32 else tf32
        return f"float32 (mixed precision off){default}"
    scale = f", loss scale from {settings.init_scale:g}" if amp == "fp16" else ""
    layers = f", float32 in {' '.join(settings.fp32_layers)}" if settings.fp32_layers else ""
    return f"{amp}{scale}{layers}{tf32}"
