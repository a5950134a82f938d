"""Where the channels-last memory format is faster."""

from __future__ import annotations

import torch
from torch import nn


def channels_last_is_faster(model: nn.Module, device: torch.device, amp: str) -> bool:
    """Whether ``model`` trains faster in channels-last on ``device``; ``amp`` is 'off', 'fp16' or 'bf16'."""
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return False
    return device.type == "cpu" or amp != "off"
