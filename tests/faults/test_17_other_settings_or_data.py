"""A run goes on with its own settings and data: others are refused with a line each, or taken on request."""

import random
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import main
from tests.end_to_end.processes import load, rows
from tests.faults.small_run import FLAGS, as_older, begin, copy_of, told
from tests.helpers import class_files, run_in
from utils.config.arguments import parse
from utils.optim.lr_policy import LRPolicy

STEPS = 23  # of an epoch of the digits at the default batch
CPU = ("--device", "cpu", "--no-progress", "--picture-epochs", "off")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 3 epochs cut in its second one."""
    return begin(tmp_path_factory.mktemp("trained"), "--max-steps", STEPS + 7)


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    return copy_of(trained, tmp_path, monkeypatch)


def rates(run):
    """The learning rate of each row's last step."""
    return {int(row["epoch"]): float(row["lr"]) for row in rows(run)}


# ----------------------------------------------------------------------------------------- refused


def test_all_differences_are_told_at_once_and_nothing_is_touched(run, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, lines = told(capsys, (*CPU, "--resume", run, "--epochs", 9, "--lr", 1, "--seed", 3, "--amp", "bf16"))
    assert code == 2 and [line.split()[1] for line in lines] == ["--seed", "--epochs", "--lr", "--amp"]
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_run_made_with_a_setting_that_is_gone_goes_on_only_without_it(run, tmp_path, capsys):
    state = load(run, "last.pt")
    path = tmp_path / "older.pt"
    state["settings"] |= {"local_sgd_steps": 4, "local_sgd_after_epochs": 0.0}
    torch.save(state, path)
    code, (line,) = told(capsys, (*CPU, "--resume", path))
    assert code == 2 and line.startswith(
        f"main.py: --local-sgd-steps 4: {path} was made with it, and it is gone; CHANGELOG"
    )
    code, lines = told(capsys, (*CPU, "--resume", path, "--resume-override", "--max-steps", STEPS + 8))
    assert code == 0 and "--local-sgd-steps 4" in "".join(lines) and "going on without it" in "".join(lines)


# -------------------------------------------------------------------------------------- other data


def images(folder, classes, first=0):
    """Class folders of 8 training and 4 validation images a class, numbered from ``first``."""
    numbers = random.Random(first)
    for path, *_, number in class_files(folder, {"train": 8, "val": 4}, classes):
        Image.frombytes("RGB", (8, 8), numbers.randbytes(192)).save(path.with_stem(f"{first + number}"))


ON_IMAGES = (*FLAGS, "--dataname", "folder", "--batch-size", "4", "--image-size", "8", "--workers", "0")


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """The current folder, with class folders in ``data``."""
    images(tmp_path / "data", "abcd")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def on_images(workplace):
    """A run on ``data``, 8 steps an epoch, cut in its second epoch."""
    assert main.main([*ON_IMAGES, "--datapath", "data", "--max-steps", "11"]) == 0
    return run_in("runs")


def override(capsys, run, folder):
    return told(capsys, (*CPU, "--resume", run, "--resume-override", "--workers", 0, "--datapath", folder))


def test_override_refuses_data_of_more_or_fewer_classes(on_images, tmp_path, capsys):
    for classes, words in (("abc", "3 classes, lacks d, where"), ("abcdef", "6 classes, adds e, f, where")):
        images(tmp_path / classes, classes)
        code, (line,) = override(capsys, on_images, classes)
        assert code == 2 and f"has {words} there are 4" in line and "--weights" in line


@pytest.mark.parametrize(
    ("classes", "first", "expected"),
    [("abcd", 100, ["holds other images or labels"]), ("abce", 0, ["lacks d, adds e", "holds other images"])],
)
def test_override_goes_on_with_other_data_where_the_network_fits_it(
    on_images, tmp_path, capsys, classes, first, expected
):
    images(tmp_path / "other", classes, first)
    code, lines = override(capsys, on_images, "other")
    assert code == 0 and all("warning: " in line for line in lines) and len(lines) == len(expected) + 3
    assert any("was trained on other images than these, perhaps on some of the 16 valid" in line for line in lines)
    assert "epoch 3 begins" in lines[-1]
    final = load(on_images, "final.pt")
    assert final["classes"] == list(classes) and final["progress"]["epoch"] == 3
    assert final["progress"]["step"] == 11 + 8, "the cut epoch is not gone on with"
    assert [row["epoch"] for row in rows(on_images)] == ["1", "3"]
    assert told(capsys, (*CPU, "--resume", on_images, "--workers", 0)) == (0, []), "the run is of the new data now"


# ---------------------------------------------------------------------------------------- override


def test_override_goes_on_in_the_same_folder_with_the_new_settings(run, capsys):
    flags = "--epochs 4 --lr 0.05 --momentum 0.5 --ema-decay 0.5".split()
    code, lines = told(capsys, (*CPU, "--resume", run, "--resume-override", *flags))
    made = f"{run / 'checkpoints/last.pt'} was made with"
    assert code == 0 and lines == [
        f"main.py: warning: --epochs 4: {made} --epochs 3; going on with --epochs 4",
        f"main.py: warning: --lr 0.05: {made} --lr 0.1; going on with --lr 0.05",
        f"main.py: warning: --momentum 0.5: {made} --momentum 0.9; going on with --momentum 0.5",
        f"main.py: warning: --ema-decay 0.5: {made} --ema-decay 0.9; going on with --ema-decay 0.5",
    ]
    log = (run / "log.txt").read_text()
    assert all(line.removeprefix("main.py: ") in log for line in lines)
    # From here on the learning rate is that of a run that always had these settings.
    policy = LRPolicy(parse(["--epochs", "4", "--lr", "0.05"]).optimisation, STEPS)
    assert rates(run) == {1: rates(run)[1]} | {
        epoch: pytest.approx(policy(epoch * STEPS - 1), rel=1e-5) for epoch in (2, 3, 4)
    }
    final = load(run, "final.pt")
    assert final["progress"]["step"] == 4 * STEPS, "the cut epoch was gone on with"
    assert final["optimizer"]["param_groups"][0]["momentum"] == 0.5
    assert (final["settings"]["epochs"], final["settings"]["lr"]) == (4, 0.05)


def test_config_is_that_of_the_new_settings_and_the_old_one_is_kept(run, trained, capsys):
    told(capsys, (*CPU, "--resume", run, "--resume-override", "--epochs", 4, "--max-steps", STEPS + 9))
    told(capsys, (*CPU, "--resume", run, "--resume-override", "--epochs", 5, "--max-steps", STEPS + 11))
    kept = [yaml.safe_load((run / name).read_text())["epochs"] for name in ("config.1.yaml", "config.2.yaml")]
    assert kept == [3, 4] and yaml.safe_load((run / "config.yaml").read_text())["epochs"] == 5
    assert (run / "config.1.yaml").read_bytes() == (trained / "config.yaml").read_bytes()
    assert told(capsys, (*FLAGS, "--epochs", 5, "--resume", "auto")) == (0, [])
    assert list(run.parent.iterdir()) == [run] and load(run, "last.pt")["progress"]["epoch"] == 5


def test_a_run_keeps_its_name_when_its_settings_change(tmp_path):
    named = ("--train-samples", 64, "--name", "mine")
    run = begin(tmp_path, *named, "--max-steps", 1)
    override = (*CPU, "--resume", run, "--resume-override", "--epochs", 4, "--max-steps", 2)
    assert main.main([*map(str, override)]) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["name"] == "mine"
    assert begin(tmp_path, *named, "--epochs", 4, "--resume", "auto") == run, "the same command began a new run"


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (("--global-batch-size", 128), 12),
        (("--train-samples", 320), 5),
        (("--balanced-sampler",), STEPS),
        (("--repeated-augmentation", 3), STEPS),
    ],
)
def test_with_epochs_of_other_steps_the_next_one_begins_and_the_schedule_keeps_its_place(run, capsys, flags, steps):
    line = (*CPU, "--resume", run, "--resume-override", *flags)
    code, lines = told(capsys, (*line, "--max-steps", STEPS + 7 + steps // 2))
    assert code == 0 and "after step 7 of an epoch, epoch 3 begins" in lines[-1]
    assert told(capsys, (*CPU, "--resume", run)) == (0, [])  # stopped and continued, as any run
    policy = LRPolicy(parse(["--epochs", "3"]).optimisation, steps)
    assert rates(run)[3] == pytest.approx(policy(3 * steps - 1), rel=1e-5)
    assert load(run, "final.pt")["progress"]["step"] == STEPS + 7 + steps


def test_in_the_last_epoch_that_epoch_begins_again(run, capsys):
    code, lines = told(capsys, (*CPU, "--resume", run, "--resume-override", "--epochs", 2, "--seed", 5))
    assert code == 0 and "epoch 2 begins" in lines[-1]
    progress = load(run, "final.pt")["progress"]
    assert (progress["epoch"], progress["step"]) == (2, STEPS + 7 + STEPS)


IMPOSSIBLE = [
    (("--ema-decay", "none"), ("was made with --ema-decay 0.9; ",)),
    (("--opt-kwargs", "dampening=0.1"), ("--opt-kwargs dampening=0.1",)),
    (("--arch", "conv4", "--optimizer", "lamb", "--lr", "1"), ("--arch conv4", "--optimizer lamb")),
    (("--no-decay-norm-bias",), ("--decay-norm-bias",)),
    (("--layer-decay", "0.5"), ("--layer-decay",)),
    (("--freeze", "layers.1"), ("--freeze layers.1",)),
    (("--freeze-epoch", "1", "--unfreeze-epoch", "2"), ("--freeze-epoch 1", "--unfreeze-epoch 2")),
    (("--image-size", "16"), ("size mismatch",)),
]


@pytest.mark.parametrize(("flags", "expected"), IMPOSSIBLE)
def test_what_the_state_cannot_follow_is_refused_all_the_same(run, capsys, flags, expected):
    before = sorted(path.name for path in run.rglob("*"))
    code, lines = told(capsys, (*CPU, "--resume", run, "--resume-override", *flags))
    lines = [line for line in lines if "warning" not in line]
    assert code == 2 and len(lines) == len(expected)
    assert all(words in line for words, line in zip(expected, lines, strict=True))
    assert load(run, "last.pt")["progress"]["step"] == STEPS + 7
    assert [name for name in before if not name.startswith("events")] == sorted(
        path.name for path in run.rglob("*") if not path.name.startswith("events")
    )


def test_a_scaler_begins_and_ends_by_override(run, capsys):
    line = (*CPU, "--resume", run, "--resume-override", "--max-steps")
    code, (told_amp,) = told(capsys, (*line, STEPS + 9, "--amp", "fp16", "--init-scale", 65536))
    assert code == 0 and "--amp fp16" in told_amp and load(run, "last.pt")["scaler"]["scale"] == 65536
    code, (told_amp,) = told(capsys, (*line, STEPS + 11, "--amp", "off"))
    assert code == 0 and "--amp off" in told_amp and load(run, "last.pt")["scaler"] == {}


def test_a_checkpoint_outside_a_run_folder_begins_a_folder_that_auto_finds(run, tmp_path, capsys):
    shutil.copyfile(run / "checkpoints/last.pt", tmp_path / "loose.pt")
    shutil.rmtree(run)
    assert told(capsys, (*CPU, "--resume", "loose.pt", "--max-steps", STEPS + 9)) == (0, [])
    assert told(capsys, (*FLAGS, "--resume", "auto")) == (0, [])
    (new,) = run.parent.iterdir()
    assert load(new, "final.pt")["progress"]["epoch"] == 3


# ------------------------------------------------------------------------------------ --resume auto


def auto(capsys, folder, *more):
    """A command with ``--resume auto`` on the images in ``folder``: the run that it ends with, and its stderr."""
    assert main.main([*ON_IMAGES, "--resume", "auto", "--datapath", folder, *more]) == 0
    said = capsys.readouterr()
    return Path(said.out.rpartition("run=")[2].strip()), said.err


def darken(folder):
    for path in folder.rglob("*.png"):
        with Image.open(path) as image:
            image.point(lambda value: value // 2).save(path)


def rename_one(folder):
    (folder / "train/a/0.png").rename(folder / "train/a/new.png")


CUT = ("--max-steps", "11")


@pytest.mark.parametrize(
    ("place", "change", "max_steps"),
    [("other", darken, CUT), ("data", rename_one, ())],  # a run that is cut is refused, as below
)
def test_auto_takes_no_run_on_other_images(workplace, capsys, place, change, max_steps):
    run, _ = auto(capsys, "data", *max_steps)
    if place == "other":
        shutil.copytree("data", "other")
    change(workplace / place)
    again, err = auto(capsys, place)
    assert again != run and len(rows(again)) == 3
    began = f"begins a new run; {run} was trained on other images, those that were in {workplace / 'data'}"
    assert err == f"main.py: warning: --resume auto: {began}\n"
    assert auto(capsys, place) == (again, "")
    if place == "other":
        assert auto(capsys, "data") == (run, "")


def test_a_run_goes_on_with_a_changed_file_and_says_how_many_have_changed(workplace, capsys):
    run, _ = auto(capsys, "data", *CUT)
    darken(workplace / "data/val/a")
    all_files = len([*(workplace / "data").rglob("*.png")])  # few enough that each is compared
    again, err = auto(capsys, "data")
    changed = f"4 of the {all_files} files that were compared have other content than when {run}/checkpoints/last.pt"
    assert again == run and err == f"main.py: warning: --datapath: {changed} was saved; training goes on with it\n"


def test_a_checkpoint_of_an_older_version_compares_the_names_alone(workplace, capsys):
    run, _ = auto(capsys, "data", "--max-steps", "11")
    state = load(run, "last.pt")
    state["fingerprint"], plus, contents = state["fingerprint"].partition("+")
    assert plus and contents
    torch.save(state, workplace / "older.pt")
    (workplace / "data").rename(workplace / "moved")
    assert told(capsys, (*ON_IMAGES, "--datapath", "moved", "--resume", "older.pt")) == (0, [])


def test_a_run_of_an_older_version_keeps_its_reach_of_a_shift(workplace, capsys):
    run, _ = auto(capsys, "data", "--augment", "shift", "--max-steps", "3")
    assert load(run, "last.pt")["max_shift"] is None and "shift (at most an eighth" in (run / "log.txt").read_text()
    line = (*ON_IMAGES, "--datapath", "data", "--augment", "shift", "--resume")
    assert told(capsys, (*line, as_older(run, "max_shift"), "--max-steps", 5)) == (0, [])
    (older,) = (folder for folder in run.parent.iterdir() if folder.name != run.name)
    assert told(capsys, (*line, older, "--max-steps", 7)) == (0, []), "which has gone on since"
    assert load(older, "last.pt")["max_shift"] == 28
    assert (older / "log.txt").read_text().count("shift (at most 28 px") == 2


def test_weights_begin_a_run_with_auto_and_are_not_read_when_it_goes_on(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("start.pt", "other.pt"):
        shutil.copyfile(trained / "checkpoints/best.pt", name)
    begin = (*FLAGS, "--resume", "auto", "--weights")
    assert told(capsys, (*begin, "none.pt"))[0] == 2
    assert told(capsys, (*begin, "start.pt", "--max-steps", "5")) == (0, [])
    (folder,) = Path("runs/digits/fc").iterdir()
    loss = float(rows(folder)[0]["train_loss"])
    Path("start.pt").unlink()
    assert told(capsys, (*begin, "start.pt")) == (0, []) and [row["epoch"] for row in rows(folder)] == list("123")
    code, (line,) = told(capsys, (*begin, "other.pt", "--max-steps", "5"))
    assert code == 0 and line.endswith(f"the nearest, {folder}, has --weights start.pt where this has other.pt")
    (new,) = (path for path in Path("runs/digits/fc").iterdir() if path != folder)
    assert float(rows(new)[0]["train_loss"]) == loss < 1.5, "of five steps of a network that was trained"
    code, lines = told(capsys, (*CPU, "--resume", folder, "--weights", "other.pt"))
    assert (code, lines) == (2, ["main.py: --resume PATH brings its own weights; remove --weights"])
