"""Files that a hooked training process leaves for the one that watches it: a line per step, and its current position.

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

# The points, in words, and what ``RunRecorder.reach`` says about them besides their step.
IN_TRAINING = {
    "step": "at the beginning of step {}",  # epoch
    "forward": "in step {}, after a forward pass",  # epoch, pass
    "update": "in step {}, before the update",  # epoch
    "after_step": "after step {}",  # epoch; before what is due then: a log line, a checkpoint
    "validation": "in validation after step {}",  # epoch, batch; a moving average's batches follow the raw weights'
    "epoch_end": "after validation at step {}",  # epoch; before the epoch's row and checkpoints
}
IN_A_SAVE = (
    "copy",  # when=before and after the state is handed over
    "write",  # half of the file is written
    "flush",  # all of it is, but it may not be on the disk
    "manifest",  # when=before and after the digests are entered, nth=1 and 2
    "prune",  # when=before and after last.pt becomes previous.pt
    "rename",  # when=before and after a checkpoint (name=last) gets its name
)
BYTES = 48  # of a field
IDLE = "idle"
DONE = "done"
LOOP = {"start": "before the first step", **IN_TRAINING, DONE: "at its end"}
SAVE = (IDLE, *IN_A_SAVE)
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
        os.pwrite(self._descriptor, b"".join(f"{point} 0".ljust(BYTES).encode() for point in ("start", IDLE)), 0)

    def set(self, point: str, step: int) -> None:
        """Overwrite the field of the loop or of the save."""
        os.pwrite(self._descriptor, f"{point} {step}".ljust(BYTES).encode(), BYTES if point in SAVE else 0)


class Position(NamedTuple):
    """Position of a process: point and step of its loop, and of its save ('idle' without one)."""

    loop: str = "start"
    step: int = 0
    save: str = IDLE
    save_step: int = 0

    def has_done(self, step: int) -> bool:
        """True if ``step`` is behind it."""
        within = self.loop in ("step", "forward", "update")
        return self.loop != "start" and self.step - within >= step

    @property
    def kind(self) -> str:
        """The kind of place in words, for counting."""
        if self.loop == "start":
            return "before the first step"
        if self.save != IDLE or self.loop in ("validation", "epoch_end"):
            return "in validation or saving"
        return "in training"

    def __str__(self) -> str:
        saving = f", saving step {self.save_step} ({self.save})" if self.save != IDLE else ""
        return LOOP[self.loop].format(self.step) + saving


def place(folder: Path, rank: int = 0) -> Position:
    """Position of the process of ``rank``, now or when it ended."""
    path = folder / f"rank{rank}.now"
    while path.is_file() and (words := path.read_text(errors="replace").split()):
        if len(words) == 4 and words[0] in LOOP and words[2] in SAVE:  # else it was read while it was written
            return Position(words[0], int(words[1]), words[2], int(words[3]))
    return Position()


def lines(folder: Path, rank: int) -> list[StepLine]:
    """All steps that the processes of ``rank`` have trained, repeated ones too; a line cut by a kill is left out."""
    path = folder / f"rank{rank}.txt"
    found = map(LINE.fullmatch, path.read_text().splitlines() if path.is_file() else [])
    return [StepLine(int(match[1]), float(match[2]), match[3]) for match in found if match]
