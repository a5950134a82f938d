"""A run's progress in checkpoints of this and of earlier versions."""

from __future__ import annotations

import dataclasses

import pytest

from tests.utils.checkpoint.test_checkpoint import state, written
from utils.checkpoint import checkpoint
from utils.checkpoint.progress import Progress
from utils.config.settings import UserError


@dataclasses.dataclass
class NewerProgress(Progress):
    """What a later version may add."""

    largest_batch: int = 7


def saved(path, progress):
    return written(path, state() | {"progress": progress})


def test_a_checkpoint_from_before_the_newest_field_resumes_with_its_default(tmp_path, monkeypatch):
    path = saved(tmp_path / "last.pt", Progress(epoch=2, step=20, best_top1=50.0).state())
    monkeypatch.setattr(checkpoint, "Progress", NewerProgress)
    progress = NewerProgress.from_state(checkpoint.load_run(path)["progress"])
    assert progress == NewerProgress(epoch=2, step=20, best_top1=50.0, largest_batch=7)


def test_a_newer_field_is_checked_where_a_checkpoint_holds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "Progress", NewerProgress)
    path = saved(tmp_path / "last.pt", NewerProgress(largest_batch=9).state())
    assert NewerProgress.from_state(checkpoint.load_run(path)["progress"]).largest_batch == 9
    with pytest.raises(UserError, match=r"progress/largest_batch is -1"):
        checkpoint.load_run(saved(path, NewerProgress(largest_batch=-1).state()))


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(Progress) if item.metadata])
def test_a_field_that_every_checkpoint_of_the_format_holds_must_be_there(tmp_path, name):
    state = Progress().state()
    del state[name]
    with pytest.raises(UserError, match=f"progress lacks {name}"):
        checkpoint.load_run(saved(tmp_path / "last.pt", state))


def test_a_field_of_a_later_version_is_refused(tmp_path):
    with pytest.raises(UserError, match="progress has largest_batch, unknown to this version"):
        checkpoint.load_run(saved(tmp_path / "last.pt", NewerProgress().state()))
