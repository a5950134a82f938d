"""What evaluation shows of an image: the whole resized, then its middle, as timm's and torchvision's transforms do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

INTERPOLATIONS = ("bilinear", "bicubic")
REACH = {"bilinear": 1, "bicubic": 2}  # how many pixels away a pixel still counts, more when the image shrinks
LONGEST = 50  # times the shorter side; a longer image would fill the memory when its shorter side is resized

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels


class Place(NamedTuple):
    """Where in an image file lies what is shown of it.

    The part ``of`` the file, which is all of it but for very long images, becomes ``width`` x ``height`` pixels. What
    is shown begins there at ``left``, ``top``, negative beyond the image. No pixel outside of ``needed`` counts for it.
    """

    of: Box
    width: int
    height: int
    left: int
    top: int
    needed: Box


@dataclass(frozen=True)
class View:
    """How an image of any size is shown to a network in evaluation.

    The image is resized by ``interpolation``, with antialiasing, until its shorter side ('center'), both sides
    ('squash') or the longer side ('border') are floor(``size`` / ``crop_pct``) pixels long. Of that the middle
    ``size`` x ``size`` pixels are shown; what lies beyond the image is black, or with 'border' has the levels
    ``border`` (0 to 255, one a channel). Geometry and names are those of timm's ``transforms_imagenet_eval``;
    torchvision's presets are 'center'. In training, which shows random boxes, ``size`` and ``interpolation`` count.
    """

    size: int
    crop_pct: float = 0.875  # the middle 224 of 256 pixels, the convention since AlexNet
    crop_mode: str = "center"
    interpolation: str = "bilinear"
    border: tuple[int, ...] = (0,)

    def place(self, width: int, height: int) -> Place:
        """What is shown of a file of ``width`` x ``height`` pixels."""
        of = _not_too_long(width, height) if self.crop_mode == "center" else (0, 0, width, height)
        sides = (of[2] - of[0], of[3] - of[1])
        resized = self._resized(*sides)
        offsets = [_offset(length, self.size) for length in resized]
        spans = [self._span(*values) for values in zip(sides, resized, offsets, strict=True)]
        needed = (of[0] + spans[0][0], of[1] + spans[1][0], of[0] + spans[0][1], of[1] + spans[1][1])
        return Place(of, *resized, *offsets, needed)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        target = math.floor(self.size / self.crop_pct)
        short, long = min(width, height), max(width, height)
        if self.crop_mode == "squash":
            return target, target
        if self.crop_mode == "border":
            ratio = long / target
            return max(1, round(width / ratio)), max(1, round(height / ratio))
        other = int(target * long / short)
        return (other, target) if width > height else (target, other)

    def _span(self, side: int, resized: int, offset: int) -> tuple[int, int]:
        """From and up to which of ``side`` pixels count for the ``size`` pixels from ``offset`` on."""
        scale = side / resized
        reach = REACH[self.interpolation] * max(scale, 1) + 1
        return max(0, math.floor(offset * scale - reach)), min(side, math.ceil((offset + self.size) * scale + reach))

    def show(self, pixels: torch.Tensor, place: Place) -> torch.Tensor:
        """The view, (channels, size, size), of the ``pixels`` (channels, h, w) inside ``place.needed``.

        uint8 on a CPU; floats, neither rounded nor clamped, when ``pixels`` are floats.
        """
        left, top, right, bottom = place.of
        if place.needed != place.of:  # what is needed is resized as it is within the whole
            whole = pixels.new_empty(bottom - top, right - left, len(pixels)).permute(2, 0, 1)
            rows = slice(place.needed[1] - top, place.needed[3] - top)
            whole[:, rows, place.needed[0] - left : place.needed[2] - left] = pixels
            pixels = whole
        return self._middle(resize(pixels, place.height, place.width, self.interpolation), place.left, place.top)

    def _middle(self, image: torch.Tensor, left: int, top: int) -> torch.Tensor:
        """``size`` pixels square of ``image`` from ``left``, ``top`` on, filled up where they lie beyond it."""
        inside = image[:, max(top, 0) : top + self.size, max(left, 0) : left + self.size]
        if left >= 0 and top >= 0:
            return inside
        levels = self.border if self.crop_mode == "border" else (0,)
        shown = torch.tensor(levels, dtype=image.dtype, device=image.device).view(-1, 1, 1)
        shown = shown.expand(len(image), self.size, self.size).contiguous()
        across, down = max(-left, 0), max(-top, 0)
        shown[:, down : down + inside.shape[1], across : across + inside.shape[2]] = inside
        return shown


def resize(pixels: torch.Tensor, height: int, width: int, interpolation: str) -> torch.Tensor:
    """Pixels (channels, h, w) as (channels, ``height``, ``width``), antialiased, in the memory format that they have.

    uint8 on a CPU is rounded to whole levels, first the width being resized, then the height. So does Pillow, and the
    levels are its own but for a few in a hundred, which are off by one, rarely by two: torch's weights have 16 bits.
    From version 13 on Pillow begins with the height where that shrinks by more than twice as many pixels as the width.
    Its levels then differ, as from those of its own older versions, by one in about 15 of 100 numbers, and by up to ten
    at sharp edges (bicubic).
    """
    if pixels.shape[1:] == (height, width):
        return pixels
    images = pixels.permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # so torch sees channels-last memory, and is quicker
    return functional.interpolate(images, (height, width), mode=interpolation, antialias=True)[0]


def _not_too_long(width: int, height: int) -> Box:
    """The whole image, or of one more than ``LONGEST`` times as long as wide the middle part that is not."""
    longest = LONGEST * min(width, height)
    left, top = max(0, (width - longest) // 2), max(0, (height - longest) // 2)
    return left, top, left + min(width, longest), top + min(height, longest)


def _offset(length: int, size: int) -> int:
    """Where the middle ``size`` of ``length`` pixels begin, rounded as torchvision does; negative beyond the image."""
    return round((length - size) / 2) if length >= size else -((size - length) // 2)
