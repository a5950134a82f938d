"""Progressive image size: training begins with small images and ends with those of ``--image-size``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from utils.config.image_size import Size, sides, size_of, size_text
from utils.config.settings import Settings, UserError

RAMP = (65 / 88, 76 / 88)  # shares of all epochs at which FFCV's recipes of 88 and 16 epochs begin and end the growth


@dataclass(frozen=True)
class Resolution:
    """The size of training images, a function of the epoch alone.

    The shorter side has ``low`` pixels up to epoch ``start`` (counted from 0) and that of ``high`` from epoch ``end``
    on. In between it grows linearly, rounded to multiples of ``step``; the longer side keeps its ratio to it. As FFCV's
    ``get_resolution`` (Leclerc et al., 2023; in steps of 32 pixels), but all sizes are between ``low`` and ``high``.
    """

    low: int
    high: Size
    step: int
    start: int
    end: int

    def size(self, epoch: int) -> Size:
        """The size of the images of ``epoch``, counted from 0."""
        if epoch >= self.end:
            return self.high
        high = min(sides(self.high))
        grown = max(0, epoch - self.start) / (self.end - self.start) if self.end > self.start else 0
        side = round((self.low + grown * (high - self.low)) / self.step) * self.step
        shorter = min(max(side, self.low), high) if grown else self.low
        return size_of(*(round(shorter * side / high) for side in sides(self.high)))

    def sizes(self, epochs: int) -> list[Size]:
        """The sizes in a run of ``epochs`` epochs, in order, without repetition."""
        return [size for size, _ in groupby(map(self.size, range(epochs)))]

    def table(self, epochs: int) -> str:
        """The sizes in a run of ``epochs`` epochs as text, with epochs counted from 1."""
        parts = []
        for size, of_size in groupby(range(epochs), key=self.size):
            first, *rest = of_size
            until = f" to {rest[-1] + 1}" if rest else ""
            parts.append(f"{size_text(size)} px in epoch{'s' if rest else ''} {first + 1}{until}")
        return ", ".join(parts)


def build_resolution(args: Settings, image_size: Size) -> Resolution | None:
    """The growth that ``--progressive-size`` asks for, up to ``image_size``; None if unset. Raises ``UserError``."""
    settings = args.data
    epochs = args.optimisation.epochs
    low = settings.progressive_size
    if low is None:
        return None
    high = min(sides(image_size))
    if low >= high:
        raise UserError(f"--progressive-size {low} is where images begin to grow: it must be below {high} pixels")
    start, end = settings.progressive_epochs or (int(part * epochs) for part in RAMP)
    return Resolution(low, image_size, settings.progressive_step, start, end)
