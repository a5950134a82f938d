"""Run folders that count for the settings in their config.yaml: those that were trained with these alone."""

import shutil

import pytest

import main
from scripts.common.runs import read_run
from tests.faults.small_run import begin
from tests.scripts.test_sweep import EARLY, keep_run
from utils import run as run_module

SMALL = ["--device", "cpu", "--no-progress", "--picture-epochs", "off"]
FLAGS = ["--arch", "fc", "--epochs", "3"]


def read(folder, *flags):
    """Result of a run that went on with ``flags`` and is finished, and what is said of it."""
    said = []
    if flags:
        assert main.main([*SMALL, *map(str, flags)]) == 0
    return read_run(folder, said.append), said


@pytest.mark.parametrize(
    ("cut", "change"),
    [(20, ("--lr", "0.3")), (23, ("--epochs", "2"))],
    ids=["in its last steps", "after its end"],
)
def test_a_run_that_was_trained_with_two_settings_counts_for_neither(cut, change, tmp_path):
    folder = begin(tmp_path, "--epochs", "1", "--max-steps", cut)
    run, said = read(folder, "--resume", folder, "--resume-override", *change)
    assert run is None
    assert said == [f"{folder} does not count: its settings or data were changed by --resume-override"]


def test_an_override_that_changes_nothing_does_no_harm(tmp_path):
    folder = begin(tmp_path, "--epochs", "1", "--max-steps", "20")
    run, said = read(folder, "--resume", folder, "--resume-override", "--lr", "0.1")
    assert (run.epochs, said) == (1, [])


def test_an_override_is_known_by_the_log_alone_where_its_settings_were_not_saved_in_time(tmp_path, capsys):
    line = "warning: --lr 0.3: last.pt was made with --lr 0.1; going on with --lr 0.3"
    folder = keep_run(tmp_path / "run", FLAGS, [90.0] * 3, log=line)
    assert read_run(folder) is None
    assert capsys.readouterr().err.startswith(f"{folder} does not count: its settings or data were changed by")


def test_a_run_that_went_on_after_its_end_is_under_way(tmp_path):
    """Its config.yaml has the new settings, its files the figures of the old ones."""
    flags = [*FLAGS, "--early-stopping", "30"]
    folder = keep_run(tmp_path / "run", flags, [95.0, 94.0], log=EARLY)
    assert read(folder)[0].final == 94.0
    with open(folder / "log.txt", "a") as log:
        log.write("2026-11-22 08:00:01 Run x\n2026-11-22 08:00:01 Continuing x/checkpoints/last.pt after epoch 2\n")
    assert read(folder) == (None, [])


def test_a_run_whose_beginning_is_in_another_folder_does_not_count(tmp_path):
    """Although its table has all epochs: the other run was cut in its first."""
    first = begin(tmp_path / "first", "--epochs", "2", "--max-steps", "5")
    shutil.copy(first / "checkpoints" / "last.pt", tmp_path / "moved.pt")
    folder = begin(tmp_path / "second", "--epochs", "2", "--resume", tmp_path / "moved.pt")
    assert read(folder) == (None, [f"{folder} does not count: it was begun in another folder"])
    run, said = read(first, "--resume", first)
    assert (run.epochs, said) == (2, [])


def test_a_run_whose_epochs_are_not_all_in_its_table_does_not_count(tmp_path):
    folder = begin(tmp_path, "--epochs", "2", "--max-steps", "30")
    (folder / "metrics.csv").write_text("x")
    run, said = read(folder, "--resume", folder)
    assert run is None and said == [f"{folder} does not count: metrics.csv lacks some of its epochs"]


def test_epochs_that_are_not_validated_are_in_the_table_as_well(tmp_path):
    folder = begin(tmp_path, "--val-every-epochs", "2")
    assert read(folder)[0].epochs == 3


def test_a_run_names_the_machines_of_all_its_starts_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "machine", lambda _: "a computer")
    folder = begin(tmp_path, "--epochs", "1", "--max-steps", "5")
    assert main.main([*SMALL, "--resume", str(folder), "--max-steps", "10"]) == 0
    monkeypatch.setattr(run_module, "machine", lambda _: "another")
    run, _ = read(folder, "--resume", folder)
    assert run.machine == "a computer; then another"
