"""Shearing, translating and rotating a batch of images, each by an amount of its own.

Pixels are those of torchvision's affine and rotate on uint8 tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional

from utils.runtime.distributed import to_device


def _inverse(
    angle: np.ndarray, shift: tuple[np.ndarray | float, ...], shear: tuple[np.ndarray | float, ...],
    centre: tuple[float, float] = (0.0, 0.0),
) -> np.ndarray:  # fmt: skip
    """From places in the output to places in the image, relative to its middle: float64 (k, 6), row by row.

    ``angle`` and ``shear`` (x, y) in radians; ``shift`` (x, y) and ``centre``, that of rotation and shear, in pixels.
    The order of the floating-point operations is that of torchvision, so that the same pixel wins a tie.
    """
    a = np.cos(angle - shear[1]) / np.cos(shear[1])
    b = -(a * np.tan(shear[0]) + np.sin(angle))
    c = np.sin(angle - shear[1]) / np.cos(shear[1])
    d = np.cos(angle) - c * np.tan(shear[0])
    moved = [centre[axis] + shift[axis] for axis in (0, 1)]
    rows = [(d, -b), (-c, a)]
    last = [centre[axis] - row[0] * moved[0] - row[1] * moved[1] for axis, row in enumerate(rows)]
    return np.stack([*rows[0], last[0], *rows[1], last[1]], axis=1)


def _shear_x(amounts: np.ndarray, height: int, width: int) -> np.ndarray:
    """``amounts``: pixels to the side a row; the upper left corner stays."""
    angles = np.radians(np.degrees(np.arctan(amounts)))
    return _inverse(np.zeros(len(amounts)), (0.0, 0.0), (angles, 0.0), (-0.5 * width, -0.5 * height))


def _shear_y(amounts: np.ndarray, height: int, width: int) -> np.ndarray:
    angles = np.radians(np.degrees(np.arctan(amounts)))
    return _inverse(np.zeros(len(amounts)), (0.0, 0.0), (0.0, angles), (-0.5 * width, -0.5 * height))


def _translate_x(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    return _inverse(np.zeros(len(pixels)), (pixels, 0.0), (0.0, 0.0))


def _translate_y(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    return _inverse(np.zeros(len(pixels)), (0.0, pixels), (0.0, 0.0))


def _rotate(degrees: np.ndarray, height: int, width: int) -> np.ndarray:
    """Counter-clockwise around the middle."""
    return _inverse(np.radians(-(degrees % 360)), (0.0, 0.0), (0.0, 0.0))


# Arguments float64 (k,), height and width to the matrices of ``warp``.
MATRICES: dict[str, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateX": _translate_x,
    "TranslateY": _translate_y,
    "Rotate": _rotate,
}


def warp(images: torch.Tensor, matrices: np.ndarray, interpolation: str, fill: Sequence[int]) -> torch.Tensor:
    """uint8 images (k, c, h, w), where each pixel comes from where ``matrices``, float64 (k, 6), say.

    Gives levels as uint8 or whole float32. ``fill`` is the level of each channel outside; () is black.
    """
    height, width = images.shape[-2:]
    theta = torch.from_numpy(matrices.astype(np.float32)).view(-1, 2, 3)
    theta = theta / torch.tensor([[[0.5 * width], [0.5 * height]]])
    theta = to_device(theta, images.device)[..., None, None]  # (k, 2, 3, 1, 1)
    columns = torch.arange(width, device=images.device).sub(0.5 * (width - 1)).view(1, 1, width)
    rows = torch.arange(height, device=images.device).sub(0.5 * (height - 1)).view(1, height, 1)
    # As the matrix product in torchvision rounds; from -1 to 1 across the image.
    across, down = (
        torch.addcmul(columns * theta[:, axis, 0], rows, theta[:, axis, 1]).add_(theta[:, axis, 2]) for axis in (0, 1)
    )
    if interpolation == "nearest":
        return _nearest(images, across, down, fill)
    return _bilinear(images, torch.stack([across, down], dim=3), fill)


def _nearest(images: torch.Tensor, across: torch.Tensor, down: torch.Tensor, fill: Sequence[int]) -> torch.Tensor:
    count, channels, height, width = images.shape
    column = across.add_(1).mul_(0.5 * width).sub_(0.5).round_()
    row = down.add_(1).mul_(0.5 * height).sub_(0.5).round_()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    outside = height * width  # the place of one more pixel, which has the fill's level
    places = torch.where(inside, row.long() * width + column.long(), outside).view(count, 1, -1)
    with_fill = functional.pad(images.flatten(2), (0, 1))
    if fill:
        with_fill[:, :, -1] = torch.tensor(fill, dtype=torch.uint8, device=images.device)
    return with_fill.gather(2, places.expand(-1, channels, -1)).view_as(images)


def _bilinear(images: torch.Tensor, grid: torch.Tensor, fill: Sequence[int]) -> torch.Tensor:
    levels = images.float()
    if not fill:
        return _sampled(levels, grid).round_()
    levels = _sampled(functional.pad(levels, (0, 0, 0, 0, 0, 1), value=1.0), grid)  # its last channel: how far inside
    levels, inside = levels[:, :-1], levels[:, -1:]
    level = torch.tensor(fill, dtype=torch.float32, device=images.device).view(1, -1, 1, 1)
    return levels.sub(level).mul_(inside).add_(level).round_()


def _sampled(levels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return functional.grid_sample(levels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def mirrored(places: torch.Tensor, size: int) -> torch.Tensor:
    """Places on a line of ``size`` pixels; those beyond an end are mirrored there without repeating the end pixel."""
    period = max(1, 2 * (size - 1))
    places = places % period
    return torch.minimum(places, period - places)
