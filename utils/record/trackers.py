"""The program that mirrors a run to one tracker: ``python -m utils.record.trackers``, started by ``tracking.py``.

The queue is the run folder itself: TensorBoard's event files and metrics.csv are read as they grow, and each tag and
step that the tracker lacks is sent. So nothing is lost while a tracker cannot be reached, and a resumed run sends what
a killed process could not. Points of steps that a kill undid stay in the tracker and are not sent again.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import re
import select
import signal
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from utils.record.event_files import NAMES

POLL_SECONDS = 2
RETRY_SECONDS = 60
MLFLOW_METRICS = 1000  # the most in a batch
MLFLOW_PARAMS = 100
SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
FINISHED, STOPPED = "finished", "stopped"
LEVELDB_BLOCK = 32768  # bytes; https://github.com/google/leveldb/blob/main/doc/log_format.md


class Point(NamedTuple):
    """A value, and the time when it was logged, in seconds since 1970."""

    value: float
    seconds: float


Group = tuple[int, dict[str, Point]]  # a step, and its points by tag
Has = Callable[[int, str], bool]


class Job(NamedTuple):
    """A run to mirror, and the names to use. ``tagged``: the columns of metrics.csv that TensorBoard has as well."""

    folder: str
    tracker: str
    identity: str
    project: str
    name: str
    settings: Mapping[str, Any]
    tagged: Sequence[str]


class Tracker(Protocol):
    """A service that keeps curves. Each method may raise anything, or hang."""

    def open(self) -> Has:
        """Begin the job's run or continue it; return a function that tells whether a step's tag is there already."""

    def send(self, groups: Sequence[Group]) -> None:
        """Add points in the order of steps; all points of a step come together."""

    def close(self, finished: bool) -> None:
        """End the run, for good if ``finished``, otherwise until a resume."""


# ------------------------------------------------------------------------------------------------ trackers


class Csv:
    """``scalars.csv`` in the run folder, one row per point, written anew by each process."""

    def __init__(self, job: Job) -> None:
        self._path = Path(job.folder) / "scalars.csv"

    def open(self) -> Has:
        self._file = open(self._path, "w", newline="", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115 - closed in close()
        self._rows = csv.writer(self._file)
        self._rows.writerow(("tag", "step", "value", "seconds"))
        return lambda step, tag: False

    def send(self, groups: Sequence[Group]) -> None:
        self._rows.writerows((tag, step, *point) for step, points in groups for tag, point in points.items())
        self._file.flush()

    def close(self, finished: bool) -> None:
        self._file.close()


class MLflow:
    """A run of MLflow, found again by a tag that holds the job's identity."""

    TAG = "training_run"

    def __init__(self, job: Job) -> None:
        self._job = job

    def open(self) -> Has:
        import mlflow
        from mlflow.entities import Param

        self._client = client = mlflow.MlflowClient()
        identity = self._job.identity
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", self._job.project)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or mlflow.set_experiment(name).experiment_id
        found = client.search_runs([experiment], f"tags.{self.TAG} = '{identity}'", max_results=1)
        if found:
            run = found[0]
            client.update_run(run.info.run_id, status="RUNNING")
        else:
            tags = {self.TAG: identity, "run_folder": self._job.folder}
            run = client.create_run(experiment, tags=tags, run_name=self._job.name)
        self._id = run.info.run_id
        settings = {name: str(value) for name, value in self._job.settings.items() if name not in run.data.params}
        params = [Param(name, value) for name, value in settings.items()]
        for start in range(0, len(params), MLFLOW_PARAMS):
            client.log_batch(self._id, params=params[start : start + MLFLOW_PARAMS])
        there = {(m.step, key) for key in run.data.metrics for m in client.get_metric_history(self._id, key)}
        return lambda step, tag: (step, _mlflow_key(tag)) in there

    def send(self, groups: Sequence[Group]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_mlflow_key(tag), point.value, round(point.seconds * 1000), step)
            for step, points in groups
            for tag, point in points.items()
        ]
        for start in range(0, len(metrics), MLFLOW_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + MLFLOW_METRICS])

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


class Wandb:
    """A run of Weights & Biases with the job's identity as its id.

    wandb takes steps in rising order only, so the server has all steps below the next one that it expects. Offline,
    each process leaves a folder of its own, which holds what reached the disk.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def open(self) -> Has:
        import wandb

        job = self._job
        wandb.teardown()  # what a failed try has left
        self._run = wandb.init(
            id=job.identity,
            project=os.environ.get("WANDB_PROJECT", job.project),
            name=os.environ.get("WANDB_NAME", job.name),
            dir=os.environ.get("WANDB_DIR", job.folder),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        self._run.config.update({**job.settings, "run_folder": job.folder}, allow_val_change=True)
        if not self._run.offline:
            first = self._run.step
            return lambda step, tag: step < first
        root = Path(self._run.dir).parent.parent
        there = {step for path in root.glob(f"*-{job.identity}/*.wandb") for step in _offline_steps(path)}
        return lambda step, tag: step in there

    def send(self, groups: Sequence[Group]) -> None:
        for step, points in groups:
            values = {tag: point.value for tag, point in points.items()}
            self._run.log({**values, "_timestamp": max(point.seconds for point in points.values())}, step=step)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


TRACKERS: dict[str, Callable[[Job], Tracker]] = {"csv": Csv, "mlflow": MLflow, "wandb": Wandb}


def _mlflow_key(tag: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", tag)


def _offline_steps(path: Path) -> Iterator[int]:
    """Yield the steps in one of wandb's files: protobuf records in LevelDB's log format. Skip a cut-off last one."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    position = 7  # behind wandb's header
    parts = b""
    while position + 7 <= len(content):
        if LEVELDB_BLOCK - position % LEVELDB_BLOCK < 7:
            position += LEVELDB_BLOCK - position % LEVELDB_BLOCK
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if position > len(content):
            return
        if kind in (1, 4):  # whole, or the last part
            record = Record.FromString(parts)
            parts = b""
            if record.HasField("history"):
                yield record.history.step.num


# --------------------------------------------------------------------------------------------- the mirror


class Points:
    """Reads the points that a run logs into ``folder``, step by step, while its files grow.

    Of several points with the same tag and step, only the first is kept. Values are TensorBoard's float32, with as few
    digits as tell them apart. Columns of metrics.csv without a tag become ``Epoch/COLUMN``.
    """

    def __init__(self, folder: Path, tagged: Sequence[str]) -> None:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

        self._files = [RawEventFileLoader(str(path)) for path in sorted(folder.glob(NAMES))]
        self._table = folder / "metrics.csv"
        self._left_out = {"step", "seconds", *tagged}
        self._known: set[tuple[int, str]] = set()
        self._by_step: dict[int, dict[str, Point]] = defaultdict(dict)
        self._newest = -1

    def take(self, everything: bool) -> list[Group]:
        """Points of the steps that have ended since the last call, as a later one has begun; ``everything``: of all."""
        self._read_events()
        self._read_rows()  # after the events: the row of a step that they have passed is then there
        ended = sorted(step for step in self._by_step if everything or step < self._newest)
        return [(step, self._by_step.pop(step)) for step in ended]

    def _read_events(self) -> None:
        import numpy as np
        from tensorboard.compat.proto.event_pb2 import Event

        for file in self._files:
            for record in file.Load():
                event = Event.FromString(record)
                for value in event.summary.value:
                    if value.HasField("simple_value"):
                        shortest = float(str(np.float32(value.simple_value)))
                        self._add(event.step, value.tag, Point(shortest, event.wall_time))
                        self._newest = max(self._newest, event.step)

    def _read_rows(self) -> None:
        if not self._table.is_file():
            return
        now = time.time()
        with open(self._table, newline="", encoding="utf-8", errors="surrogateescape") as file:
            for row in csv.DictReader(file):
                for column, text in row.items():
                    if text and column not in self._left_out:
                        self._add(int(row["step"]), f"Epoch/{column}", Point(float(text), now))

    def _add(self, step: int, tag: str, point: Point) -> None:
        if (step, tag) not in self._known:
            self._known.add((step, tag))
            self._by_step[step][tag] = point


def lock_of(folder: Path, tracker: str) -> Path:
    """The file in a run's ``folder`` that a process of ``tracker`` locks; it holds FINISHED once all has been sent."""
    return folder / f".{tracker}.lock"


def mirror(job: Job, tracker: Tracker, ended: Callable[[float], str], say: Callable[[str], None]) -> bool:
    """Send what the run logs until it has ended; return True if all has been sent.

    ``ended`` waits for at most the given seconds and returns how the run has ended, '' if it goes on. The first failure
    of ``tracker`` is passed to ``say``; then the tracker is tried again, and once more when the run has ended.
    """
    complained = False
    while True:
        try:
            has = tracker.open()
            points = Points(Path(job.folder), job.tagged)
            how = ""
            while not how:
                how = ended(POLL_SECONDS)
                groups = points.take(everything=how == FINISHED)
                lacking = [(step, {tag: of[tag] for tag in of if not has(step, tag)}) for step, of in groups]
                if lacking := [group for group in lacking if group[1]]:
                    tracker.send(lacking)
            tracker.close(how == FINISHED)
            return True
        except Exception as error:
            if not complained:
                say(_without_secrets(f"{type(error).__name__}: {error}"))
            complained = True
            if ended(0):
                return False
            ended(RETRY_SECONDS)


def _without_secrets(text: str) -> str:
    for secret in filter(None, map(os.environ.get, SECRETS)):
        text = text.replace(secret, "***")
    return re.sub(r"//[^/@\s]+@", "//***@", " ".join(text.split()))[:300]


class Ending:
    """Waits for the run's end: a line on the unbuffered ``stdin`` that tells how it ended, or the death of its process.

    Within ``SECONDS`` of that death, this process ends in any case.
    """

    SECONDS = 15

    def __init__(self, stdin: io.RawIOBase) -> None:
        self._stdin = stdin
        self._how = ""
        self._parent = os.getppid()
        self._alarmed = False
        # A scheduler signals every process of a job, and the run goes on for as long as it takes to save.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._look_after_parent())

    def _look_after_parent(self) -> None:
        if os.getppid() != self._parent and not self._alarmed:
            self._alarmed = True
            self._how = self._how or STOPPED
            signal.alarm(self.SECONDS)  # ends the process even within a call that hangs

    def __call__(self, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while True:
            self._look_after_parent()
            left = max(0.0, min(1.0, deadline - time.monotonic()))
            if self._how:
                return self._how
            if select.select([self._stdin], [], [], left)[0]:
                self._how = self._stdin.readline().decode().strip() or STOPPED
            elif not left:
                return ""


def main() -> int:
    """Mirror the job described in the first line on stdin; lines on stdout are for the run's log."""
    from utils.runtime.process import end_with_parent

    # Unbuffered: select would never see the last line of a short run if it had been read together with the first.
    stdin = io.FileIO(sys.stdin.fileno(), closefd=False)
    job = Job(**json.loads(stdin.readline()))
    ended = Ending(stdin)
    end_with_parent()
    os.nice(10)  # a busy processor belongs to the training
    log = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # trackers talk

    def say(line: str) -> None:
        with suppress(OSError):
            print(line, file=log, flush=True)

    with open(lock_of(Path(job.folder), job.tracker), "w", encoding="utf-8") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(lock, fcntl.LOCK_EX)  # until the mirror of a killed process has ended
        if not mirror(job, TRACKERS[job.tracker](job), ended, say):
            return 1
        if ended(0) == FINISHED:
            lock.write(FINISHED)
        return 0


if __name__ == "__main__":
    os._exit(main())  # no tracker's thread may hold the process up
