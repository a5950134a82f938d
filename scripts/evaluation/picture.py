"""Images that one of two networks gets right and the other wrong, as a picture."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from scripts.evaluation.as_text import short
from scripts.evaluation.comparison import Comparison

# of each of the two groups
COLUMNS = 6
ROWS = 2
LARGEST_SIDE = 224  # pixels of a tile's image


def draw(path: Path, comparison: Comparison) -> None:
    """Write the grid to ``path`` (PNG): above what the first alone gets right, below what the second alone does.

    In each group the most confident mistakes come first; a tile names the class, then both answers.
    """
    from matplotlib.figure import Figure

    groups = [(second, comparison.only(second)) for second in (False, True)]
    heights = [max(1, min(ROWS, -(-len(places) // COLUMNS))) for _, places in groups]
    figure = Figure(figsize=(1.9 * COLUMNS, 2.6 * sum(heights) + 0.6), layout="constrained", facecolor="white")
    for (second, places), part in zip(groups, figure.subfigures(2, 1, height_ratios=heights), strict=True):
        shown = places[: COLUMNS * ROWS].tolist()
        which = ("first (A)", "second (B)")[second]
        part.suptitle(
            f"Only the {which} is right: {len(shown)} of {len(places):,} images, the most confident mistakes of the "
            "other",
            fontsize=11,
        )
        axes = list(part.subplots(heights[second], COLUMNS, squeeze=False).flat)
        for axis in axes:
            axis.set_axis_off()
        for axis, place in zip(axes, shown, strict=False):
            _tile(axis, comparison, place)
    with warnings.catch_warnings():  # that the font lacks a letter, for which it draws a box
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(path, dpi=100, format="png")


def _tile(axis: Any, comparison: Comparison, place: int) -> None:
    one, two = (int(places[place]) for places in comparison.places)
    image = comparison.first.picture(one)
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    axis.imshow(image, cmap="gray" if image.mode == "L" else None, vmin=0, vmax=255, interpolation="nearest")
    names = comparison.first.classes
    lines = [short(names[comparison.first.truth[one]])]
    for letter, network, number in (("A", comparison.first, one), ("B", comparison.second, two)):
        predicted = int(network.predicted[number])
        name = network.classes[predicted] if predicted >= 0 else "no number"
        lines.append(f"{letter}: {short(name)} {network.confidence[number]:.2f}")
    axis.set_title("\n".join(lines), fontsize=8, parse_math=False)
