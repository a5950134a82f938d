"""A checkpoint is whole or not there, is verified when it is read, and holds nothing that can run."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from utils.record import checkpoint
from utils.record.checkpoint import Checkpointer
from utils.record.progress import Progress
from utils.run_record import versions
from utils.settings import UserError


def state(step=1, **extra):
    return {
        "format": checkpoint.FORMAT,
        "arch": "linear",
        "model": {"weight": torch.full((1000,), float(step))},
        "ema": None,
        "optimizer": {"state": {}, "param_groups": [{"params": [0]}]},
        "scaler": {},
        "progress": Progress(step=step).state(),
        "classes": ["a", "b"],
        "preprocessing": {},
        "settings": {},
        "versions": versions(),
        "fingerprint": "",
        **extra,
    }


def save(saver, *arguments):
    """Save and wait until it is on the disk."""
    saver.save(*arguments)
    saver.wait()


def steps(folder):
    return {path.name: checkpoint.load(path)["progress"]["step"] for path in folder.glob("*.pt")}


def test_the_newest_of_each_name_and_the_last_but_one_are_kept(tmp_path):
    saver = Checkpointer(tmp_path, is_main=True)
    save(saver, state(0), "initial")
    for step in (1, 2, 3):
        save(saver, state(step), *(["best"] if step == 2 else []), "last")
    assert steps(tmp_path) == {"initial.pt": 0, "best.pt": 2, "previous.pt": 2, "last.pt": 3}
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_other_ranks_write_nothing(tmp_path):
    save(Checkpointer(tmp_path, is_main=False), state(), "last")
    assert list(tmp_path.iterdir()) == []


class Killed(BaseException):
    """Stands for a kill: nothing after it runs."""


@pytest.mark.parametrize("call", range(12))
def test_a_kill_between_any_two_file_operations_leaves_the_newest_or_the_one_before(tmp_path, monkeypatch, call):
    """Each os.replace, os.link and os.fsync in turn is the last thing that the process does."""
    saver = Checkpointer(tmp_path, is_main=True)
    save(saver, state(1), "last")
    save(saver, state(2), "last")
    calls = 0

    def killing(original):
        def call_or_die(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls > call:
                raise Killed
            return original(*arguments, **options)

        return call_or_die

    for name in ("replace", "link", "fsync"):
        monkeypatch.setattr(os, name, killing(getattr(os, name)))
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    try:
        save(saver, state(3), "last")
        killed = False
    except Killed:
        killed = True
    monkeypatch.undo()
    warnings = []
    _, found = checkpoint.newest(tmp_path, warnings.append)
    assert found["progress"]["step"] in ((2, 3) if killed else (3,))
    assert warnings == []
    save(saver, state(4), "last")  # and the next save works
    assert checkpoint.newest(tmp_path, warnings.append)[1]["progress"]["step"] == 4


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(tmp_path, damage):
    saver = Checkpointer(tmp_path, is_main=True)
    save(saver, state(1), "last")
    save(saver, state(2), "last")
    data = bytearray((tmp_path / "last.pt").read_bytes())
    data[len(data) // 2] ^= damage == "flip"
    (tmp_path / "last.pt").write_bytes({"cut": data[: len(data) // 2], "flip": data, "empty": b""}[damage])
    with pytest.raises(UserError, match=r"last\.pt: is damaged"):
        checkpoint.load(tmp_path / "last.pt")
    warnings = []
    path, found = checkpoint.newest(tmp_path, warnings.append)
    assert (path.name, found["progress"]["step"], len(warnings)) == ("previous.pt", 1, 1)


class Malicious:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("save", [torch.save, lambda content, path: Path(path).write_bytes(pickle.dumps(content))])
def test_code_in_a_checkpoint_never_runs(tmp_path, save):
    save({"model": Malicious(tmp_path / "touched")}, tmp_path / "evil.pt")
    for read in (checkpoint.load, checkpoint.load_run):
        with pytest.raises(UserError, match=r"evil\.pt: is not a checkpoint that can be loaded safely"):
            read(tmp_path / "evil.pt")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("key", checkpoint.KEYS)
def test_a_run_does_not_continue_from_a_checkpoint_that_lacks_a_part(tmp_path, key):
    content = state()
    del content[key]
    torch.save(content, tmp_path / "part.pt")
    with pytest.raises(UserError, match=f"lacks {key};"):
        checkpoint.load_run(tmp_path / "part.pt")


def test_a_full_disk_is_one_line_and_the_previous_checkpoint_stays(tmp_path, monkeypatch):
    saver = Checkpointer(tmp_path, is_main=True)
    save(saver, state(1), "last")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"--output: cannot write .*No space left"):
        save(saver, state(2), "last")
    assert steps(tmp_path) == {"last.pt": 1}
    assert len(list(tmp_path.iterdir())) == 2, "a checkpoint and the manifest; no temporary file"


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"model": s}, lambda s: {"state_dict": s}])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_weights_are_taken_from_our_checkpoints_and_from_bare_and_wrapped_state_dicts(wrap, prefix):
    model = nn.Linear(2, 3)
    content = wrap({prefix + name: value for name, value in model.state_dict().items()})
    other = nn.Linear(2, 3)
    checkpoint.load_weights(other, checkpoint.weights_of(content, Path("x")), "x")
    assert torch.equal(model.weight, other.weight)


def test_the_moving_average_is_preferred_to_the_raw_weights():
    content = {"model": {"weight": torch.zeros(1)}, "ema": {"model": {"weight": torch.ones(1)}}}
    assert checkpoint.weights_of(content, Path("x"))["weight"] == 1


def test_weights_that_do_not_fit_are_named():
    with pytest.raises(UserError, match=r"lacks bias; has extra.*weight is \(1, 2\) and should be \(3, 2\); is --arch"):
        checkpoint.load_weights(nn.Linear(2, 3), {"weight": torch.zeros(1, 2), "extra": torch.zeros(1)}, "x")
