"""An epoch that ended without a validation gets one once nothing follows it: in its row, and as a whole epoch."""

import shutil
import time

import pytest

import main
from tests.end_to_end.processes import load, points
from tests.helpers import QUIETLY, csv_rows, trained
from utils.loop import validation
from utils.record.metrics import Report

FLAGS = [*QUIETLY, "--arch", "fc", "--amp", "off", "--train-samples", "320"]
STEPS = 5  # of an epoch


def instead(monkeypatch, given):
    """Validations have these top-1 instead, one after the other, and take some milliseconds."""

    def validate(*_):
        time.sleep(0.003)
        return Report(1.0, given.pop(0), 90.0, 360)

    monkeypatch.setattr(validation, "validate", validate)
    return given


@pytest.fixture
def validate(monkeypatch):
    return instead(monkeypatch, [])


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        instead(patch, [50.0, 40.0])
        return trained(tmp_path_factory.mktemp("runs"), *FLAGS, "--epochs", 5, "--val-every-epochs", 3)


@pytest.fixture
def run(original, tmp_path):
    """The folder of a run of 5 epochs, of which the third and the last are validated; top-1 is 50 and 40."""
    return shutil.copytree(original, tmp_path / "run")


def table(run):
    return csv_rows(run / "metrics.csv")


def training(rows):
    """What the rows say of the training."""
    return [{name: row[name] for name in row if not name.startswith("val_") and name != "seconds"} for row in rows]


def test_its_row_is_completed_and_it_may_be_the_best(run, validate, capsys):
    before = table(run)
    cut = ["--resume", str(run / "checkpoints" / "previous.pt"), "--max-steps", str(4 * STEPS)]
    validate[:] = [60.0]
    assert main.main([*FLAGS, *cut]) == 0
    assert " val_epoch=4 best_top1=60.0000 best_epoch=4 " in capsys.readouterr().out.splitlines()[-1]
    rows = table(run)
    assert [row["val_top1"] for row in rows] == ["", "", "50.0", "60.0"] and training(rows) == training(before[:4])
    assert float(rows[3]["seconds"]) > float(before[3]["seconds"])
    assert points(run)["Top1/Test"] == [(3 * STEPS, "50.0"), (4 * STEPS, "60.0")]
    progress = load(run, "best.pt")["progress"]
    assert (progress["epoch"], progress["step_in_epoch"], progress["step"]) == (4, 0, 4 * STEPS)
    assert load(run, "final.pt")["progress"] == progress

    validate[:] = [45.0]
    assert main.main([*FLAGS, "--resume", str(run)]) == 0
    assert " val_epoch=5 best_top1=60.0000 best_epoch=4 " in capsys.readouterr().out.splitlines()[-1]
    again = table(run)
    assert again[:4] == rows and [row["val_top1"] for row in again[4:]] == ["45.0"]


@pytest.mark.parametrize(("top1", "epochs"), [(45.0, 4), (60.0, 5)])
def test_early_stopping_goes_by_it(run, validate, capsys, top1, epochs):
    """Less patience ends the run after epoch 4 unless that turns out to be better."""
    before = table(run)
    changed = ["--resume", str(run / "checkpoints" / "previous.pt"), "--resume-override", "--early-stopping", "1"]
    validate[:] = [top1, 55.0]
    assert main.main([*FLAGS, *changed]) == 0
    assert f" val_epoch={epochs} " in capsys.readouterr().out.splitlines()[-1]
    rows = table(run)
    assert training(rows) != [] and training(rows)[:4] == training(before)[:4]
    assert [row["val_top1"] for row in rows] == ["", "", "50.0", str(top1), "55.0"][:epochs]


def test_without_its_row_as_in_a_new_folder_the_row_says_nothing_of_its_training(run, validate, tmp_path):
    checkpoint = (run / "checkpoints" / "previous.pt").rename(tmp_path / "elsewhere.pt")
    validate[:] = [60.0]
    folder = trained(tmp_path / "new", *FLAGS, "--resume", checkpoint, "--max-steps", 4 * STEPS)
    (row,) = table(folder)
    assert (row["epoch"], row["step"], row["val_top1"]) == ("4", str(4 * STEPS), "60.0")
    assert row.keys().isdisjoint(("train_loss", "train_top1", "train_top5", "images_per_second"))


def test_fewer_epochs_than_are_trained_end_with_the_figures_of_the_last_one(run, validate, capsys):
    """The last validation was that of the third epoch."""
    (run / "checkpoints" / "final.pt").unlink()
    fewer = ["--resume", str(run / "checkpoints" / "previous.pt"), "--resume-override", "--epochs", "4"]
    validate[:] = [45.0]
    assert main.main([*FLAGS, *fewer]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("val_top1=45.0000 ") and " val_epoch=4 best_top1=50.0000 best_epoch=3 " in last
    assert load(run, "final.pt")["progress"]["validated_step"] == 4 * STEPS
    assert "\nepochs: 4" in (run / "config.yaml").read_text()
    assert main.main([*FLAGS, "--resume", str(run)]) == 0
    told, again = capsys.readouterr().out.splitlines()
    assert " is finished: 4 epochs, 20 steps" in told and again == last


def test_another_setting_for_a_finished_run_is_said_to_come_too_late(run, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main.main([*FLAGS, "--resume", str(run), "--resume-override", "--lr", "7"]) == 0
    output = capsys.readouterr()
    (warning,) = output.err.splitlines()
    assert warning.startswith("main.py: warning: --resume-override: nothing remains to be trained with --lr 7; ")
    assert " is finished: 5 epochs" in output.out
    assert main.main([*FLAGS, "--resume", str(run), "--resume-override"]) == 0 and not capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
