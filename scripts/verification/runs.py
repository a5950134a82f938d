"""Training runs that are watched from outside: run to the end, or killed again and again and continued."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from bisect import bisect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.common.runs import RUN_LINE
from scripts.verification import training_marks
from scripts.verification.processes import kill_tree
from utils.config.settings import UserError

PROGRAM = Path(__file__).resolve().parents[2] / "main.py"
POLL_SECONDS = 0.002
START_SHARE = 0.15  # of the kills: before the first step
LAST_LINES = 15


class Failure(UserError):
    """Error of a training run that ended by itself or hung; the mistakes after the first are the run's last lines."""


@dataclass(frozen=True)
class Timeline:
    """Times of the run without kills, in seconds. ``steps`` and ``end`` count from the end of its first step."""

    start_up: float
    steps: list[float]
    end: float

    def moments(self, kills: int, chance: random.Random) -> Iterator[tuple[int, float]]:
        """Yield (step, delay in seconds) for each kill, in the order of the run; step 0 means the start of the program.

        Each kill has its own part of the run and may strike anywhere in it, so long gaps, such as a validation or a
        save, get their share. Some kills come before the first step instead.
        """
        early = {*chance.sample(range(kills), round(START_SHARE * kills))}
        for number in range(kills):
            if number in early:
                yield 0, chance.random() * self.start_up
                continue
            moment = self.end * (number + chance.random()) / kills
            step = bisect(self.steps, moment)
            yield step, moment - self.steps[step - 1]


@dataclass
class WatchedRun:
    """One run of the training program, below ``folder``, on ``ranks`` processes, in one or more starts.

    ``began``: clock time of the latest start, in seconds. ``landed``: the position at each kill that struck a living
    process. ``run_folder``: the folder that the run has made, once it has come to its end.
    """

    folder: Path
    flags: list[str]
    ranks: int
    starts: int = 0
    began: float = 0.0
    landed: list[training_marks.Mark] = field(default_factory=list)
    run_folder: Path = Path()

    @property
    def latest(self) -> Path:
        """Folder with what the latest start printed and the marks that its processes made."""
        return self.folder / f"start_{self.starts:03d}"

    @property
    def printed(self) -> str:
        return (self.latest / "output.txt").read_text(errors="replace")

    def train(self, *more_flags: str, kill: tuple[int, float] | None = None, stall_seconds: float = 3600) -> bool:
        """Begin or continue the run. ``kill``: a step (0: the start), and how long after it to kill, in seconds.

        Without progress for ``stall_seconds``, the run counts as hanging. Returns True if it was killed, False if it
        has come to its end. Raises ``Failure``.
        """
        self.starts += 1
        self.latest.mkdir(parents=True)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        program = [*(launcher if self.ranks > 1 else []), str(PROGRAM), "--plugin", training_marks.__file__]
        line = [sys.executable, *program, *self.flags, "--output", str(self.folder / "runs"), *more_flags]
        environment = {**os.environ, training_marks.FOLDER: str(self.latest)}
        self.began = time.time()
        # A killed launcher's temporary files are removed with this folder.
        with (
            TemporaryDirectory(prefix="verify_resume_", ignore_cleanup_errors=True) as environment["TMPDIR"],
            open(self.latest / "output.txt", "w", encoding="utf-8") as file,
            # In a new session: Ctrl-C must reach this tool only, which then kills the training.
            subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            ) as process,
        ):
            try:
                reached = self._reaches(process, kill, stall_seconds)
            finally:
                if process.poll() is None:
                    kill_tree(process.pid)
        killed = reached and process.returncode == -signal.SIGKILL
        if process.returncode and not killed:
            raise self.failure(f"ended by itself with exit code {process.returncode}:")
        if len(begun := self.begun()) > 1:  # such a run ends with the same bits, and has lost all that it did before
            raise self.failure(f"began anew, though {begun[0]} holds a checkpoint to continue from:")
        if ends := RUN_LINE.findall(self.printed):
            self.run_folder = Path(ends[-1])
        elif killed:
            self.landed.append(self.place()._replace(saving=self.is_saving()))
        else:
            raise self.failure("ended without its last line:")
        return not ends

    def _reaches(self, process: subprocess.Popen, kill: tuple[int, float] | None, stall_seconds: float) -> bool:
        """Wait until it is time to kill the process or until it ends; return True if it is time to kill.

        ``kill``: as in ``train``. Raises ``Failure`` without progress for ``stall_seconds``.
        """
        place = self.place()
        since = time.monotonic()
        while process.poll() is None:
            if kill is not None and place.done >= kill[0]:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(kill[1])
                return process.poll() is None
            if place != (place := self.place()):
                since = time.monotonic()
            elif time.monotonic() - since > stall_seconds:
                raise self.failure(f"hangs: nothing new for {stall_seconds:.0f} s, {place}")
            time.sleep(POLL_SECONDS)
        return False

    def place(self) -> training_marks.Mark:
        """Position of the latest start now, or when it ended."""
        return [training_marks.Mark(), *training_marks.read(self.latest / "rank0.txt", latest=True)][-1]

    def begun(self) -> list[Path]:
        """Folders with a checkpoint that the starts have made, in the order in which they began."""
        return sorted({path.parents[1] for path in (self.folder / "runs").rglob("checkpoints/*.pt")})

    def is_saving(self) -> bool:
        """True if the latest start was writing a file when it ended; an earlier kill's remains are older."""
        found = (self.folder / "runs").rglob(".*.tmp")
        return any(path.stat().st_mtime >= self.began for path in found)

    def failure(self, what: str) -> Failure:
        name = self.folder.name.partition("_")[0]  # straight or killed
        return Failure(f"the {name} run {what}", *self.printed.splitlines()[-LAST_LINES:])

    def timeline(self) -> Timeline:
        """Times of the latest start, which has come to its end."""
        ended = (self.latest / "output.txt").stat().st_mtime  # its last line comes when all is saved
        marks = training_marks.read(self.latest / "rank0.txt")
        first = {mark.done: mark.seconds for mark in reversed(marks)}  # when a mark first said that so many are done
        clocks = [seconds for done, seconds in first.items() if done]
        begin = min(clocks)
        return Timeline(begin - self.began, sorted(clock - begin for clock in clocks), ended - begin)
