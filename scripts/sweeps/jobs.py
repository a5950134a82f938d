"""Running the trainings of a sweep, several at a time, so that it can be interrupted at any time."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from scripts.common.runs import RunResult, read_run
from scripts.sweeps.grid import Trial
from utils.config.settings import UserError
from utils.runtime import console, heartbeat
from utils.runtime.process import end_with_parent

MAIN = Path(__file__).resolve().parents[2] / "main.py"
LOOK_SECONDS = 0.1
LONGEST_NAME = 100  # bytes, of an output's file; file systems take 255, encrypted ones fewer
FIRST_STEP = "  first step after "  # in the line of main.py that says that it works
OWN_LINE = "main.py: "  # so begin its errors, and its warnings
RUN = re.compile(r"^val_(?:top1|map)=.* run=(.+)$", re.MULTILINE)  # in the last line of main.py


@dataclass
class RunningTraining:
    """A training under way in process ``process``, on slot ``slot``.

    What it prints goes to ``output``, from byte ``begins`` on: below what earlier attempts have said. ``pruned``: it
    was told to stop, as it is not worth going on.
    """

    trial: Trial
    process: subprocess.Popen
    slot: int
    output: Path
    begins: int
    pruned: bool = False


@dataclass(frozen=True)
class Slots:
    """Room for ``count`` trainings at once, each with ``threads`` threads, on ``gpus`` GPUs in turn."""

    count: int
    threads: int
    gpus: int

    def environment(self, slot: int) -> dict[str, str]:
        """The variables of a process on ``slot``."""
        # Both of its outputs go into one file, in the order in which they are written.
        chosen = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if self.count > 1:
            chosen.setdefault("OMP_NUM_THREADS", str(self.threads))
        if self.gpus > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.gpus)))).split(",")
            chosen["CUDA_VISIBLE_DEVICES"] = visible[slot % self.gpus]
        return chosen


def run_all(
    trials: Iterable[Trial],
    folder: Path,
    slots: Slots,
    ended: Callable[[Trial, RunResult | str], None],
    worthwhile: Callable[[Trial], bool] = lambda trial: True,
) -> list[str]:
    """Train all ``trials``, each of which is asked for when a slot is free, into ``folder``; a line for each failure.

    ``ended`` is called after each with its result or why there is none. A training that is no longer ``worthwhile`` is
    ended, and no failure. Prints the first training's line about its first step, and the latest line of each whenever
    nothing has been printed for a while. Ctrl-C and SIGTERM end the trainings, which save, and are raised here when all
    have ended. Raises ``UserError`` if one of them reports the user's mistake before any has succeeded.
    """
    waiting = iter(trials)
    jobs: list[RunningTraining] = []
    failures = []
    works = succeeded = False
    try:
        while True:
            for slot in sorted({*range(slots.count)} - {job.slot for job in jobs}):
                if (trial := next(waiting, None)) is not None:
                    jobs.append(_start(trial, folder, slots, slot))
            if not jobs:
                break
            time.sleep(LOOK_SECONDS)
            for job in jobs:
                if not job.pruned and not worthwhile(job.trial):
                    job.pruned = True
                    job.process.terminate()
            begun = [] if works else [job for job in jobs if FIRST_STEP in _said(job)]
            works = works or bool(begun)
            for job in jobs if console.silence() >= heartbeat.SILENCE_SECONDS else begun:
                console.log(f"{job.trial.name}: {_last_line(job)}")
            for job in [job for job in jobs if job.process.poll() is not None]:
                jobs.remove(job)
                outcome = _outcome(job)
                ended(job.trial, outcome)
                if isinstance(outcome, str) and not job.pruned:
                    failures.append(f"{job.trial.name}: {outcome}")
                    if job.process.returncode == 2 and not succeeded:
                        raise UserError(failures[-1])
                succeeded = succeeded or not isinstance(outcome, str)
    finally:
        for job in jobs:
            job.process.terminate()  # Ctrl-C they ignore where a shell's & began the sweep
        for job in jobs:
            job.process.wait()
    return failures


def _start(trial: Trial, folder: Path, slots: Slots, slot: int) -> RunningTraining:
    output = folder / "output" / f"{_file_name(trial)}.txt"
    flags = [*trial.flags, "--output", str(folder / trial.room), "--resume", "auto", "--no-progress"]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        file = open(output, "ab")  # noqa: SIM115 - added to: the training of a sweep that was killed may still write
    except OSError as error:
        raise UserError(f"--output {folder}: {output} cannot be written ({error.strerror})") from error
    with file:
        begins = file.tell()
        process = subprocess.Popen(
            [sys.executable, str(MAIN), *flags],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=slots.environment(slot),
            start_new_session=True,  # a terminal's Ctrl-C reaches it through us alone, once
            preexec_fn=end_with_parent,  # noqa: PLW1509 - there is one thread; a new sweep would wait for its folder
        )
    return RunningTraining(trial, process, slot, output, begins)


def _file_name(trial: Trial) -> str:
    """The trial's name as one file's name of its own: where that needs other characters or fewer, with a digest."""
    text = "_".join((*trial.point, *(part.replace("=", "") for part in trial.parts[len(trial.point) :])))
    plain = os.fsencode(text.replace(os.sep, "-"))
    if os.fsencode(text) == plain and len(plain) <= LONGEST_NAME:
        return text
    return f"{plain[:LONGEST_NAME].decode(errors='ignore')}-{hashlib.sha256(os.fsencode(text)).hexdigest()[:8]}"


def _outcome(job: RunningTraining) -> RunResult | str:
    """The result of the run that a training that has ended names as its own, or why there is none.

    It knows its run better than ``finished`` does: main.py recognises images that were moved.
    """
    said = _said(job)
    code = job.process.returncode
    if code == 0:
        named = RUN.findall(said)
        doubts = []
        result = read_run(Path(named[-1]), doubts.append) if named else None
        if doubts:
            return f"{doubts[0]}; move it away, and it is trained anew"
        return result or f"it ended without a result (see {job.output})"
    if code == -signal.SIGKILL:
        return f"it was killed, perhaps because memory ran out (SIGKILL; see {job.output})"
    return f"{_reason(said)} (exit code {code}; see {job.output})"


def _said(job: RunningTraining) -> str:
    """Text that a training has printed so far."""
    return job.output.read_bytes()[job.begins :].decode(errors="replace")


def _last_line(job: RunningTraining) -> str:
    return (_said(job).split("\n")[:-1] or ["nothing said yet"])[-1]


def _reason(said: str) -> str:
    """The last error of all that main.py said, which libraries may have written below."""
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(OWN_LINE) and not line.startswith(f"{OWN_LINE}warning: ")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix(OWN_LINE)
