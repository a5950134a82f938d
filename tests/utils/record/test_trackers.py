"""A run mirrored to trackers: each tag and step once, also after kill -9, and no tracker in the way of a training."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import sys
import threading

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import main
from tests.end_to_end.forked import Forked, server
from tests.end_to_end.processes import differences
from tests.helpers import csv_rows, trained, wait_for
from utils.checkpoint import checkpoint
from utils.record import trackers, tracking
from utils.record.trackers import FINISHED, STOPPED, Job, mirror

FLAGS = "--device cpu --arch fc --no-progress --picture-epochs off".split()
TAGGED = tracking.tagged_columns()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run without trackers."""
    return trained(tmp_path_factory.mktemp("mirrored"), *FLAGS, "--epochs", 3, "--print-freq", 10)


def logged(folder):
    """What the folder holds: TensorBoard's points, and the columns of metrics.csv that are none of them."""
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    tags = board.Tags()["scalars"]
    steps = {(event.step, tag): event.value for tag in tags for event in board.Scalars(tag)}
    for row in csv_rows(folder / "metrics.csv"):
        for column in row.keys() - {"step", "seconds", *TAGGED}:
            if row[column]:
                steps[int(row["step"]), f"Epoch/{column}"] = float(row[column])
    return steps


def same(values, others):
    """True if both have the same tags and steps, and values that float32 cannot tell apart."""
    assert values.keys() == others.keys()
    left = np.array([values[key] for key in values], np.float32)
    return np.array_equal(left, np.array([others[key] for key in values], np.float32), equal_nan=True)


def same_but_for_speeds(values, others):
    """Of a step that a kill undid, the first measurement stands; a resumed run may measure none in its first steps."""
    timed = ("Speed", "Epoch/images_per_second")
    assert values.keys() >= others.keys()
    assert all(key[1].startswith(timed) for key in values.keys() - others.keys())
    untimed = {key: value for key, value in others.items() if not key[1].startswith(timed)}
    return same({key: values[key] for key in untimed}, untimed)


class Remembering:
    """A tracker that keeps what it gets beyond the process, and may fail: ``fails`` times when opened or sent to."""

    def __init__(self, fails=()):
        self.got = []
        self.ends = []
        self.fails = list(fails)

    def _may_fail(self, where):
        if where in self.fails:
            self.fails.remove(where)
            raise ConnectionError(f"https://me:word@server:1/ {os.environ.get('WANDB_API_KEY', '')}")

    def open(self):
        self._may_fail("open")
        there = {(step, tag) for step, tag, _ in self.got}
        return lambda step, tag: (step, tag) in there

    def send(self, groups):
        for step, of in groups:
            self.got += [(step, tag, point.value) for tag, point in of.items()]
            self._may_fail("send")

    def close(self, finished):
        self._may_fail("close")
        self.ends.append(finished)


def job(folder, name="csv"):
    return Job(str(folder), name, "0" * 16, "digits", "n", {"lr": 0.1}, TAGGED)


def endings(*hows):
    """The answers of ``Ending``, in turn; the last for ever."""
    rest = list(hows)
    return lambda seconds: rest.pop(0) if len(rest) > 1 else rest[0]


def test_a_finished_run_is_mirrored_whole(run):
    tracker = Remembering()
    assert mirror(job(run), tracker, endings(FINISHED), pytest.fail)
    assert same({(step, tag): value for step, tag, value in tracker.got}, logged(run))
    assert tracker.ends == [True]


def mirroring(lines):
    """The process of a tracker that reads ``lines``, a socket."""
    os.dup2(lines.fileno(), sys.stdin.fileno())
    os._exit(trackers.main())


def test_a_run_that_ended_before_its_tracker_had_begun_is_mirrored_whole_at_once(run, tmp_path):
    """Its last line then lies in the pipe behind the first, and no further one comes."""
    folder = shutil.copytree(run, tmp_path / "run")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(f"{json.dumps(job(folder)._asdict())}\n{FINISHED}\n".encode())
        process = server().Process(target=mirroring, args=(theirs,))
        process.start()
        process.join(60)  # seconds: it would wait for ever
        process.kill()
    assert process.exitcode == 0
    table = {(int(row["step"]), row["tag"]): float(row["value"]) for row in csv_rows(folder / "scalars.csv")}
    assert same(table, logged(folder))


@pytest.mark.parametrize("fails", [["open"], ["send"], ["send", "send", "open"]])
def test_a_tracker_that_fails_gets_each_tag_and_step_once_with_one_complaint(run, fails, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "word2")
    tracker = Remembering(fails)
    said = []
    assert mirror(job(run), tracker, endings(*[""] * 9, FINISHED), said.append)
    got = {(step, tag): value for step, tag, value in tracker.got}
    assert len(got) == len(tracker.got)
    assert same(got, logged(run))
    assert said == ["ConnectionError: https://***@server:1/ ***"]


def test_a_tracker_that_always_fails_is_tried_once_more_at_the_end(run):
    tracker = Remembering(["open"] * 99)
    assert not mirror(job(run), tracker, endings("", "", FINISHED), lambda line: None)
    assert len(tracker.fails) == 99 - 2


def test_the_newest_step_waits_until_it_is_whole(run):
    """A validation adds to the step that training has logged, and a step of wandb's cannot be added to later."""
    stopped = Remembering()
    assert mirror(job(run), stopped, endings(STOPPED), pytest.fail)
    newest = max(step for step, _ in logged(run))
    there = {(step, tag) for step, tag, _ in stopped.got}
    assert there == {key for key in logged(run) if key[0] < newest}
    assert stopped.ends == [False]


def test_a_point_that_is_read_again_is_not_sent_again(run):
    points = trackers.Points(run, TAGGED)
    first = points.take(everything=True)
    points._files = trackers.Points(run, TAGGED)._files  # from their beginnings
    assert first and points.take(everything=True) == []


def test_offline_steps_of_wandb_are_read_up_to_a_cut_record(tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record

    content = b":W&B\x24\xbe\x00"
    for step in range(3):
        record = Record()
        record.history.step.num = step
        record.history.item.add(key="a", value_json="1" * 30000)  # so that records lie over the ends of blocks
        rest, kind = record.SerializeToString(), 1
        while rest:
            room = trackers.LEVELDB_BLOCK - len(content) % trackers.LEVELDB_BLOCK
            if room < 7:
                content += bytes(room)
                continue
            part, rest = rest[: room - 7], rest[room - 7 :]
            first = kind == 1
            kind = (1 if first else 4) if not rest else (2 if first else 3)
            content += bytes(4) + len(part).to_bytes(2, "little") + bytes([kind]) + part
    path = tmp_path / "run.wandb"
    path.write_bytes(content)
    assert list(trackers._offline_steps(path)) == [0, 1, 2]
    path.write_bytes(content[:-1])
    assert list(trackers._offline_steps(path)) == [0, 1]


# ------------------------------------------------------------------------------------------ whole programs


def test_a_missing_package_is_one_line_and_nothing_is_made(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    assert main.main([*FLAGS, "--track", "wandb", "--output", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "main.py: --track wandb: the package wandb is not installed; python -m pip install wandb"
    ]
    assert not (tmp_path / "runs").exists()


def test_the_plan_names_the_trackers_but_no_password(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:word@server:1")
    assert tracking.describe(("csv", "mlflow")) == "csv (scalars.csv), mlflow (https://server:1)"


def test_a_server_that_accepts_and_never_answers_costs_no_step_and_a_bounded_end(run, tmp_path, capsys, monkeypatch):
    taken = []
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=lambda: taken.append(server.accept()), daemon=True).start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr(tracking, "SECONDS_TO_FINISH", 1)
    end = tracking.Tracking.end

    def end_once_it_speaks(self, finished):
        wait_for(lambda: taken, seconds=300)  # its imports take long on a busy machine
        end(self, finished)

    monkeypatch.setattr(tracking.Tracking, "end", end_once_it_speaks)
    folder = trained(tmp_path, *FLAGS, "--epochs", 3, "--print-freq", 10, "--track", "mlflow")
    assert not differences(run, folder)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("val_top1=")
    warned = [line for line in lines if "--track" in line]
    assert warned == [
        f"warning: --track mlflow lacks the last points or all: it did not end within 1 s; {folder} has them"
    ]
    server.close()


def test_a_run_killed_before_its_trackers_ended_sends_the_rest_when_the_command_is_repeated(
    tmp_path, capsys, monkeypatch
):
    flags = [*FLAGS, *"--epochs 3 --print-freq 10 --track csv --resume auto --output".split(), str(tmp_path)]
    with monkeypatch.context() as killed:
        killed.setattr(
            tracking.Tracking, "end", lambda self, finished: [own.kill() for own in self._processes.values()]
        )
        assert main.main(flags) == 0
    (folder,) = tmp_path.glob("digits/fc/*")
    table = folder / "scalars.csv"
    table.unlink(missing_ok=True)
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert main.main(flags) == 0
    assert capsys.readouterr().out.splitlines()[-1] == last_line
    assert same({(int(row["step"]), row["tag"]): float(row["value"]) for row in csv_rows(table)}, logged(folder))
    table.unlink()
    assert main.main(flags) == 0
    assert not table.exists()  # nothing is sent twice


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The folder where MLflow keeps its runs, with wandb offline."""
    import mlflow

    folder = tmp_path / "store"  # making a database takes longer than the training
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", folder.as_uri())
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(folder.as_uri())
    yield folder
    mlflow.set_tracking_uri(before)


def test_a_killed_and_resumed_run_has_each_step_once(tmp_path, store):
    """kill -9 within an epoch, then --resume: in scalars.csv, MLflow's store and the folders of offline wandb."""
    import mlflow

    client = mlflow.MlflowClient()
    output = tmp_path / "runs"
    flags = [*FLAGS[2:], *"--epochs 200 --print-freq 7 --save-every-steps 50 --track csv mlflow wandb".split()]
    process = Forked(*flags, "--output", output)
    (rank,) = process.ranks

    def epochs():
        return sum(len(csv_rows(path)) for path in output.glob("digits/fc/*/metrics.csv"))

    wait_for(lambda: epochs() >= 3)
    os.kill(rank.pid, signal.SIGSTOP)  # it waits while the trackers are imported

    def under_way():
        wandb_began = next(output.glob("digits/fc/*/wandb/offline-run-*/*.wandb"), None)
        return wandb_began and next(store.glob("*/*/metrics/Loss/Test"), None)

    wait_for(under_way)
    before_it_waited = epochs()
    os.kill(rank.pid, signal.SIGCONT)
    wait_for(lambda: epochs() > before_it_waited)
    process.kill()
    process.communicate()
    (folder,) = output.glob("digits/fc/*")
    assert not (folder / "checkpoints" / "final.pt").exists()
    _, saved = checkpoint.newest(folder / "checkpoints", print)
    flags += ["--max-steps", str(saved["progress"]["step"] + 60)]  # beyond the kill, which came within 50 of it
    assert main.main([*FLAGS[:2], *flags, "--output", str(output), "--resume", str(folder)]) == 0

    there = logged(folder)
    rows = csv_rows(folder / "scalars.csv")
    table = {(int(row["step"]), row["tag"]): float(row["value"]) for row in rows}
    assert len(table) == len(rows)
    assert same_but_for_speeds(table, there)

    (found,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["arch"] == "fc"
    history = [
        (metric.step, key, metric.value)
        for key in found.data.metrics
        for metric in client.get_metric_history(found.info.run_id, key)
    ]
    in_mlflow = {(step, key): value for step, key, value in history}
    assert len(in_mlflow) == len(history)
    assert same_but_for_speeds(in_mlflow, there)

    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    steps = [step for path in files for step in trackers._offline_steps(path)]
    assert steps == sorted({step for step, _ in there})
