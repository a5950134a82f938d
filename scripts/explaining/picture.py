"""Heat maps as a picture: each image, its map laid over it, and what the network takes it for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from scripts.common.heat_map import overlay

GREY = "#666666"
LONGEST_NAME = 34  # characters of a file's name
SMALL = 64  # pixels a side; such images are shown with their pixels, larger ones smoothly
GAP = 0.04  # between an image and its map, of its width


class Explained(NamedTuple):
    """An image ``pixels``, float (channels, h, w) between 0 and 1, its heat map (h, w), and lines about both."""

    name: str
    pixels: torch.Tensor
    heat: np.ndarray
    prediction: str
    target: str


def draw(path: Path, title: str, explained: Sequence[Explained]) -> None:
    """Write the grid to ``path`` (PNG), replacing it at once."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(explained), 2 if len(explained) <= 4 else 3 if len(explained) <= 12 else 4)
    rows = -(-len(explained) // columns)
    figure = Figure(figsize=(3.6 * columns, 0.55 + 2.2 * rows), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9, color=GREY, parse_math=False)
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    small = {"color": GREY, "parse_math": False}  # a name may hold dollars
    for place in places:
        place.set_axis_off()
    for place, one in zip(places, explained, strict=False):  # the last row may have room left
        both = _side_by_side(one)
        place.imshow(both, interpolation="nearest" if one.pixels.shape[-1] <= SMALL else "antialiased")
        place.set_title(one.prediction, fontsize=10, pad=12 if one.target else 4, parse_math=False)
        if one.target:
            place.text(0.5, 1.015, one.target, transform=place.transAxes, ha="center", fontsize=8, **small)
        name = _shortened(one.name)
        place.text(0.5, -0.02, name, transform=place.transAxes, ha="center", va="top", fontsize=7, **small)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=110)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _side_by_side(one: Explained) -> np.ndarray:
    """The image and its overlay with a white gap: uint8 (h, w, 3)."""
    image = np.asarray(overlay(one.pixels, np.zeros_like(one.heat)))
    gap = np.full((len(image), max(1, round(GAP * image.shape[1])), 3), 255, np.uint8)
    return np.concatenate([image, gap, np.asarray(overlay(one.pixels, one.heat))], axis=1)


def _shortened(name: str) -> str:
    printable = "".join(character if character.isprintable() else "?" for character in name)
    return printable if len(printable) <= LONGEST_NAME else f"...{printable[-LONGEST_NAME:]}"
