"""A checkpoint that lacks any part, however deep, is not continued from; weights need only what they use."""

import copy

import pytest
import torch

import main
from tests.faults.small_run import FLAGS, copy_of, save_as, told
from utils.checkpoint import checkpoint
from utils.checkpoint.inventory import parts
from utils.config.settings import UserError


@pytest.fixture(scope="module")
def trained(small_run):
    """A run with a gradient scaler, momentum and a moving average."""
    return small_run("--amp", "fp16", "--max-steps", 2)


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    return copy_of(trained, tmp_path, monkeypatch)


def without(state, path):
    """``state`` without the part at ``path``; only what holds it is copied."""
    state = copy.copy(state)
    key, _, below = path.partition("/")
    if isinstance(state, list) or int_key(state, key):
        key = int(key)
    if below:
        state[key] = without(state[key], below)
    else:
        del state[key]
    return state


def int_key(holder, name):
    return isinstance(holder, dict) and name not in holder and int(name) in holder


def removable(state):
    """The path of every part that can be taken out: keys and items, but not those of tuples."""
    tuples = [path for path, value in parts(state) if isinstance(value, tuple)]
    inside = tuple(f"{path}/" for path in (*tuples, "contents"))
    return sorted(path for path, _ in parts(state) if not path.startswith(inside))


TELLING = (
    "progress/step optimizer/state/0/momentum_buffer optimizer/state/3 optimizer/param_groups/0/params/2 scaler/scale "
    "scaler/_growth_tracker classes/3 settings/lr ema/model/layers.1.weight progress/epoch_sums/1 model/layers.5.bias"
).split()


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_each_part_taken_out_is_named_and_the_run_is_not_continued(trained, tmp_path, every):
    state = checkpoint.load_run(trained / "checkpoints/last.pt")
    telling = [*state, *TELLING]
    paths = removable(state)
    assert {"format", "contents", *telling} <= set(paths)
    for path in paths if every else telling:
        save_as(tmp_path / "part.pt", without(state, path))
        with pytest.raises(UserError) as caught:
            checkpoint.load_run(tmp_path / "part.pt")
        (line,) = caught.value.mistakes
        # An item taken out of a list is told by the list's length.
        named = path if not path.rpartition("/")[2].isdigit() or path.startswith("optimizer/state") else path[:-2]
        assert "part.pt: lacks" in line and named.strip("/") in line, (path, line)


def test_a_part_of_another_kind_is_named(trained, tmp_path):
    state = checkpoint.load_run(trained / "checkpoints/last.pt")
    state["optimizer"]["state"][0]["momentum_buffer"] = torch.zeros(3)
    save_as(tmp_path / "part.pt", state)
    with pytest.raises(UserError, match=r"optimizer/state/0/momentum_buffer \(float32 300x64; it is float32 3\)"):
        checkpoint.load_run(tmp_path / "part.pt")


def test_the_program_refuses_and_names_what_is_missing(run, capsys):
    path = "ema/model/layers.3.bias"
    for file in (run / "checkpoints").glob("*.pt"):
        save_as(file, without(checkpoint.load(file), path))
    code, (line,) = told(capsys, ("--resume", run / "checkpoints/last.pt"))
    assert code == 2 and path in line
    code, lines = told(capsys, ("--resume", run))
    assert code == 2 and sum(path in line for line in lines) == len(lines) - 1


UNUSED = ("optimizer", "scaler", "progress", "contents", "versions", "fingerprint", "preprocessing", "format", "model")


def test_evaluation_and_weights_need_only_what_they_use(run, capsys):
    last = run / "checkpoints/last.pt"

    assert main.main(["--device", "cpu", "--evaluate", "--resume", str(last)]) == 0
    expected = capsys.readouterr().out.splitlines()[-1]
    state = checkpoint.load(last)
    save_as(last, {key: value for key, value in state.items() if key not in UNUSED})
    assert main.main(["--device", "cpu", "--evaluate", "--resume", str(last)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == expected
    assert told(capsys, (*FLAGS, "--weights", last, "--max-steps", 1)) == (0, [])
