"""Random erasing of normalised images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch

from utils.data.augment.base import Augmentation, Numbers, Samples, Stream
from utils.data.sample_plan import hashes
from utils.runtime.devices import to_device

AREA = (0.02, 1 / 3)  # of the image, for all boxes together
ASPECT = (0.3, 1 / 0.3)  # height / width, log-uniform
ATTEMPTS = 10  # to find a box that fits


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
        top, left, height, width = boxes.T
        area = height * width
        box = np.repeat(np.arange(len(boxes)), area)
        pixel = np.arange(len(box)) - np.repeat(np.cumsum(area) - area, area)  # within its box
        row = top[box] + pixel // width[box]
        column = left[box] + pixel % width[box]
        image_step, channel_step, *steps = images.stride()
        first = chosen[box] * image_step + row * steps[0] + column * steps[1]
        places = first[:, None] + np.arange(images.shape[1]) * channel_step
        values = np.zeros(places.shape, dtype=np.float32)
        if self.mode == "pixel":
            values = normals(keys[box], pixel, images.shape[1])
        elif self.mode == "rand":
            values = normals(keys, np.zeros(len(keys), dtype=np.int64), images.shape[1])[box]
        flat = images.as_strided((images.numel(),), (1,))
        at, filling = (to_device(torch.from_numpy(each.reshape(-1)), images.device) for each in (places, values))
        flat.index_copy_(0, at, filling)

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


def normals(keys: np.ndarray, counters: np.ndarray, channels: int) -> np.ndarray:
    """Normally distributed float32 (k, channels), a function of ``keys``, uint64 (k,), and ``counters``, int64 (k,).

    One 64-bit hash of key and counter gives the numbers of four channels.
    """
    hashed = [
        hashes(keys, counters + (four << 40)).view(np.uint16).reshape(len(keys), 4) for four in range(-(-channels // 4))
    ]
    return _quantiles()[np.concatenate(hashed, axis=1)[:, :channels]]


@lru_cache(maxsize=1)
def _quantiles() -> np.ndarray:
    """The normal distribution as 2^16 equally likely values: float32 (65536,)."""
    from scipy.special import ndtri  # here, so that only runs that need noise pay for the import

    return ndtri((np.arange(2**16) + 0.5) / 2**16).astype(np.float32)
