"""Image file into uint8 tensor.

Pillow reads every format and mode that a class-folder tree holds in practice; the crop box goes into
its resize, so that only the wanted region is resampled.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image, ImageOps

from utils.settings import UserError

EVAL_CROP_SHARE = 0.875  # evaluation sees the middle 224 of 256 pixels, the convention since AlexNet
CROP_AREA = (0.08, 1.0)  # random-resized-crop of Szegedy et al., Going deeper with convolutions, 2014
CROP_RATIO = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


def open_image(path: str, colour: str) -> Image.Image:
    """An image upright (EXIF rotation applied) in mode ``colour`` ('L' or 'RGB').

    Raises ``UserError`` with the path when the file cannot be read.
    """
    try:
        with Image.open(path) as image:
            image.load()
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I;16") or image.mode == "I":
                # Pillow clips 16-bit grey instead of scaling it.
                image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
            if image.mode == "P" and "transparency" in image.info:
                image = image.convert("RGBA")
            return image if image.mode == colour else image.convert(colour)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: cannot be read as an image ({error}); mend or remove the file") from error


def decode_crop(path: str, size: int, colour: str, uniforms: np.ndarray | None = None) -> torch.Tensor:
    """A uint8 tensor (channels, size, size) of a file.

    With ``uniforms`` (22 numbers in [0, 1)) a random-resized-crop for training; without, the middle
    of the image for evaluation.
    """
    image = open_image(path, colour)
    box = central_box(*image.size) if uniforms is None else random_box(*image.size, uniforms)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return to_tensor(image)


def decode_whole(path: str, size: int, colour: str) -> torch.Tensor:
    """A uint8 tensor (channels, size, size) of a whole file, resampled only when it has another size."""
    image = open_image(path, colour)
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return to_tensor(image)


def to_tensor(image: Image.Image) -> torch.Tensor:
    """The pixels as a contiguous uint8 tensor (channels, height, width)."""
    pixels = np.array(image)
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def central_box(width: int, height: int) -> Box:
    """The central square, 87.5 % of the shorter side: what resize-then-centre-crop leaves."""
    side = EVAL_CROP_SHARE * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, uniforms: np.ndarray) -> Box:
    """A box of random area and aspect ratio, as torchvision's ``RandomResizedCrop`` draws it.

    ``uniforms``: ten pairs for area and ratio (the first that fits is taken), then two for the place.
    """
    low, high = (math.log(ratio) for ratio in CROP_RATIO)
    across, down = uniforms[2 * CROP_ATTEMPTS : 2 * CROP_ATTEMPTS + 2]
    for first, second in uniforms[: 2 * CROP_ATTEMPTS].reshape(CROP_ATTEMPTS, 2):
        area = width * height * (CROP_AREA[0] + (CROP_AREA[1] - CROP_AREA[0]) * float(first))
        ratio = math.exp(low + (high - low) * float(second))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = math.floor(float(across) * (width - box_width + 1))
            top = math.floor(float(down) * (height - box_height + 1))
            return left, top, left + box_width, top + box_height
    ratio = min(max(width / height, CROP_RATIO[0]), CROP_RATIO[1])
    box_width, box_height = min(width, round(height * ratio)), min(height, round(width / ratio))
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height
