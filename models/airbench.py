"""The network that reaches 94 % on CIFAR-10 fastest (Jordan, 94% on CIFAR-10 in 3.29 seconds on a single GPU, 2024)."""

from __future__ import annotations

import torch
from torch import nn

from utils.config.image_size import Size, sides

WIDTHS = (64, 256, 256)
WHITENED = 2  # pixels: the side of the patches that the first layer whitens
WHITENING_EPS = 5e-4  # added to the variances: those of normalised images lie between 1e-4 and 10
NORM_MOMENTUM = 0.4  # few steps are taken, so the statistics must follow fast
NORM_EPS = 1e-12
CHUNK = 500  # images whose patches are in memory at a time


class Airbench(nn.Module):
    """Whitened patches, three pairs of 3x3 convolutions, and a linear layer; no residual connections.

    As in airbench94: the first layer's filters are the principal components of 2x2 patches of the training images, each
    divided by its standard deviation, once as they are and once negated (``start_from_images``); they do not train.
    Convolutions begin as the identity on as many channels as they receive (Dirac), batch norms keep their scale of 1,
    and logits are divided by the number of features, each of which is its map's maximum. A max-pool that would leave
    nothing is left out. Input (n, channels, h, w), output (n, classes).
    """

    def __init__(self, classes: int, channels: int, size: Size, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        shortest = min(sides(size))
        side = min(WHITENED, shortest)
        before = 2 * channels * side**2
        shortest = shortest - side + 1
        self.whitening = nn.Conv2d(channels, before, side)
        self.whitening.weight.requires_grad_(False)
        nn.init.zeros_(self.whitening.get_parameter("bias"))
        layers: list[nn.Module] = [nn.GELU()]
        for width in widths:
            layers.append(_Pair(before, width, pools=shortest > 1))
            before = width
            shortest = max(1, shortest // 2)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(widths[-1], classes, bias=False)
        with torch.no_grad():
            self.classifier.weight.div_(self.classifier.weight.std())

    @torch.no_grad()
    def start_from_images(self, images: torch.Tensor) -> None:
        """Set the first layer's filters for training ``images``, normalised float32 (n, channels, h, w)."""
        filters = whitening_filters(images.float().cpu(), self.whitening.kernel_size[0])
        self.whitening.weight.copy_(torch.cat([filters, -filters]))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = _largest(self.features(self._whitened(images)))
        return self.classifier(features) / features.shape[1]

    def _whitened(self, images: torch.Tensor) -> torch.Tensor:
        """First layer's outputs in float32: small differences of large numbers, of which bfloat16 would lose 6 %."""
        if not torch.is_autocast_enabled(images.device.type):
            return self.whitening(images)
        with torch.autocast(images.device.type, enabled=False):
            return self.whitening(images.float())


def _largest(maps: torch.Tensor) -> torch.Tensor:
    """The maximum of each map of ``maps`` (n, c, h, w): (n, c). Its gradient is shared by all places that hold it.

    Compiled, the first place takes it all: in half precision, compiled code compares unrounded maps with their rounded
    maximum, so that no place may hold it, and a share would be divided by 0 (torch 2.11 and 2.14).
    """
    return maps.flatten(2).max(2).values if torch.compiler.is_compiling() else maps.amax((2, 3))


class _Pair(nn.Module):
    """Two 3x3 convolutions, each with batch norm and GELU; a 2x2 max-pool follows the first convolution."""

    def __init__(self, before: int, after: int, pools: bool) -> None:
        super().__init__()
        self.conv1 = _convolution(before, after)
        self.conv2 = _convolution(after, after)
        self.norm1 = _norm(after)
        self.norm2 = _norm(after)
        self.pool = nn.MaxPool2d(2) if pools else nn.Identity()
        self.activation = nn.GELU()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = self.activation(self.norm1(self.pool(self.conv1(images))))
        return self.activation(self.norm2(self.conv2(images)))


def _convolution(before: int, after: int) -> nn.Conv2d:
    layer = nn.Conv2d(before, after, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:before])
    return layer


def _norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, eps=NORM_EPS, momentum=NORM_MOMENTUM)
    norm.weight.requires_grad_(False)
    return norm


def whitening_filters(images: torch.Tensor, side: int = WHITENED) -> torch.Tensor:
    """Filters (c x side^2, c, side, side) whose responses over all patches of ``images`` (n, c, h, w) do not correlate.

    The mean square of each response is 1, except for components with a variance of about ``WHITENING_EPS`` or less.
    Patches are not centred, as normalised images have a mean of about 0.
    """
    channels = images.shape[1]
    size = channels * side**2
    sums = torch.zeros(size, size, dtype=torch.float64)
    count = 0
    for some in images.split(CHUNK):
        patches = some.unfold(2, side, 1).unfold(3, side, 1)  # (n, c, h - side + 1, w - side + 1, side, side)
        patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, size)
        sums += patches.T @ patches
        count += len(patches)
    variances, components = torch.linalg.eigh(sums / count)
    filters = components.T / (variances[:, None] + WHITENING_EPS).sqrt()
    return filters.float().view(size, channels, side, side)
