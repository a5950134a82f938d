"""Images with any number of channels and bits, as arrays: .npy files, multi-band TIFF files, and all that Pillow reads.

``of_colour`` returns levels from 0 to 255: uint8, or float32 if a ``Colour`` keeps all levels.
"""

from __future__ import annotations

import math
import os
import warnings
from tokenize import TokenError
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import SAMPLESPERPIXEL, ImageFileDirectory_v2

from utils.config.settings import UserError
from utils.data.images.levels import (
    channels_of,
    do_not_map,
    is_deep,
    keeps_levels,
    numbers_of,
    range_of,
    raw_mode,
    refuse_misread,
    refuse_unknown_range,
    scaled,
    to_8_bits,
)
from utils.data.images.stored import RAW, NamedBytes, content_of

TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MANY = 2**16
TOO_SHORT = "holds fewer numbers than those of shape {}, which its header states"
LUMA = (0.299, 0.587, 0.114)  # Pillow's weights of red, green and blue
# Steps that turn a stored array upright, by EXIF orientation: whether to transpose it, then the axes to reverse.
UPRIGHT = {2: (0, (1,)), 3: (0, (0, 1)), 4: (0, (0,)), 5: (1, ()), 6: (1, (1,)), 7: (1, (0, 1)), 8: (1, (0,))}


class Header(NamedTuple):
    """The header of an array file. ``size``: width and height as stored; ``bits``: of each number, 32 if the range of
    the numbers is unknown; ``file_format``: 'NPY' or 'TIFF'."""

    size: tuple[int, int]
    channels: int
    bits: int
    file_format: str


def bits_of(dtype: np.dtype) -> int:
    """Bits of each number: 8, 16, or 32 for every other dtype, as no file states the range of its numbers."""
    return {"u1": 8, "b1": 8, "u2": 16}.get(dtype.str[1:], 32)


def array_header(path: str | BinaryIO) -> Header | None:
    """The header of a file that Pillow cannot read as an image; None for one that it can, and for a damaged TIFF file.

    Raises ``UserError`` if a package needed to read the file is missing.
    """
    start = _start(path)
    if start.startswith(RAW):
        shape, dtype = _npy_header(path)
        height, width, channels = checked(shape)
        return Header((width, height), channels, bits_of(dtype), "NPY")
    if not start.startswith(TIFF) or not _is_for_tifffile(path):
        return None
    with _tiff_file(path) as tiff:
        page = tiff.pages[0]
        channels = len(tiff.pages) if _stacked(tiff) else page.samplesperpixel
        return Header((page.imagewidth, page.imagelength), channels, bits_of(np.dtype(page.dtype)), "TIFF")


def of_colour(numbers: np.ndarray, colour: str) -> np.ndarray:
    """Convert an array (h, w) or (h, w, channels) to levels (h, w, channels) of a ``colour`` that is read as arrays.

    Raises ``ValueError`` for the wrong number of channels, or numbers without a known range.
    """
    _refuse_no_image(numbers.shape)
    numbers = numbers[..., None] if numbers.ndim == 2 else numbers
    levels = _levels(numbers, range_of(colour), keeps_levels(colour))
    channels = channels_of(colour)
    if channels in (1, 3) and levels.shape[2] in (2, 4):  # the last is alpha
        levels = levels[..., :-1]
    held = levels.shape[2]
    if held == channels:
        return levels
    if channels == 3 and held == 1:
        return np.repeat(levels, 3, axis=2)
    if channels == 1 and held == 3:
        grey = levels.astype(np.float64) @ np.array(LUMA)
        return (grey if levels.dtype == np.float32 else np.rint(grey))[..., None].astype(levels.dtype)
    raise ValueError(f"has {held} channel{'s' * (held > 1)}, and the network takes {channels} (--in-channels)")


def _levels(numbers: np.ndarray, pixel_range: tuple[float, float] | None, keeps: bool) -> np.ndarray:
    if numbers.dtype == bool:
        numbers = numbers.astype(np.uint8) * np.uint8(255)
    bits = bits_of(numbers.dtype)
    if numbers.dtype.kind not in "uif":
        raise ValueError(f"holds {numbers.dtype}, which are no levels; save whole numbers or floats")
    if bits == 8:
        return numbers.astype(np.float32) if keeps else numbers
    if pixel_range is None and bits == 16 and not keeps:
        return (numbers >> 8).astype(np.uint8)  # as for a 16-bit PNG file
    if pixel_range is None and bits == 32:
        refuse_unknown_range(numbers)
    pixel_range = pixel_range or (0, 65535 if bits == 16 else 255)
    return scaled(numbers, pixel_range).astype(np.float32) if keeps else to_8_bits(numbers, pixel_range)


# ------------------------------------------------------------------------------------------ each kind of file


def _start(path: str | BinaryIO) -> bytes:
    if isinstance(path, str):
        with open(path, "rb") as file:
            return file.read(8)
    path.seek(0)
    return path.read(8)


def _file(path: str | BinaryIO) -> BinaryIO:
    if isinstance(path, str):
        return NamedBytes(path, content_of(path))
    path.seek(0)
    return NamedBytes(str(path), path.read())


def numbers_in(path: str | BinaryIO, colour: str, formats: list[str] | tuple[str, ...] | None = None) -> np.ndarray:
    """Read a file's numbers as stored, but upright: (h, w) or (h, w, c).

    Those of a PPM file, which states its own range, are brought into the range of ``colour``, or else to 16 bits.
    Raises ``ValueError`` for a .npy file that cannot be an image.
    """
    channels = channels_of(colour)
    start = _start(path)
    if start.startswith(RAW):
        saved = npy_numbers(_file(path))
        checked(saved.shape)
        return saved
    if start.startswith(TIFF) and _is_for_tifffile(path, channels):
        return _of_tiff(path)
    with Image.open(path, formats=formats) as image:
        refuse_misread(image)
        do_not_map(image)
        if (numbers := numbers_of(image, path, max(3, channels))) is not None:
            return numbers
        image.load()
        image = ImageOps.exif_transpose(image)
        if is_deep(image):  # a PPM file, whose numbers Pillow has scaled to 16 bits
            numbers = np.asarray(image).astype(np.uint16)
            return numbers if (pixel_range := range_of(colour)) is None else np.interp(numbers, (0, 65535), pixel_range)
        return np.asarray(in_plain_mode(image, colour))


def in_plain_mode(image: Image.Image, colour: str) -> Image.Image:
    """``image`` in a mode whose numbers are levels: no palette, inks, single bits or another space of colours."""
    channels = channels_of(colour)
    if image.mode in ("P", "1", "CMYK") or (channels in (1, 3) and image.mode not in ("L", "RGB", "LA", "RGBA")):
        has_alpha = (channels == 4 and image.mode != "CMYK") or (image.mode == "P" and "transparency" in image.info)
        return image.convert("RGBA" if has_alpha else "L" if image.mode == "1" else "RGB")
    return image


def npy_numbers(file: BinaryIO) -> np.ndarray:
    """The numbers in an open .npy file. Raises ``ValueError`` if it is damaged."""
    try:
        return np.lib.format.read_array(file, allow_pickle=False)
    except (MemoryError, RecursionError, TokenError):
        shape, dtype = _npy_header(file)
        if math.prod(shape) * dtype.itemsize > file.seek(0, os.SEEK_END):  # the file is damaged, the memory suffices
            raise ValueError(TOO_SHORT.format(shape)) from None
        raise


def _npy_header(path: str | BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    with _file(path) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        try:
            shape, _, dtype = read(file)
        except (MemoryError, RecursionError, TokenError) as error:  # of Python's parser, which numpy lets through
            raise ValueError("its header is damaged") from error
    return shape, dtype


def _refuse_no_image(shape: tuple[int, ...]) -> None:
    if len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(f"holds numbers of shape {shape} instead of (height, width) or (height, width, channels)")


def checked(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Height, width and channels of an array of this ``shape``. Raises ``ValueError`` if it cannot be an image.

    Not for TIFF files, which state what their axes are.
    """
    _refuse_no_image(shape)
    height, width, channels = (*shape, 1)[:3]
    # Bands, as where torch's arrays are saved: few of them, or of a square image.
    first = height <= 4 < min(width, channels) or height != width == channels > 4
    if first or (channels > max(height, width) > 4 and height != width):  # a patch of many channels is square
        raise ValueError(f"has shape {shape}, {channels} channels if they come last; save (height, width, channels)")
    return height, width, channels


def _is_for_tifffile(path: str | BinaryIO, channels: int | None = None) -> bool:
    """True if Pillow cannot read a TIFF file as an image, or cannot read all of the ``channels`` that are wanted."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                bands = len(image.getbands())
                samples = int(getattr(image, "tag_v2", {}).get(SAMPLESPERPIXEL, bands))
                deep = ";16" in raw_mode(image) and not is_deep(image)
                in_pages = are_pages(image, channels)
    except (UnidentifiedImageError, SyntaxError):
        return _samples_of(path) > 1  # a damaged file has none
    return channels not in (None, 1, 3) and (samples > bands or in_pages or (deep and samples != 3))


def are_pages(image: Image.Image, channels: int | None) -> bool:
    """True if the ``channels`` that are wanted, other than 1 and 3, may be the pages of this TIFF file."""
    if image.format != "TIFF" or channels in (None, 1, 3) or image.mode == "P":
        return False
    return int(getattr(image, "tag_v2", {}).get(SAMPLESPERPIXEL, 1)) == 1 and getattr(image, "n_frames", 1) == channels


def _samples_of(path: str | BinaryIO) -> int:
    """The number of bands that a TIFF file's first directory states; 0 if damaged, ``MANY`` for a BigTIFF file."""
    file = _file(path)
    head = file.read(8)
    if head[2:4] in (b"+\0", b"\0+"):
        return MANY
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a damaged file, on which Pillow also fails in other ways
        try:
            directory = ImageFileDirectory_v2(head)
            file.seek(directory.next)
            directory.load(file)
            return int(directory.get(SAMPLESPERPIXEL, 1))
        except Exception:
            return 0


def _tiff_file(path: str | BinaryIO) -> Any:
    try:
        import tifffile
    except ImportError as error:
        raise UserError(
            f"{path}: a TIFF file of several bands needs tifffile: python -m pip install -r requirements-tools.txt"
        ) from error
    return tifffile.TiffFile(_file(path))


def _of_tiff(path: str | BinaryIO) -> np.ndarray:
    with _tiff_file(path) as tiff:
        page = tiff.pages[0]
        tag = page.tags.get("Orientation")
        stacked = _stacked(tiff)
        try:
            numbers = tiff.series[0].asarray() if stacked else page.asarray()
        except MemoryError:
            if page.compression == 1 and page.nbytes > tiff.filehandle.size:  # of numbers that are not compressed
                raise ValueError(TOO_SHORT.format(page.shape)) from None
            raise
        if stacked or (page.axes.startswith("S") and numbers.ndim == 3):
            numbers = np.moveaxis(numbers, 0, -1)
    transposes, reversed_axes = UPRIGHT.get(int(tag.value) if tag else 1, (0, ()))
    numbers = numbers.swapaxes(0, 1) if transposes else numbers
    return np.flip(numbers, reversed_axes)


def _stacked(tiff: Any) -> bool:
    """True if the channels are pages, as ImageJ and OME write them."""
    return tiff.pages[0].samplesperpixel == 1 and tiff.series[0].axes == "CYX"
