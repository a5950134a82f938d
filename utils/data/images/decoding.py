"""Decoding of image files into tensors, on the CPU.

Of a plain JPEG, only the wanted box is decoded (see ``jpeg.py``). Pillow reads all other formats and modes that class
folders hold in practice, and decides whether a file is damaged. All images are cropped and resized in the same way, so
that the pixels do not depend on the file's format.
"""

from __future__ import annotations

import errno
import math
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from utils.config.settings import UserError
from utils.config.spelling import reason_of
from utils.data.images import jpeg
from utils.data.images.arrays import checked, npy_numbers, numbers_in, of_colour
from utils.data.images.levels import in_colour, is_array, keeps_levels, numbers_of, range_of, refuse_misread, to_8_bits
from utils.data.images.stored import RAW, NamedBytes, content_of
from utils.data.images.view import LEAST_AREA, Box, Placement, View, resized

CROP_RATIO = (3 / 4, 4 / 3)  # random-resized-crop of Szegedy et al., Going deeper with convolutions, 2014
CROP_ATTEMPTS = 10
CROP_NUMBERS = 2 * CROP_ATTEMPTS + 2  # random numbers per crop: area and ratio of each attempt, then the place
LEVELS = "levels"  # a key in the ``info`` of a picture
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of file descriptors and of memory


class UnreadableImage(UserError):
    """Error: the file at ``path`` cannot be read as an image, for this ``reason``."""

    def __init__(self, path: str | BinaryIO, reason: object) -> None:
        super().__init__(
            f"{path}: cannot be read as an image ({reason}); repair or remove the file, or skip it with "
            "--skip-bad-images"
        )
        self.path = str(path)
        self.reason = str(reason)

    def __reduce__(self) -> tuple[Any, ...]:  # for pickling, on the way from a worker
        return type(self), (self.path, self.reason)


def open_image(path: str | BinaryIO, colour: str, formats: list[str] | tuple[str, ...] | None = None) -> Image.Image:
    """Open the image at a path or in a binary file, upright (EXIF rotation applied), in mode ``colour`` ('L' or 'RGB').

    If ``colour`` is a ``Colour``, it gives the range of numbers of more than 8 bits. ``formats``: Pillow's names of the
    only formats to read; None: all except EPS, a program. Raises ``UnreadableImage`` with the path if the file cannot
    be read, and a plain ``UserError`` if the system is short of memory or file descriptors.
    """
    return _read(path, lambda file: _open_image(file, colour, formats))


def read_pixels(path: str | BinaryIO, colour: str) -> torch.Tensor:
    """Read the pixels of an image at a path or in a binary file, upright: (channels, h, w) in channels-last memory.

    The dtype is uint8, or float32 (0 to 255) for a ``Colour`` that keeps all levels. Raises what ``open_image`` raises.
    """
    if not is_array(colour):
        return to_tensor(open_image(path, colour))
    levels = _read(path, lambda file: of_colour(numbers_in(file, colour), colour))
    return torch.from_numpy(np.require(levels, requirements=["C", "W"])).permute(2, 0, 1)


def dtype_of(colour: str) -> torch.dtype:
    """The dtype of pixels that are read in ``colour``: uint8 or float32."""
    return torch.float32 if keeps_levels(colour) else torch.uint8


def _read(path: str | BinaryIO, read: Callable[[BinaryIO], Any]) -> Any:
    """Apply ``read`` to the file's content in memory, which several readers then read once."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's warnings concern metadata and large images, not the pixels
            return read(NamedBytes(path, content_of(path)) if isinstance(path, str) else path)
    except UserError:  # such as that a shard was replaced
        raise
    except Exception as error:  # each of Pillow's readers fails in its own ways on a damaged file
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in SHORTAGES:
            raise UserError(f"{path}: cannot be read ({error}); use fewer --workers, or raise the limit") from error
        raise UnreadableImage(path, why_unreadable(error)) from error


def why_unreadable(error: Exception) -> str:
    """The reason why an image cannot be decoded, on one line, without the path that Pillow's message repeats."""
    if isinstance(error, UnidentifiedImageError):
        return "is not an image in a known format"
    return reason_of(error, with_file=True)


def _open_image(file: BinaryIO, colour: str, formats: list[str] | tuple[str, ...] | None) -> Image.Image:
    if is_array(colour):
        return for_people(of_colour(numbers_in(file, colour, formats), colour))
    if isinstance(file, NamedBytes) and file.getbuffer()[: len(RAW)] == RAW:
        return in_colour(_raw_image(file, colour), colour)
    with Image.open(file, formats=formats) as image:
        if image.format == "EPS":
            raise ValueError("is PostScript, a program, which is not run")  # Pillow would, in Ghostscript
        refuse_misread(image)
        pixel_range = range_of(colour)
        if pixel_range is not None and (numbers := numbers_of(image, file)) is not None:
            return in_colour(Image.fromarray(to_8_bits(numbers, pixel_range)), colour)
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return in_colour(image, colour, image.format)


def _raw_image(file: BinaryIO, colour: str) -> Image.Image:
    """The image in an open .npy file."""
    pixels = npy_numbers(file)
    checked(pixels.shape)
    if pixels.dtype != np.uint8 or (pixels.ndim != 2 and pixels.shape[2:] != (3,)):
        pixels = of_colour(pixels, colour)
        pixels = pixels[..., 0] if pixels.shape[2] == 1 else pixels
    return Image.fromarray(pixels)


def for_people(levels: np.ndarray) -> Image.Image:
    """A viewable picture of ``levels`` (h, w, channels): the first three channels as RGB, or else the first as grey.

    Its ``info`` keeps the levels themselves, for ``Preprocessing``.
    """
    shown = np.rint(levels[..., : 3 if levels.shape[2] >= 3 else 1]).astype(np.uint8)
    picture = Image.fromarray(shown[..., 0] if shown.shape[2] == 1 else np.ascontiguousarray(shown))
    picture.info[LEVELS] = levels
    return picture


def decode_crop(path: str | NamedBytes, view: View, colour: str, uniforms: np.ndarray | None = None) -> torch.Tensor:
    """Decode a crop of an image file: (channels, h, w), dtype as from ``read_pixels``, in channels-last memory.

    With ``uniforms`` (``CROP_NUMBERS`` in [0, 1)) it is a random-resized-crop for training, otherwise what ``view``
    shows in evaluation; with ``view.whole``, it is always the whole image, resampled only if its size is not the
    view's. Raises what ``open_image`` raises.
    """
    if view.whole:
        return resized(read_pixels(path, colour), view.size, "bilinear")
    pixels, place = decode_box(path, view, colour, uniforms)
    shown = cropped(pixels, view, place)
    return shown.clamp(0, 255) if shown.is_floating_point() else shown  # bicubic overshoots; bytes cannot


def decode_box(
    path: str | NamedBytes, view: View, colour: str, uniforms: np.ndarray | None = None
) -> tuple[torch.Tensor, Placement | None]:
    """The pixels (channels, h, w) that ``decode_crop`` resizes, and their place in the view (None in training)."""
    source = loaded(path)
    plain = read_plain_jpeg(source, colour)
    if plain is not None:
        data, width, height = plain
        box, place = boxes(view, width, height, uniforms)
        pixels = jpeg.decode_region(data, box)
        if pixels is not None:
            return pixels.permute(2, 0, 1), place
    pixels = read_pixels(source, colour)
    height, width = pixels.shape[1:]
    box, place = boxes(view, width, height, uniforms)
    left, top, right, bottom = box
    return pixels[:, top:bottom, left:right], place


def decoder() -> str:
    """Text for the log: the library that decodes plain JPEG files, its version, and whether it decodes regions."""
    if jpeg.nvimgcodec is not None:
        return f"nvImageCodec {jpeg.nvimgcodec.__version__}, regions"
    return f"torchvision {metadata.version('torchvision')}, whole images"


def loaded(path: str | NamedBytes) -> NamedBytes:
    """Load the content of an image file. Raises what ``open_image`` raises."""
    return _read(path, lambda file: file)


def read_plain_jpeg(file: NamedBytes, colour: str) -> tuple[bytes, int, int] | None:
    """Read a plain JPEG file: its content, width and height; None for any other file, which Pillow must read."""
    if colour != "RGB" or is_array(colour):
        return None  # Pillow makes grey from rounded RGB
    data = file.getvalue()
    size = jpeg.plain_size(data)
    if size is None or size[0] * size[1] > (Image.MAX_IMAGE_PIXELS or math.inf):
        return None  # Pillow warns of large images and refuses enormous ones
    return data, *size


def to_tensor(image: Image.Image) -> torch.Tensor:
    """The pixels of ``image`` as uint8 (channels, height, width), in channels-last memory."""
    pixels = torch.from_numpy(np.array(image))
    return (pixels[:, :, None] if pixels.ndim == 2 else pixels).permute(2, 0, 1)


def boxes(view: View, width: int, height: int, uniforms: np.ndarray | None) -> tuple[Box, Placement | None]:
    """The box to read of a ``width`` x ``height`` image and, in evaluation (no ``uniforms``), its place in the view."""
    if uniforms is not None:
        return random_box(width, height, uniforms, view.least_area), None
    place = view.place(width, height)
    return place.box, place


def cropped(pixels: torch.Tensor, view: View, place: Placement | None) -> torch.Tensor:
    """The ``pixels`` (channels, h, w) of the box from ``boxes``, resized and cropped to the size of ``view``."""
    return resized(pixels, view.size, view.interpolation) if place is None else view.show(pixels, place)


def random_box(width: int, height: int, uniforms: np.ndarray, least_area: float = LEAST_AREA) -> Box:
    """A box of random area and aspect ratio, as torchvision's ``RandomResizedCrop`` draws it.

    Its area is at least the fraction ``least_area`` of the image. ``uniforms``: ten pairs for area and ratio, of which
    the first that fits is used (if none fits, the box is in the middle), then two numbers for the place.
    """
    low, high = (math.log(ratio) for ratio in CROP_RATIO)
    across, down = uniforms[2 * CROP_ATTEMPTS : CROP_NUMBERS]
    for first, second in uniforms[: 2 * CROP_ATTEMPTS].reshape(CROP_ATTEMPTS, 2):
        area = width * height * (least_area + (1.0 - least_area) * float(first))
        ratio = math.exp(low + (high - low) * float(second))
        box_width = round(math.sqrt(area * ratio))
        box_height = round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = math.floor(float(across) * (width - box_width + 1))
            top = math.floor(float(down) * (height - box_height + 1))
            return left, top, left + box_width, top + box_height
    ratio = min(max(width / height, CROP_RATIO[0]), CROP_RATIO[1])
    box_width = min(width, round(height * ratio))
    box_height = min(height, round(width / ratio))
    left = (width - box_width) // 2
    top = (height - box_height) // 2
    return left, top, left + box_width, top + box_height
