"""Own networks, for small images of any size and number of channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from models.airbench import Airbench
from utils.config.image_size import Size, sides, size_of


class FullyConnected(nn.Module):
    """LeNet-300-100: two hidden layers (LeCun et al., Gradient-based learning, 1998).

    Input (n, channels, h, w), output (n, classes).
    """

    def __init__(self, classes: int, channels: int, size: Size) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * math.prod(sides(size)), 300),
            nn.ReLU(inplace=True),
            nn.Linear(300, 100),
            nn.ReLU(inplace=True),
            nn.Linear(100, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def _convolutions(
    channels: int, size: Size, stages: Sequence[Sequence[int]], bias: bool = False, norm: bool = False
) -> tuple[list[nn.Module], Size]:
    """3x3 convolutions of each stage's widths, with a 2x2 max-pool after each stage; and the image size they leave.

    ``norm``: a batch norm follows each convolution. A max-pool that would leave nothing is left out.
    """
    layers: list[nn.Module] = []
    down, across = sides(size)
    for stage in stages:
        for width in stage:
            layers.append(nn.Conv2d(channels, width, 3, padding=1, bias=bias))
            layers += [nn.BatchNorm2d(width)] if norm else []
            layers.append(nn.ReLU(inplace=True))
            channels = width
        if min(down, across) > 1:
            layers.append(nn.MaxPool2d(2))
            down //= 2
            across //= 2
    return layers, size_of(down, across)


class Conv(nn.Module):
    """Conv-2, -4 and -6 of Frankle and Carbin, The Lottery Ticket Hypothesis, 2019 (figure 2).

    Pairs of 3x3 convolutions of 64, 128 and 256 channels, each pair with a 2x2 max-pool, then linear
    layers of 256, 256 and ``classes``. Input (n, channels, h, w), output (n, classes).
    """

    def __init__(self, classes: int, channels: int, size: Size, widths: Sequence[int]) -> None:
        super().__init__()
        layers, size = _convolutions(channels, size, [(width, width) for width in widths], bias=True)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(widths[-1] * math.prod(sides(size)), 256),
            nn.ReLU(inplace=True),
            nn.Linear(256, 256),
            nn.ReLU(inplace=True),
            nn.Linear(256, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


class Pooled(nn.Module):
    """3x3 convolutions of each stage's widths without bias, a global average pool, and one linear layer.

    Stages of two equal convolutions make ``Conv`` with the pool instead of its hidden linear layers. ``norm``: a batch
    norm follows each convolution. Equally many weights for images of any size. Input (n, channels, h, w), output (n,
    classes).
    """

    def __init__(
        self, classes: int, channels: int, size: Size, stages: Sequence[Sequence[int]], norm: bool = False
    ) -> None:
        super().__init__()
        layers, _ = _convolutions(channels, size, stages, norm=norm)
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(stages[-1][-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


VGG_STAGES = {
    11: ((64,), (128,), (256, 256), (512, 512), (512, 512)),
    13: ((64, 64), (128, 128), (256, 256), (512, 512), (512, 512)),
    16: ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3),
    19: ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4),
}


def small_vgg(classes: int, channels: int, size: Size, depth: int) -> Pooled:
    """VGG (Simonyan and Zisserman, 2014) for small images: batch norm, average pool, one linear layer."""
    return Pooled(classes, channels, size, VGG_STAGES[depth], norm=True)


# The networks of our own, each made from (classes, channels, image size).
OWN: dict[str, Callable[..., nn.Module]] = {
    "fc": FullyConnected,
    "conv2": partial(Conv, widths=(64,)),
    "conv4": partial(Conv, widths=(64, 128)),
    "conv6": partial(Conv, widths=(64, 128, 256)),
    "conv2a": partial(Pooled, stages=((64, 64),)),
    "conv4a": partial(Pooled, stages=((64, 64), (128, 128))),
    "conv6a": partial(Pooled, stages=((64, 64), (128, 128), (256, 256))),
    "vgg11": partial(small_vgg, depth=11),
    "vgg13": partial(small_vgg, depth=13),
    "vgg16": partial(small_vgg, depth=16),
    "vgg19": partial(small_vgg, depth=19),
    "airbench": Airbench,
}
