"""The view of an image in evaluation: resized, then cropped to its middle, as transforms of timm and torchvision do."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn import functional

from utils.config.image_size import Size, enlarged, sides
from utils.runtime.devices import constant

REACH = {"bilinear": 1, "bicubic": 2}  # pixels that a resized pixel depends on, each way; more if the image shrinks
LEAST_AREA = 0.08  # random-resized-crop of Szegedy et al., Going deeper with convolutions, 2014
LONGEST = 50  # times the shorter side; a longer image could fill the memory when resized

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels


class Placement(NamedTuple):
    """The part of an image file that is shown; it depends only on the pixels in ``box``.

    The box, with ``columns`` and ``rows`` of arbitrary pixels added to its left and above it, is made ``across`` times
    as wide and ``down`` times as high. In the result, the part shown begins at ``left`` and ``top``, which are negative
    outside the image.
    """

    box: Box
    columns: int
    rows: int
    across: float
    down: float
    left: int
    top: int


@dataclass(frozen=True)
class View:
    """The part of an image of any size that a network sees in evaluation.

    The image is resized by ``interpolation``, with antialiasing, until its shorter side (``crop_mode`` 'center'), both
    sides ('squash') or its longer side ('border') are floor(``size`` / ``crop_pct``) pixels long; if ``size`` is not
    square, sides are compared in proportion to it. The middle ``size`` pixels of the result (a square, or height and
    width) are shown; pixels outside the image are black, or with 'border' have the levels ``border`` (0 to 255, one per
    channel). Geometry and names are those of timm's ``transforms_imagenet_eval``; torchvision's presets are 'center'.
    Training shows random boxes, of at least the fraction ``least_area`` of the image, and otherwise uses only ``size``
    and ``interpolation``. With ``whole``, stored images of ``size`` pixels a side are shown as they are; an image of a
    different size is resampled.
    """

    size: Size
    crop_pct: float = 0.875  # the middle 224 of 256 pixels, the convention since AlexNet
    crop_mode: str = "center"
    interpolation: str = "bilinear"
    border: tuple[int, ...] = (0,)
    # Left out of repr, which names files of the decoded cache.
    whole: bool = field(default=False, repr=False)
    least_area: float = field(default=LEAST_AREA, repr=False)

    @property
    def _shown(self) -> tuple[int, int]:
        return sides(self.size)

    def place(self, width: int, height: int) -> Placement:
        """The part shown of a file with ``width`` x ``height`` pixels."""
        first = [0, 0]
        lengths = [width, height]
        if self.crop_mode == "center":
            longest = LONGEST * min(lengths)
            first = [max(0, (length - longest) // 2) for length in lengths]
            lengths = [min(length, longest) for length in lengths]
        resized = self._resized(*lengths)
        shown = self._shown[::-1]  # width and height, like everything here
        offsets = list(map(_offset, resized, shown))
        (left, right), (top, bottom) = map(self._span, lengths, resized, offsets, shown)
        box = (first[0] + left, first[1] + top, first[0] + right, first[1] + bottom)
        across, down = map(_factor, lengths, resized)
        return Placement(box, left, top, across, down, *offsets)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        down, across = enlarged(self.size, self.crop_pct)
        if self.crop_mode == "squash":
            return across, down
        if self.crop_mode == "border" or down != across:
            ratio = (max if self.crop_mode == "border" else min)(width / across, height / down)
            return max(1, round(width / ratio)), max(1, round(height / ratio))
        target = down
        short = min(width, height)
        long = max(width, height)
        other = int(target * long / short)
        return (other, target) if width > height else (target, other)

    def _span(self, side: int, resized: int, offset: int, shown: int) -> tuple[int, int]:
        """First pixel and end of the range, along one side, that a part of the resized image depends on.

        ``side`` pixels are resized to ``resized``; the part is ``shown`` pixels long and begins at ``offset``.
        """
        scale = side / resized
        reach = REACH[self.interpolation] * max(scale, 1) + 1
        return max(0, math.floor(offset * scale - reach)), min(side, math.ceil((offset + shown) * scale + reach))

    def show(self, pixels: torch.Tensor, place: Placement) -> torch.Tensor:
        """Resize and crop the ``pixels`` (channels, h, w) of ``place.box`` to the view, (channels, h, w) of ``size``.

        The dtype stays: uint8, on a CPU only, or floats, which are neither rounded nor clamped.
        """
        if place.columns or place.rows:
            height = pixels.shape[1] + place.rows
            width = pixels.shape[2] + place.columns
            whole = pixels.new_empty(height, width, len(pixels)).permute(2, 0, 1)
            whole[:, place.rows :, place.columns :] = pixels
            pixels = whole
        return self._middle(resize(pixels, (place.down, place.across), self.interpolation), place.left, place.top)

    def _middle(self, image: torch.Tensor, left: int, top: int) -> torch.Tensor:
        """Crop ``self.size`` from ``image`` at ``left``, ``top``, padded where the crop extends beyond the image."""
        height, width = self._shown
        inside = image[:, max(top, 0) : top + height, max(left, 0) : left + width]
        if inside.shape[1:] == (height, width):
            return inside
        levels = self.border if self.crop_mode == "border" else (0,)
        shown = constant(tuple(levels), image.dtype, image.device).view(-1, 1, 1)
        shown = shown.expand(len(image), height, width).clone(memory_format=torch.contiguous_format)
        across = max(-left, 0)
        down = max(-top, 0)
        shown[:, down : down + inside.shape[1], across : across + inside.shape[2]] = inside
        return shown


def resize(pixels: torch.Tensor, factors: tuple[float, float], interpolation: str) -> torch.Tensor:
    """Resize pixels (channels, h, w) by ``factors`` (of height, of width), antialiased; the new size is rounded down.

    The memory format stays. uint8 on a CPU is rounded to whole levels after resizing the width and again after the
    height, as in Pillow. All but a few levels in a hundred equal Pillow's; the rest differ by one, rarely by two, as
    torch's weights have 16 bits. From version 13 on, Pillow begins with the height if that shrinks by more than twice
    as many pixels as the width. Its levels then differ from these, and from its own older versions', by one in about 15
    of 100 numbers, and by up to ten at sharp edges (bicubic).
    """
    if factors == (1, 1):
        return pixels
    images = pixels.permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # torch then sees channels-last memory and is faster
    return functional.interpolate(
        images, scale_factor=factors, recompute_scale_factor=False, mode=interpolation, antialias=True
    )[0]


def resized(pixels: torch.Tensor, size: Size, interpolation: str) -> torch.Tensor:
    """Resize pixels (channels, h, w) to ``size``, antialiased."""
    down, across = map(_factor, pixels.shape[1:], sides(size))
    return resize(pixels, (down, across), interpolation)


def _factor(side: int, wanted: int) -> float:
    """The factor that turns ``side`` pixels into ``wanted``; rounded up, so that the product is not too small."""
    factor = wanted / side
    return factor if side * factor >= wanted else math.nextafter(factor, math.inf)


def _offset(length: int, size: int) -> int:
    """Start of the middle ``size`` of ``length`` pixels, rounded as in torchvision; negative if ``size`` is larger."""
    return round((length - size) / 2) if length >= size else -((size - length) // 2)
