"""Advice on the learning rate from a range test, as text and as a picture."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import NamedTuple

from scripts.common.output import draw_png, whole_file
from scripts.lr_range.measure import FIRST_STEPS, RangePoint, RangeTest

BELOW_DIVERGENCE = 10.0
# multiples of the initial loss: below FELL it has fallen, above BACK it has risen again
FELL = 0.98
BACK = 1.05
NOISE = 1.5  # standard deviations of a step's loss, by which it must fall or rise as well
RED = "#c62828"
GREEN = "#2e7d32"
BLUE = "#1565c0"
GREY = "#9e9e9e"


class RateAdvice(NamedTuple):
    """Advice on the learning rate. ``steepest``: where the smoothed loss falls fastest; None if it never falls.

    ``diverged``: where the loss diverges; None if it does not.
    """

    steepest: float | None
    diverged: float | None

    @property
    def rate(self) -> float | None:
        """Learning rate to train with, to two digits, by the more cautious of two rules; None without advice."""
        if self.steepest is None:
            return None
        safe = self.diverged / BELOW_DIVERGENCE if self.diverged is not None else math.inf
        return float(f"{min(self.steepest, safe):.2g}")

    def line(self, start: float, end: float) -> str:
        """Text of the advice and its reasons, for a range from ``start`` to ``end``."""
        if self.rate is None:
            return f"no advice: the loss falls at no rate between {start:g} and {end:g}" + (
                f", and diverges at {self.diverged:.2g}; a lower --start-lr may help" if self.diverged else ""
            )
        reasons = f"the loss falls fastest at {self.steepest:.2g}"
        if self.diverged is None:
            return f"--lr {self.rate:g} ({reasons}, and does not diverge up to {end:g})"
        tenth = self.diverged / BELOW_DIVERGENCE
        return f"--lr {self.rate:g} ({reasons}; a tenth of {self.diverged:.2g}, where it diverges, is {tenth:.2g})"


def advise(test: RangeTest) -> RateAdvice:
    """Find the rate of steepest descent, before the lowest smoothed loss, and the rate of divergence after it.

    The slope is that of the smoothed loss over log(rate), by central differences. The first tenth of the steps, whose
    running mean is of few batches, only tells the initial loss and how much it differs between batches. The loss also
    counts as diverging once it exceeds its initial value: a network that answers the same for every image has a bounded
    loss.
    """
    points = test.points
    first = max(FIRST_STEPS, len(points) // 10)
    if len(points) < first + 3:
        return RateAdvice(None, test.diverged)
    losses = [point.loss for point in points[:first]]
    initial = statistics.fmean(losses)
    noise = NOISE * statistics.stdev(losses)
    lowest = min(range(first, len(points)), key=lambda place: points[place].smoothed)
    if points[lowest].smoothed > min(FELL * initial, initial - noise):
        return RateAdvice(None, test.diverged)
    back = (point.lr for point in points[lowest:] if point.smoothed > max(BACK * initial, initial + noise))
    places = range(first, min(lowest + 1, len(points) - 1))
    steepest = min(places, key=lambda place: _slope(points[place - 1], points[place + 1]))
    return RateAdvice(points[steepest].lr, next(back, test.diverged))


def _slope(before: RangePoint, after: RangePoint) -> float:
    return (after.smoothed - before.smoothed) / math.log(after.lr / before.lr)


def draw(output: str, title: str, test: RangeTest, advice: RateAdvice) -> None:
    """Draw losses and advice to ``output`` (PNG). Raises ``UserError`` if it cannot be written."""
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
    # Higher losses are only the divergence, beside which the descent would look flat.
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
        draw_png(figure, file, dpi=110)
