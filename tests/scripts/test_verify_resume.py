"""verify_resume.py's parts: marks, processes, moments and the comparison."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from scripts import verify_resume
from scripts.verification import processes, runs, training_marks
from scripts.verification.comparison import checkpoint, compare, compare_runs, points, steps, unequal
from scripts.verification.runs import Failure, Timeline, WatchedRun
from tests.end_to_end.forked import Launched
from tests.end_to_end.processes import ROOT
from tests.helpers import wait_for
from utils.config.settings import UserError
from utils.loop.hooks import Hooks

# --------------------------------------------------------------------------------------------- marks


def batch(*indices, pixel=0.5):
    images = torch.full((len(indices), 1, 2, 2), pixel)
    return SimpleNamespace(indices=np.array(indices), images=images, targets=torch.tensor(indices))


def mark(recorder, point, done, *given):
    recorder.mark(point, SimpleNamespace(progress=SimpleNamespace(step=done)), *given)


def test_marks_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "rank0.txt"
    assert training_marks.read(path) == []
    none = training_marks.Mark()
    assert str(none) == none.kind == "before the first step"
    recorder = training_marks.Recorder(tmp_path)
    for point in training_marks.POINTS:
        mark(recorder, point, 11, batch(1))
    marks = training_marks.read(path)
    assert [(place.point, place.done) for place in marks] == [(point, 11) for point in training_marks.POINTS]
    assert training_marks.read(path, latest=True)[-1] == marks[-1]
    beginning, forward, _, *validation = marks
    assert str(beginning) == "at the beginning of step 12"
    assert str(forward) == "in step 12, after a forward pass" and forward.kind == "in training"
    assert {place.kind for place in validation} == {"in validation or saving"}
    saving = forward._replace(saving=True)
    assert str(saving) == "in step 12, after a forward pass, saving" and saving.kind == "in validation or saving"


def test_a_mark_can_be_at_points_of_the_training_alone_and_makes_the_loop_wait_for_no_step():
    assert training_marks.POINTS.keys() <= {point.name for point in fields(Hooks)} - {"after_update"}


def test_a_step_that_is_repeated_within_the_next_one_to_be_explained_leaves_no_mark(tmp_path):
    checksums = []
    for repeated in (False, True):
        folder = tmp_path / str(repeated)
        folder.mkdir()
        recorder = training_marks.Recorder(folder)
        for done in (0, 1):
            mark(recorder, "before_forward", done, batch(done))
        for point in ("before_forward", "after_forward") if repeated else ():
            mark(recorder, point, 0, batch(0))
        mark(recorder, "before_update", 1, None)
        checksums.append([place.crc for place in training_marks.read(folder / "rank0.txt")])
    assert checksums[0] == checksums[1]


def test_a_timeline_counts_a_step_as_done_from_the_first_mark_that_says_so(tmp_path):
    run = WatchedRun(tmp_path, [], 1, starts=1, began=10.0)
    run.latest.mkdir()
    (run.latest / "output.txt").touch()
    os.utime(run.latest / "output.txt", (20, 20))
    places = ("before_forward 0 12", "before_update 0 13", "before_forward 1 14", "before_update 1 15")
    places = (*places, "before_validation_batch 2 17", "after_validation 2 19")
    (run.latest / "rank0.txt").write_text("".join(f"{place}.0 00c0ffee\n" for place in places))
    assert run.timeline() == Timeline(4.0, [0.0, 3.0], 6.0)


def given(folder, *passes):
    """The checksum of a step that has been given ``passes``, and the number of its beginnings."""
    folder.mkdir()
    recorder = training_marks.Recorder(folder)
    mark(recorder, "before_forward", 0, batch(7))  # another step
    for one in passes:
        mark(recorder, "before_forward", 1, one)
    mark(recorder, "before_update", 1, None)
    *_, last = marks = training_marks.read(folder / "rank0.txt")
    return last.crc, [(place.point, place.done) for place in marks].count(("before_forward", 1))


def test_the_checksum_of_a_step_is_of_the_samples_and_images_of_each_of_its_passes(tmp_path):
    several = {
        "same": (batch(1, 2), batch(3)),
        "samples": (batch(1, 2), batch(4)),
        "order": (batch(2, 1), batch(3)),
        "images": (batch(1, 2, pixel=0.25), batch(3)),
        "passes": (batch(1), batch(2, 3)),
        "fewer": (batch(1, 2),),
    }
    found = {name: given(tmp_path / name, *passes) for name, passes in several.items()}
    assert {beginnings for _, beginnings in found.values()} == {1}
    assert len({crc for crc, _ in found.values()}) == len(several)
    assert given(tmp_path / "again", *several["same"]) == found["same"]


def test_a_file_that_is_being_written_says_that_a_kill_met_a_save_and_what_an_earlier_kill_left_does_not(tmp_path):
    folder = tmp_path / "runs" / "digits" / "fc" / "time" / "checkpoints"
    folder.mkdir(parents=True)
    run = WatchedRun(tmp_path, [], 1, began=time.time() - 1)  # the clock of files is coarser
    (folder / "last.pt").touch()
    (folder / ".next.tmp").touch()
    os.utime(folder / ".next.tmp", (run.began - 60, run.began - 60))
    assert not run.is_saving()
    (folder / ".next.tmp").touch()
    assert run.is_saving()


def test_a_line_that_a_kill_cut_is_left_out(tmp_path):
    path = tmp_path / "rank1.txt"
    path.write_text("before_update 1 10.5 00c0ffee\nbefore_forward 2 11.5 00c0ffee\nbefore_update 2 11.75 0ba")
    expected = [("before_update", 1, 10.5, "00c0ffee", False), ("before_forward", 2, 11.5, "00c0ffee", False)]
    assert [tuple(place) for place in training_marks.read(path)] == expected
    assert training_marks.read(path, latest=True)[-1] == expected[-1]


# ---------------------------------------------------------------------------------- a start anew

PROGRAM = """
import sys
from pathlib import Path

name, folder, *files = sys.argv[sys.argv.index("--plugin") + 2 : -2]
run = Path(sys.argv[-1]) / folder
(run / "checkpoints").mkdir(parents=True, exist_ok=True)
for file in files:
    (run / "checkpoints" / file).touch()
print(f"val_top1=50 run={run}")
"""


@pytest.mark.parametrize(
    ("first", "second", "fails"),
    [("a last.pt", "a last.pt", False), ("a .next.tmp", "b last.pt", False), ("a initial.pt", "b last.pt", True)],
    ids=["continued", "killed before its first checkpoint", "begun anew"],
)
def test_a_start_that_leaves_a_run_with_a_checkpoint_for_a_new_one_is_a_failure(
    tmp_path, monkeypatch, first, second, fails
):
    """Both end with the same bits: that a resume finds no run would not show."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(runs, "PROGRAM", tmp_path / "program.py")
    run = WatchedRun(tmp_path / "killed_1", [], 1)
    for flags in (first, second):
        run.flags = ["run", *flags.split()]
        if fails and flags == second:
            with pytest.raises(Failure, match=f"^the killed run began anew, though {run.folder}/runs/a holds a check"):
                run.train()
        else:
            assert run.train() is False


# ----------------------------------------------------------------------------------------- processes


@pytest.fixture
def tree():
    """A process with a child in a session of its own, which has a child too."""
    inner = "import subprocess; subprocess.run(['sleep', '300'])"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", outer])
    wait_for(lambda: len(processes.descendants(process.pid)) >= 2)
    yield process
    processes.kill_tree(process.pid)
    process.wait()


def test_a_tree_is_found_through_sessions_and_killed_at_once(tree):
    found = processes.descendants(tree.pid)
    assert len(found) == 2
    processes.kill_tree(tree.pid)
    assert tree.wait(10) == -signal.SIGKILL
    assert not found & processes.processes().keys()


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
    assert len(drawn) == kills and sum(step == 0 for step, _ in drawn) == round(0.15 * kills)
    assert all(0 <= delay <= LONG.start_up for step, delay in drawn if step == 0)
    moments = [STEPS[step - 1] + delay for step, delay in drawn if step > 0]
    assert moments == sorted(moments) and all(0 <= moment <= 400 for moment in moments)
    if kills >= 20:
        assert moments[0] < 60 and moments[-1] > 340
        assert sum(step > 0 and step % 10 == 0 for step, _ in drawn) > 0.3 * kills, "half of the time is there"


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
        (torch.tensor([1.0, np.nan]), torch.tensor([1.0, 2.0])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.ones(1).bfloat16(), torch.zeros(1).bfloat16()),
    ],
)
def test_entries_that_differ_in_one_bit_are_not_equal(value, other):
    assert unequal(value, other)
    assert not unequal(value, value)


def test_a_nan_equals_the_same_nan():
    assert not unequal(float("nan"), float("nan"))
    assert not unequal(torch.tensor([np.nan]), torch.tensor([np.nan]))


def test_a_difference_tells_how_many_numbers_and_by_how_much():
    assert unequal(torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 2.5, 3])) == "1 of 3 numbers, by up to 0.5"


def test_entries_that_only_one_run_has_are_differences():
    wrong = ["a is missing in the killed run", "c is only in the killed run"]
    assert compare({"a": 1, "b": 2}, {"b": 2, "c": 3}) == (3, wrong)
    assert compare({"a": 1, "b": 2}, {"a": 1, "b": 2}, {"b": 2, "c": 3}) == (2 + 3, wrong)


def test_a_point_that_tensorboard_shows_twice_is_seen(tmp_path):
    for _ in range(2):
        board = SummaryWriter(str(tmp_path))
        for step in (1, 2):
            board.add_scalar("Loss/Test", 0.5 * step, step)
            board.add_scalar("Speed/images_per_second", time.time(), step)
        board.close()
    assert points(tmp_path) == {"Loss/Test at step 1": [0.5, 0.5], "Loss/Test at step 2": [1.0, 1.0]}


def test_a_file_that_only_one_run_has_is_a_difference(tmp_path):
    straight, killed = (WatchedRun(tmp_path / name, [], 1, run_folder=tmp_path / name) for name in ("a", "b"))
    for run in (straight, killed):
        run.run_folder.mkdir()
    assert compare_runs(straight, [killed]) == {"TensorBoard": (0, []), "samples and images": (0, [])}
    (killed.run_folder / "metrics.csv").write_text("epoch,seconds\n1,0.5\n")
    assert compare_runs(straight, [killed])["metrics.csv"] == (1, ["row 1 epoch is only in the killed run"])
    missing = (2, 2 * ["row 1 epoch is missing in the killed run"])
    assert compare_runs(killed, [straight, straight])["metrics.csv"] == missing


def test_every_part_of_a_checkpoint_is_an_entry_but_clocks_and_what_may_differ(tmp_path):
    state = {
        "contents": [],
        "model": {"0.weight": torch.ones(2)},
        "optimizer": [{"param_groups": [{"betas": (0.9, 0.99)}], "state": {}}],
        "progress": {"step": 3, "epoch_seconds": 1.5},
        "settings": {"seed": 1, "workers": 2},
    }
    torch.save(state, tmp_path / "final.pt")
    found = checkpoint(tmp_path / "final.pt", {"workers"})
    expected = {
        "model/0.weight": state["model"]["0.weight"],
        "optimizer/0/param_groups/0/betas/0": 0.9,
        "optimizer/0/param_groups/0/betas/1": 0.99,
        "optimizer/0/state": {},
        "progress/step": 3,
        "settings/seed": 1,
    }
    assert list(found) == list(expected) and compare(expected, found) == (2 + 5, [])


def write_steps(run, start, rank, *lines):
    folder = run.folder / f"start_{start:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    marks = [f"before_forward {step - 1} 1.0 00000000\nbefore_update {step - 1} 1.5 {crc:08x}\n" for step, crc in lines]
    (folder / f"rank{rank}.txt").write_text("".join(marks))


def test_every_execution_of_a_step_on_every_rank_must_have_the_same_samples_and_images(tmp_path):
    straight = WatchedRun(tmp_path / "a", [], 2)
    killed = WatchedRun(tmp_path / "b", [], 2)
    for rank in (0, 1):
        write_steps(straight, 1, rank, (1, 7), (2, 8), (3, 9))
    write_steps(killed, 1, 0, (1, 7), (2, 8))
    write_steps(killed, 2, 0, (2, 8), (3, 9))
    write_steps(killed, 1, 1, (1, 7), (2, 0xBAD))
    write_steps(killed, 2, 1, (2, 8))
    wrong = ["step 2 on rank 1: other samples or images", "step 3 on rank 1 is missing in the killed run"]
    assert compare(steps(straight.folder), steps(killed.folder)) == (7 + 1, wrong), "executions, and the missing one"
    write_steps(killed, 1, 1, (1, 7), (2, 8))
    write_steps(killed, 2, 1, (2, 8), (3, 10))
    assert compare(steps(straight.folder), steps(killed.folder))[1] == ["step 3 on rank 1: other samples or images"]


# --------------------------------------------------------------------------------------------- flags


def test_flags_get_what_the_comparison_needs_and_keep_what_they_say():
    own, flags = verify_resume.read_flags(["--arch", "fc"])
    assert flags == ["--arch", "fc", "--deterministic", "--save-every-steps", "10", "--no-progress"]
    assert (own.kills, own.ranks) == (20, 1)
    own, flags = verify_resume.read_flags(["--deterministic", "--save-every-steps", "3", "--no-progress"])
    assert flags == ["--deterministic", "--save-every-steps", "3", "--no-progress"]


def test_a_recipe_s_own_files_are_named_beside_the_tool_s(tmp_path):
    (tmp_path / "mine.py").touch()
    (tmp_path / "recipe.yaml").write_text("plugin: mine.py\n")
    _, flags = verify_resume.read_flags(["--config", str(tmp_path / "recipe.yaml")])
    assert flags[-2:] == ["--plugin", str(tmp_path / "mine.py")]
    _, flags = verify_resume.read_flags(["--plugin", str(tmp_path / "mine.py")])
    assert flags.count("--plugin") == 1


def test_a_folder_to_keep_must_be_empty(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--keep .*: is not empty"), verify_resume.folder_of(str(tmp_path)):
        pass


def test_a_training_that_fails_by_itself_is_a_mistake_that_shows_its_last_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(Popen=Launched, DEVNULL=None))
    flags = ["--dataname", "folder", "--datapath", str(tmp_path / "nothing"), "--device", "cpu"]
    with pytest.raises(UserError, match="ended by itself with exit code 2") as caught:
        verify_resume.main(flags)
    assert "--datapath" in caught.value.mistakes[-1]


def test_each_round_of_soak_sh_is_a_training_that_the_tool_takes():
    listed = "source <(sed -n '/^timm=/,/^)/p' scripts/lab/soak.sh) && printf '%s\\n' \"${rounds[@]}\""
    rounds = subprocess.run(["bash", "-c", listed], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    taken = [verify_resume.read_flags(["--device", "cpu", *line.split()]) for line in rounds.splitlines()]
    assert {own.ranks for own, _ in taken} == {1, 2, 3}
