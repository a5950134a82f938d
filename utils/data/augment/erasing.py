"""Random erasing of normalised images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch

from utils.data.augment.base import Augmentation, Numbers, Samples, Stream
from utils.data.sample_plan import mixed
from utils.runtime.devices import to_device

AREA = (0.02, 1 / 3)  # of the image, for all boxes together
ASPECT = (0.3, 1 / 0.3)  # height / width, log-uniform
ATTEMPTS = 10  # to find a box that fits
_GOLDEN = -0x61C8864680B583EB  # SplitMix64's, as int64


@dataclass(frozen=True)
class RandomErasing(Augmentation):
    """Boxes of noise or of one colour in some images (Zhong et al., 2017), with the geometry of timm's RandomErasing.

    ``mode``: 'const' fills with the mean, 'rand' with one random colour per box, 'pixel' with one per pixel; random
    colours are normal, with the data set's mean and standard deviation. An erased image has 1 to ``count`` boxes.
    """

    probability: float
    mode: str = "const"
    count: int = 1
    normalised: ClassVar[bool] = True

    def draw(self, samples: Samples, height: int, width: int) -> Numbers:
        """Draw random numbers, float64 (n, k), from which ``apply``, which knows the final image size, makes boxes."""
        return (samples.uniforms(Stream.ERASE, 4 + self.count * (2 * ATTEMPTS + 2)).astype(np.float64),)

    def apply(self, images: torch.Tensor, *numbers: np.ndarray) -> torch.Tensor:
        (uniforms,) = numbers
        chosen = np.flatnonzero(uniforms[:, 0] < self.probability)
        count = 1 + (uniforms[chosen, 1] * self.count).astype(np.int64)
        keys = (uniforms[chosen, 2:4] * 2**24).astype(np.uint64)  # all 24 bits of each
        keys = keys[:, 0] << np.uint64(24) | keys[:, 1]
        for number in range(self.count):  # one after the other, since later boxes may cover earlier ones
            first = 4 + number * (2 * ATTEMPTS + 2)
            boxes = boxes_of(uniforms[chosen, first : first + 2 * ATTEMPTS + 2], count, *images.shape[-2:])
            boxes[number >= count] = 0
            self._erase(images, chosen, boxes, keys + (np.uint64(number) << np.uint64(48)))
        return images

    def _erase(self, images: torch.Tensor, chosen: np.ndarray, boxes: np.ndarray, keys: np.ndarray) -> None:
        """Fill box i of ``boxes`` (k, 4) in image ``chosen[i]`` of ``images``, in place and in any memory format.

        ``keys``: uint64 (k,), from which the random colours of each box are made.
        """
        device = images.device
        channels = images.shape[1]
        image_step, channel_step, row_step, column_step = images.stride()
        top, left, height, width = boxes.T
        area = height * width
        start = chosen * image_step + top * row_step + left * column_step
        table = np.stack([start, width, np.cumsum(area) - area, area, mixed(keys).view(np.int64)])
        facts = to_device(torch.from_numpy(table), device)  # all else is computed there
        areas, codes = facts[3:]
        box = torch.repeat_interleave(torch.arange(len(boxes), device=device), areas, output_size=int(area.sum()))
        start, width, before = facts[:3, box]
        pixel = torch.arange(len(box), device=device) - before  # within its box
        first = start + pixel // width * row_step + pixel % width * column_step
        places = (first[:, None] + torch.arange(channels, device=device) * channel_step).view(-1)
        flat = images.as_strided((images.numel(),), (1,))
        if self.mode == "const":
            flat.index_fill_(0, places, 0.0)
        elif self.mode == "pixel":
            flat.index_copy_(0, places, normals(codes[box], pixel, channels).view(-1))
        else:
            flat.index_copy_(0, places, normals(codes, torch.zeros_like(codes), channels)[box].view(-1))

    def __str__(self) -> str:
        boxes = "a box" if self.count == 1 else f"1 to {self.count} boxes"
        return f"random erasing ({boxes} in {100 * self.probability:g} % of the images, {self.mode})"


def boxes_of(uniforms: np.ndarray, counts: np.ndarray, height: int, width: int) -> np.ndarray:
    """Boxes in images of ``height`` x ``width`` pixels, int64 (k, 4): top, left, height and width of each.

    ``uniforms`` (k, 2 * ATTEMPTS + 2): for the areas of all attempts, their aspect ratios, then the place; the first
    attempt that fits counts, and if none does, the box has 0 x 0 pixels. ``counts`` (k,): how many boxes share the area
    in the image.
    """
    rows = np.arange(len(uniforms))
    areas = (AREA[0] + (AREA[1] - AREA[0]) * uniforms[:, :ATTEMPTS]) * height * width / counts[:, None]
    low, high = (math.log(ratio) for ratio in ASPECT)
    ratios = np.exp(low + (high - low) * uniforms[:, ATTEMPTS : 2 * ATTEMPTS])
    heights, widths = (np.rint(np.sqrt(of)).astype(np.int64) for of in (areas * ratios, areas / ratios))
    fits = (heights < height) & (widths < width)
    attempt = fits.argmax(1)  # the first that fits
    found = fits[rows, attempt]
    box_height, box_width = (np.where(found, sides[rows, attempt], 0) for sides in (heights, widths))
    top, left = (
        (uniforms[:, 2 * ATTEMPTS + axis] * (side - own + 1)).astype(np.int64)
        for axis, (side, own) in enumerate(((height, box_height), (width, box_width)))
    )
    return np.stack([top, left, box_height, box_width], axis=1)


def normals(codes: torch.Tensor, counters: torch.Tensor, channels: int) -> torch.Tensor:
    """Normally distributed float32 (k, channels), a function of ``codes`` and ``counters``, int64 (k,) each.

    ``codes``: ``mixed`` keys. One 64-bit hash of code and counter gives the numbers of four channels.
    """
    hashed = [_mixed(codes + (counters + ((four << 40) + 1)) * _GOLDEN) for four in range(-(-channels // 4))]
    sixteen_bits = [hashed[channel // 4] >> 16 * (channel % 4) & 0xFFFF for channel in range(channels)]
    return _quantiles(codes.device)[torch.stack(sixteen_bits, dim=1)]


def _mixed(value: torch.Tensor) -> torch.Tensor:
    """``mixed`` in int64, whose products wrap as those of uint64 do."""
    value = value + _GOLDEN
    for bits, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        value = (value ^ _shifted(value, bits)) * factor
    return value ^ _shifted(value, 31)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """``value``, int64, shifted right, with zeros from the left."""
    return value >> bits & (1 << 64 - bits) - 1


@lru_cache(maxsize=8)
def _quantiles(device: torch.device) -> torch.Tensor:
    """The normal distribution as 2^16 equally likely values: float32 (65536,)."""
    from scipy.special import ndtri  # here, so that only runs that need noise pay for the import

    return torch.from_numpy(ndtri((np.arange(2**16) + 0.5) / 2**16).astype(np.float32)).to(device)
