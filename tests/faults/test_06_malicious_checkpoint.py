"""What a run reads back from files may be anything: nothing in it runs, and each answer is a line a mistake."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.faults.small_run import FLAGS, Attack, copy_of, save_as, told, with_contents
from utils.checkpoint import checkpoint
from utils.config.settings import UserError


@pytest.fixture
def run(small_run, tmp_path, monkeypatch):
    """A run of two steps below ``runs`` in the current folder."""
    return copy_of(small_run("--epochs", 1, "--max-steps", 2), tmp_path, monkeypatch)


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
RUN = (*FLAGS, "--epochs", "1")
READERS = {  # the path of the checkpoint and of its run -> a command line; tools: tests/scripts/test_bad_input_of_tools.py
    "resume file": lambda path, run: ("--resume", path),
    "resume folder": lambda path, run: ("--resume", run),
    "resume auto": lambda path, run: (*RUN, "--max-steps", "1", "--resume", "auto"),
    "weights": lambda path, run: (*RUN, "--weights", path),
    "evaluate": lambda path, run: ("--evaluate", "--resume", path),
    "evaluate folder": lambda path, run: ("--evaluate", "--resume", run),
    "evaluate weights": lambda path, run: (*RUN, "--evaluate", "--weights", path),
    "teacher": lambda path, run: (*RUN, "--teacher", path),
    "folds": lambda path, run: (*RUN, "--folds", "3", "--fold", "0", "--folds-from", path),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", [checkpoint.load, checkpoint.load_run])
def test_code_in_a_checkpoint_of_any_kind_never_runs(tmp_path, way, read):
    WAYS[way]({"model": Attack(tmp_path / "attacked")}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match=r"evil\.pt: is not a checkpoint that can be loaded safely"):
        read(tmp_path / "evil.pt")
    assert not (tmp_path / "attacked").exists()


def with_attacks(run, target):
    """Put an attack in place of each checkpoint, with its digest in the manifest; gives one of them."""
    paths = sorted((run / "checkpoints").glob("*.pt"))
    for path in paths:
        path.unlink()
        torch.save({"model": Attack(target)}, path)
    checkpoint._write_manifest(run / "checkpoints", {path.name: [checkpoint.sha256(path)] for path in paths})
    return run / "checkpoints/last.pt"


@pytest.mark.parametrize("reader", READERS)
def test_each_way_to_read_a_checkpoint_answers_code_in_it_with_one_line(run, tmp_path, capsys, reader):
    target = tmp_path / "attacked"
    code, lines = told(capsys, READERS[reader](with_attacks(run, target), run))
    assert not target.exists()
    assert sum("last.pt: is not a checkpoint that can be loaded safely" in line for line in lines) == 1
    if reader == "resume auto":
        assert code == 0 and "begins a new run" in lines[-1]
        assert len(list(run.parent.iterdir())) == 2
    else:
        assert code == 2 and "warning" not in lines[-1]
        assert len(list(run.parent.iterdir())) == 1, "nothing is begun"


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
        path, Claimed(10**6, (10**6,), (1,)), bytes(4 * 10**6), zipfile.ZIP_DEFLATED
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
NAN = float("nan")
# Of each part, what else a file may hold there.
WRONG_PARTS = {
    "model": [[], {}, {"a": 1}, None, {1: torch.zeros(1)}, {"layers.1.weight": torch.zeros(3)}],
    "ema": [[], {"model": 5}, None, {}],
    "optimizer": [None, [], {"state": 1}, {"state": {}, "param_groups": 3}, {"state": {}, "param_groups": []}],
    "optimizer's state": [{"state": {0: 5}, "param_groups": [{}]}],
    "scaler": [5, {"scale": "x"}, {"scale": NAN}, None],
    "progress": ["x", [], {}, {"step": 1}],
    "classes": [None, 5, ["a"], [5] * 10],
    "settings": [5, [], {5: 5}, {"lr": [1], "epochs": "many"}, {"arch": "../../x"}],
    "fingerprint": [5, None],
    "format": ["3", None, {}, HUGE],
}
WRONG_PROGRESS = {
    "step": [-1, HUGE, 1.5, True, "1", None],
    "epoch": [[1], -5],
    "best_top1": [NAN, float("inf"), "x"],
    "epoch_sums": [[], [1.0], [NAN] * 4],
    "window_sums": [0.0, ["x"] * 4],
    "last_validation": [[1.0] * 3, {}],
    "loss_names": ["ab", [1]],
    "skipped_steps": [10**9],
    "step_in_epoch": [10**9],
    "skipped_in_row": [10**9],
    "samples_seen": [-1],
    "best_value": [NAN, "x"],
    "stopping_value": [[1.0]],
    "stopping_epoch": [None],
    "averaged_step": [-1],
    "averaged_epochs": [0.5],
}


@pytest.mark.parametrize("part", WRONG_PARTS)
def test_parts_of_a_wrong_kind_are_lines_and_never_tracebacks(run, capsys, part):
    last = run / "checkpoints/last.pt"
    sound = checkpoint.load(last)
    for wrong in WRONG_PARTS[part]:
        save_as(last, with_contents(sound | {part.removesuffix("'s state"): wrong}))  # as an attacker would
        code, lines = told(capsys, ("--device", "cpu", "--resume", last))
        assert code == 2 and lines and all(len(line) < 1000 for line in lines), (wrong, lines)
        evaluated, lines = told(capsys, ("--device", "cpu", "--evaluate", "--resume", last))
        assert evaluated in (0, 2) and bool(lines) == (evaluated == 2), wrong
        if part in ("model", "ema"):  # of which alone weights are taken
            weights, lines = told(capsys, (*RUN, "--dry-run", "--weights", last))
            assert weights in (0, 2) and bool(lines) == (weights == 2), wrong


def test_impossible_progress_is_one_line_that_names_it(run):
    last = run / "checkpoints/last.pt"
    state = checkpoint.load(last)
    for name, values in WRONG_PROGRESS.items():
        for wrong in values:
            save_as(last, with_contents(state | {"progress": state["progress"] | {name: wrong}}))
            with pytest.raises(UserError, match=r"last\.pt.*progress") as caught:
                checkpoint.load_run(last)
            assert len(caught.value.mistakes) == 1, (name, wrong)


# --------------------------------------------------------------------------- other files of the run


def as_pickle(path, target):
    path.write_bytes(pickle.dumps({"sha256": Attack(target)}))


def as_object_array(path, target):
    with open(path, "wb") as file:
        np.savez(file, **dict.fromkeys(("step", "epoch", "loss"), np.array([Attack(target)], dtype=object)))


OF_ITS_KIND = {
    ".npz": as_object_array,
    ".json": lambda path, target: path.write_text('{"sha256": 5}'),
    ".yaml": lambda path, target: path.write_text(f"lr: !!python/object/apply:os.mkdir ['{target}']\n"),
    ".csv": lambda path, target: path.write_text("epoch,step\nx,y\n1\n,,,,,\n"),
}
CONTENTS = {
    "empty": lambda path, target: path.write_bytes(b""),
    "garbage": lambda path, target: path.write_bytes(b"\xff\0garbage\n" * 100),
    "a pickle": as_pickle,
    "of its kind": lambda path, target: OF_ITS_KIND.get(path.suffix, as_pickle)(path, target),
    "nested": lambda path, target: path.write_text("[" * 100_000),
}


@pytest.mark.parametrize("content", CONTENTS)
def test_all_other_files_of_a_run_may_hold_anything(run, tmp_path, capsys, content):
    """Each is written where the run is begun or goes on, and what it held is lost at worst."""
    names = ("config.yaml", "metrics.csv", "metrics.npz", "log.txt", "checkpoints/manifest.json")
    for path in (*(run / name for name in names), *run.glob("events.*")):
        CONTENTS[content](path, tmp_path / "attacked")
    code, lines = told(capsys, ("--device", "cpu", "--no-progress", "--resume", run))
    known = ("config", "metric", "log.tx", "manife", "events")
    assert code == 0 and all("warning" in line and any(name in line for name in known) for line in lines), lines
    assert not (tmp_path / "attacked").exists()
    assert told(capsys, ("--device", "cpu", "--resume", run)) == (0, []), "afterwards all is sound again"
    assert os.listdir(tmp_path) == ["runs"]
