"""Shearing, translating and rotating a batch of images, each by its own amount.

Pixels equal those of torchvision's affine and rotate on uint8 tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from utils.runtime.devices import constant, to_device

Pair = tuple[np.ndarray | float, np.ndarray | float]  # across and down


def _inverse(
    angle: np.ndarray, shift: Pair = (0.0, 0.0), shear: Pair = (0.0, 0.0), centre: Pair = (0.0, 0.0)
) -> np.ndarray:
    """Matrices that map places in the output to places in the image, relative to the middle: float64 (k, 6), by rows.

    ``angle`` and ``shear`` (x, y) in radians; ``shift`` (x, y) and the ``centre`` of rotation and shear in pixels.
    Floating-point operations are in torchvision's order, so that the same pixel wins a tie.
    """
    a = np.cos(angle - shear[1]) / np.cos(shear[1])
    b = -(a * np.tan(shear[0]) + np.sin(angle))
    c = np.sin(angle - shear[1]) / np.cos(shear[1])
    d = np.cos(angle) - c * np.tan(shear[0])
    moved = [centre[axis] + shift[axis] for axis in (0, 1)]
    rows = [(d, -b), (-c, a)]
    last = [centre[axis] - row[0] * moved[0] - row[1] * moved[1] for axis, row in enumerate(rows)]
    return np.stack([*rows[0], last[0], *rows[1], last[1]], axis=1)


def _sheared(axis: int, amounts: np.ndarray, height: int, width: int) -> np.ndarray:
    """Matrices that shear by ``amounts`` (k,): pixels sideways per row or, with ``axis`` 1, down per column.

    The upper left corner stays where it is.
    """
    angles = np.radians(np.degrees(np.arctan(amounts)))
    shear: Pair = (0.0, angles) if axis else (angles, 0.0)
    return _inverse(np.zeros(len(amounts)), shear=shear, centre=(-0.5 * width, -0.5 * height))


# By operation, a function from arguments, float64 (k,), height and width to the matrices for ``warp``.
MATRICES: dict[str, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "ShearX": partial(_sheared, 0),
    "ShearY": partial(_sheared, 1),
    "TranslateX": lambda pixels, *_: _inverse(np.zeros(len(pixels)), shift=(pixels, 0.0)),
    "TranslateY": lambda pixels, *_: _inverse(np.zeros(len(pixels)), shift=(0.0, pixels)),
    "Rotate": lambda degrees, *_: _inverse(np.radians(-(degrees % 360))),  # counter-clockwise around the middle
}


def warp(images: torch.Tensor, matrices: np.ndarray, interpolation: str, fill: Sequence[int]) -> torch.Tensor:
    """Warp images (k, c, h, w); ``matrices``, float64 (k, 6), map each output pixel to its place in the image.

    Returns float32: the images' own levels if ``interpolation`` is 'nearest', whole ones if it is 'bilinear'. ``fill``:
    each channel's level outside the image; () is black.
    """
    levels = images.float()
    if fill:  # its last channel tells how far a pixel lies inside
        levels = functional.pad(levels, (0, 0, 0, 0, 0, 1), value=1.0)
    height, width = images.shape[-2:]
    grid = _grid(matrices, height, width, images.device)
    levels = functional.grid_sample(levels, grid, mode=interpolation, padding_mode="zeros", align_corners=False)
    if fill:
        levels, inside = levels[:, :-1], levels[:, -1:]
        level = constant(tuple(fill), torch.float32, images.device).view(1, -1, 1, 1)
        levels = levels.sub(level).mul_(inside).add_(level)
    return levels.round_() if interpolation == "bilinear" else levels


def _grid(matrices: np.ndarray, height: int, width: int, device: torch.device) -> torch.Tensor:
    """Column and row that each output pixel comes from, -1 to 1 across the image: float32 (k, height, width, 2)."""
    theta = torch.from_numpy(matrices.astype(np.float32)).view(-1, 2, 3)
    theta = to_device(theta / torch.tensor([[[0.5 * width], [0.5 * height]]]), device)
    rows, columns = (torch.arange(size, device=device).sub(0.5 * (size - 1)) for size in (height, width))
    if device.type == "cpu":  # torchvision's own product, since each kind of CPU rounds it in its own way
        pixels = torch.ones(1, height, width, 3)
        pixels[..., 0] = columns
        pixels[..., 1] = rows[:, None]
        places = pixels.view(1, -1, 3).expand(len(theta), -1, -1).bmm(theta.transpose(1, 2))
        return places.view(-1, height, width, 2)
    across, down, moved = theta[:, None, None].unbind(4)  # (k, 1, 1, 2) each
    # a product might use TF32
    return torch.addcmul(columns[:, None] * across, rows[:, None, None], down).add_(moved)


def mirrored(places: torch.Tensor, size: int) -> torch.Tensor:
    """Mirror ``places`` beyond the ends of a line of ``size`` pixels back into it, without repeating the end pixel."""
    period = max(1, 2 * (size - 1))
    places = places % period
    return torch.minimum(places, period - places)
