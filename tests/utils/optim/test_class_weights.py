"""Class weights against scikit-learn, and what is wrong with a file of them."""

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

import main
from components import build
from tests.end_to_end.processes import load
from tests.faults.small_run import as_older, told
from tests.helpers import QUIETLY, mistakes_of, trained
from utils.checkpoint.resume import ResumePoint
from utils.config import arguments
from utils.config.groups.loss import LossSettings
from utils.optim.class_weights import class_weights, other_weights
from utils.run import Run
from utils.runtime.distributed import Distributed, RankInfo

LABELS = torch.tensor([0] * 70 + [1] * 20 + [2] * 10)
NAMES = ("cat", "dog", "no")


def test_balanced_weights_are_scikit_learns():
    expected = compute_class_weight("balanced", classes=np.arange(3), y=LABELS.numpy())
    found = class_weights(LABELS, NAMES, "balanced")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.from_numpy(expected).float())
    assert found[LABELS].mean().item() == pytest.approx(1)


def test_a_class_without_images_counts_as_absent():
    found = class_weights(LABELS, (*NAMES, "owl"), "balanced")
    torch.testing.assert_close(found[:3], class_weights(LABELS, NAMES, "balanced"))
    assert found[3] == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("w.csv", "class,weight\nno,4\ncat,1\n\ndog,2\n"),
        ("w.csv", '\ufeffdog, 2\ncat,1.0\n"no",4e0\n'),
        ("w.yaml", "no: 4\ndog: 2\ncat: 1\n"),
        ("w.yml", "{cat: 1, dog: 2, no: 4}"),
    ],
)
def test_a_file_gives_weights_by_name_whose_mean_over_the_training_images_is_one(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = class_weights(LABELS, NAMES, str(tmp_path / name))
    torch.testing.assert_close(found, torch.tensor([1.0, 2.0, 4.0]) / 1.5)  # (70 + 2 * 20 + 4 * 10) / 100
    assert found[LABELS].mean().item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("w.csv", "cat,1\nno,1\n", ["lacks dog"]),
        ("w.csv", "cat,1\ndog,1\nno,1\nowl,1\n", ["names what is no class: owl"]),
        ("w.csv", "cat,1\ndog,-1\nno,nan\n", ["has no weight of at least 0 for dog, no"]),
        ("w.csv", "cat,1\ndog,1\nno,1\ncat,2\n", ["names twice cat"]),
        ("w.csv", "cat,x\nmouse,1\n", ["lacks dog, no", "no class: mouse", "at least 0 for cat"]),
        ("w.csv", "cat 1\n", ["not lines of a class name and its weight"]),
        ("w.csv", "cat,0\ndog,0\nno,0\n", ["no training image has a weight above 0"]),
        ("w.yaml", "- cat\n- dog\n", ["not lines of a class name and its weight"]),
        ("w.yaml", "cat: [1]\n", ["not lines of a class name and its weight"]),
        ("w.yaml", "cat: {\n", ["not lines of a class name and its weight"]),
        ("missing.csv", None, ["cannot be read"]),
    ],
)
def test_what_is_wrong_with_a_file_is_reported_at_once(tmp_path, name, text, expected):
    if text is not None:
        (tmp_path / name).write_text(text)
    mistakes = mistakes_of(class_weights, LABELS, NAMES, str(tmp_path / name))
    for line, words in zip(mistakes, expected, strict=True):
        assert line.startswith(f"--class-weights {tmp_path / name}: ") and words in line


def test_the_training_images_alone_count():
    args = arguments.parse(["--device", "cpu", "--class-weights", "balanced", "--train-samples", "200", "--arch", "fc"])
    with Distributed(RankInfo(), args.run) as distributed:
        parts = build(Run(args, distributed))
    chosen = parts.train_loader.plan.sampling.available
    labels = parts.data.train.labels[chosen]
    expected = compute_class_weight("balanced", classes=np.arange(10), y=labels.numpy())
    torch.testing.assert_close(parts.criterion.weights, torch.from_numpy(expected).float())


def test_a_run_goes_on_with_the_weights_that_it_began_with(workplace, monkeypatch, capsys):
    file = workplace / "weights.csv"
    file.write_text("".join(f"{name},{1 + name}\n" for name in range(10)))
    flags = (*QUIETLY, "--arch", "fc", "--class-weights", "weights.csv", "--max-steps")
    folder = trained(workplace / "runs", *flags, 2)
    state = load(folder, "last.pt")
    assert state["settings"]["class_weights"] == str(file)
    (workplace / "elsewhere").mkdir()
    monkeypatch.chdir(workplace / "elsewhere")
    assert main.main(["--device", "cpu", "--no-progress", "--max-steps", "2", "--resume", str(folder)]) == 0
    monkeypatch.chdir(workplace)
    point = ResumePoint.of(folder / "checkpoints/last.pt", state, folder)
    point.state["settings"]["class_weights"] = "weights.csv"  # as earlier versions saved it
    assert point.differences(arguments.parse(list(flags[:-1]))) == {}
    assert main.main([*flags, "3", "--resume", "auto"]) == 0
    file.write_text("".join(f"{name},{2 * (1 + name)}\n" for name in range(10)))  # the same after division by the mean
    assert main.main([*flags, "4", "--resume", "auto"]) == 0
    older = as_older(folder, "weighs_images")  # of cross entropy, to which both rules are one
    capsys.readouterr()
    assert told(capsys, (*flags, "4", "--resume", older)) == (0, [])
    file.write_text("".join(f"{name},{9 - name}\n" for name in range(10)))
    capsys.readouterr()
    code, lines = told(capsys, (*flags, "5", "--resume", folder))
    assert code == 2 and "was trained with other weights of the classes" in lines[0]
    code, lines = told(capsys, (*flags, "5", "--resume", folder, "--resume-override"))
    assert code == 0 and any("going on with these" in line for line in lines)


def test_a_run_of_an_older_version_does_not_change_its_loss_unasked(workplace, capsys):
    flags = (*QUIETLY, "--arch", "fc", "--class-weights", "balanced", "--loss", "bce", "--max-steps")
    folder = trained(workplace / "runs", *flags, 2)
    older = as_older(folder, "weighs_images")
    capsys.readouterr()
    code, (line,) = told(capsys, (*flags, "3", "--resume", older))
    assert code == 2 and "an earlier version's --loss bce" in line and "weighted the classes' terms" in line
    code, (line,) = told(capsys, (*flags, "3", "--resume", older, "--resume-override"))
    assert code == 0 and line.endswith("not the images; going on with these")
    assert told(capsys, (*flags, "4", "--resume", "auto")) == (0, []), "it is a run of this version now"
    assert main.main(["--device", "cpu", "--evaluate", "--resume", older]) == 0
    weights = torch.ones(2)
    smoothed = LossSettings(label_smoothing=0.1)
    line, advice = other_weights(weights, smoothed, {"class_weights": weights.tolist()}, folder)
    assert "an earlier version's --label-smoothing" in line and advice == "begin anew"
