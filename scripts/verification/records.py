"""Files that a hooked training process leaves for the one that watches it: a line per step, and its current position.

``rankR.txt`` holds a line for every training step whose samples have all been handed out: step, clock (seconds),
CRC-32 of images and targets, sample numbers; forward passes are divided by ``;``. Each is one unbuffered write, so a
kill loses at most the current line. ``rankR.now`` holds a point and a step, overwritten at every point.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

POINTS = {  # in words
    "start": "before the first step",
    "step": "at the beginning of step {}",
    "forward": "in step {}, after a forward pass",
    "update": "in step {}, before the update",
    "after_step": "after step {}",  # before what is due then: a log line, a checkpoint
    "validation": "in validation after step {}",
    "epoch_end": "after validation at step {}",  # before the epoch's row and checkpoints
    "done": "at its end",
}
DONE = "done"
BYTES = 24  # of a mark
LINE = re.compile(r"(\d+) (\d+\.\d+) ([0-9a-f]{8} [\d,;]*) end")


class StepLine(NamedTuple):
    """One step as one rank trained it: ``seconds`` is a clock, ``content`` CRC-32 and sample numbers in one text."""

    step: int
    seconds: float
    content: str


class Marks:
    """The position of a process: written by it, read by another."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.set("start", 0)

    def set(self, point: str, step: int) -> None:
        os.pwrite(self._descriptor, f"{point} {step}".ljust(BYTES).encode(), 0)


class Position(NamedTuple):
    """Position of a process: point and step of its training, and whether a file was being written meanwhile."""

    point: str = "start"
    step: int = 0
    saving: bool = False

    def has_done(self, step: int) -> bool:
        """True if ``step`` is behind it."""
        within = self.point in ("step", "forward", "update")
        return self.point != "start" and self.step - within >= step

    @property
    def kind(self) -> str:
        """The kind of place in words, for counting."""
        if self.point == "start":
            return "before the first step"
        if self.saving or self.point in ("validation", "epoch_end"):
            return "in validation or saving"
        return "in training"

    def __str__(self) -> str:
        return POINTS[self.point].format(self.step) + ", saving" * self.saving


def place(folder: Path, rank: int = 0) -> Position:
    """Position of the process of ``rank``, now or when it ended."""
    path = folder / f"rank{rank}.now"
    while path.is_file() and (words := path.read_text(errors="replace").split()):
        if len(words) == 2 and words[0] in POINTS:  # else it was read while it was written
            return Position(words[0], int(words[1]))
    return Position()


def lines(folder: Path, rank: int) -> list[StepLine]:
    """All steps that the processes of ``rank`` have trained, repeated ones too; a line cut by a kill is left out."""
    path = folder / f"rank{rank}.txt"
    found = map(LINE.fullmatch, path.read_text().splitlines() if path.is_file() else [])
    return [StepLine(int(match[1]), float(match[2]), match[3]) for match in found if match]
