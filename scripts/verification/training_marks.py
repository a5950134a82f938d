"""Marks of a training run's position, for a program that watches it: written by this file as a --plugin, and read.

Each process appends a line to ``rankR.txt`` in the folder VERIFICATION_RECORD at each point of the training: the point,
the number of steps done, a clock in seconds, and the CRC-32 of what the current step has been given so far. Each line
is one unbuffered write, so a kill loses at most the last line.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.plugin import hook

if TYPE_CHECKING:
    from utils.loop.hooks import Caller

FOLDER = "VERIFICATION_RECORD"
BEGINNING = "before the first step"
POINTS = {  # in words; not after_update, for which the loop would wait for each step, as it does for no user's training
    "before_forward": "at the beginning of step {next}",
    "after_forward": "in step {next}, after a forward pass",
    "before_update": "in step {next}, before the update",
    "before_validation_batch": "in validation after step {done}",
    "after_validation": "after validation at step {done}",  # before the epoch's row and checkpoints
}
LINE = re.compile(r"^(\w+) (\d+) (\d+\.\d+) ([0-9a-f]{8})\n", re.MULTILINE)
LATEST_BYTES = 200  # hold a whole line, and one that is cut


class Mark(NamedTuple):
    """Position of a process; ``done``: steps done; ``saving``: True if a file was being written."""

    point: str = ""
    done: int = 0
    seconds: float = 0.0
    crc: str = ""
    saving: bool = False

    @property
    def kind(self) -> str:
        """What the process was doing at this position, in words, for counting."""
        if not self.point:
            return BEGINNING
        return "in validation or saving" if self.saving or "validation" in self.point else "in training"

    def __str__(self) -> str:
        words = POINTS.get(self.point, BEGINNING)
        return words.format(done=self.done, next=self.done + 1) + ", saving" * self.saving


def read(path: Path, latest: bool = False) -> list[Mark]:
    """Marks that a process has written to ``path``, or only the latest; a line cut off by a kill is left out."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - LATEST_BYTES) if latest else 0)
        found = LINE.findall(file.read().decode())
    return [Mark(point, int(done), float(seconds), crc) for point, done, seconds, crc in found]


class Recorder:
    """Writes this process's positions in training (``Mark``) to a file in ``folder``."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"rank{os.environ.get('RANK', '0')}.txt"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._done = -1
        self._crc = 0

    def mark(self, point: str, traval: Caller, *given: Any) -> None:
        """Write a mark; called at ``point`` with what that hook is given."""
        done = traval.progress.step
        if done < self._done:  # a step without a finite gradient is repeated, within the next one, to be explained
            return
        if point == "before_forward":
            batch = given[0]
            again = done == self._done
            self._done = done
            self._crc = self._crc if again else 0
            for array in (batch.indices, batch.images.numpy(force=True), batch.targets.numpy(force=True)):
                self._crc = zlib.crc32(array.tobytes(), self._crc)
            if again:  # one more pass
                return
        os.write(self._file, f"{point} {done} {time.time():.6f} {self._crc:08x}\n".encode())


if FOLDER in os.environ:
    recorder = Recorder(Path(os.environ[FOLDER]))
    for point in POINTS:
        hook(point)(partial(recorder.mark, point))
