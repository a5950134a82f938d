"""The run's name and folder."""

import dataclasses
from datetime import datetime as real_datetime
from pathlib import Path

import pytest

from utils import scenario
from utils.arguments import parse
from utils.scenario import Scenario
from utils.settings import UserError


@pytest.fixture
def frozen(monkeypatch):
    """Every run starts in the same second."""

    class Frozen(real_datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 2, 29, 23, 59, 58, 999_999)

    monkeypatch.setattr(scenario, "datetime", Frozen)
    return "2024-02-29_23-59-58"


def settings_for(folder, *argv, arch=None):
    """Settings with their output below ``folder``; ``arch`` as it is, whether such a network exists or not."""
    args = parse(["--output", str(folder / "runs"), *argv])
    return dataclasses.replace(args, model=dataclasses.replace(args.model, arch=arch)) if arch is not None else args


def test_runs_started_in_the_same_second_get_a_folder_each(tmp_path, frozen):
    args = settings_for(tmp_path)
    folders = [Scenario.create(args, 1).folder for _ in range(4)]
    assert len(set(folders)) == 4
    assert all(folder.is_dir() and (folder / "checkpoints").is_dir() for folder in folders)
    assert all(folder.name.startswith(frozen) for folder in folders)


def test_folder_is_output_dataname_arch_and_a_name_that_begins_with_the_time(tmp_path, frozen):
    made = Scenario.create(settings_for(tmp_path, "--arch", "fc"), 1)
    assert made.folder.parent == tmp_path / "runs" / "digits" / "fc"
    assert made.name == made.folder.name and made.name.startswith(f"{frozen}_")
    assert made.checkpoints == made.folder / "checkpoints"


def test_name_holds_the_settings_that_matter(tmp_path, frozen):
    argv = "--dataname synthetic --arch resnet18 --init xavier_normal --batch-size 16 --optimizer lamb --lr 0.0125"
    argv += " --lr-policy gaussian --epochs 7 --name mine"
    planned = Scenario.planned(settings_for(tmp_path, *argv.split()), 3)
    expected = "synthetic_resnet18_xavier_normal_procs3_batch16_lamb_lr0.0125_gaussian_epochs7_mine"
    assert planned.name == f"{frozen}_{expected}"


def test_batch_in_the_name_is_the_global_one(tmp_path, frozen):
    args = parse(["--output", str(tmp_path), "--batch-size", "16", "--accumulate", "2"], world_size=3)
    assert "_procs3_batch96_" in Scenario.planned(args, 3).name


def test_planning_creates_nothing(tmp_path):
    Scenario.planned(settings_for(tmp_path), 1)
    assert list(tmp_path.iterdir()) == []


def test_planned_folder_is_the_one_that_is_made(tmp_path, frozen):
    args = settings_for(tmp_path)
    assert Scenario.planned(args, 1) == Scenario.create(args, 1).folder


HOSTILE = ["../../escaped", "/etc/passwd", "..", ".", ".hidden", "-rf", "a/b", "a\\b", "a\nb", "a\0b", "~root", "$HOME"]
HOSTILE += ["n\u00e9t", "x" * 1000, "\u7f51\u7edc", " ", "timm/resnet18", "a" * 79 + "/" + "b" * 79, 'con*?<>|:"']


@pytest.mark.parametrize("arch", HOSTILE, ids=lambda arch: ascii(arch)[:20])
def test_folder_stays_below_the_output_whatever_the_network_is_called(arch, tmp_path, frozen):
    made = Scenario.create(settings_for(tmp_path, arch=arch), 1)
    inside = made.folder.resolve().relative_to((tmp_path / "runs").resolve())
    data, network, name = inside.parts
    assert data == "digits" and name.startswith(frozen)
    assert all(part.isascii() and part[0] not in ".-" and len(part) <= 255 for part in (network, name))
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_longest_names_still_fit_a_file_system(tmp_path, frozen):
    args = settings_for(tmp_path, "--optimizer", "o" * 300, "--name", "n" * 80, arch="a" * 300)
    folders = {Scenario.create(args, 100_000).folder for _ in range(2)}
    assert len(folders) == 2


@pytest.mark.parametrize("place", ["runs", "runs/digits", "runs/digits/conv2"])
def test_file_where_a_folder_must_be_is_one_line_about_the_output(place, tmp_path):
    taken = tmp_path / place
    taken.parent.mkdir(parents=True, exist_ok=True)
    taken.write_text("mine")
    with pytest.raises(UserError) as caught:
        Scenario.create(settings_for(tmp_path), 1)
    (line,) = caught.value.mistakes
    assert f"--output {tmp_path / 'runs'}" in line
    assert taken.read_text() == "mine"


def test_output_name_too_long_for_the_file_system_is_one_line(tmp_path):
    args = parse(["--output", str(Path(tmp_path) / ("x" * 300))])
    with pytest.raises(UserError) as caught:
        Scenario.create(args, 1)
    (line,) = caught.value.mistakes
    assert "--output" in line and "too long" in line
    assert list(tmp_path.iterdir()) == []
