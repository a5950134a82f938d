"""A run that stops early is finished: in its files, for a resume and in what it prints."""

import contextlib
import copy
import io
import math
import shutil

import pytest

import main
from tests.end_to_end.processes import load, rows
from tests.helpers import QUIETLY, trained
from tests.utils.loop.test_between_steps import THREE_STEPS, names, results, watched  # noqa: F401 - a fixture
from utils.loop import validation
from utils.record.metrics import Report

VALUES = (50, 60, 60, 55, 99)


def test_the_epoch_that_ends_the_run_is_the_final_one(results):  # noqa: F811
    results += [(top1, 1.0) for top1 in VALUES]
    traval, recorder, _ = watched(*THREE_STEPS, "--epochs", "9", "--early-stopping", "2", "--save-every-epochs", "3")
    traval.fit()
    assert names(recorder) == [("best",), ("best",), ("last",), ("final", "last")]
    assert (traval.progress.epoch, traval.progress.best_epoch) == (4, 2) and traval.progress.is_finished(traval.args)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_run_that_is_cut_and_goes_on_stops_after_the_same_epoch(results, cut):  # noqa: F811
    flags = (*THREE_STEPS, "--epochs", "9", "--early-stopping", "2")
    results += [(top1, 1.0) for top1 in VALUES]
    whole, *_ = watched(*flags)
    whole.fit()
    results[:] = [(top1, 1.0) for top1 in VALUES]
    first, *_ = watched(*flags)
    for epoch in range(cut):
        first.train(epoch)
        first.validation(epoch)
    second, *_ = watched(*flags)
    second.load_state(copy.deepcopy(first.state()))
    second.fit()
    ours = second.progress.state()
    theirs = whole.progress.state()
    assert ours == theirs and ours["epoch"] == 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The current folder of a run of main.py that stopped after epoch 3 of 20, and its output. Only to copy."""
    given = [Report(loss, 50.0, 90.0, 360) for loss in (1.0, 2.0, 3.0)]
    place = tmp_path_factory.mktemp("finished")
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patches, contextlib.redirect_stdout(out):
        patches.setattr(validation, "validate", lambda *_: given.pop(0))
        patches.chdir(place)
        assert main.main([*FLAGS, "--resume", "auto"]) == 0
    return place, out.getvalue().splitlines()


@pytest.fixture
def stopped(finished, tmp_path, monkeypatch):
    """A copy of that run below the current folder, and the run's output."""
    place, lines = finished
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(validation, "validate", lambda *_: pytest.fail("it has stopped"))
    (run,) = tmp_path.glob("runs/digits/fc/*")
    return run, lines


FEW = ["--arch", "fc", "--train-samples", "128"]  # two steps an epoch
FLAGS = [*QUIETLY, *FEW, "--early-stopping", "2", "--best-metric", "loss"]


def test_the_log_says_why_the_run_ended_and_the_last_line_what_the_best_is(stopped):
    run, lines = stopped
    rule = "best.pt has the lowest val_loss; stops after 2 epoch(s) in which val_loss has not improved"
    assert f"Selection: {rule}" in lines
    assert (
        "Stopped early: after 2 epoch(s) in which val_loss has not improved; the best, 1.0000, is that of epoch 1; the "
        "learning-rate schedule was planned for 20 epochs" in lines
    )
    assert "Best epoch 1, with the lowest val_loss, 1.0000: top1 50.00" in lines
    assert lines[-1].startswith("val_top1=50.0000 ")
    assert " val_epoch=3 best_top1=50.0000 best_epoch=1 best_loss=1.0000 run=" in lines[-1]
    assert len(rows(run)) == 3 and load(run, "final.pt")["progress"]["epoch"] == 3
    assert load(run, "best.pt")["progress"]["epoch"] == 1


def test_resume_auto_reports_it_as_finished_and_more_patience_goes_on(stopped, capsys, monkeypatch):
    run, lines = stopped
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main.main([*FLAGS, "--resume", "auto"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert "is finished: 3 epochs, 6 steps; it stopped early after 2 epoch(s)" in first
    assert last.partition(" run=")[0] == lines[-1].partition(" run=")[0]
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    given = [Report(4.0, 50.0, 90.0, 360)]
    monkeypatch.setattr(validation, "validate", lambda *_: given.pop(0))
    more = ["--resume", str(run), "--resume-override", "--early-stopping", "3", "--device", "cpu"]
    assert main.main(more) == 0 and len(rows(run)) == 4


def test_a_run_that_max_steps_cut_waits_anew_for_another_metric_and_never_stopped_early(tmp_path, capsys, monkeypatch):
    given = [Report(loss, 50.0, 90.0, 360) for loss in (1.0, 2.0, 3.0, 4.0, 3.0, 3.5)]
    monkeypatch.setattr(validation, "validate", lambda *_: given.pop(0))
    run = trained(tmp_path, *FEW, "--epochs", 9, "--max-steps", 6)
    override = ["--resume", str(run), "--resume-override", "--device", "cpu"]
    capsys.readouterr()
    assert main.main([*override, "--early-stopping", "1"]) == 0
    said = capsys.readouterr()
    assert "is finished: 3 epochs, 6 steps\n" in said.out and "nothing remains to be trained with" in said.err
    more = ["--max-steps", "999", "--early-stopping", "1", "--early-stopping-metric", "loss"]
    assert main.main([*override, *more]) == 0 and len(rows(run)) == 6, "4 is the first, 3 better, and 3.5 ends it"


def test_other_settings_for_a_run_that_has_stopped_do_not_stand_beside_its_figures(stopped, capsys):
    run, _ = stopped
    told = []
    other = "--resume-override --best-metric top1 --early-stopping-delta 1 --max-val-batches 1"
    for more in ([], other.split()):
        assert main.main(["--resume", str(run), "--device", "cpu", *more]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and "in which val_loss has not improved; the best, 1.0000, is that" in told[0]


def test_a_run_whose_figure_never_was_finite_ends_as_others_do(tmp_path, monkeypatch, capsys):
    given = [Report(math.nan, 0.0, 0.0, 360)] * 2
    monkeypatch.setattr(validation, "validate", lambda *_: given.pop(0))
    flags = [*FLAGS, "--output", str(tmp_path), "--resume", "auto"]
    assert main.main(flags) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    why = (
        "in which val_loss has not improved; it never was finite; the learning-rate schedule was planned for 20 epochs"
    )
    assert f"Stopped early: after 2 epoch(s) {why}" in lines and " best_top1=nan best_epoch=0 " in last
    assert main.main(flags) == 0
    told, again = capsys.readouterr().out.splitlines()
    assert told.endswith(why) and again == last


@pytest.mark.parametrize(
    ("flags", "of", "last"),
    [
        ("--best-metric top1", "another metric", "best_epoch=4 run="),
        ("--max-val-batches 1", "other validation images", "best_epoch=4 best_loss=4.0000 run="),
        ("--tta flip", "other views of the validation images", "best_epoch=4 best_loss=4.0000 run="),
    ],
)
def test_another_metric_other_validation_images_or_views_make_a_resume_forget_the_best(
    stopped, capsys, monkeypatch, flags, of, last
):
    """Otherwise a figure of all images would be the one that figures of a few have to beat."""
    run, _ = stopped
    given = [Report(4.0, 30.0, 90.0, 64)] * 2
    monkeypatch.setattr(validation, "validate", lambda *_: given.pop(0))
    more = ["--resume", str(run), "--resume-override", "--early-stopping", "9", *flags.split()]
    assert main.main([*more, "--device", "cpu", "--max-steps", "8"]) == 0
    output = capsys.readouterr()
    assert f"the best result so far is of {of}, and is forgotten" in output.err
    assert f"val_epoch=4 best_top1=30.0000 {last}" in output.out.splitlines()[-1]
