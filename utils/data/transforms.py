"""Augmenting and normalising batches on the device.

Images arrive as uint8 and stay so as long as possible; normalisation makes floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property, lru_cache, partial

import numpy as np
import torch
from torch.nn import functional

from utils.config.image_size import Size, enlarged, sides
from utils.data.augment.base import Augmentation, Numbers, Samples
from utils.data.augmentations import fused, in_range
from utils.runtime.devices import constant, to_device

ENLARGED_PIXELS = 2**26  # in all images that are enlarged at once to crop their middle


@dataclass(frozen=True)
class BatchTransform:
    """The transform of uint8 images (n, channels, height, width) into normalised float32 images of ``size`` pixels.

    ``mean`` and ``std`` are per channel, for pixel values between 0 and 1. ``compiled``: the work on the device goes
    through torch.compile. ``interpolation``: for images of a different size. With ``crop_pct`` below 1, evaluation
    shows only the middle, as ``View`` does; pixels are not rounded to whole levels, so they are within one level of
    ``View``'s.
    """

    size: Size
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentations: tuple[Augmentation, ...] = ()
    seed: int = 0
    channels_last: bool = False
    compiled: bool = False
    interpolation: str = "bilinear"
    crop_pct: float = 1.0

    def training(
        self, images: torch.Tensor, keys: np.ndarray, epoch: int, drawn: list[Numbers] | None = None
    ) -> torch.Tensor:
        """Augment and normalise images; random numbers depend on ``keys`` (``MicroBatch.keys``), seed and epoch.

        ``drawn``: the random numbers that ``draw`` returned, if it was called before.
        """
        if drawn is None:
            drawn = self.draw(keys, epoch, (images.shape[-2], images.shape[-1]), images.device)
        return self._on_device(images, drawn)

    def draw(self, keys: np.ndarray, epoch: int, shape: tuple[int, int], device: torch.device) -> list[Numbers]:
        """Draw each augmentation's numbers for images of ``shape`` (height, width): a row per image, on ``device``.

        Drawing for several batches at once gives the same numbers as batch by batch, with fewer launches on the device.
        """
        samples = Samples(self.seed, epoch, keys)
        drawn = []
        for one in self._steps:
            numbers = one.draw(samples, *shape)
            on_device = [to_device(own, device) if isinstance(own, torch.Tensor) else own for own in numbers]
            drawn.append(one.prepared(*shape, *on_device) if on_device else ())
        return drawn

    def evaluation(self, images: torch.Tensor) -> torch.Tensor:
        """Resize if needed, crop the middle, and normalise."""
        if self.crop_pct < 1:
            whole = enlarged(self.size, self.crop_pct)
            firsts = [round((side - shown) / 2) for side, shown in zip(whole, self._shape, strict=True)]
            down, across = (slice(first, first + shown) for first, shown in zip(firsts, self._shape, strict=True))
            few = max(1, ENLARGED_PIXELS // math.prod(whole))  # a small crop_pct enlarges each image many times
            images = torch.cat([self._resized(part, whole)[..., down, across] for part in images.split(few)])
        return self._on_device(images, [()] * len(self._steps))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the transformed images."""
        return len(self.mean), *self._shape

    def at_size(self, size: Size) -> BatchTransform:
        """The transform for images of ``size`` pixels; augmentations that have a field ``size`` change, too."""
        if size == self.size:
            return self
        if size not in self._other_sizes:  # kept, because each is compiled on its own
            augmentations = tuple(
                replace(one, size=size) if is_dataclass(one) and hasattr(one, "size") else one
                for one in self.augmentations
            )
            self._other_sizes[size] = replace(self, size=size, augmentations=augmentations)
        return self._other_sizes[size]

    @property
    def _shape(self) -> tuple[int, int]:
        return sides(self.size)

    @cached_property
    def _other_sizes(self) -> dict[Size, BatchTransform]:
        return {}

    @cached_property
    def _steps(self) -> tuple[Augmentation, ...]:
        return fused(self.augmentations)

    def _on_device(self, images: torch.Tensor, drawn: list[Numbers]) -> torch.Tensor:
        return self._device_part(images, *_statistics(self.mean, self.std, 255, images.device), drawn)

    @cached_property
    def _device_part(self) -> Callable[..., torch.Tensor]:
        if not self.compiled:
            return partial(self._augmented, [one.apply for one in self._steps])
        # As a decorator of the methods, disable() would import the compiler, a quarter of the start of every run.
        apply = [one.apply if one.compilable else torch.compiler.disable(one.apply) for one in self._steps]
        # An epoch has few sizes of batches, and each compiles better on its own.
        return torch.compile(partial(self._augmented, apply), dynamic=False)

    def _augmented(
        self,
        applied: Sequence[Callable[..., torch.Tensor]],
        images: torch.Tensor,
        mean: torch.Tensor,
        std: torch.Tensor,
        drawn: list[Numbers],
    ) -> torch.Tensor:
        steps = [step for step in zip(self._steps, applied, drawn, strict=True) if step[-1]]
        for augmentation, apply, numbers in steps:
            if not augmentation.normalised:
                images = apply(images, *numbers)
        images = self._normalised(images, mean, std)
        for augmentation, apply, numbers in steps:
            if augmentation.normalised:
                images = apply(images, *numbers)
        return images

    def _normalised(self, images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
        if images.shape[-2:] != self._shape:
            images = self._resized(images, self._shape)
        # Bytes are rearranged faster than floats; and float() makes a new tensor of uint8, which can be overwritten.
        images = images.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)
        images = images.float()
        lines = images
        by_pixel = images.permute(0, 2, 3, 1)
        if self.channels_last and by_pixel.is_contiguous():  # a row at a time, not the three numbers of a pixel
            height, width = self._shape
            lines = by_pixel.view(len(images), height, width * images.shape[1])  # -1 is ambiguous for no image
            mean = mean.flatten().repeat(width)
            std = std.flatten().repeat(width)
        lines.sub_(mean).div_(std)
        return images

    def _resized(self, images: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        images = images.float()
        sizes = [shape]
        if self.interpolation == "bicubic":  # width first, as in Pillow, which clips overshoot in between
            sizes.insert(0, (images.shape[-2], shape[1]))
        for size in sizes:
            images = in_range(
                functional.interpolate(images, size, mode=self.interpolation, antialias=True), self.interpolation
            )
        return images

    def to_pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Undo the normalisation: floats between 0 and 1, for pictures."""
        mean, std = _statistics(self.mean, self.std, 1, images.device)
        return (images * std + mean).clamp(0, 1)


def for_people(pixels: torch.Tensor) -> torch.Tensor:
    """Select the channels of ``pixels`` (..., c, h, w) that a picture can show: the first three, or else the first."""
    return pixels[..., : 3 if pixels.shape[-3] >= 3 else 1, :, :]


@lru_cache(maxsize=8)
def _statistics(
    mean: tuple[float, ...], std: tuple[float, ...], levels: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Mean and std times ``levels``: tensors (1, c, 1, 1), kept, so that they are moved to ``device`` only once."""
    return tuple(levels * constant(values, torch.float32, device).view(1, -1, 1, 1) for values in (mean, std))
