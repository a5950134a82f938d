"""Shearing, translating and rotating a batch of images, each by its own amount.

Pixels equal those of torchvision's affine and rotate on uint8 tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from utils.runtime.devices import to_device

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


# torchvision's policies have few magnitudes, so the same maps recur: the first ones are kept.
MOST_KEPT = 2**22  # pixels
# For each output pixel the nearest image pixel, int64 (height * width,), and 255 if that lies inside the image, else 0.
Map = tuple[torch.Tensor, torch.Tensor]
_KEPT: dict[tuple[bytes, int, int, torch.device], Map] = {}


def warp(images: torch.Tensor, matrices: np.ndarray, interpolation: str, fill: Sequence[int]) -> torch.Tensor:
    """Warp uint8 images (k, c, h, w); ``matrices``, float64 (k, 6), map each output pixel to its place in the image.

    Returns uint8, or whole float32 levels if bilinear. ``fill``: each channel's level outside the image; () is black.
    """
    height, width = images.shape[-2:]
    if interpolation == "bilinear":
        return _bilinear(images, torch.stack(_places(matrices, height, width, images.device)[::-1], dim=3), fill)
    if len(images) == 1:
        a, b, across, c, d, down = matrices[0].tolist()
        if (a, b, c, d) == (1, 0, 0, 1) and across.is_integer() and down.is_integer():
            return _translated(images, int(across), int(down), fill)
    places, inside = _maps(matrices, height, width, images.device)
    moved = images.flatten(2).gather(2, places.expand(-1, images.shape[1], -1)).bitwise_and_(inside)
    if any(fill):
        level = torch.tensor(fill, dtype=torch.uint8, device=images.device).view(1, -1, 1)
        moved.bitwise_or_(level & ~inside)
    return moved.view(images.shape)


def _translated(images: torch.Tensor, across: int, down: int, fill: Sequence[int]) -> torch.Tensor:
    """Shift images: each output pixel comes from ``across`` pixels further right and ``down`` pixels further down."""
    level = torch.tensor(fill or [0], dtype=torch.uint8, device=images.device).view(1, -1, 1, 1)
    moved = level.expand(images.shape).clone(memory_format=torch.contiguous_format)
    (rows, from_rows), (columns, from_columns) = (
        (slice(max(0, -by), max(0, size - by)), slice(max(0, by), max(0, size + by)))
        for by, size in zip((down, across), images.shape[2:], strict=True)
    )
    moved[..., rows, columns] = images[..., from_rows, from_columns]
    return moved


def _places(matrices: np.ndarray, height: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column that each output pixel comes from, -1 to 1 across the image: float32 (k, height, width) each."""
    theta = torch.from_numpy(matrices.astype(np.float32)).view(-1, 2, 3)
    theta = to_device(theta / torch.tensor([[[0.5 * width], [0.5 * height]]]), device)
    rows, columns = (torch.arange(size, device=device).sub(0.5 * (size - 1)) for size in (height, width))
    if device.type == "cpu":  # torchvision's own product, since each kind of CPU rounds it in its own way
        pixels = torch.ones(1, height, width, 3)
        pixels[..., 0] = columns
        pixels[..., 1] = rows[:, None]
        across_and_down = pixels.view(1, -1, 3).expand(len(theta), -1, -1).bmm(theta.transpose(1, 2))
        across, down = across_and_down.view(-1, height, width, 2).unbind(3)
        return down, across

    def places(across: torch.Tensor, down: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(columns * across, rows[:, None], down).add_(moved)  # a product might use TF32

    theta = theta[..., None, None]  # (k, 2, 3, 1, 1)
    return places(*theta[:, 1].unbind(1)), places(*theta[:, 0].unbind(1))


def _maps(matrices: np.ndarray, height: int, width: int, device: torch.device) -> Map:
    """The ``Map`` of each of ``matrices`` (k, 6), stacked: two tensors (k, 1, height * width)."""
    keys = [(matrix.tobytes(), height, width, device) for matrix in matrices]
    missing = [place for place, key in enumerate(keys) if key not in _KEPT]
    new = {}
    if missing:
        places = _places(matrices[missing], height, width, device)
        row, column = (_nearest(*each) for each in zip(places, (height, width), strict=True))
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        computed = row.clamp_(0, height - 1).long().mul_(width).add_(column.clamp_(0, width - 1).long()).flatten(1)
        inside = inside.to(torch.uint8).mul_(255).flatten(1)
        new = {keys[place]: one for place, *one in zip(missing, computed, inside, strict=True)}
        for key, one in new.items():
            if (len(_KEPT) + 1) * height * width <= MOST_KEPT:
                _KEPT[key] = tuple(each.clone() for each in one)
    maps = [new[key] if key in new else _KEPT[key] for key in keys]
    if len(maps) == 1:
        return maps[0][0][None, None], maps[0][1][None, None]
    of_all, inside_of_all = (torch.stack(each)[:, None] for each in zip(*maps, strict=True))
    return of_all, inside_of_all


def _nearest(places: torch.Tensor, size: int) -> torch.Tensor:
    """Convert ``places``, in place, from -1 to 1 across the image, to the nearest pixel's number, 0 to ``size`` - 1."""
    return places.add_(1).mul_(0.5 * size).sub_(0.5).round_()


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
    """Mirror ``places`` beyond the ends of a line of ``size`` pixels back into it, without repeating the end pixel."""
    period = max(1, 2 * (size - 1))
    places = places % period
    return torch.minimum(places, period - places)
