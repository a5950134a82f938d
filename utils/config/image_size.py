"""Sizes of images: the side of a square in pixels, or (height, width)."""

from __future__ import annotations

import math
from typing import Any

LARGEST_SIDE = 8192  # pixels, more than any network takes

Size = int | tuple[int, int]


def sides(size: int | tuple[int, ...]) -> tuple[int, int]:
    """Height and width of ``size``."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def size_of(height: int, width: int) -> Size:
    """The inverse of ``sides``: one number for a square, so that it is always written and compared alike."""
    return height if height == width else (height, width)


def size_text(size: Size) -> str:
    """The size as text: '224', or '160x224', height first."""
    return "x".join(map(str, (size,) if isinstance(size, int) else size))


def pixels_text(size: Size) -> str:
    """The size as an adjective: '224-pixel', or '160x224-pixel'."""
    return f"{size_text(size)}-pixel"


def enlarged(size: Size, share: float) -> tuple[int, int]:
    """Height and width of ``size`` divided by the fraction ``share``, each rounded down, but at least 1 pixel."""
    height, width = (max(1, math.floor(side / share)) for side in sides(size))
    return height, width


def is_size(value: Any) -> bool:
    """True if ``value`` is a size that a network may take: one whole number, or two in a sequence."""
    both = value if isinstance(value, list | tuple) and len(value) == 2 else (value,)
    return all(type(side) is int and 0 < side <= LARGEST_SIDE for side in both)
