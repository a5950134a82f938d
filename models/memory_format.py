"""The choice of the channels-last memory format."""

from __future__ import annotations

import torch
from torch import nn


def channels_last_is_faster(model: nn.Module, device: torch.device, amp: str) -> bool:
    """Whether ``model`` trains faster in channels-last on ``device``; ``amp`` is 'off', 'fp16' or 'bf16'.

    On a CPU (2 cores, AVX-512, float32) it was never slower for a network with convolutions. Without it a step took
    1.40 times as long for MobileNetV3-small (128 pixels), 1.13 for ResNet-50 (128), 1.10 for VGG-16 and ResNet-18
    (32), 1.03 for conv2 and ConvNeXt-atto (128), 1.0 for ViT-tiny, whose only convolution is its stem. On a GPU, tensor
    cores prefer it in half precision (published: 1.26 for ResNet-18 to 1.47 for ResNet-50; not measured here); in
    float32 it is not known to help.
    """
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return False
    return device.type == "cpu" or amp != "off"
