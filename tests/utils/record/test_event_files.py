"""TensorBoard files against those of torch's own SummaryWriter."""

import os
import threading
import time
from contextlib import closing

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter, summary

from tests.helpers import points_of
from utils.record.event_files import EventFile
from utils.record.writer import Writer


def contents(folder):
    return {place: value.SerializeToString() for place, value in points_of(folder)}


def test_points_are_those_of_torchs_summary_writer(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(9, 4)
    images = torch.rand(2, 3, 32, 32)
    (tmp_path / "own").mkdir()
    writer = Writer(tmp_path / "own", progress=False)
    writer.text("Settings", "seed: 0\nepochs: 2")
    writer.weights(model)
    writer.images("First_Training_Batch", images)
    writer.scalars({"Optim/lr": 0.1, "AMP/scale": 1024}, 3)
    writer.close()
    with SummaryWriter(str(tmp_path / "torch")) as board:
        board.add_text("Settings", "    seed: 0\n    epochs: 2", 0)
        for name, parameter in model.named_parameters():
            board.add_histogram(f"Initial_Weights/{name}", parameter, 0)
        board.add_images("First_Training_Batch", torch.nn.functional.pad(images, (1, 1, 1, 1), value=0.5), 0)
        board.add_scalar("Optim/lr", 0.1, 3)
        board.add_scalar("AMP/scale", 1024, 3)
    assert contents(tmp_path / "own") == contents(tmp_path / "torch")


@pytest.mark.parametrize("step", [0, 3])
def test_a_picture_is_there_once_whether_a_run_was_stopped_before_it_or_after_it(tmp_path, step):
    """As by a kill right after the first checkpoint."""
    first = torch.zeros(2, 1, 8, 8)
    second = torch.ones(2, 1, 8, 8)
    Writer(tmp_path, progress=False).close()
    pictures = []
    for images in (first, second):
        writer = Writer(tmp_path, progress=False, resumed=(0, step))
        writer.images("First_Training_Batch", images)
        writer.close()
        pictures.append(contents(tmp_path))
        assert len(points_of(tmp_path)) == 1
    assert list(pictures[0]) == [("First_Training_Batch", 0)] and pictures[1] == pictures[0]


def test_a_later_file_sorts_behind_an_earlier_one_of_any_version(tmp_path):
    names = [SummaryWriter(str(tmp_path)).file_writer.event_writer._file_name]
    for _ in range(2):
        EventFile(tmp_path).close()
    names += sorted(str(path) for path in tmp_path.iterdir() if str(path) not in names)
    assert sorted(names) == names and len(names) == 3


def test_points_stay_where_an_earlier_file_has_a_later_time_in_its_name(tmp_path):
    """A clock was set back, or the other machine's is ahead."""
    for name in (f"{time.time_ns() + 10**12}.there.1", f"{int(time.time()) + 10**4}.there.2.0", "mark.there"):
        (tmp_path / f"events.out.tfevents.{name}").touch()
    writer = Writer(tmp_path, progress=False)
    (own,) = [path for path in tmp_path.glob("events.*") if path.stat().st_size]
    assert own.name == max(path.name for path in tmp_path.glob("events.*[0-9]")), "readers take them in this order"
    own.with_name("events.out.tfevents.9999999999999999999.there.3").touch()  # by now another writes, too
    writer.table_row({"lr": 0.1})
    writer.charts({"Charts": {"Loss": ["Multiline", ["Loss/Training"]]}})
    writer.table_row({"lr": 0.2})
    writer.scalars({"Optim/lr": 0.2}, 3)
    writer.close()
    assert ("Optim/lr", 3) in contents(tmp_path)


def test_a_full_disk_raises_where_a_point_is_written_and_no_thread_reports_it(tmp_path, monkeypatch):
    reported = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    events = EventFile(tmp_path)
    events._records._writer.close()
    events._records._writer = open("/dev/full", "wb")  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        events.add(summary.scalar("Optim/lr", 0.1), 1)
    assert reported == []


@pytest.mark.parametrize("lost", ["nothing", "the end", "all", "all, and metrics.csv"])
def test_a_continued_run_names_the_points_that_are_lost(lost, tmp_path, capsys):
    with closing(Writer(tmp_path, progress=False, resumed=(0, 0))) as writer:
        writer.text("Settings", "seed: 0")
        for epoch in (1, 2, 3):
            if epoch == 2:
                whole = writer._events.path.stat().st_size
            writer.scalars({"Loss/Training": 1.0}, 10 * epoch)
            writer.epoch({"epoch": epoch, "step": 10 * epoch, "seconds": 1.0})
    (path,) = tmp_path.glob("events.*")
    if lost == "the end":
        os.truncate(path, whole + 5)
    elif lost != "nothing":
        path.unlink()
    if "metrics" in lost:
        (tmp_path / "metrics.csv").unlink()
    capsys.readouterr()
    Writer(tmp_path, progress=False, resumed=(3, 30)).close()
    warnings = [line for line in capsys.readouterr().out.splitlines() if "event files" in line]
    which = {"the end": "epochs 2, 3", "all": "epochs 1, 2, 3", "all, and metrics.csv": "the first 30 steps"}
    said = f"warning: {tmp_path}: TensorBoard's event files lack the points of {which.get(lost)}; they stay lost"
    assert warnings == ([said] if lost in which else [])
