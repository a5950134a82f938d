"""Progressive image size: training begins with small images and ends with those of ``--image-size``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from utils.config.settings import Settings, UserError

RAMP = (65 / 88, 76 / 88)  # of all epochs: where FFCV's recipes of 88 and of 16 epochs begin and end the growth


@dataclass(frozen=True)
class Resolution:
    """The side in pixels of training images, a function of the epoch alone.

    ``low`` up to epoch ``start``, counted from 0, ``high`` from epoch ``end`` on, in between on a straight line,
    rounded to multiples of ``step``. FFCV's ``get_resolution`` (Leclerc et al., 2023; its steps are of 32 pixels), but
    no size is below ``low`` or above ``high``.
    """

    low: int
    high: int
    step: int
    start: int
    end: int

    def size(self, epoch: int) -> int:
        """The side of the images of ``epoch``, counted from 0."""
        if epoch >= self.end:
            return self.high
        grown = max(0, epoch - self.start) / (self.end - self.start) if self.end > self.start else 0
        size = round((self.low + grown * (self.high - self.low)) / self.step) * self.step
        return min(max(size, self.low), self.high) if grown else self.low

    def sizes(self, epochs: int) -> list[int]:
        """The sizes of a run of ``epochs``, in order."""
        return [size for size, _ in groupby(map(self.size, range(epochs)))]

    def table(self, epochs: int) -> str:
        """The sizes of a run of ``epochs`` in words, with epochs counted from 1."""
        parts = []
        for size, of_size in groupby(range(epochs), key=self.size):
            first, *rest = of_size
            until = f" to {rest[-1] + 1}" if rest else ""
            parts.append(f"{size} px in epoch{'s' if rest else ''} {first + 1}{until}")
        return ", ".join(parts)


def build_resolution(args: Settings, image_size: int) -> Resolution | None:
    """The growth that ``--progressive-size`` asks for, up to ``image_size``; None without it."""
    settings = args.data
    epochs = args.optimisation.epochs
    low = settings.progressive_size
    if low is None:
        return None
    if low >= image_size:
        raise UserError(f"--progressive-size {low} is where images begin to grow: it must be below {image_size} pixels")
    start, end = settings.progressive_epochs or (int(part * epochs) for part in RAMP)
    return Resolution(low, image_size, settings.progressive_step, start, end)
