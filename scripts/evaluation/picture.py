"""Pictures of an evaluation: images that one of two networks gets right, accepted answers, other images' scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from scripts.common.output import draw_png
from scripts.evaluation.as_text import short
from scripts.evaluation.comparison import Comparison
from scripts.evaluation.distance import Others
from scripts.evaluation.rejection import Rejection

# per group
COLUMNS = 6
ROWS = 2
LARGEST_SIDE = 224  # pixels of a tile's image
BINS = 50


def draw(path: Path, comparison: Comparison) -> None:
    """Draw images in a grid to ``path`` (PNG): above, those that only the first network gets right; below, the second.

    The most confident mistakes come first in each group; a tile names the class, then both answers.
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
    draw_png(figure, path)


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


def draw_curve(path: Path, found: Rejection) -> None:
    """Draw the accuracy of the accepted answers over their share of all images to ``path`` (PNG)."""
    from matplotlib.figure import Figure

    curve = found.curve
    figure = Figure(figsize=(7, 4.5), layout="constrained", facecolor="white")
    axis = figure.subplots()
    axis.plot(100 * curve.coverage, 100 * curve.accuracy, drawstyle="steps-pre", label=f"AURC {curve.aurc:.4f}")
    axis.axhline(100 * (1 - curve.random), color="gray", linestyle=":", label=f"random order {curve.random:.4f}")
    if found.accepted:
        point = (100 * found.accepted / found.images, 100 * found.right / found.accepted)
        words = f"probability {found.below:g} or more: {point[1]:.2f} % of {point[0]:.2f} %"
        axis.plot(*point, "o", color="tab:red", label=words)
    axis.set(xlabel="accepted images, percent", ylabel="right answers among them, percent", xlim=(0, 101))
    axis.legend()
    axis.grid(alpha=0.3)
    draw_png(figure, path)


def draw_others(path: Path, found: Others) -> None:
    """Draw histograms of distance and confidence, of the evaluated images and those of no class, to ``path`` (PNG)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained", facecolor="white")
    scores = {"distance": found.distances, "confidence": found.confidences}
    for axis, (name, both) in zip(figure.subplots(1, 2), scores.items(), strict=True):
        finite = [values[np.isfinite(values)] for values in both]
        every = np.concatenate(finite)
        edges = np.linspace(0, 1, BINS + 1)
        if name == "distance":  # distances of others may be a hundred times as large
            smallest = max(every.min(), every.max() * 1e-6)
            edges = np.geomspace(smallest, max(every.max(), smallest * 1.001), BINS + 1)
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("{x:g}" if every.max() < 10 * smallest else "")
            axis.axvline(
                found.distance.usual, color="gray", linestyle=":", label="95 % of the images that it was tried on"
            )
        for values, label in zip(finite, ("evaluated", "others"), strict=True):
            weights = np.full(len(values), 100 / max(1, len(values)))
            axis.hist(values, edges, weights=weights, alpha=0.55, label=f"{label}: {len(values):,} images")
        of = found.separations[name]
        words = f"AUROC {of.auroc:.2f} %; with 95 % of the evaluated, {of.false_positives:.2f} % of the others"
        axis.set_title(f"{name}\n{words}", fontsize=10)
        axis.set(xlabel=name, ylabel="percent of the images")
        axis.margins(y=0.35)  # room for the legend
        axis.legend()
    draw_png(figure, path)
