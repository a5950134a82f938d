"""What a run reads back from files may be anything: nothing in it runs, and each answer is a line a mistake."""

import io
import os
import pickle
import shutil
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

import main
from scripts import amp_audit, amp_walkthrough, doctor
from scripts.common.command_line import run_tool
from utils.checkpoint import checkpoint
from utils.config.settings import UserError

FLAGS = ("--device", "cpu", "--arch", "fc", "--epochs", "1", "--max-steps", "2", "--no-progress", "--ema-decay", "0.9")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An output folder that holds one run of two steps."""
    output = tmp_path_factory.mktemp("trained")
    assert main.main([*FLAGS, "--output", str(output)]) == 0
    return output


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of that run, below ``runs`` in the current folder."""
    shutil.copytree(trained, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    (folder,) = Path("runs/digits/fc").iterdir()
    return folder


class Attack:
    """Unpickled, it makes a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


def zipped(data, path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(data, protocol=2))
        archive.writestr("archive/version", "3\n")


WAYS = {
    "torch.save": torch.save,
    "torch.save of old": lambda data, path: torch.save(data, path, _use_new_zipfile_serialization=False),
    "a pickle": lambda data, path: Path(path).write_bytes(pickle.dumps(data)),
    "a zip file": zipped,
}
READERS = {  # the path of the checkpoint and of its run -> a command line
    "resume file": lambda path, run: ("--resume", path),
    "resume folder": lambda path, run: ("--resume", run),
    "resume auto": lambda path, run: (*FLAGS, "--resume", "auto"),
    "weights": lambda path, run: (*FLAGS, "--weights", path),
    "evaluate": lambda path, run: ("--evaluate", "--resume", path),
    "evaluate folder": lambda path, run: ("--evaluate", "--resume", run),
    "evaluate weights": lambda path, run: (*FLAGS, "--evaluate", "--weights", path),
}
TOOLS = {
    "audit": (amp_audit.NAME, amp_audit.main, lambda path, run: ("--resume", path)),
    "audit folder": (amp_audit.NAME, amp_audit.main, lambda path, run: ("--resume", run)),
    "audit batch": (amp_audit.NAME, amp_audit.main, lambda path, run: ("--batch", path)),
    "audit weights": (amp_audit.NAME, amp_audit.main, lambda path, run: (*FLAGS, "--weights", path)),
    "walkthrough": (amp_walkthrough.NAME, amp_walkthrough.walk_through, lambda path, run: ("--resume", path)),
    "walkthrough weights": (
        amp_walkthrough.NAME,
        amp_walkthrough.walk_through,
        lambda path, run: (*FLAGS, "--weights", path),
    ),
    "doctor": (doctor.NAME, doctor.main, lambda path, run: ("--resume", path)),
}


def told(capsys, line):
    """The exit code of a command line of main.py, and its lines on stderr, none of them a traceback."""
    code = main.main([str(word) for word in line])
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("main.py: ") for line in lines), lines
    return code, lines


def replace_all(run, write, manifest):
    """Put what ``write`` makes in place of each checkpoint; with ``manifest`` its digests are right."""
    paths = sorted((run / "checkpoints").glob("*.pt"))
    for path in paths:
        path.unlink()
        write(path)
    if manifest:
        checkpoint._write_manifest(run / "checkpoints", {path.name: [checkpoint.sha256(path)] for path in paths})
    else:
        (run / "checkpoints/manifest.json").unlink()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("way", WAYS)
def test_code_in_a_checkpoint_never_runs_and_is_one_line(run, tmp_path, capsys, way, reader):
    target = tmp_path / "attacked"
    replace_all(run, lambda path: WAYS[way]({"model": Attack(target)}, path), manifest=way == "torch.save")
    code, lines = told(capsys, READERS[reader](run / "checkpoints/last.pt", run))
    assert not target.exists()
    assert sum("last.pt: is not a checkpoint that can be loaded safely" in line for line in lines) == 1
    if reader == "resume auto":
        assert code == 0 and "begins a new run" in lines[-1]
        assert len(list(run.parent.iterdir())) == 2
    else:
        assert code == 2 and "warning" not in lines[-1]
        assert len(list(run.parent.iterdir())) == 1, "nothing is begun"


@pytest.mark.parametrize("tool", TOOLS)
def test_code_in_a_checkpoint_never_runs_in_a_tool(run, tmp_path, capsys, monkeypatch, tool):
    target = tmp_path / "attacked"
    replace_all(run, lambda path: torch.save({"model": Attack(target)}, path), manifest=True)
    name, entry, line = TOOLS[tool]
    monkeypatch.setattr(sys, "argv", [name, *map(str, line(run / "checkpoints/last.pt", run))])
    assert run_tool(name, entry) == 2
    lines = capsys.readouterr().err.splitlines()
    assert not target.exists()
    assert all(line.startswith(f"{name}: ") for line in lines) and "last.pt" in "".join(lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_the_attack_works_where_nothing_guards_against_it(tmp_path):
    torch.save({"model": Attack(tmp_path / "attacked")}, tmp_path / "evil.pt")
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert (tmp_path / "attacked").exists()


# ------------------------------------------------------------------------------ sizes and nesting


class Storage:
    pass


class Claimed:
    """A tensor that claims ``size`` with ``stride`` over a storage that claims ``numbers`` float32 numbers."""

    def __init__(self, numbers, size, stride):
        self.numbers = numbers
        self.size = size
        self.stride = stride

    def __reduce__(self):
        storage = Storage()
        storage.numbers = self.numbers
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.size, self.stride, False, OrderedDict())


def write_tensor(path, tensor, data=b"\0" * 16, compression=zipfile.ZIP_STORED):
    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, "0", "cpu", value.numbers) if isinstance(value, Storage) else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump({"model": {"layers.1.weight": tensor}})
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in (("data.pkl", buffer.getvalue()), ("byteorder", "little"), ("data/0", data)):
            archive.writestr(f"archive/{name}", content)
        archive.writestr("archive/version", "3\n")


def nested(depth):
    """Lists in which each holds the one before twice: few bytes, and 2 to the power of ``depth`` parts."""
    value = [1]
    for _ in range(depth):
        value = [value, value]
    return value


def endless():
    value = []
    value.append(value)
    return value


BOMBS = {
    "more than its storage": lambda path: write_tensor(path, Claimed(4, (10**12,), (0,))),
    "a huge storage": lambda path: write_tensor(path, Claimed(10**13, (10**13,), (1,))),
    "beyond its storage": lambda path: write_tensor(path, Claimed(4, (1000,), (1,))),
    "a negative size": lambda path: write_tensor(path, Claimed(4, (-3,), (1,))),
    "compressed": lambda path: write_tensor(
        path, Claimed(10**7, (10**7,), (1,)), bytes(4 * 10**7), zipfile.ZIP_DEFLATED
    ),
    "doubled": lambda path: torch.save({"model": nested(60)}, path),
    "in itself": lambda path: torch.save({"model": endless()}, path),
    "sparse": lambda path: torch.save({"model": {"w": torch.zeros(10**6, 10**6, layout=torch.sparse_coo)}}, path),
    "nowhere": lambda path: torch.save({"model": {"w": torch.zeros(10**6, 10**6, device="meta")}}, path),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_would_not_fit_into_memory_is_refused_before_it_is_tried(tmp_path, bomb):
    BOMBS[bomb](tmp_path / "bomb.pt")
    assert (tmp_path / "bomb.pt").stat().st_size < 10**6
    for read in (checkpoint.load, checkpoint.load_run):
        with pytest.raises(UserError, match=r"bomb\.pt: is not a checkpoint that can be loaded safely"):
            read(tmp_path / "bomb.pt")


# -------------------------------------------------------------------------------------- wrong kinds

HUGE = 10**30
WRONG_PARTS = [
    {"model": []},
    {"model": {}},
    {"model": {"a": 1}},
    {"model": None},
    {"model": {1: torch.zeros(1)}},
    {"model": {"layers.1.weight": torch.zeros(3)}},
    {"ema": []},
    {"ema": {"model": 5}},
    {"ema": None},
    {"ema": {}},
    {"optimizer": None},
    {"optimizer": []},
    {"optimizer": {"state": 1}},
    {"optimizer": {"state": {}, "param_groups": 3}},
    {"optimizer": {"state": {}, "param_groups": []}},
    {"optimizer": {"state": {0: 5}, "param_groups": [{}]}},
    {"scaler": 5},
    {"scaler": {"scale": "x"}},
    {"scaler": {"scale": float("nan")}},
    {"scaler": None},
    {"progress": "x"},
    {"progress": []},
    {"progress": {}},
    {"progress": {"step": 1}},
    {"classes": None},
    {"classes": 5},
    {"classes": ["a"]},
    {"classes": [5] * 10},
    {"settings": 5},
    {"settings": []},
    {"settings": {5: 5}},
    {"settings": {"lr": [1], "epochs": "many"}},
    {"settings": {"arch": "../../x"}},
    {"fingerprint": 5},
    {"fingerprint": None},
    {"format": "3"},
    {"format": None},
    {"format": {}},
    {"format": HUGE},
]
WRONG_PROGRESS = [
    {"step": -1},
    {"step": HUGE},
    {"step": 1.5},
    {"step": True},
    {"step": "1"},
    {"step": None},
    {"epoch": [1]},
    {"epoch": -5},
    {"best_top1": float("nan")},
    {"best_top1": float("inf")},
    {"best_top1": "x"},
    {"epoch_sums": []},
    {"epoch_sums": [1.0]},
    {"epoch_sums": [float("nan")] * 4},
    {"window_sums": 0.0},
    {"window_sums": ["x"] * 4},
    {"last_validation": [1.0] * 3},
    {"last_validation": {}},
    {"loss_names": "ab"},
    {"loss_names": [1]},
    {"skipped_steps": 10**9},
    {"step_in_epoch": 10**9},
    {"skipped_in_row": 10**9},
    {"samples_seen": -1},
    {"best_value": float("nan")},
    {"best_value": "x"},
    {"stopping_value": [1.0]},
    {"stopping_epoch": None},
    {"averaged_step": -1},
    {"averaged_epochs": 0.5},
]


def save_with(path, state, changes):
    """``state`` with other parts, and with the inventory that fits them, as an attacker would."""
    changed = {key: value for key, value in (state | changes).items() if key != "contents"}
    with_contents = changed | {"contents": checkpoint.inventory(changed)}
    path.unlink(missing_ok=True)
    torch.save(with_contents, path)
    (path.parent / "manifest.json").unlink(missing_ok=True)


@pytest.mark.parametrize("changes", WRONG_PARTS, ids=lambda changes: str(changes)[:50])
def test_parts_of_a_wrong_kind_are_lines_and_never_tracebacks(run, capsys, changes):
    last = run / "checkpoints/last.pt"
    save_with(last, checkpoint.load(last), changes)
    code, lines = told(capsys, ("--device", "cpu", "--resume", last))
    assert code == 2 and lines and all(len(line) < 1000 for line in lines), lines
    evaluated, lines = told(capsys, ("--device", "cpu", "--evaluate", "--resume", last))
    assert evaluated in (0, 2) and bool(lines) == (evaluated == 2)
    weights, lines = told(capsys, (*FLAGS, "--weights", last))
    assert weights in (0, 2) and bool(lines) == (weights == 2)


@pytest.mark.parametrize("changes", WRONG_PROGRESS, ids=lambda changes: str(changes)[:50])
def test_impossible_progress_is_one_line_that_names_it(run, capsys, changes):
    last = run / "checkpoints/last.pt"
    state = checkpoint.load(last)
    save_with(last, state, {"progress": state["progress"] | changes})
    code, lines = told(capsys, ("--device", "cpu", "--resume", last))
    (line,) = lines
    assert code == 2 and "last.pt" in line and "progress" in line


# --------------------------------------------------------------------------- other files of the run


def as_pickle(path, target):
    path.write_bytes(pickle.dumps({"sha256": Attack(target)}))


def as_object_array(path, target):
    with open(path, "wb") as file:
        np.savez(file, **dict.fromkeys(("step", "epoch", "loss"), np.array([Attack(target)], dtype=object)))


CONTENTS = {
    "empty": lambda path, target: path.write_bytes(b""),
    "garbage": lambda path, target: path.write_bytes(b"\xff\0garbage\n" * 100),
    "a pickle": as_pickle,
    "an object array": as_object_array,
    "json": lambda path, target: path.write_text('{"sha256": 5}'),
    "yaml": lambda path, target: path.write_text(f"lr: !!python/object/apply:os.mkdir ['{target}']\n"),
    "table": lambda path, target: path.write_text("epoch,step\nx,y\n1\n,,,,,\n"),
    "nested": lambda path, target: path.write_text("[" * 100_000),
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", ["config.yaml", "metrics.csv", "metrics.npz", "log.txt", "manifest.json", "events"])
def test_any_other_file_of_a_run_may_hold_anything(run, tmp_path, capsys, name, content):
    (events,) = sorted(run.glob("events.*"))[:1]
    path = {"manifest.json": run / "checkpoints/manifest.json", "events": events}.get(name, run / name)
    CONTENTS[content](path, tmp_path / "attacked")
    code, lines = told(capsys, ("--device", "cpu", "--no-progress", "--resume", run))
    assert code == 0 and all("warning" in line and name[:6] in line for line in lines), lines
    assert not (tmp_path / "attacked").exists()
    assert told(capsys, ("--device", "cpu", "--resume", run)) == (0, []), "afterwards all is sound again"
    assert os.listdir(tmp_path) == ["runs"]
