"""verify_resume.py's parts: faults, marks, processes, moments and the comparison."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from scripts import verify_resume
from scripts.verification import processes, records
from scripts.verification.comparison import compare, points, steps, unequal
from scripts.verification.runs import Timeline, WatchedRun
from tests.faults.planted import Fault
from tests.faults.points import wrap
from utils.config.settings import UserError

# -------------------------------------------------------------------------------------------- faults


def strikes(fault, steps, **details):
    """The steps at which a fault that asks for a NaN strikes."""
    return [step for step in steps if fault.reached("forward", step, details)]


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [("", [1]), ("step=3", [3]), ("times=2", [1, 2]), ("step=3 times=2", [3, 4]), ("step=9", [])],
)
def test_a_fault_strikes_at_its_step_as_often_as_it_says(conditions, expected):
    assert strikes(Fault.from_text(f"nan forward {conditions}"), range(1, 7), **{"pass": 1}) == expected


def test_a_fault_strikes_only_where_its_other_conditions_hold_too():
    fault = Fault.from_text("nan forward pass=2 rank=1 times=9")
    assert strikes(fault, [1, 2], **{"pass": 1}) == []
    assert strikes(fault, [1, 2], **{"pass": 2}) == [1, 2]
    assert (fault.concerns(0), fault.concerns(1)) == (False, True)


def test_a_step_that_is_repeated_has_the_same_nan_again_and_the_same_signal_only_once():
    assert strikes(Fault.from_text("nan forward step=2"), [1, 2, 2, 3]) == [2, 2]
    fault = Fault.from_text("usr1 update step=2")
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        for step in (1, 2, 2, 3):
            fault.reached("update", step, {})
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]


def test_a_fault_of_a_save_is_on_the_rank_that_saves():
    assert Fault.from_text("enospc write").concerns(0)
    assert not Fault.from_text("enospc write").concerns(1)


def test_a_full_disk_is_the_error_that_the_system_would_raise():
    with pytest.raises(OSError, match="No space left on device"):
        Fault.from_text("enospc write step=4").reached("write", 4, {})


def test_a_hook_on_a_method_that_is_gone_fails():
    with pytest.raises(AttributeError, match="has no no_such_method any more"):
        wrap(Fault, "no_such_method", lambda original: original)


# --------------------------------------------------------------------------------------------- marks


def test_marks_are_read_as_they_were_written(tmp_path):
    assert records.place(tmp_path) == records.Position()
    marks = records.Marks(tmp_path / "rank0.now")
    assert records.place(tmp_path) == records.Position()
    marks.set("forward", 12)
    place = records.place(tmp_path)
    assert str(place) == "in step 12, after a forward pass" and place.kind == "in training"
    assert (place.has_done(11), place.has_done(12)) == (True, False)
    saving = place._replace(saving=True)
    assert str(saving) == "in step 12, after a forward pass, saving" and saving.kind == "in validation or saving"
    marks.set("after_step", 12)
    assert records.place(tmp_path).has_done(12)
    for point in records.POINTS:
        marks.set(point, 7)
        place = records.place(tmp_path)
        assert (place.point, place.step, "{" in str(place)) == (point, 7, False)


def test_a_file_that_is_being_written_says_that_a_kill_met_a_save_and_what_an_earlier_kill_left_does_not(tmp_path):
    folder = tmp_path / "runs" / "digits" / "fc" / "time" / "checkpoints"
    folder.mkdir(parents=True)
    run = WatchedRun(tmp_path, [], 1)
    began = time.time() - 1  # the clock of files is coarser
    (folder / "last.pt").touch()
    (folder / ".last.tmp").touch()
    os.utime(folder / ".last.tmp", (began - 60, began - 60))
    assert not run.is_saving(began)
    (folder / ".last.tmp").touch()
    assert run.is_saving(began)


def test_a_line_that_a_kill_cut_is_left_out_and_the_next_start_goes_on_below_it(tmp_path):
    path = tmp_path / "rank1.txt"
    path.write_text("\n1 10.5 00c0ffee 3,4;5 end\n2 11.5 00c0ffee 6,\n3 12.5 0badcafe 7 end\n")
    expected = [(1, 10.5, "00c0ffee 3,4;5"), (3, 12.5, "0badcafe 7")]
    assert [tuple(line) for line in records.lines(tmp_path, 1)] == expected
    assert records.lines(tmp_path, 0) == []


# ----------------------------------------------------------------------------------------- processes


@pytest.fixture
def tree():
    """A process with a child in a session of its own, which has a child too."""
    inner = "import subprocess; subprocess.run(['sleep', '300'])"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", outer])
    deadline = time.monotonic() + 30
    while len(processes.descendants(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    yield process
    processes.kill_tree(process.pid)
    process.wait()


def test_a_tree_is_found_through_sessions_and_killed_at_once(tree):
    found = processes.descendants(tree.pid)
    assert len(found) == 2
    processes.kill_tree(tree.pid)
    assert tree.wait(10) == -signal.SIGKILL
    assert not found & processes.processes().keys()


def test_a_tree_can_be_killed_but_for_one(tree):
    spared = min(processes.descendants(tree.pid), key=lambda pid: len(processes.descendants(pid)))
    processes.kill_tree(tree.pid, sparing=[spared])
    assert tree.wait(10) == -signal.SIGKILL
    assert spared in processes.processes()
    processes.kill_tree(spared)


def test_ps_tells_the_same_as_proc(tree, monkeypatch):
    expected = processes.processes()
    monkeypatch.setattr(processes.Path, "glob", lambda self, pattern: iter(()))
    found = processes.processes()
    for pid in (os.getpid(), tree.pid):
        assert found[pid] == expected[pid]


# ------------------------------------------------------------------------------------------- moments

STEPS = [float(step + 9 * (step // 10)) for step in range(200)]  # before every tenth step ten seconds of validation
LONG = Timeline(4.0, STEPS, 400.0)


@pytest.mark.parametrize("kills", [1, 3, 20, 500])
def test_moments_are_spread_over_the_run_in_its_order_and_within_its_time(kills):
    drawn = list(LONG.moments(kills, random.Random(1)))
    assert len(drawn) == kills and sum(step is None for step, _ in drawn) == round(0.15 * kills)
    assert all(0 <= delay <= LONG.start_up for step, delay in drawn if step is None)
    moments = [STEPS[step - 1] + delay for step, delay in drawn if step is not None]
    assert moments == sorted(moments) and all(0 <= moment <= 400 for moment in moments)
    if kills >= 20:
        assert moments[0] < 60 and moments[-1] > 340
        assert sum(step is not None and step % 10 == 0 for step, _ in drawn) > 0.3 * kills, "half of the time is there"


# ---------------------------------------------------------------------------------------- comparison


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, 1.0),
        (0.0, -0.0),
        (True, 1),
        ("a", "b"),
        (None, 0),
        (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2).double()),
        (torch.ones(2), torch.ones(2) + 2**-23),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (np.array([1.0, np.nan]), np.array([1.0, 2.0])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.ones(1).bfloat16(), torch.zeros(1).bfloat16()),
    ],
)
def test_entries_that_differ_in_one_bit_are_not_equal(value, other):
    assert unequal(value, other)
    assert not unequal(value, value)


def test_a_nan_equals_the_same_nan():
    assert not unequal(float("nan"), float("nan"))
    assert not unequal(np.array([np.nan]), np.array([np.nan]))


def test_a_difference_tells_how_many_numbers_and_by_how_much():
    assert unequal(torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 2.5, 3])) == "1 of 3 numbers, by up to 0.5"


def test_entries_that_only_one_run_has_are_differences():
    wrong = ["a is missing in the killed run", "c is only in the killed run"]
    assert compare({"a": 1, "b": 2}, {"b": 2, "c": 3}) == (3, wrong)


def test_a_point_that_tensorboard_shows_twice_is_seen(tmp_path):
    for _ in range(2):
        board = SummaryWriter(str(tmp_path))
        for step in (1, 2):
            board.add_scalar("Loss/Test", 0.5 * step, step)
            board.add_scalar("Speed/images_per_second", time.time(), step)
        board.close()
    assert points(tmp_path) == {"Loss/Test at step 1": [0.5, 0.5], "Loss/Test at step 2": [1.0, 1.0]}


def write_steps(folder, rank, *lines):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}.txt").write_text("".join(f"{step} 1.0 {crc:08x} {ids} end\n" for step, crc, ids in lines))


def test_every_execution_of_a_step_on_every_rank_must_have_the_same_samples_and_images(tmp_path):
    straight = WatchedRun(tmp_path / "a", [], 2)
    killed = WatchedRun(tmp_path / "b", [], 2)
    for rank in (0, 1):
        write_steps(straight.records, rank, (1, 7, "1,2"), (2, 8, "3;4"), (3, 9, "5"))
    write_steps(killed.records, 0, (1, 7, "1,2"), (2, 8, "3;4"), (2, 8, "3;4"), (3, 9, "5"))
    write_steps(killed.records, 1, (1, 7, "1,2"), (2, 8, "4;3"), (2, 8, "3;4"))
    wrong = ["step 2 on rank 1: other samples or images", "step 3 on rank 1 is missing in the killed run"]
    assert compare(steps(straight), steps(killed)) == (7 + 1, wrong), "executions, and the one that is missing"
    write_steps(killed.records, 1, (1, 7, "1,2"), (2, 8, "3;4"), (3, 10, "5"))
    assert compare(steps(straight), steps(killed))[1] == ["step 3 on rank 1: other samples or images"]


# --------------------------------------------------------------------------------------------- flags


def test_flags_get_what_the_comparison_needs_and_keep_what_they_say():
    own, flags = verify_resume.read_flags(["--arch", "fc"])
    assert flags == ["--arch", "fc", "--deterministic", "--save-every-steps", "10", "--no-progress"]
    assert (own.kills, own.ranks) == (20, 1)
    own, flags = verify_resume.read_flags(["--deterministic", "--save-every-steps", "3", "--no-progress"])
    assert flags == ["--deterministic", "--save-every-steps", "3", "--no-progress"]


def test_a_folder_to_keep_must_be_empty(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--keep .*: is not empty"), verify_resume.folder_of(str(tmp_path)):
        pass


def test_a_training_that_fails_by_itself_is_a_mistake_that_shows_its_last_lines(tmp_path):
    flags = ["--dataname", "folder", "--datapath", str(tmp_path / "nothing"), "--device", "cpu"]
    with pytest.raises(UserError, match="ended by itself with exit code 2") as caught:
        verify_resume.main(flags)
    assert "--datapath" in caught.value.mistakes[-1]
