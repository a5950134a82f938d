"""A resume reads the checkpoint's tensors where they are needed and keeps none of them."""

import dataclasses
import gc
import pickle
import shutil
import weakref

import pytest
import torch

import main
from tests.faults.small_run import begin
from utils.record import checkpoint
from utils.record.inventory import parts
from utils.record.resume import Found, from_path
from utils.settings import UserError
from utils.train_validation import TraVal

CPU = ("--device", "cpu", "--no-progress")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with an average and two optimizers, cut after three steps."""
    return begin(tmp_path_factory.mktemp("trained"), "--optimizer", "muon", "--amp", "fp16", "--max-steps", 3)


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "digits/fc/run")
    return tmp_path / "digits/fc/run"


@pytest.mark.parametrize("more", [(), ("--resume-override", "--lr", "0.5")])
def test_when_training_goes_on_no_tensor_of_the_checkpoint_is_left_but_what_the_optimizers_took(run, monkeypatch, more):
    loaded, left = [], []
    unpickle, train = checkpoint._unpickle, TraVal.train

    def remembered(path):
        state = unpickle(path)
        loaded.extend(weakref.ref(value) for _, value in parts(state) if isinstance(value, torch.Tensor))
        return state

    def looked_at(traval, epoch):
        gc.collect()
        states = [state for optimizer in traval.optimizers for state in optimizer.state.values()]
        taken = {id(value) for state in states for value in state.values()}
        left.extend(ref() for ref in loaded if ref() is not None and id(ref()) not in taken)
        return train(traval, epoch)

    monkeypatch.setattr(checkpoint, "_unpickle", remembered)
    monkeypatch.setattr(TraVal, "train", looked_at)
    assert main.main([*CPU, "--resume", str(run), *more, "--max-steps", "5"]) == 0
    assert loaded and left == []


def test_what_the_other_processes_are_told_of_a_checkpoint_holds_no_tensor(run):
    found = from_path(run, pytest.fail)
    assert [path for path, value in parts(found.state) if isinstance(value, torch.Tensor)] == []
    assert len(pickle.dumps(found)) < 0.1 * found.path.stat().st_size


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or left != left)


def test_read_gives_the_whole_checkpoint(run):
    found = from_path(run, pytest.fail)
    assert same(checkpoint.load(found.path), found.read())


def test_read_gives_what_was_changed_meanwhile_and_all_tensors_wherever_they_stand(tmp_path):
    whole = {
        "progress": {"step": 7, "sums": [1.0, 2.0, 3.0]},
        "optimizer": [{"state": {0: {"buffers": [torch.ones(1), torch.zeros(2)]}}, "param_groups": [{"lr": 0.1}]}],
        "weight": torch.ones(3),
    }
    torch.save(whole, tmp_path / "file.pt")
    found = Found.of(tmp_path / "file.pt", whole)
    assert same(found.read(), whole)
    whole["progress"], whole["optimizer"][0]["param_groups"] = {"step": 0, "sums": [0.0]}, [{"lr": 0.5}]
    assert same(dataclasses.replace(found, state=Found.of(found.path, whole).state).read(), whole)


def test_a_file_that_is_not_the_one_that_was_found_is_refused(run):
    found = from_path(run, pytest.fail)
    assert found.path.name == "last.pt"
    found.path.unlink()
    with pytest.raises(UserError, match=r"last\.pt: no such checkpoint; .*each machine must see its folder"):
        found.read()
    shutil.copyfile(run / "checkpoints/initial.pt", found.path)
    with pytest.raises(UserError, match=r"last\.pt: is not the file any more that was found"):
        found.read()
