"""Advice from a range test about the learning rate."""

from __future__ import annotations

import math
from typing import NamedTuple

from scripts.lr_range.measure import FIRST_STEPS, RangePoint, RangeTest

BELOW_DIVERGENCE = 10.0
# times the loss at first: fallen by more than noise, and back above where it began
FELL = 0.98
BACK = 1.05


class RateAdvice(NamedTuple):
    """``steepest``: the rate at which the smoothed loss falls fastest; None if it never falls."""

    steepest: float | None
    diverged: float | None

    @property
    def rate(self) -> float | None:
        """The rate to train with: the lower one of both rules, to two digits."""
        if self.steepest is None:
            return None
        safe = self.diverged / BELOW_DIVERGENCE if self.diverged is not None else math.inf
        return float(f"{min(self.steepest, safe):.2g}")

    def line(self, start: float, end: float) -> str:
        """The advice with its reasons, for a range from ``start`` to ``end``."""
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
    """The rate of steepest descent, before the lowest smoothed loss, and that of the divergence after it.

    The slope is that of the smoothed loss over log(rate), by central differences. The loss also counts as diverging
    where it is back above its beginning: a network that answers the same for every image has a bounded loss.
    """
    points = test.points
    if len(points) < FIRST_STEPS + 3:
        return RateAdvice(None, test.diverged)
    losses = [point.smoothed for point in points]
    lowest = losses.index(min(losses))
    if losses[lowest] > FELL * losses[0]:
        return RateAdvice(None, test.diverged)
    back = (point.lr for point in points[lowest:] if point.smoothed > BACK * losses[0])
    places = range(1, min(lowest + 1, len(points) - 1))
    steepest = min(places, key=lambda place: _slope(points[place - 1], points[place + 1]))
    return RateAdvice(points[steepest].lr, next(back, test.diverged))


def _slope(before: RangePoint, after: RangePoint) -> float:
    return (after.smoothed - before.smoothed) / math.log(after.lr / before.lr)
