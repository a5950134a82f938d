"""A range test as a picture: loss over learning rate."""

from __future__ import annotations

from pathlib import Path

from scripts.common.output import whole_file
from scripts.lr_range.advice import BELOW_DIVERGENCE, RateAdvice
from scripts.lr_range.measure import RangeTest

RED = "#c62828"
GREEN = "#2e7d32"
BLUE = "#1565c0"
GREY = "#9e9e9e"


def draw(output: str, title: str, test: RangeTest, advice: RateAdvice) -> None:
    """Write the picture to ``output`` (PNG). Raises ``UserError`` if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    rates = [point.lr for point in test.points]
    axis.plot(rates, [point.loss for point in test.points], ".", color=GREY, ms=5, label="loss of a step")
    axis.plot(rates, [point.smoothed for point in test.points], color=BLUE, lw=2, label="smoothed")
    marks = [
        (advice.steepest, GREEN, "-", "falls fastest: {:.2g}"),
        (advice.diverged, RED, "-", "diverges: {:.2g}"),
        (advice.diverged and advice.diverged / BELOW_DIVERGENCE, RED, "--", "a tenth of that: {:.2g}"),
    ]
    for rate, colour, style, text in marks:
        if rate is not None:
            axis.axvline(rate, color=colour, ls=style, lw=1.3, label=text.format(rate))
    # Above, there is only the explosion, next to which the descent would be a flat line.
    low = min(point.loss for point in test.points)
    high = 1.5 * test.points[0].smoothed
    axis.set_ylim(low - 0.05 * abs(high - low), high)
    axis.set_xscale("log")
    axis.set_xlabel("learning rate")
    axis.set_ylabel("training loss")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, loc="left", fontsize=11)
    axis.legend(loc="best", fontsize=9, framealpha=0.9)
    with whole_file(Path(output), f"--picture {output}") as file:
        figure.savefig(file, format="png", dpi=110)
