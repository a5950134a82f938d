"""Run the training runs of a sweep, several at a time, so that it can be interrupted at any time."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.common.runs import RUN_LINE, RunResult, read_run
from scripts.sweeps.grid import Trial
from utils.config.settings import UserError, as_user_error
from utils.runtime import console, heartbeat
from utils.runtime.process import end_with_parent

MAIN = Path(__file__).resolve().parents[2] / "main.py"
LOOK_SECONDS = 0.1
LONGEST_NAME = 100  # bytes of an output file's name; file systems allow 255, encrypted ones fewer
FIRST_STEP = "  first step after "  # in main.py's line that shows that training works
OWN_LINE = "main.py: "  # main.py's errors and warnings begin with this


@dataclass
class RunningTraining:
    """A training run under way in ``process``, on slot ``slot``.

    Its output goes to the file ``output``, from byte ``begins`` on, after the output of earlier attempts. ``pruned``:
    it was told to stop, because continuing is not worthwhile.
    """

    trial: Trial
    process: subprocess.Popen
    slot: int
    output: Path
    begins: int
    pruned: bool = False


@dataclass(frozen=True)
class Slots:
    """Room for ``count`` training runs at once, each with ``threads`` threads, on ``gpus`` GPUs in turn."""

    count: int
    threads: int
    gpus: int

    def environment(self, slot: int) -> dict[str, str]:
        """Environment variables of a process on ``slot``."""
        # The process's stdout and stderr go into one file, in the order of writing.
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
    *,
    succeeded: bool = False,
) -> list[str]:
    """Train all ``trials`` into ``folder``, taking the next one when a slot is free; return a line for each failure.

    ``ended`` is called after each with its result, or why there is none. A run that is no longer ``worthwhile`` is
    stopped, which is no failure. Prints main.py's line about the first training step, from whichever run has it first,
    and the latest line of each run whenever nothing has been printed for a while. Ctrl-C and SIGTERM end the runs,
    which save, and are raised here once all have ended. Raises ``UserError`` if a run reports a mistake of the user
    before any run has ``succeeded``, now or in an earlier call.
    """
    waiting = iter(trials)
    jobs: list[RunningTraining] = []
    failures = []
    works = False
    try:
        while True:
            for slot in sorted({*range(slots.count)} - {job.slot for job in jobs}):
                if (trial := next(waiting, None)) is not None:
                    with _stop_signals_held_back() as mask:
                        jobs.append(_start(trial, folder, slots, slot, mask))
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
            job.process.terminate()  # they ignore Ctrl-C if the sweep was started with the shell's &
        for job in jobs:
            job.process.wait()
    return failures


@contextmanager
def _stop_signals_held_back() -> Iterator[set[int]]:
    """Context that holds Ctrl-C and SIGTERM back until its end; gives the signal mask from before.

    Python drops what a handler raises while it forks, and a run that is not in the list yet would not be ended.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield {*mask}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start(trial: Trial, folder: Path, slots: Slots, slot: int, mask: set[int]) -> RunningTraining:
    """Start the training of ``trial``, whose process gets the signal ``mask``. Raises ``UserError``."""

    def begin() -> None:
        end_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    output = folder / "output" / f"{_file_name(trial)}.txt"
    flags = [*trial.flags, "--output", str(folder / trial.room), "--resume", "auto", "--no-progress"]
    with as_user_error(f"--output {folder}: {output} cannot be written"):
        output.parent.mkdir(parents=True, exist_ok=True)
        _need_room(output.parent)
        file = open(output, "ab")  # noqa: SIM115 - added to: the training of a sweep that was killed may still write
    with file:
        begins = file.tell()
        process = subprocess.Popen(
            [sys.executable, str(MAIN), *flags],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=slots.environment(slot),
            start_new_session=True,  # a terminal's Ctrl-C reaches it through us alone, once
            preexec_fn=begin,  # noqa: PLW1509 - there is one thread; a new sweep would wait for its folder
        )
    return RunningTraining(trial, process, slot, output, begins)


def _need_room(folder: Path) -> None:
    """Raise ``OSError`` if the disk of ``folder`` is full, since main.py's own message would then be lost, too."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1))


def _file_name(trial: Trial) -> str:
    """Unique file name of a trial; with a digest if the trial's name is too long or has a path separator."""
    text = "_".join((*trial.point, *(part.replace("=", "") for part in trial.parts[len(trial.point) :])))
    plain = os.fsencode(text.replace(os.sep, "-"))
    if os.fsencode(text) == plain and len(plain) <= LONGEST_NAME:
        return text
    return f"{plain[:LONGEST_NAME].decode(errors='ignore')}-{hashlib.sha256(os.fsencode(text)).hexdigest()[:8]}"


def _outcome(job: RunningTraining) -> RunResult | str:
    """Result of the run that an ended process names in its output, or why there is none.

    Searching the folder with ``finished`` could miss that run: main.py also recognises images that were moved.
    """
    said = _said(job)
    code = job.process.returncode
    if code == 0:
        named = RUN_LINE.findall(said)
        doubts = []
        result = read_run(Path(named[-1]), doubts.append) if named else None
        if doubts:
            return f"{doubts[0]}; move it away, and it is trained anew"
        return result or f"it ended without a result (see {job.output})"
    if code == -signal.SIGKILL:
        return f"it was killed, perhaps because memory ran out (SIGKILL; see {job.output})"
    return f"{_reason(said, job.output.parent)} (exit code {code}; see {job.output})"


def _said(job: RunningTraining) -> str:
    """Text that a training run has printed so far."""
    return job.output.read_bytes()[job.begins :].decode(errors="replace")


def _last_line(job: RunningTraining) -> str:
    return (_said(job).split("\n")[:-1] or ["nothing said yet"])[-1]


def _reason(said: str, folder: Path) -> str:
    """Last error that main.py printed, even if libraries printed something after it; else its last line.

    If its output in ``folder`` met a full disk, its last line is not the reason.
    """
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(OWN_LINE) and not line.startswith(f"{OWN_LINE}warning: ")]
    if errors:
        return errors[-1].removeprefix(OWN_LINE)
    try:
        _need_room(folder)
    except OSError as error:
        return f"nothing can be written to {folder} ({error.strerror}); free some space, and the same command continues"
    return (lines or ["it said nothing"])[-1].removeprefix(OWN_LINE)
