"""Class folders from the outside: a test folder needs nothing but its images, and warnings are told once and kept."""

import re
import shutil

import numpy as np
import pytest
from PIL import Image

from main import main
from tests.end_to_end.forked import Forked
from tests.end_to_end.processes import FINAL_LINE
from tests.helpers import trained

CLASSES = ("ants", "bees", "cats")
FIGURES = re.compile(r"val_top1=(\S+) val_top5=\S+ val_loss=(\S+) val_count=(\d+)")
FLAGS = ("--dataname", "folder", "--arch", "fc", "--image-size", 8, "--epochs", 2, "-b", 4, "--no-progress", "-w", 0)


def plant(root, counts, seed):
    """Noise with a tint for each class, which a network learns in part."""
    generator = np.random.default_rng(seed)
    for label, (name, count) in enumerate(zip(CLASSES, counts, strict=True)):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = generator.integers(0, 200, (8, 8, 3), dtype=np.uint8)
            pixels[..., label] += 20
            Image.fromarray(pixels).save(root / name / f"{number}.png")


def evaluate(capsys, run, *flags):
    """Figures (top-1, loss, count), stdout and the warnings of an evaluation of the last checkpoint."""
    capsys.readouterr()
    code = main(["--device", "cpu", "-w", "0", "--evaluate", "--resume", str(run / "checkpoints" / "last.pt"), *flags])
    out, err = capsys.readouterr()
    assert code == 0, err
    top1, loss, count = FIGURES.fullmatch(out.splitlines()[-1]).groups()
    return (float(top1), float(loss), int(count)), err.splitlines()


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    """A tree with train/ and val/, and a run on it."""
    root = tmp_path_factory.mktemp("splits")
    plant(root / "data" / "train", (8, 8, 8), 0)
    plant(root / "data" / "val", (7, 5, 3), 1)
    return root / "data", trained(root / "runs", *FLAGS, "--datapath", root / "data")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One tree, and a run that keeps a quarter of it to validate on."""
    root = tmp_path_factory.mktemp("whole")
    plant(root / "data", (8, 8, 8), 0)
    return root / "data", trained(root / "runs", *FLAGS, "--datapath", root / "data", "--val-split", 0.25)


def last_validation(run):
    """The figures of a run's log."""
    found = FINAL_LINE.search((run / "log.txt").read_text())
    return float(found["top1"]), float(found["loss"]), int(found["count"])


def test_a_bare_test_folder_gives_what_the_same_images_give_beside_their_training_images(splits, tmp_path, capsys):
    root, run = splits
    expected = last_validation(run)
    assert expected[2] == 15
    assert evaluate(capsys, run) == (expected, [])
    assert evaluate(capsys, run, "--datapath", str(root / "val")) == (expected, [])
    for name in ("val", "test", "Validation"):
        shutil.copytree(root / "val", tmp_path / name / name)
        assert evaluate(capsys, run, "--datapath", str(tmp_path / name)) == (expected, [])
    shutil.copytree(root / "val", tmp_path / "unnamed")
    assert evaluate(capsys, run, "--datapath", str(tmp_path / "unnamed")) == (expected, [])


def test_classes_are_matched_by_name_whichever_of_them_a_folder_holds(splits, tmp_path, capsys):
    root, run = splits
    top1, loss, count = last_validation(run)
    rights = []
    losses = []
    for name in CLASSES:
        shutil.copytree(root / "val" / name, tmp_path / name / name)
        (own_top1, own_loss, own_count), lines = evaluate(capsys, run, "--datapath", str(tmp_path / name))
        rights.append(own_top1 * own_count)
        losses.append(own_loss * own_count)
        others = ", ".join(other for other in CLASSES if other != name)
        assert lines == [
            f"main.py: warning: --datapath {tmp_path / name}: 2 of 3 classes have no validation image, and the results "
            f"say nothing about them: {others}"
        ]
    assert sum(rights) / count == pytest.approx(top1, abs=1e-3)
    assert sum(losses) / count == pytest.approx(loss, abs=1e-3)


def test_a_class_map_of_other_classes_than_the_runs_is_refused(splits, tmp_path, capsys):
    root, run = splits
    (tmp_path / "map.txt").write_text("cats\nants\n")
    flags = ("--class-map", str(tmp_path / "map.txt"))
    assert main(["--device", "cpu", "--evaluate", "--resume", str(run), *flags]) == 2
    assert f"--class-map {tmp_path / 'map.txt'}: names other classes than {run}" in capsys.readouterr().err
    (tmp_path / "map.txt").write_text("cats\nbees\nants\n")
    assert evaluate(capsys, run, *flags) == (last_validation(run), [])


def test_training_images_are_neither_needed_nor_looked_at(splits, tmp_path, capsys):
    root, run = splits
    shutil.copytree(root, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "train" / "ants")
    plant(tmp_path / "data" / "train" / "dogs", (1, 0, 0), 0)
    assert evaluate(capsys, run, "--datapath", str(tmp_path / "data")) == (last_validation(run), [])


def test_the_folder_that_the_run_was_trained_on_is_recognised(splits, capsys):
    root, run = splits
    (_, _, count), (line,) = evaluate(capsys, run, "--datapath", str(root / "train"))
    assert count == 24 and line.endswith(f"last.pt was trained on images in {root / 'train'}")
    assert evaluate(capsys, run, "--datapath", str(root / "val"))[1] == []


@pytest.mark.parametrize(("where", "known"), [("", True), ("val", True), ("", False)])
def test_classes_that_the_checkpoint_does_not_know_are_refused(splits, tmp_path, capsys, where, known):
    root, run = splits
    if known:  # beside them
        shutil.copytree(root / "val", tmp_path / "data" / where)
    (tmp_path / "data" / where / "dogs").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "data" / where / "dogs/1.png")
    last = run / "checkpoints" / "last.pt"
    line = ["--device", "cpu", "--evaluate", "--resume", str(last), "--datapath", str(tmp_path / "data")]
    assert main(line) == 2
    folder = tmp_path / "data" / where
    assert capsys.readouterr().err.splitlines() == [
        f"main.py: --datapath: {folder} has folders that are no classes of {last}: dogs; those are ants, bees, cats"
    ]


def test_the_plan_of_an_evaluation_shows_what_concerns_it(splits, capsys):
    root, run = splits
    line = ["--device", "cpu", "--evaluate", "--resume", str(run / "checkpoints" / "last.pt"), "--dry-run"]
    assert main([*line, "--datapath", str(root / "val")]) == 0
    rows = dict(re.split(r"\s+", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["Data"] == "folder: 15 validation images" and rows["Classes"] == "3: ants, bees, cats"
    assert rows["Network"] == f"fc, weights of {run / 'checkpoints' / 'last.pt'}"
    assert not rows.keys() & {"Steps", "Optimizer", "Augmentation"}


# ------------------------------------------------------------------------------- a share of one tree


def test_a_share_that_training_kept_is_the_one_that_is_evaluated_also_when_the_tree_moved(whole, tmp_path, capsys):
    root, run = whole
    expected = last_validation(run)
    assert expected[2] == 7
    assert evaluate(capsys, run) == (expected, [])
    shutil.copytree(root, tmp_path / "moved")
    assert evaluate(capsys, run, "--datapath", str(tmp_path / "moved")) == (expected, [])


def test_of_another_folder_all_images_are_evaluated_and_that_is_said(whole, tmp_path, capsys):
    _, run = whole
    plant(tmp_path / "other", (5, 4, 3), 2)
    (_, _, count), lines = evaluate(capsys, run, "--datapath", str(tmp_path / "other"))
    assert count == 12
    assert lines == [
        f"main.py: warning: --datapath {tmp_path / 'other'}: is not what {run / 'checkpoints' / 'last.pt'} was trained "
        "on, so any images that it was trained on are evaluated, too (perhaps 9 of 12, by their names); "
        "main.py --evaluate --val-split 0.25 leaves these out"
    ]
    (_, _, count), lines = evaluate(capsys, run, "--datapath", str(tmp_path / "other"), "--val-split", "0.25")
    (line,) = lines
    assert count == 3 and line.endswith("was trained: by their names, on none of the 3 validation images")
    for path in [*(tmp_path / "other").glob("*/*.png")]:
        path.rename(path.with_stem(f"new{path.stem}"))
    assert evaluate(capsys, run, "--datapath", str(tmp_path / "other"))[1] == [], "no name of the run's images"
    (tmp_path / "other").rename(tmp_path / "val")
    (_, _, count), lines = evaluate(capsys, run, "--datapath", str(tmp_path))
    assert (count, lines) == (12, [])


def test_without_the_runs_own_images_names_tell_all_the_same(tmp_path, capsys):
    plant(tmp_path / "data", (8, 8, 8), 0)
    run = trained(tmp_path / "runs", *FLAGS, "--datapath", tmp_path / "data", "--val-split", 0.25)
    plant(tmp_path / "other", (5, 4, 3), 2)
    shutil.rmtree(tmp_path / "data")
    (line,) = evaluate(capsys, run, "--datapath", str(tmp_path / "other"))[1]
    assert "(perhaps 9 of 12, by their names)" in line
    plant(tmp_path / "undivided", (5, 4, 1), 2)
    (line,) = evaluate(capsys, run, "--datapath", str(tmp_path / "undivided"))[1]
    assert line.endswith("any images that it was trained on are evaluated, too"), "no name was compared"


def test_a_folder_that_cannot_be_divided_is_compared_by_names_all_the_same(whole, tmp_path, capsys):
    _, run = whole
    plant(tmp_path / "other", (5, 4, 1), 2)
    (_, _, count), (line,) = evaluate(capsys, run, "--datapath", str(tmp_path / "other"))
    assert count == 10 and line.endswith(" (perhaps 8 of 10, by their names)"), "no flag leaves images out"
    for path in [*(tmp_path / "other").glob("*/*.png")]:
        path.rename(path.with_stem(f"new{path.stem}"))
    (_, _, count), lines = evaluate(capsys, run, "--datapath", str(tmp_path / "other"))
    assert (count, lines) == (10, [])


# -------------------------------------------------------------------------------------------- warnings


def test_warnings_are_told_once_by_several_processes_and_stand_in_the_log_and_beside_the_plan(tmp_path):
    plant(tmp_path / "data" / "train", (4, 4, 4), 0)
    plant(tmp_path / "data" / "val", (4, 0, 4), 1)
    Image.new("L", (8, 8)).save(tmp_path / "data" / "train" / "ants" / "moving.gif")
    flags = (*FLAGS, "--datapath", tmp_path / "data", "--output", tmp_path / "runs", "--max-steps", 1)
    warnings = [
        f"warning: --datapath {tmp_path / 'data'}: 1 of 3 classes have no validation image, and the results say "
        "nothing about them: bees",
        f"warning: --datapath: files below {tmp_path / 'data' / 'train'} and {tmp_path / 'data' / 'val'} are left "
        "out: 1 .gif; convert them to .jpg or .png files",
    ]
    for more in ((), ("--dry-run",)):
        _, err = Forked(*flags, *more, processes=2).communicate()
        assert [line for line in err.splitlines() if "warning" in line] == [f"main.py: {line}" for line in warnings]
    (log,) = (tmp_path / "runs").glob("folder/fc/*/log.txt")
    lines = [line.split(" ", 2)[2] for line in log.read_text().splitlines()]
    assert [line for line in lines if line.startswith("warning")] == warnings
