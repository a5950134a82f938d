"""Augmentation: batched on the device, from random numbers that belong to the sample.

Images arrive as uint8; shift and flip are one gather, then normalisation makes floats. Each random
number depends on (seed, epoch, index) alone (see ``sample_plan.sample_uniforms``), so that an image is
augmented alike by either loader and on any number of workers and ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch.nn import functional

from utils.data.decoding import CROP_AREA, CROP_RATIO
from utils.data.sample_plan import sample_uniforms

# Each kind of randomness has its own stream, so that switching one off leaves the others as they were.
SHIFT_STREAM, FLIP_STREAM, CROP_STREAM = 1, 2, 3
CROP_NUMBERS = 22


@dataclass(frozen=True)
class BatchTransform:
    """uint8 images (n, channels, height, width) into normalised float32 of ``size`` pixels square.

    ``mean`` and ``std`` are per channel, for pixel values between 0 and 1. ``max_shift`` is in pixels
    of the stored image; what a shift uncovers is black. ``crop_here``: whether a random-resized-crop
    is done here, on whole images; the streaming loader does it while decoding.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: tuple[str, ...]
    max_shift: int
    seed: int
    crop_here: bool
    channels_last: bool

    def training(self, images: torch.Tensor, indices: np.ndarray, epoch: int) -> torch.Tensor:
        """Augment and normalise; ``indices`` are the samples' numbers in the data set."""
        if "shift" in self.augment or "flip" in self.augment:
            images = self._shift_and_flip(images, indices, epoch)
        if "resized-crop" in self.augment and self.crop_here:
            uniforms = sample_uniforms(self.seed, epoch, indices, CROP_STREAM, 4)
            images = resized_crop(images.float(), torch.from_numpy(uniforms).to(images.device), self.size)
        return self._finish(images)

    def evaluation(self, images: torch.Tensor) -> torch.Tensor:
        """Normalise only."""
        return self._finish(images)

    def _shift_and_flip(self, images: torch.Tensor, indices: np.ndarray, epoch: int) -> torch.Tensor:
        count, _, height, width = images.shape
        rows = torch.arange(height).expand(count, height)
        columns = torch.arange(width).expand(count, width)
        if "flip" in self.augment:
            flips = torch.from_numpy(sample_uniforms(self.seed, epoch, indices, FLIP_STREAM, 1)) < 0.5
            columns = torch.where(flips, width - 1 - columns, columns)
        if "shift" in self.augment:
            reach = self.max_shift
            uniforms = torch.from_numpy(sample_uniforms(self.seed, epoch, indices, SHIFT_STREAM, 2))
            offsets = (uniforms * (2 * reach + 1)).long()  # 0 ... 2 reach: where the window lies in the padded image
            rows, columns = rows + offsets[:, :1], columns + offsets[:, 1:]
            images = functional.pad(images, (reach, reach, reach, reach))
        rows, columns = rows.to(images.device), columns.to(images.device)
        batch = torch.arange(count, device=images.device)
        # Indexing with a slice between puts channels last; permute is only a view.
        return images[batch[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

    def _finish(self, images: torch.Tensor) -> torch.Tensor:
        images = images.float()
        if images.shape[-2:] != (self.size, self.size):
            images = functional.interpolate(images, (self.size, self.size), mode="bilinear", antialias=True)
        mean, std = _statistics(self.mean, self.std, images.device)
        images = (images - 255 * mean) / (255 * std)
        return images.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)

    def to_pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Undo the normalisation: floats between 0 and 1, for pictures."""
        mean, std = _statistics(self.mean, self.std, images.device)
        return (images * std + mean).clamp(0, 1)


@lru_cache(maxsize=4)
def _statistics(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Mean and std as tensors (1, c, 1, 1), brought to the device once and not for every batch."""
    return tuple(torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (mean, std))


def resized_crop(images: torch.Tensor, uniforms: torch.Tensor, size: int) -> torch.Tensor:
    """Random-resized-crop of a float batch (n, c, h, w) on its device, bilinear, to ``size`` pixels square.

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
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
