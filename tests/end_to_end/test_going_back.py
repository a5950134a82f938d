"""A run that goes on from an earlier checkpoint, or that another process has continued, stays one run."""

import os
import shutil

import numpy as np
import pytest
import torch
import yaml

import main
from tests.end_to_end.processes import differences, load, rows
from tests.faults.small_run import FLAGS, begin, copy_of, told
from tests.helpers import trained
from utils.checkpoint import checkpoint
from utils.checkpoint.resume import ResumePoint, take_as_last
from utils.config.settings import UserError
from utils.loop.hooks import Hooks
from utils.run import Run
from utils.runtime.distributed import Distributed

CPU = FLAGS[:2]
STEPS = 23  # of an epoch


@pytest.fixture(scope="module")
def whole(small_run):
    return small_run()


@pytest.fixture
def run(whole, tmp_path, monkeypatch):
    return copy_of(whole, tmp_path, monkeypatch)


def steps_of(run):
    return len(np.load(run / "metrics.npz")["step"])


def killed_in_its_first_step(*flags, after=0):
    def kill(traval, *_):
        if traval.progress.step >= after:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        main.main([*CPU, *map(str, flags)], hooks=Hooks(before_forward=[kill]))


def test_a_run_that_is_killed_after_it_went_back_goes_on_from_there(whole, run, capsys):
    killed_in_its_first_step("--resume", run / "checkpoints/initial.pt")
    assert load(run, "last.pt")["progress"]["step"] == 0
    for name in ("previous", "final"):
        assert load(run, f"abandoned_{name}.pt")["progress"]["step"] == 3 * STEPS
        assert not (run / f"checkpoints/{name}.pt").exists()
    capsys.readouterr()
    assert told(capsys, (*FLAGS, "--resume", "auto")) == (0, [])
    assert [row["epoch"] for row in rows(run)] == ["1", "2", "3"] and steps_of(run) == 3 * STEPS
    assert differences(whole, run) == []


def test_going_back_sets_aside_checkpoints_of_later_steps_and_says_so(run, capsys):
    code, lines = told(capsys, (*CPU, "--resume", run / "checkpoints/initial.pt", "--max-steps", STEPS))
    assert code == 0 and [line.partition(" is of step ")[0].rpartition("/")[2] for line in lines] == [
        "best.pt",
        "previous.pt",
        "final.pt",
    ]
    assert lines[0].endswith("from which the run goes back to step 0; it is kept as abandoned_best.pt")
    assert load(run, "best.pt")["progress"]["step"] == load(run, "final.pt")["progress"]["step"] == STEPS


def test_what_was_set_aside_is_kept_and_goes_on_in_a_folder_of_its_own(run, capsys):
    for _ in range(2):
        assert told(capsys, (*CPU, "--resume", run / "checkpoints/initial.pt", "--max-steps", STEPS))[0] == 0
    assert load(run, "abandoned_final.pt")["progress"]["step"] == 3 * STEPS
    assert load(run, "abandoned_final.2.pt")["progress"]["step"] == STEPS
    before = rows(run)
    assert told(capsys, (*CPU, "--resume", run / "checkpoints/abandoned_final.2.pt"))[0] == 0
    (other,) = {*run.parent.iterdir()} - {run}
    assert rows(run) == before and steps_of(other) == 2 * STEPS


def test_a_best_epoch_that_was_saved_after_the_last_checkpoint_is_gone_on_from(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    killed_in_its_first_step(*FLAGS[2:], "--save-every-epochs", 5, after=2 * STEPS)
    (run,) = (tmp_path / "runs/digits/fc").iterdir()
    assert not (run / "checkpoints/last.pt").exists() and load(run, "best.pt")["progress"]["epoch"] == 2
    shutil.copyfile(run / "checkpoints/initial.pt", run / "checkpoints/last.pt")
    (run / "checkpoints/manifest.json").unlink()
    os.utime(run / "checkpoints/best.pt", (0, 0))  # a copy without times
    assert told(capsys, (*CPU, "--resume", run))[0] == 0
    assert f"Continuing {run / 'checkpoints/best.pt'} after epoch 2, step {2 * STEPS}" in (run / "log.txt").read_text()
    assert differences(whole, run) == []


def test_a_run_that_went_back_never_goes_on_from_what_it_abandoned(whole, run):
    """Not even where best.pt is newer than last.pt, so that any checkpoint may be the newest."""
    killed_in_its_first_step("--resume", run / "checkpoints/initial.pt", "--save-every-epochs", 5, after=STEPS)
    assert load(run, "last.pt")["progress"]["step"] == 0 and load(run, "best.pt")["progress"]["epoch"] == 1
    assert main.main([*CPU, "--resume", str(run)]) == 0
    assert f"Continuing {run / 'checkpoints/best.pt'} after epoch 1" in (run / "log.txt").read_text()
    assert differences(whole, run) == []


def test_a_best_epoch_whose_checkpoint_is_gone_is_told_and_one_that_is_there_is_kept(run, tmp_path):
    assert load(run, "best.pt")["progress"]["best_epoch"] == 3
    shutil.copyfile(run / "checkpoints/previous.pt", tmp_path / "loose.pt")  # after epoch 2, the best until then
    line = ("--resume", tmp_path / "loose.pt", "--max-steps", 2 * STEPS + 3)
    assert load(trained(tmp_path / "kept", *line), "best.pt")["progress"]["epoch"] == 2
    state = load(run, "previous.pt")
    state["progress"]["best_epoch"] = 1
    torch.save(state, tmp_path / "loose.pt")
    log = (trained(tmp_path / "gone", *line) / "log.txt").read_text()
    assert "warning: the checkpoint of epoch 1, the best so far, is not in" in log


def test_going_back_behind_an_override_takes_its_settings_back(run, capsys):
    assert told(capsys, (*CPU, "--resume", run, "--resume-override", "--lr", 0.01, "--epochs", 4))[0] == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["lr"] == 0.01
    assert told(capsys, (*CPU, "--resume", run / "checkpoints/initial.pt", "--max-steps", STEPS))[0] == 0
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["lr"], config["epochs"]) == (0.1, 3) and float(rows(run)[0]["lr"]) > 0.05
    assert yaml.safe_load((run / "config.2.yaml").read_text())["lr"] == 0.01
    assert not (run / "config.3.yaml").exists()


def test_a_plain_resume_leaves_the_settings_file_alone(run, capsys):
    before = (run / "config.yaml").read_bytes()
    assert told(capsys, (*CPU, "--resume", run / "checkpoints/initial.pt", "--max-steps", 2))[0] == 0
    assert (run / "config.yaml").read_bytes() == before and not (run / "config.1.yaml").exists()


def test_a_process_that_comes_late_leaves_the_curves_of_the_other(run, capsys, monkeypatch):
    assert told(capsys, (*CPU, "--resume", run / "checkpoints/initial.pt", "--max-steps", STEPS))[0] == 0
    open_folder = Run.open_folder

    def after_the_other(late):
        monkeypatch.setattr(Run, "open_folder", open_folder)
        assert main.main([*CPU, "--resume", str(run)]) == 0
        open_folder(late)

    monkeypatch.setattr(Run, "open_folder", after_the_other)
    code, (line,) = told(capsys, (*CPU, "--resume", run))
    assert code == 2 and line.endswith(
        "last.pt: another process has continued the run; the same command goes on from there"
    )
    assert steps_of(run) == 3 * STEPS and len(rows(run)) == 3
    assert told(capsys, (*CPU, "--resume", run)) == (0, [])


def test_a_resume_has_the_precision_of_products_that_the_run_began_with(tmp_path, monkeypatch):
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    run = begin(tmp_path, "--max-steps", 3, "--tf32", "--save-every-steps", 2)
    in_run = []
    leave = Distributed.__exit__

    def leaving(self, *error):
        in_run.append([backend.allow_tf32 for backend in backends])
        leave(self, *error)

    monkeypatch.setattr(Distributed, "__exit__", leaving)
    for flags in (["--resume", str(run), "--max-steps", "5"], ["--evaluate", "--resume", str(run)]):
        assert main.main([*CPU, *flags]) == 0
    assert in_run == [[True, True]] * 2
    assert [backend.allow_tf32 for backend in backends] == before, "what else the process computes is as it was"
    assert main.main([*CPU, "--evaluate", "--resume", str(run), "--deterministic"]) == 0
    assert not (torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic)


def test_a_checkpoint_that_was_replaced_while_it_was_read_is_not_gone_on_from(run):
    before = checkpoint.load(run / "checkpoints/initial.pt")
    point = ResumePoint.of(run / "checkpoints/last.pt", before, run)
    with pytest.raises(UserError, match="another process has continued the run"):
        take_as_last(point, pytest.fail)


def test_an_epoch_without_a_row_is_no_lost_record(tmp_path, capsys):
    run = begin(tmp_path, "--epochs", 6, "--max-steps", STEPS + 7)
    line = (*CPU, "--resume", run, "--resume-override", "--global-batch-size", 32)
    told(capsys, (*line, "--max-steps", STEPS + 7 + 50))
    told(capsys, (*CPU, "--resume", run, "--max-steps", STEPS + 7 + 60))
    assert "stays lost" not in (run / "log.txt").read_text()
    (run / "metrics.csv").unlink()
    told(capsys, (*CPU, "--resume", run, "--max-steps", STEPS + 7 + 64))
    assert "stays lost" in (run / "log.txt").read_text()
