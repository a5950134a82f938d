"""Trackers (``--track``): a process for each mirrors the run folder, so that none can slow, hold up or end training.

It is a process rather than a thread, because importing mlflow or wandb takes seconds of the interpreter, and a process
that hangs can be ended. ``trackers.py`` is its program.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from utils.config.settings import Settings
from utils.record.epoch_scalars import tagged_columns
from utils.record.summary import table_row
from utils.record.trackers import FINISHED, STOPPED, Job, lock_of
from utils.runtime.files import whole_file

IDENTITY = "tracker_id.txt"
SECONDS_TO_FINISH = 60
SECONDS_TO_STOP = 10  # a scheduler may kill a stopped run after half a minute
ROOT = Path(__file__).resolve().parents[2]


def missing_packages(trackers: Sequence[str] | None) -> list[str]:
    """Error messages for trackers whose package is not installed."""
    needed = {name: [name] for name in trackers or () if name != "csv"}
    if "mlflow" in needed and _mlflow_store().startswith("sqlite:"):
        needed["mlflow"] += ["sqlalchemy", "alembic"]  # which mlflow-skinny leaves out
    lacking = {name: [part for part in parts if not importlib.util.find_spec(part)] for name, parts in needed.items()}
    return [
        f"--track {name}: the package {parts[0]} is not installed; python -m pip install {name}"
        for name, parts in lacking.items()
        if parts
    ]


def describe(trackers: Sequence[str] | None) -> str:
    """Text that names each tracker and where it keeps the run, without passwords; 'none' without trackers."""
    places = {
        "csv": "scalars.csv",
        "mlflow": re.sub(r"//[^/@]+@", "//", _mlflow_store()),
        "wandb": os.environ.get("WANDB_MODE", "online"),
    }
    return ", ".join(f"{name} ({places[name]})" for name in trackers or ()) or "none"


def _mlflow_store() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"


class Tracking:
    """The processes of all trackers of the run in ``folder``; their complaints go to ``log``.

    ``anew``: True if the run continues with other settings; the trackers then begin another run, with all that the
    folder holds. ``names``: the trackers; by default all of ``args``.
    """

    def __init__(
        self, args: Settings, folder: Path, anew: bool, log: Callable[[str], None], names: Sequence[str] | None = None
    ) -> None:
        self._log = log
        self._folder = folder
        self._readers: list[threading.Thread] = []
        self._processes: dict[str, subprocess.Popen[str]] = {}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        for name in (args.logging.track or ()) if names is None else names:
            job = Job(
                str(folder.absolute()),
                name,
                _identity(folder, anew),
                args.data.dataname,
                f"{args.model.arch} {folder.name}",
                table_row(args),
                tagged_columns(),
            )
            anew = False
            process = subprocess.Popen(
                [sys.executable, "-m", "utils.record.trackers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the training process
            )
            self._processes[name] = process
            self._tell(process, json.dumps(job._asdict()))
            self._readers.append(threading.Thread(target=self._pass_on, args=(name, process), daemon=True))
            self._readers[-1].start()

    @staticmethod
    def _tell(process: subprocess.Popen[str], line: str) -> None:
        with suppress(OSError):  # it has ended, which ``end`` reports
            assert process.stdin is not None  # a pipe
            process.stdin.write(f"{line}\n")
            process.stdin.flush()

    def _pass_on(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None  # a pipe
        for line in process.stdout:
            self._log(f"warning: --track {name}: {line.rstrip()}; the run goes on, and what it lacks is sent later")

    def end(self, finished: bool) -> None:
        """Let the trackers send the rest, for a limited time; log which of them could not."""
        seconds = SECONDS_TO_FINISH if finished else SECONDS_TO_STOP
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            self._tell(process, FINISHED if finished else STOPPED)
        for name, process in self._processes.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
                failed = f"it failed (exit code {code})" if code else ""
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                failed = f"it did not end within {seconds} s"
            if failed:
                self._log(f"warning: --track {name} lacks the last points or all: {failed}; {self._folder} has them")
        for reader in self._readers:
            reader.join(timeout=1)


def send_the_rest(args: Settings, folder: Path, log: Callable[[str], None]) -> None:
    """Send what the trackers of the finished run in ``folder`` lack, after a kill or a failure at its very end."""
    with suppress(OSError):  # a folder that cannot be written
        if lacking := [name for name in args.logging.track or () if not _has_all(folder, name)]:
            Tracking(args, folder, False, log, lacking).end(finished=True)


def _has_all(folder: Path, tracker: str) -> bool:
    path = lock_of(folder, tracker)
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace") == FINISHED


def _identity(folder: Path, anew: bool) -> str:
    """The identifier by which trackers know the run, kept in its folder."""
    path = folder / IDENTITY
    known = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    if anew or not re.fullmatch(r"[0-9a-f]{16}", known):
        known = secrets.token_hex(8)
        with whole_file(path, "w", encoding="utf-8") as file:
            file.write(f"{known}\n")
    return known
