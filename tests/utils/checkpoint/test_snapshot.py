"""What is saved is the state at the call, however long the writing takes; its errors are not lost."""

import threading

import pytest
import torch

from tests.utils.checkpoint.test_checkpoint import state, steps
from utils.checkpoint import checkpoint
from utils.checkpoint.checkpoint import Checkpointer
from utils.checkpoint.snapshot import Snapshot


def nested(value):
    weight = torch.full((3, 4, 2, 2), value).to(memory_format=torch.channels_last)
    return {"model": {"a": weight, "tied": weight, "half": torch.tensor(value).half()}, "list": [1, (weight[0], "x")]}


def test_a_snapshot_has_the_same_numbers_kinds_and_strides_and_none_of_the_memory():
    source = nested(1.5)
    copy, complete = Snapshot().take(source)
    complete()
    source["model"]["a"].fill_(9)
    assert torch.equal(copy["model"]["a"], torch.full((3, 4, 2, 2), 1.5))
    assert copy["model"]["a"].stride() == source["model"]["a"].stride()
    assert copy["model"]["half"].dtype == torch.float16 and copy["model"]["half"].shape == ()
    assert copy["list"][0] == 1 and copy["list"][1][1] == "x" and isinstance(copy["list"][1], tuple)


def test_tensors_that_share_memory_share_it_in_the_snapshot_and_so_in_the_file():
    copy, _ = Snapshot().take(nested(1.0))
    assert copy["model"]["a"].data_ptr() == copy["model"]["tied"].data_ptr()


def test_the_next_snapshot_uses_the_same_memory_unless_the_shape_has_changed():
    snapshot = Snapshot()
    first, _ = snapshot.take(nested(1.0))
    place = first["model"]["a"].data_ptr()
    second, _ = snapshot.take(nested(2.0))
    assert second["model"]["a"].data_ptr() == place and second["model"]["a"][0, 0, 0, 0] == 2
    third, _ = snapshot.take({"model": {"a": torch.ones(5)}})
    assert third["model"]["a"].tolist() == [1.0] * 5


@pytest.fixture
def held(monkeypatch):
    """Holds the writing of checkpoints up until it is set."""
    go_on = threading.Event()
    original = torch.save

    def save(*arguments, **options):
        assert go_on.wait(20)
        return original(*arguments, **options)

    monkeypatch.setattr(checkpoint.torch, "save", save)
    yield go_on
    go_on.set()


def test_save_returns_while_the_file_is_written_and_later_changes_are_not_in_it(tmp_path, held):
    saver = Checkpointer(tmp_path)
    content = state(1)
    saver.save(content, "last")
    content["model"]["weight"].fill_(7)
    content["progress"]["step"] = 7
    assert not (tmp_path / "last.pt").exists()
    held.set()
    saver.wait()
    assert steps(tmp_path) == {"last.pt": 1}
    assert checkpoint.load(tmp_path / "last.pt")["model"]["weight"].unique().tolist() == [1.0]


def test_a_second_save_waits_for_the_first(tmp_path, held):
    saver = Checkpointer(tmp_path)
    saver.save(state(1), "last")
    threading.Timer(0.2, held.set).start()
    saver.save(state(2), "last")
    saver.wait()
    assert steps(tmp_path) == {"last.pt": 2, "previous.pt": 1}
