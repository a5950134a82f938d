"""Facts about an image file, and about what a network does not see of it."""

from __future__ import annotations

import hashlib
import warnings
from contextlib import suppress
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import SAMPLESPERPIXEL

from utils.data.images.arrays import LUMA, are_pages, array_header, numbers_in, of_colour
from utils.data.images.decoding import open_image
from utils.data.images.levels import (
    channels_of,
    is_array,
    is_deep,
    keeps_levels,
    numbers_of,
    range_of,
    raw_mode,
    to_8_bits,
)

GREY = ("1", "L", "LA", "I", "F")
THUMBNAIL = (64, 64)  # least size, in pixels, at which a JPEG file is decoded to see how bright it is


class Look(NamedTuple):
    """Facts about an image file.

    ``kind``: 'grey', 'colour', 'CMYK' or 'N channels'; ``bits``: of each number; ``size``: width and height as stored.
    ``low``, ``high``: the extremes of numbers of more than 8 bits, else None. ``alpha``: the extremes of an alpha
    channel, in 8 bits. ``further``: number of channels that are neither colour nor alpha; ``frames``: number of
    pictures in the file. ``seen``: darkest level, mean as grey and brightest level that a network sees, 0 to 255;
    None if there were too many pixels to look at. ``lost``: a hash of the content that no network sees; b'' if there is
    none.
    """

    kind: str
    bits: int
    file_format: str
    size: tuple[int, int]
    low: float | None = None
    high: float | None = None
    alpha: tuple[int, int] | None = None
    further: int = 0
    frames: int = 1
    seen: tuple[float, float, float] | None = None
    lost: bytes = b""

    @property
    def extremes(self) -> tuple[float, float]:
        """The extremes, ``low`` and ``high``, of numbers of more than 8 bits."""
        assert self.low is not None and self.high is not None
        return self.low, self.high

    @property
    def pixels(self) -> int:
        """Number of pixels to decode for facts that are not in the header; for a JPEG file, one in 32."""
        return self.size[0] * self.size[1] // (32 if self.file_format in ("JPEG", "MPO") else 1)


def header(path: str | BinaryIO, colour: str = "RGB") -> Look:
    """The facts in the header of a file that is to be read in ``colour``."""
    if (array := array_header(path)) is not None:
        channels = array.channels
        return Look(
            {1: "grey", 3: "colour"}.get(channels, f"{channels} channels"),
            array.bits,
            array.file_format,
            array.size,
            further=max(0, channels - channels_of(colour)) if channels > 4 else 0,  # a fourth may be alpha
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's concern metadata and large images
        image = Image.open(path)
    with image:
        raw = raw_mode(image)
        bands = len(image.getbands())
        deep = is_deep(image) or ";16" in raw
        bits = 8 if not deep else 32 if image.mode == "F" or ("16" not in raw and image.format == "TIFF") else 16
        samples = getattr(image, "tag_v2", {}).get(SAMPLESPERPIXEL, bands)
        grey = image.mode in GREY or image.mode.startswith("I;16")
        is_one = image.format == "MPO" or are_pages(image, channels_of(colour))
        return Look(
            "CMYK" if image.mode == "CMYK" else "grey" if grey else "colour",
            bits,
            image.format or "",
            image.size,
            further=max(0, int(samples) - bands) if image.mode != "P" and not is_array(colour) else 0,
            frames=1 if is_one else getattr(image, "n_frames", 1),
        )


def look(path: str | BinaryIO, colour: str, shown: Image.Image | None = None) -> Look:
    """Find all facts about a file. ``shown``: the image as it is read, if it is already decoded.

    Raises what ``open_image`` and Pillow raise.
    """
    found = header(path, colour)
    if is_array(colour) or array_header(path) is not None:
        return _look_at_array(found, path, colour)
    numbers = None
    alpha = None
    lost = b""
    passed_over = () if range_of(colour) else (ValueError,)  # without a range, 8 bits of some are read
    with Image.open(path) as image:
        if found.bits > 8:
            with suppress(*passed_over):
                numbers = numbers_of(image, path)
        if not is_deep(image) and ("A" in image.getbands() or "transparency" in image.info):
            alpha = np.asarray(image.convert("RGBA"))[..., 3]
    if numbers is not None:
        rule = range_of(colour) or (0, 65280 if found.bits == 16 else 255)
        spread = np.unique(numbers)
        found = found._replace(low=float(spread[0]), high=float(spread[-1]))
        if len(np.unique(to_8_bits(spread, rule))) < len(spread) or not rule[0] <= spread[0] <= spread[-1] <= rule[1]:
            lost += numbers.tobytes()
    if alpha is not None:
        found = found._replace(alpha=(int(alpha.min()), int(alpha.max())))
        if alpha.min() < 255:
            lost += alpha.tobytes()
    picture = _thumbnail(path) if shown is None and found.file_format == "JPEG" else shown or open_image(path, colour)
    pixels = np.asarray(picture)
    seen = (float(pixels.min()), float(np.asarray(picture.convert("L")).mean()), float(pixels.max()))
    return found._replace(seen=seen, lost=hashlib.sha256(lost).digest() if lost else b"")


def _look_at_array(found: Look, path: str | BinaryIO, colour: str) -> Look:
    """The facts ``found`` and those that need an array's numbers; ``lost`` is what rounding to 256 levels loses."""
    numbers = numbers_in(path, colour)
    levels = of_colour(numbers, colour)
    grey = levels @ np.array(LUMA) if levels.shape[2] == 3 else levels
    seen = (float(levels.min()), float(grey.mean()), float(levels.max()))
    if found.bits > 8:
        found = found._replace(low=float(numbers.min()), high=float(numbers.max()))
    return found._replace(
        seen=seen, lost=b"" if keeps_levels(colour) or found.bits == 8 else hashlib.sha256(numbers.tobytes()).digest()
    )


def _thumbnail(path: str | BinaryIO) -> Image.Image:
    with Image.open(path) as image:
        image.draft("L", THUMBNAIL)
        return image.convert("L")


def levels_seen(low: float, high: float, bits: int, pixel_range: tuple[float, float] | None) -> int:
    """How many of the 256 levels lie between those that ``low`` and ``high`` become, inclusive."""
    if pixel_range is None:
        darkest, brightest = (int(number) >> 8 if bits == 16 else int(number) for number in (low, high))
    else:
        darkest, brightest = to_8_bits(np.array([low, high]), pixel_range).tolist()
    return brightest - darkest + 1
