"""Conversion of the numbers in an image file to the levels from 0 to 255 that networks see."""

from __future__ import annotations

import sys
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps, TiffImagePlugin
from PIL.ImageFile import ImageFile

# Values of TIFF's tags for photometric interpretation, samples, planes and compression.
WHITE_IS_ZERO, SIGNED, IN_PLANES, RAW = 0, 2, 2, 1
SIXTEEN_BITS_AS_I = ("PNG", "PPM")  # formats whose 16-bit images Pillow opens in its 32-bit mode


class Colour(str):
    """Pillow's mode in which images are read, 'L' or 'RGB'; for other numbers of channels, that number as text.

    A ``Colour`` can be used wherever a plain mode can. ``keeps_levels``: numbers of more than 8 bits are read as
    float32, from 0 to 255, not rounded to 256 levels. Such images, and those of other numbers of channels, are read as
    arrays (see ``arrays.py``). ``pixel_range``: the two numbers of more than 8 bits that become 0 and 255; if None,
    16-bit numbers are divided by 256, and others are refused unless they are integers from 0 to 255.
    """

    pixel_range: tuple[float, float] | None
    keeps_levels: bool

    def __new__(cls, mode: str, pixel_range: tuple[float, float] | None = None, keeps_levels: bool = False) -> Colour:
        colour = super().__new__(cls, mode)
        colour.pixel_range = pixel_range
        colour.keeps_levels = keeps_levels
        return colour


def range_of(colour: str) -> tuple[float, float] | None:
    """The ``pixel_range`` of a ``Colour``; None for a plain mode."""
    return getattr(colour, "pixel_range", None)


def keeps_levels(colour: str) -> bool:
    """True if levels of more than 8 bits are kept, as float32; False for a plain mode."""
    return getattr(colour, "keeps_levels", False)


def channels_of(colour: str) -> int:
    """The number of channels of images that are read in ``colour``."""
    return {"L": 1, "RGB": 3}.get(colour) or int(colour)


def is_array(colour: str) -> bool:
    """True if images are read in ``colour`` as arrays, because Pillow has no mode for it."""
    return keeps_levels(colour) or colour not in ("L", "RGB")


def is_deep(image: Image.Image) -> bool:
    """True if the image is grey with more than 8 bits per pixel."""
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


def in_colour(image: Image.Image, colour: str, file_format: str | None = None) -> Image.Image:
    """Convert a Pillow image to mode ``colour`` ('L' or 'RGB').

    ``file_format``: Pillow's name of the file's format. Raises ``ValueError`` for 32-bit numbers, whose range no file
    states, unless they are integers from 0 to 255 or ``colour`` has a ``pixel_range``.
    """
    pixel_range = range_of(colour)
    if is_deep(image) and pixel_range is not None and file_format != "PPM":  # PPM states its own range
        image = Image.fromarray(to_8_bits(np.asarray(image), pixel_range))
    elif image.mode.startswith("I;16") or (image.mode == "I" and file_format in SIXTEEN_BITS_AS_I):
        # Pillow clips 16-bit grey instead of scaling it.
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode in ("I", "F"):
        refuse_unknown_range(np.asarray(image))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == colour else image.convert(colour)


def grey_of(pixels: torch.Tensor) -> torch.Tensor:
    """Convert RGB pixels, uint8 (n, 3, h, w), to grey, uint8 (n, 1, h, w), with Pillow's weights and rounding."""
    red, green, blue = pixels.int().unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)[:, None]


def refuse_unknown_range(numbers: np.ndarray) -> None:
    """Raise ``ValueError`` unless ``numbers``, of 32 bits, are integers from 0 to 255, as 8-bit levels are."""
    lowest, highest = numbers.min(), numbers.max()
    if numbers.dtype.kind == "f" or not 0 <= lowest <= highest <= 255:
        kind = "floats" if numbers.dtype.kind == "f" else "integers"
        raise ValueError(
            f"its levels, {kind} from {lowest:g} to {highest:g}, have no known range; give --pixel-range LOW HIGH, or "
            "save it with 8 or 16 bits"
        )


def scaled(numbers: np.ndarray, pixel_range: tuple[float, float]) -> np.ndarray:
    """Map ``numbers`` linearly from ``pixel_range`` to [0, 255], clipped, as float64. Raises ``ValueError`` for NaN."""
    low, high = pixel_range
    levels = (numbers.astype(np.float64) - low) * (255 / (high - low))
    if np.isnan(levels).any():
        raise ValueError("its levels hold NaN; save it with numbers alone")
    return levels.clip(0, 255)


def to_8_bits(numbers: np.ndarray, pixel_range: tuple[float, float]) -> np.ndarray:
    """Map ``numbers`` as ``scaled`` does, and round them to uint8."""
    return np.rint(scaled(numbers, pixel_range)).astype(np.uint8)


def refuse_misread(image: Image.Image) -> None:
    """Raise ``ValueError`` for an opened TIFF file that Pillow would read as other numbers than it holds."""
    tags = getattr(image, "tag_v2", {})
    bits = max(tags.get(TiffImagePlugin.BITSPERSAMPLE, (1,)))
    signed = SIGNED in tags.get(TiffImagePlugin.SAMPLEFORMAT, ())
    if bits == 8 and signed:
        raise ValueError("its levels are signed numbers, which have no known range; save numbers from 0 to 255")
    if bits > 8 and tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == WHITE_IS_ZERO:
        raise ValueError("its level 0 is white, with more than 8 bits; save it with black as 0")
    if bits > 8 and tags.get(TiffImagePlugin.PLANAR_CONFIGURATION) == IN_PLANES and len(image.getbands()) > 1:
        raise ValueError("its colours lie in separate planes, with more than 8 bits; save it with pixel after pixel")
    if (
        getattr(tags, "prefix", b"") == b"MM"
        and tags.get(TiffImagePlugin.COMPRESSION, RAW) != RAW
        and (bits > 16 or (bits == 16 and signed))
    ):
        raise ValueError("its numbers are compressed with the high byte first; save it uncompressed or little-endian")


def do_not_map(image: Image.Image) -> None:
    """Keep Pillow from mapping a TIFF file into memory, which swaps width and height if EXIF asks for a rotation."""
    if isinstance(image, ImageFile) and image.format == "TIFF":
        image.filename = ""


def numbers_of(image: Image.Image, path: str | BinaryIO, most: int = 3) -> np.ndarray | None:
    """The numbers of more than 8 bits in the file at ``path``, upright: grey (h, w), or colour, uint16 (h, w, bands).

    ``most``: bands to read, 3, or 4 with alpha. ``image``: the same file, opened but not loaded. None for 8-bit
    numbers, and for PPM files, which state their own range. Of 16-bit colour, for which Pillow has no mode, it reads
    only the upper bytes; with the byte order given as reversed, it reads the lower bytes. Raises ``ValueError`` for
    other images of 16 bits.
    """
    if image.format == "PPM" or not (is_deep(image) or ";16" in raw_mode(image)):
        return None
    if not is_deep(image) and raw_mode(image).partition(";")[0] not in ("RGB", "RGBA", "RGBX"):
        raise ValueError(f"of its 16 bits ({raw_mode(image)}) only 8 can be read; save it as grey or RGB")
    halves = []
    for swapped in (False,) if is_deep(image) else (False, True):
        with Image.open(path) as half:
            if half.format == "TIFF":
                half.filename = ""  # as in ``do_not_map``, which a model card's program lacks
            if swapped:
                make = getattr(type(half.tile[0]), "_make", tuple)  # a named tuple from Pillow 11 on
                half.tile = [make([*tile[:3], other_order(tile[3])]) for tile in half.tile]
            half.load()
            halves.append(np.asarray(ImageOps.exif_transpose(half)))
    if len(halves) == 1:
        return halves[0]
    upper, lower = (half[..., :most].astype(np.uint16) for half in halves)
    return 256 * upper + lower


def raw_mode(image: Image.Image) -> str:
    """Pillow's raw mode of an opened file, such as 'RGB;16B'; '' once the image is loaded."""
    tile = getattr(image, "tile", None)
    args = tile[0][3] if tile else ""
    return args if isinstance(args, str) else str(args[0]) if args else ""


def other_order(args: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Pillow's raw mode, alone or first in a tuple of arguments, with the byte order reversed."""
    mode = args if isinstance(args, str) else args[0]
    order = {"N": sys.byteorder[0].upper()}.get(mode[-1], mode[-1])
    other = mode[:-1] + ("B" if order == "L" else "L")
    return other if isinstance(args, str) else (other, *args[1:])
