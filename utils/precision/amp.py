"""Autocast and gradient scaler.

fp16 (5 exponent bits) needs the loss scaled up, or small gradients underflow to zero (Micikevicius et
al., Mixed precision training, 2017); bf16 has float32's range and needs none. The scaler always exists,
disabled where it is not needed, so that there is one training step and no second code path.
"""

from __future__ import annotations

import torch

from utils.settings import PrecisionSettings, UserError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def resolve_amp(settings: PrecisionSettings, device: torch.device) -> str:
    """'off', 'fp16' or 'bf16': what was asked for, or the device's default. Raises ``UserError``."""
    if settings.amp == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"--amp bf16: {torch.cuda.get_device_name(device)} has no bfloat16 arithmetic; use --amp fp16")
    return settings.amp or ("fp16" if device.type == "cuda" else "off")


def build_scaler(settings: PrecisionSettings, device: torch.device) -> torch.amp.GradScaler:
    """The gradient scaler; only fp16 enables it, elsewhere it hands everything through unchanged."""
    enabled = resolve_amp(settings, device) == "fp16"
    return torch.amp.GradScaler(device.type, init_scale=settings.init_scale, enabled=enabled)


def autocast(settings: PrecisionSettings, device: torch.device) -> torch.autocast:
    """The context for forward pass and loss, reusable; it does nothing when mixed precision is off."""
    amp = resolve_amp(settings, device)
    return torch.autocast(device.type, dtype=DTYPES.get(amp), enabled=amp != "off")
