"""Training runs that are watched from outside: run to the end, or killed again and again and continued."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from scripts.verification import records
from scripts.verification.processes import kill_stopped, kill_tree, stop_tree
from utils.config.settings import UserError

PROGRAM = Path(__file__).resolve().parent / "hooked_main.py"
RUN_LINE = re.compile(r"^val_top1=.* run=(.+)$", re.MULTILINE)
POLL_SECONDS = 0.002
STALL_SECONDS = 3600  # without progress for so long, a training counts as hanging
# of the kills: before the first step, in a long gap between two
START_SHARE = 0.15
GAP_SHARE = 0.25
LAST_LINES = 15


class Failure(Exception):
    """A training ended by itself with an error, or hung; the message shows its last lines."""


class Landing(NamedTuple):
    """A kill that killed a living training: ``seconds`` after its start, and where that was."""

    seconds: float
    place: records.Position


@dataclass(frozen=True)
class Timeline:
    """When the straight run was where, in seconds. ``steps`` and ``end`` count from its first step."""

    start_up: float
    steps: list[float]
    end: float

    @property
    def longest_gap(self) -> float:
        """The longest time between two steps, or from the last one to the end."""
        return max((after - before for before, after in pairwise([*self.steps, self.end])), default=0.0)

    @property
    def stall_seconds(self) -> float:
        """Without progress for so long, a training like the straight one counts as hanging."""
        return 300 + 10 * (self.start_up + self.end)


@dataclass
class WatchedRun:
    """One run of the training below ``folder``, on ``ranks`` processes, in one or more starts."""

    folder: Path
    flags: list[str]
    ranks: int
    starts: int = 0
    landings: list[Landing] = field(default_factory=list)

    @property
    def records(self) -> Path:
        return self.folder / "record"

    @property
    def output(self) -> Path:
        """What the latest start printed."""
        return self.folder / f"start_{self.starts:03d}.txt"

    @contextmanager
    def started(self, *more_flags: str) -> Iterator[subprocess.Popen]:
        """The training, begun or continued. None of its processes outlives the context."""
        self.starts += 1
        self.records.mkdir(parents=True, exist_ok=True)
        for mark in self.records.glob("*.now"):
            mark.unlink()
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        line = [
            sys.executable,
            *(launcher if self.ranks > 1 else []),
            str(PROGRAM),
            *self.flags,
            "--output",
            str(self.folder / "runs"),
            *more_flags,
        ]
        environment = {name: value for name, value in os.environ.items() if name != "HOOK_FAULT"}
        environment["HOOK_RECORD"] = str(self.records)
        # A killed launcher's temporary files are removed with this folder.
        with TemporaryDirectory(prefix="verify_resume_", ignore_cleanup_errors=True) as environment["TMPDIR"]:
            with open(self.output, "w", encoding="utf-8") as file:
                # In a new session: Ctrl-C must reach this tool only, which then kills the training.
                process = subprocess.Popen(
                    line, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
                )
            try:
                yield process
            finally:
                if process.poll() is None:
                    kill_tree(process.pid)
                process.wait()

    def place(self) -> records.Position:
        return records.place(self.records)

    def finish(self, *more_flags: str, stall_seconds: float = STALL_SECONDS) -> None:
        """Train to the end. Raises ``Failure``."""
        with self.started(*more_flags) as process:
            self._watch(process, lambda: False, stall_seconds)
        self._refuse_failure(process)

    def kill_at(self, step: int | None, delay: float, more_flags: Sequence[str], stall_seconds: float) -> bool:
        """Continue, and kill all processes ``delay`` seconds after ``step`` (None: after the start).

        False when the training came to its end before. Raises ``Failure``.
        """
        with self.started(*more_flags) as process:
            began = time.monotonic()
            reached = self._watch(process, lambda: step is None or self.place().has_done(step), stall_seconds)
            if reached:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(delay)
            if process.poll() is None:
                stopped = stop_tree(process.pid)
                seconds = time.monotonic() - began
                place = self.place()
                alive = process.poll() is None and place.loop != records.DONE
                kill_stopped(stopped)
                process.wait()
                if alive:
                    self.landings.append(Landing(seconds, place))
                return alive
        self._refuse_failure(process)
        return False

    def _watch(self, process: subprocess.Popen, reached: Callable[[], bool], stall_seconds: float) -> bool:
        """Wait for ``reached`` or the end; whether it was reached."""
        place = self.place()
        since = time.monotonic()
        while process.poll() is None:
            if reached():
                return True
            if place != (place := self.place()):
                since = time.monotonic()
            elif time.monotonic() - since > stall_seconds:
                raise Failure(f"hangs: nothing new for {stall_seconds:.0f} s, {place}\n{self.last_lines()}")
            time.sleep(POLL_SECONDS)
        return False

    def _refuse_failure(self, process: subprocess.Popen) -> None:
        if process.returncode:
            raise Failure(f"ended by itself with exit code {process.returncode}:\n{self.last_lines()}")

    def last_lines(self) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def run_folder(self) -> Path:
        """Where the finished training has left its files. Raises ``Failure``."""
        found = RUN_LINE.findall(self.output.read_text(errors="replace"))
        if not found:
            raise Failure(f"ended without its last line:\n{self.last_lines()}")
        return Path(found[-1])


def straight_run(folder: Path, flags: list[str], ranks: int) -> tuple[WatchedRun, Timeline]:
    """The training run once to its end. Raises ``Failure``."""
    run = WatchedRun(folder, flags, ranks)
    began = time.time()
    run.finish()
    ended = records.done_at(run.records)
    clocks = [line.seconds for line in records.lines(run.records, 0)]
    first = clocks[0] if clocks else ended
    timeline = Timeline(first - began, [clock - first for clock in clocks], ended - first)
    about = {"flags": flags, "ranks": ranks, "timeline": timeline.__dict__}
    (folder / "straight.json").write_text(json.dumps(about))
    return run, timeline


def kept_straight_run(folder: Path, flags: list[str], ranks: int) -> tuple[WatchedRun, Timeline]:
    """One that ``straight_run`` made before. Raises ``UserError``."""
    try:
        about = json.loads((folder / "straight.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--straight-from {folder.parent}: holds no finished straight run; leave it out") from error
    if (about["flags"], about["ranks"]) != (flags, ranks):
        raise UserError(
            f"--straight-from {folder.parent}: was made with --ranks {about['ranks']} {' '.join(about['flags'])}; "
            "give the same flags or leave it out"
        )
    return WatchedRun(folder, flags, ranks, starts=1), Timeline(**about["timeline"])


def moments(timeline: Timeline, kills: int, chance: random.Random) -> Iterator[tuple[int | None, float]]:
    """(step, delay) of each kill: steps spread over the whole run, ascending; None is before the first step.

    Each has its own part of the run. Most strike up to the longest gap after any step of it, the others in the longest
    gap of that part, where there is validation or a save.
    """
    gaps = [after - before for before, after in pairwise([*timeline.steps, timeline.end])]
    kinds = ["start"] * round(START_SHARE * kills) + ["gap"] * round(GAP_SHARE * kills)
    kinds += ["any"] * (kills - len(kinds))
    chance.shuffle(kinds)
    for number, kind in enumerate(kinds):
        first = int(len(gaps) * number / kills)
        part = range(first, max(first + 1, int(len(gaps) * (number + 1) / kills)))
        if kind == "start":
            yield None, chance.random() * timeline.start_up
        elif kind == "gap":
            position = max(part, key=gaps.__getitem__)
            yield position + 1, chance.random() * gaps[position]
        else:
            position = chance.choice(part)
            left = timeline.end - timeline.steps[position]
            yield position + 1, chance.random() * min(timeline.longest_gap, 0.9 * left)
