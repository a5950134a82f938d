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


# torchvision's policies have few magnitudes, so their maps come again and again: the first are kept.
MOST_KEPT = 2**22  # pixels
_KEPT: dict[tuple[bytes, int, int, torch.device], torch.Tensor] = {}


def warp(images: torch.Tensor, matrices: np.ndarray, interpolation: str, fill: Sequence[int]) -> torch.Tensor:
    """uint8 images (k, c, h, w), where each pixel comes from where ``matrices``, float64 (k, 6), say.

    Gives levels as uint8 or whole float32. ``fill`` is the level of each channel outside; () is black.
    """
    height, width = images.shape[-2:]
    if interpolation == "bilinear":
        return _bilinear(images, torch.stack(_places(matrices, height, width, images.device)[::-1], dim=3), fill)
    places = _maps(matrices, height, width, images.device)[:, None].expand(-1, images.shape[1], -1)
    return _framed(images, fill).flatten(2).gather(2, places).view(images.shape)


def _places(matrices: np.ndarray, height: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in the image each pixel comes from, down and across, from -1 to 1: float32 (k, height, width) each."""
    theta = torch.from_numpy(matrices.astype(np.float32)).view(-1, 2, 3)
    theta = theta / torch.tensor([[[0.5 * width], [0.5 * height]]])
    theta = to_device(theta, device)[..., None, None]  # (k, 2, 3, 1, 1)
    rows, columns = (torch.arange(size, device=device).sub(0.5 * (size - 1)) for size in (height, width))

    def places(across: torch.Tensor, down: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(columns * across, rows[:, None], down).add_(moved)  # rounds as torchvision's product

    return places(*theta[:, 1].unbind(1)), places(*theta[:, 0].unbind(1))


def _maps(matrices: np.ndarray, height: int, width: int, device: torch.device) -> torch.Tensor:
    """The nearest pixel of each pixel, int64 (k, height * width), in images with a frame of one pixel."""
    keys = [(matrix.tobytes(), height, width, device) for matrix in matrices]
    missing = [place for place, key in enumerate(keys) if key not in _KEPT]
    new = {}
    if missing:
        places = _places(matrices[missing], height, width, device)
        row, column = (_pixels(*each).long() for each in zip(places, (height, width), strict=True))
        computed = row.mul_(width + 2).add_(column).flatten(1)
        new = {keys[place]: one for place, one in zip(missing, computed, strict=True)}
        for key, one in new.items():
            if (len(_KEPT) + 1) * height * width <= MOST_KEPT:
                _KEPT[key] = one.clone()
    return torch.stack([new[key] if key in new else _KEPT[key] for key in keys])


def _pixels(places: torch.Tensor, size: int) -> torch.Tensor:
    """The nearest pixels of places from -1 to 1: 1 to ``size``; 0 and ``size`` + 1 are the frame."""
    return places.add_(1).mul_(0.5 * size).sub_(0.5).round_().clamp_(-1, size).add_(1)


def _framed(images: torch.Tensor, fill: Sequence[int]) -> torch.Tensor:
    """The images in a frame of one pixel of the fill's level."""
    framed = functional.pad(images, (1, 1, 1, 1))
    for channel, level in enumerate(fill):
        for edge in (framed[:, channel, :: framed.shape[2] - 1], framed[:, channel, :, :: framed.shape[3] - 1]):
            edge.fill_(level)
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
