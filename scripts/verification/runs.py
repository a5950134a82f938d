"""Training runs that are watched from outside: run to the end, or killed again and again and continued."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from bisect import bisect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.verification import records
from scripts.verification.processes import kill_tree

PROGRAM = Path(__file__).resolve().parent / "hooked_main.py"
RUN_LINE = re.compile(r"^val_(?:top1|map)=.* run=(.+)$", re.MULTILINE)
POLL_SECONDS = 0.002
STALL_SECONDS = 3600  # without progress for so long, a training counts as hanging
START_SHARE = 0.15  # of the kills: before the first step
LAST_LINES = 15


class Failure(Exception):
    """A training ended by itself with an error, or hung; the message shows its last lines."""


@dataclass(frozen=True)
class Timeline:
    """Times of the straight run, in seconds. ``steps`` and ``end`` count from its first step."""

    start_up: float
    steps: list[float]
    end: float

    @property
    def longest_gap(self) -> float:
        """The longest time between two steps, or from the last one to the end."""
        return max(after - before for before, after in pairwise([0.0, *self.steps, self.end]))

    @property
    def stall_seconds(self) -> float:
        """Without progress for so long, a training like the straight one counts as hanging."""
        return 300 + 10 * (self.start_up + self.end)

    def moments(self, kills: int, chance: random.Random) -> Iterator[tuple[int | None, float]]:
        """(step, delay) of each kill, in the order of the run; step None counts from the start of the program.

        Each has its own part of the run and may strike anywhere in it, so long gaps, where there is validation or a
        save, get their share. Some come before the first step instead.
        """
        early = {*chance.sample(range(kills), round(START_SHARE * kills))}
        for number in range(kills):
            if number in early:
                yield None, chance.random() * self.start_up
                continue
            moment = self.end * (number + chance.random()) / kills
            step = bisect(self.steps, moment)
            yield step, moment - self.steps[step - 1]


@dataclass
class WatchedRun:
    """One run of the training below ``folder``, on ``ranks`` processes, in one or more starts.

    ``landed``: for each kill that killed a living training, where that was.
    """

    folder: Path
    flags: list[str]
    ranks: int
    starts: int = 0
    landed: list[records.Position] = field(default_factory=list)

    @property
    def records(self) -> Path:
        return self.folder / "record"

    @property
    def output(self) -> Path:
        """File with what the latest start printed."""
        return self.folder / f"start_{self.starts:03d}.txt"

    def train(
        self,
        *more_flags: str,
        kill: tuple[int | None, float] | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> bool:
        """Begin or continue. ``kill``: kill all processes that many seconds after a step (None: after the start).

        Returns whether it was killed; if not, it has come to its end. Raises ``Failure``.
        """
        self.starts += 1
        self.records.mkdir(parents=True, exist_ok=True)
        for mark in self.records.glob("*.now"):
            mark.unlink()
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        program = [*(launcher if self.ranks > 1 else []), str(PROGRAM)]
        line = [sys.executable, *program, *self.flags, "--output", str(self.folder / "runs"), *more_flags]
        environment = {**os.environ, "HOOK_RECORD": str(self.records)}
        began = time.time()
        # A killed launcher's temporary files are removed with this folder.
        with (
            TemporaryDirectory(prefix="verify_resume_", ignore_cleanup_errors=True) as environment["TMPDIR"],
            open(self.output, "w", encoding="utf-8") as file,
            # In a new session: Ctrl-C must reach this tool only, which then kills the training.
            subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            ) as process,
        ):
            try:
                if self._reaches(process, kill, stall_seconds):
                    alive, place, saving = kill_tree(
                        process.pid, look=lambda: (process.poll() is None, self.place(), self.is_saving(began))
                    )
                    if alive and place.point != records.DONE:
                        self.landed.append(place._replace(saving=saving))
                        return True
                    return False
            finally:
                if process.poll() is None:
                    kill_tree(process.pid)
        if process.returncode:
            raise Failure(f"ended by itself with exit code {process.returncode}:\n{self.last_lines()}")
        return False

    def _reaches(self, process: subprocess.Popen, kill: tuple[int | None, float] | None, stall_seconds: float) -> bool:
        """Wait for the moment to kill or the end; whether it was the moment. Raises ``Failure``."""
        place = self.place()
        since = time.monotonic()
        while process.poll() is None:
            if kill is not None and (kill[0] is None or place.has_done(kill[0])):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(kill[1])
                return process.poll() is None
            if place != (place := self.place()):
                since = time.monotonic()
            elif time.monotonic() - since > stall_seconds:
                raise Failure(f"hangs: nothing new for {stall_seconds:.0f} s, {place}\n{self.last_lines()}")
            time.sleep(POLL_SECONDS)
        return False

    def place(self) -> records.Position:
        return records.place(self.records)

    def is_saving(self, began: float) -> bool:
        """True if a file is being written that was not before ``began``, a kill's remains aside."""
        found = (self.folder / "runs").rglob(".*.tmp")
        return any(path.stat().st_mtime >= began for path in found)

    def last_lines(self) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def run_folder(self) -> Path:
        """Folder in which the finished training has left its files. Raises ``Failure``."""
        found = RUN_LINE.findall(self.output.read_text(errors="replace"))
        if not found:
            raise Failure(f"ended without its last line:\n{self.last_lines()}")
        return Path(found[-1])


def straight_run(folder: Path, flags: list[str], ranks: int) -> tuple[WatchedRun, Timeline]:
    """The training run once to its end. Raises ``Failure``."""
    run = WatchedRun(folder, flags, ranks)
    began = time.time()
    run.train()
    ended = (run.records / "rank0.now").stat().st_mtime
    clocks = [line.seconds for line in records.lines(run.records, 0)] or [ended]
    return run, Timeline(clocks[0] - began, [clock - clocks[0] for clock in clocks], ended - clocks[0])
