"""What a hooked training process leaves for the one that watches it: a line per step, and its current position.

``rankR.txt`` holds a line for every training step whose samples have all been handed out: step, clock (seconds),
CRC-32 of images and targets, sample numbers; forward passes are divided by ``;``. Each is one unbuffered write, so a
kill loses at most the current line. ``rankR.now`` holds two fields of fixed size, overwritten at every point: that of
the loop and that of a save, which may go on in a thread beside it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from scripts.verification.faults import IN_A_SAVE

BYTES = 48  # of a field
IDLE = "idle"
DONE = "done"
LOOP = {
    "start": "before the first step",
    "step": "at the beginning of step {}",
    "forward": "in step {}, after a forward pass",
    "update": "in step {}, before the update",
    "after_step": "after step {}",
    "validation": "in validation after step {}",
    "epoch_end": "after validation at step {}",
    DONE: "at its end",
}
SAVE = (IDLE, *IN_A_SAVE)
MARK = re.compile(rf"({'|'.join(LOOP)}) (\d+) +({'|'.join(SAVE)}) (\d+) *$")
LINE = re.compile(r"(\d+) (\d+\.\d+) ([0-9a-f]{8}) ([\d,;]*) end")


class StepLine(NamedTuple):
    """One step as one rank trained it: ``seconds`` is a clock, ``content`` CRC-32 and sample numbers in one text."""

    step: int
    seconds: float
    content: str


class Marks:
    """The position of a process: written by it, read by another."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.loop("start", 0)
        self.save(IDLE, 0)

    def loop(self, point: str, step: int) -> None:
        os.pwrite(self._descriptor, f"{point} {step}".ljust(BYTES).encode(), 0)

    def save(self, point: str, step: int) -> None:
        os.pwrite(self._descriptor, f"{point} {step}".ljust(BYTES).encode(), BYTES)


class Position(NamedTuple):
    """Where a process is: point and step of its loop, and of its save ('idle' without one)."""

    loop: str = "start"
    step: int = 0
    save: str = IDLE
    save_step: int = 0

    @property
    def begun(self) -> bool:
        """Whether its first step has begun."""
        return self.loop != "start"

    def has_done(self, step: int) -> bool:
        """Whether ``step`` is behind it."""
        within = self.loop in ("step", "forward", "update")
        return self.begun and self.step - within >= step

    @property
    def kind(self) -> str:
        """The kind of place in words, for counting."""
        if not self.begun:
            return "before the first step"
        if self.save != IDLE or self.loop in ("validation", "epoch_end"):
            return "in validation or saving"
        return "in training"

    def __str__(self) -> str:
        saving = f", saving step {self.save_step} ({self.save})" if self.save != IDLE else ""
        return LOOP[self.loop].format(self.step) + saving


def place(folder: Path, rank: int = 0) -> Position:
    """Where the process of ``rank`` is, or was when it ended."""
    path = folder / f"rank{rank}.now"
    while path.is_file():
        content = path.read_bytes().decode(errors="replace").ljust(2 * BYTES)
        if match := MARK.match(content):
            return Position(match[1], int(match[2]), match[3], int(match[4]))
        if not content.strip():
            break  # else it was read while it was written
    return Position()


def lines(folder: Path, rank: int) -> list[StepLine]:
    """All steps that the processes of ``rank`` have trained, repeated ones too; a line cut by a kill is left out."""
    path = folder / f"rank{rank}.txt"
    found = map(LINE.fullmatch, path.read_text().splitlines() if path.is_file() else [])
    return [StepLine(int(match[1]), float(match[2]), f"{match[3]} {match[4]}") for match in found if match]
