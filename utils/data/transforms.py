"""Augmentation: batched on the device, from random numbers that belong to the sample.

Images arrive as uint8; a shift copies whole rows and a flip takes columns, then normalisation makes floats. Each
random number depends on (seed, epoch, index) alone (see ``sample_plan.sample_uniforms``), so that an image is
augmented alike by either loader and on any number of workers and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch.nn import functional

from utils.data.images.decoding import CROP_AREA, CROP_RATIO
from utils.data.sample_plan import sample_uniforms
from utils.runtime.distributed import to_device

# Each kind of randomness has its own stream, so that switching one off leaves the others as they were.
SHIFT_STREAM, FLIP_STREAM, CROP_STREAM, CUTOUT_STREAM = 1, 2, 3, 4
CROP_NUMBERS = 22


@dataclass(frozen=True)
class BatchTransform:
    """uint8 images (n, channels, height, width) into normalised float32 of ``size`` pixels square.

    ``mean`` and ``std`` are per channel, for pixel values between 0 and 1. ``max_shift`` is in pixels
    of the stored image; what a shift uncovers is black, or with ``shift_padding`` 'reflect' the image's mirror
    image. 'alternating-flip' flips half of the images in one epoch and the others in the next (Jordan, 94 % on
    CIFAR-10 in 3.29 seconds, 2024). ``cutout`` is the side of a square set to the mean around any of the image's
    pixels (DeVries and Taylor, Improved regularization of convolutional neural networks with cutout, 2017).
    ``crop_here``: whether a random-resized-crop is done here, on whole images; the streaming loader does it while
    decoding. ``compiled``: the work on the device goes through torch.compile. ``interpolation`` is that of images that
    have another size. Below 1, ``crop_pct`` makes evaluation show the middle only, as ``View`` does; the pixels are not
    rounded to whole levels, so they are within one level of the view's.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: tuple[str, ...]
    max_shift: int
    seed: int
    crop_here: bool
    channels_last: bool
    shift_padding: str = "zero"
    cutout: int = 0
    compiled: bool = False
    interpolation: str = "bilinear"
    crop_pct: float = 1.0

    def training(self, images: torch.Tensor, indices: np.ndarray, epoch: int) -> torch.Tensor:
        """Augment and normalise; ``indices`` are the samples' numbers in the data set."""
        rows = columns = flips = crops = centres = None
        if "flip" in self.augment or "alternating-flip" in self.augment:
            flips = self._flips(indices, epoch)
        if "shift" in self.augment:
            rows, columns = self._window(*images.shape[-2:], indices, epoch, flips)
            flips = None  # the window has them
        if "resized-crop" in self.augment and self.crop_here:
            crops = torch.from_numpy(sample_uniforms(self.seed, epoch, indices, CROP_STREAM, 4))
        if self.cutout:
            uniforms = sample_uniforms(self.seed, epoch, indices, CUTOUT_STREAM, 2)
            centres = torch.from_numpy((uniforms * self.size).astype(np.int64))
        return self._on_device(images, rows, columns, flips, crops, centres)

    def evaluation(self, images: torch.Tensor) -> torch.Tensor:
        """Resize where that is needed, show the middle, and normalise."""
        if self.crop_pct < 1:
            side = math.floor(self.size / self.crop_pct)
            first = round((side - self.size) / 2)
            images = self._resized(images, side)[..., first : first + self.size, first : first + self.size]
        return self._on_device(images)

    def _window(
        self, height: int, width: int, indices: np.ndarray, epoch: int, flips: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which row and column of the image, padded by zeros, each pixel comes from: int64 (n, height), (n, width)."""
        uniforms = torch.from_numpy(sample_uniforms(self.seed, epoch, indices, SHIFT_STREAM, 2))
        offsets = (uniforms * (2 * self.max_shift + 1)).long()  # where the window lies in the padded image
        places = torch.arange(width)
        rows = offsets[:, :1] + torch.arange(height)
        columns = offsets[:, 1:] + (places if flips is None else torch.where(flips[:, None], places.flip(0), places))
        if self.shift_padding == "reflect":  # then the image is not padded
            rows, columns = mirrored(rows - self.max_shift, height), mirrored(columns - self.max_shift, width)
        return rows, columns

    def _flips(self, indices: np.ndarray, epoch: int) -> torch.Tensor:
        """Which images are flipped: bool (n,)."""
        alternating = "alternating-flip" in self.augment
        flips = sample_uniforms(self.seed, 0 if alternating else epoch, indices, FLIP_STREAM, 1) < 0.5
        return torch.from_numpy(~flips if alternating and epoch % 2 else flips)[:, 0]

    def _on_device(self, images: torch.Tensor, *numbers: torch.Tensor | None) -> torch.Tensor:
        given = (None if number is None else to_device(number, images.device) for number in numbers)
        return self._device_part(images, *_statistics(self.mean, self.std, 255, images.device), *given)

    @cached_property
    def _device_part(self) -> Callable[..., torch.Tensor]:
        # An epoch has few sizes of batches, and each compiles better on its own.
        return torch.compile(self._augmented, dynamic=False) if self.compiled else self._augmented

    def _augmented(
        self,
        images: torch.Tensor,
        mean: torch.Tensor,
        std: torch.Tensor,
        rows: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
        flips: torch.Tensor | None = None,
        crops: torch.Tensor | None = None,
        centres: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if rows is not None:
            if self.shift_padding == "zero":
                images = functional.pad(images, (self.max_shift,) * 4)
            images = select_rows(images, rows)
            images = images.gather(3, columns[:, None, None, :].expand(*images.shape[:3], -1))
        if flips is not None:
            images = flip_some(images, flips)
        if crops is not None:
            images = self._in_range(resized_crop(images.float(), crops, self.size, self.interpolation))
        images = self._normalised(images, mean, std)
        if centres is not None:
            images = cut_out(images, centres, self.cutout)
        return images

    def _normalised(self, images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
        if images.shape[-2:] != (self.size, self.size):
            images = self._resized(images, self.size)
        # Bytes are rearranged faster than floats are; and from uint8 float() makes a tensor that can be overwritten.
        images = images.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)
        images = images.float()
        lines, by_pixel = images, images.permute(0, 2, 3, 1)
        if self.channels_last and by_pixel.is_contiguous():  # whole lines of pixels, not three numbers at a time
            lines = by_pixel.view(len(images), self.size, -1)
            mean, std = mean.flatten().repeat(self.size), std.flatten().repeat(self.size)
        lines.sub_(mean).div_(std)
        return images

    def _resized(self, images: torch.Tensor, side: int) -> torch.Tensor:
        images, sizes = images.float(), [(side, side)]
        if self.interpolation == "bicubic":  # first the width, as Pillow does, which cuts off what that overshoots
            sizes.insert(0, (images.shape[-2], side))
        for size in sizes:
            images = self._in_range(functional.interpolate(images, size, mode=self.interpolation, antialias=True))
        return images

    def _in_range(self, images: torch.Tensor) -> torch.Tensor:
        """Bicubic interpolation overshoots at edges; bytes cannot."""
        return images.clamp_(0, 255) if self.interpolation == "bicubic" else images

    def to_pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Undo the normalisation: floats between 0 and 1, for pictures."""
        mean, std = _statistics(self.mean, self.std, 1, images.device)
        return (images * std + mean).clamp(0, 1)


@lru_cache(maxsize=8)
def _statistics(
    mean: tuple[float, ...], std: tuple[float, ...], levels: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """``levels`` times mean and std as tensors (1, c, 1, 1), brought to the device once and not for every batch."""
    return tuple(levels * torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (mean, std))


def select_rows(images: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows ``rows`` (n, k) of images (n, c, h, w): (n, c, k, w). Copies whole rows, not single pixels."""
    count, channels, height, width = images.shape
    first = torch.arange(0, count * channels * height, height, device=images.device).view(count, channels, 1)
    chosen = (first + rows[:, None, :]).flatten()
    return images.reshape(-1, width).index_select(0, chosen).view(count, channels, rows.shape[1], width)


def flip_some(images: torch.Tensor, flips: torch.Tensor) -> torch.Tensor:
    """Images (n, c, h, w), those of ``flips`` (n,) mirrored left to right: both ways of all, and of each the right one.

    Flipping all and copying whole images is several times as fast as choosing pixel by pixel.
    """
    both = torch.cat([images, images.flip(3)])
    return take(both, torch.arange(len(images), device=images.device) + len(images) * flips)


def take(images: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Images ``places``, int64 (k,), of images (n, c, h, w): (k, c, h, w), in the same memory format."""
    if images.is_contiguous():
        return images.index_select(0, places)
    # index_select copies whole images only when they lie in memory as it sees them.
    return images.permute(0, 2, 3, 1).index_select(0, places).permute(0, 3, 1, 2)


def mirrored(places: torch.Tensor, size: int) -> torch.Tensor:
    """Places on a line of ``size`` pixels; those beyond its ends as in a mirror there, the end pixel not repeated."""
    period = max(1, 2 * (size - 1))
    places = places % period
    return torch.minimum(places, period - places)


def cut_out(images: torch.Tensor, centres: torch.Tensor, side: int) -> torch.Tensor:
    """Images (n, c, h, w) with a square of zeros around ``centres`` (n, 2), row and column, as far as it is inside."""
    first = centres - side // 2
    end = first + side
    rows, columns = (inside(first[:, axis], end[:, axis], images.shape[2 + axis]) for axis in (0, 1))
    return images.masked_fill_(rows[:, None, :, None] & columns[:, None, None, :], 0)


def inside(first: torch.Tensor, end: torch.Tensor, length: int) -> torch.Tensor:
    """Which places of ``length`` lie from ``first`` (n,) up to, not including, ``end`` (n,): bool (n, length)."""
    place = torch.arange(length, device=first.device)
    return (place >= first[:, None]) & (place < end[:, None])


def resized_crop(
    images: torch.Tensor, uniforms: torch.Tensor, size: int, interpolation: str = "bilinear"
) -> torch.Tensor:
    """Random-resized-crop of a float batch (n, c, h, w) on its device to ``size`` pixels square, without antialiasing.

    ``uniforms``: (n, 4) for area, aspect ratio and place. A box that would not fit is narrowed to the
    image instead of drawn again.
    """
    height, width = images.shape[-2:]
    area = height * width * (CROP_AREA[0] + (CROP_AREA[1] - CROP_AREA[0]) * uniforms[:, 0])
    low, high = (math.log(ratio) for ratio in CROP_RATIO)
    ratio = torch.exp(low + (high - low) * uniforms[:, 1])
    box_width = (area * ratio).sqrt().clamp(max=width) / width
    box_height = (area / ratio).sqrt().clamp(max=height) / height
    theta = torch.zeros(len(images), 2, 3, device=images.device)
    theta[:, 0, 0], theta[:, 1, 1] = box_width, box_height
    theta[:, 0, 2] = (2 * uniforms[:, 2] - 1) * (1 - box_width)
    theta[:, 1, 2] = (2 * uniforms[:, 3] - 1) * (1 - box_height)
    grid = functional.affine_grid(theta, [len(images), images.shape[1], size, size], align_corners=False)
    return functional.grid_sample(images, grid, mode=interpolation, padding_mode="border", align_corners=False)
