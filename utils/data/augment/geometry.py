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


ALONG = {"ShearX": 3, "TranslateX": 3, "ShearY": 2, "TranslateY": 2}  # the only axis on which these move a pixel


def warp(
    images: torch.Tensor, matrices: np.ndarray, interpolation: str, fill: Sequence[int], axis: int | None = None
) -> torch.Tensor:
    """uint8 images (k, c, h, w), where each pixel comes from where ``matrices``, float64 (k, 6), say.

    Gives levels as uint8 or whole float32. ``fill`` is the level of each channel outside; () is black. ``axis``: that
    of ``ALONG``, if all move along one.
    """
    sizes = images.shape[-2:]
    theta = torch.from_numpy(matrices.astype(np.float32)).view(-1, 2, 3)
    theta = theta / torch.tensor([[[0.5 * sizes[1]], [0.5 * sizes[0]]]])
    theta = to_device(theta, images.device)[..., None, None]  # (k, 2, 3, 1, 1)
    rows, columns = (torch.arange(size, device=images.device).sub(0.5 * (size - 1)) for size in sizes)

    def from_(axis: int) -> torch.Tensor:
        """The place on axis 2 or 3, from -1 to 1 across the image; rounded as torchvision's matrix product."""
        across, down, moved = theta[:, 3 - axis].unbind(1)
        return torch.addcmul(columns * across, rows[:, None], down).add_(moved)

    if interpolation == "bilinear":
        return _bilinear(images, torch.stack([from_(3), from_(2)], dim=3), fill)
    if axis is not None:
        places = _pixels(from_(axis), images.shape[axis]).long()
        return _framed(images, fill, axis).gather(axis, places[:, None].expand(images.shape))
    row, column = (_pixels(from_(axis), images.shape[axis]).int() for axis in (2, 3))
    places = row.mul_(images.shape[3] + 2).add_(column).long().flatten(1)[:, None]
    framed = _framed(images, fill, 2, 3).flatten(2)
    return framed.gather(2, places.expand(-1, images.shape[1], -1)).view(images.shape)


def _pixels(places: torch.Tensor, size: int) -> torch.Tensor:
    """The nearest pixels of places from -1 to 1, in a frame of one pixel: 1 to ``size``, and 0 or more for outside."""
    return places.add_(1).mul_(0.5 * size).sub_(0.5).round_().clamp_(-1, size).add_(1)


def _framed(images: torch.Tensor, fill: Sequence[int], *axes: int) -> torch.Tensor:
    """The images with one more pixel of the fill's level at both ends of these axes."""
    count, channels, *sizes = images.shape
    frame = [int(axis in axes) for axis in (2, 3)]
    level = torch.tensor(fill or (0,), dtype=torch.uint8, device=images.device).view(1, -1, 1, 1)
    framed = level.expand(count, channels, *(size + 2 * one for size, one in zip(sizes, frame, strict=True))).clone()
    framed[:, :, frame[0] : frame[0] + sizes[0], frame[1] : frame[1] + sizes[1]] = images
    return framed


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
