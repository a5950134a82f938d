"""scripts/evaluate.py: its figures against closed formulas, the program's own validation, and other ways to count."""

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import sklearn.metrics
import torch
from PIL import Image

import main as program
from models import load_model
from scripts import evaluate
from scripts.common.predictions import Predictions
from scripts.common.uncertainty import wilson_interval
from scripts.evaluation import as_text, files
from scripts.evaluation.comparison import Comparison, with_data_settings_of
from scripts.evaluation.rejection import Rejection
from scripts.evaluation.result import Evaluation
from scripts.evaluation.summary import class_rows, fit_temperature, reliability, summary
from scripts.reporting.details import metrics_of
from scripts.sweeps.cross_validation import _pooled
from tests.end_to_end.forked import Forked
from tests.helpers import altered, answer, csv_rows, image_tree, trained
from tests.scripts.common.test_answers import random_answers
from tests.scripts.common.test_predictions import tree_of_digits
from tests.utils.runtime.test_exchange import on_two
from utils.checkpoint.fingerprint import same_images
from utils.config.groups.data import DataSettings
from utils.config.settings import UserError
from utils.data.datasets import get_data
from utils.data.formats.readers import ImageFiles, MemoryImages
from utils.record.metrics import ClassReport, Report, target_rank

CPU = ("--device", "cpu", "--no-progress", "--workers", "0")


def answers(logits, labels, names=None):
    """Predictions with these logits (n, classes) and labels (n,)."""
    ranks = target_rank(logits, labels).double()
    hits = [100 * (ranks < k).double().mean().item() for k in (1, 5)]
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    return Predictions(
        logits,
        labels,
        tuple(names or map(str, range(logits.shape[1]))),
        [f"val[{n}]" for n in range(len(labels))],
        Report(loss, *hits, len(labels), ClassReport.of(logits, labels)),
        (),
        MemoryImages(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), labels),
        np.arange(len(labels)),
    )


def guesses(seed, n=400, classes=7, sure=1.5):
    """Logits and labels of answers that are better than chance."""
    made = random_answers(n, classes, seed, sure)
    return made.logits, made.labels


def test_figures_are_those_of_the_products_validation():
    figures = answers(*guesses(1))
    theirs = figures.report
    ours = summary(figures)
    assert ours["top1"] == theirs.top1 == pytest.approx(100 * figures.right.mean())
    for name in ("macro_precision", "macro_recall", "macro_f1", "balanced_accuracy"):
        assert ours[name] == pytest.approx(getattr(theirs.by_class, name))
    assert theirs.top5 == pytest.approx(100 * (figures.rank < 5).mean())
    assert "top-5" in as_text.overall(figures, {}) and "top-5" not in as_text.overall(
        answers(*guesses(0, classes=5)), {}
    )
    assert ours["calibration_error"] == theirs.by_class.ece
    (first, *_) = class_rows(figures)
    members = figures.truth == 0
    assert first == {
        "class": "0",
        "images": members.sum(),
        "predicted": (figures.predicted == 0).sum(),
        "right": (figures.right & members).sum(),
        "precision": pytest.approx(100 * members[figures.predicted == 0].mean()),
        "recall": pytest.approx(100 * figures.right[members].mean()),
        "f1": theirs.by_class.f1[0],
    }
    assert class_rows(figures)[6]["recall"] is None, "it has no image"
    assert (figures.matrix() == sklearn.metrics.confusion_matrix(figures.truth, figures.predicted)).all()


def test_an_answer_that_is_no_number_is_wrong_and_files_stay_valid(tmp_path):
    logits, labels = guesses(2)
    logits[5, labels[5]] = math.nan
    figures = answers(logits, labels)
    assert not figures.right[5] and summary(figures)["not_a_number"] == 1
    assert summary(figures)["top1"] == pytest.approx(100 * figures.right.mean())
    assert sum(row["predicted"] for row in class_rows(figures)) == len(labels) - 1
    of = {"dataname": None, "datapath": "photos", "step": 1000}
    files.write_all(tmp_path, of, Evaluation(figures, fit_temperature(figures)))
    content = json.loads((tmp_path / files.JSON_FILE).read_text(), parse_constant=pytest.fail)
    assert content["doubts"] == as_text.doubts(figures, of)
    assert content["figures"]["calibration_error"] is None
    assert "for 1 images the network gives NaN" in as_text.overall(figures, {})


def test_answers_that_tell_nothing_of_the_classes_are_doubtful_but_not_after_two_steps():
    logits, labels = guesses(2)
    of = {"dataname": None, "datapath": "photos", "step": 1000}
    assert as_text.doubtful(answers(logits, labels), of) == []
    still = answers(torch.zeros_like(logits), labels)
    (line,) = as_text.doubtful(still, of)
    assert line.startswith("warning: doubtful: val_loss ") and "nothing was learned" in line
    assert "100.00 % of the answers" in line
    assert as_text.doubtful(still, of | {"step": 2}) == as_text.doubtful(still, of | {"dataname": "synthetic"}) == []


@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
def test_an_answer_that_is_infinite_is_counted_and_calibrates_nothing(infinite):
    logits, labels = guesses(2)
    rest = answers(logits[1:], labels[1:])
    logits = torch.cat([logits[1:], logits[:1]])
    logits[-1, 0] = infinite
    figures = answers(logits, labels.roll(-1))
    assert (summary(figures)["infinite"], summary(figures)["not_a_number"]) == (1, 0)
    assert "for 1 images the network gives an infinite number" in as_text.overall(figures, {})
    assert fit_temperature(figures) == fit_temperature(rest)
    assert str(reliability(figures)) == str(reliability(rest))


def test_the_temperature_undoes_a_wrong_scale_and_is_not_scored_where_it_is_fitted(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(6000, 5, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]  # calibrated by construction
    predictions = answers(2.5 * logits, labels)
    found = fit_temperature(predictions)
    assert found.temperature == pytest.approx(2.5, rel=0.05) and not found.at_limit
    assert found[1:3] == (3000, 3000)
    assert found.calibration_error_after < 2.5 < 10 < found.calibration_error_before
    assert found.loss_after < found.loss_before
    others = np.sort(np.random.default_rng(0).permutation(6000)[3000:])
    loss = torch.nn.functional.cross_entropy(2.5 * logits[others], labels[others])
    assert found.loss_before == pytest.approx(loss.item(), abs=1e-4)
    monkeypatch.setattr("scripts.evaluation.summary.MOST", 1000)
    assert fit_temperature(predictions)[1:3] == (1000, 5000), "one number needs no more images"


def test_a_temperature_of_perfect_answers_or_of_a_few_says_nothing():
    labels = torch.arange(100) % 5
    perfect = answers(20.0 * torch.nn.functional.one_hot(labels, 5), labels)
    found = fit_temperature(perfect)
    assert found.at_limit and "means nothing" in as_text.calibration([], found)
    harms = found._replace(at_limit=False, loss_before=0.9, loss_after=1.0, calibration_error_before=9.0)
    for error, raised in ((8.0, "the loss;"), (10.0, "the loss and the calibration error;")):
        text = as_text.calibration([], harms._replace(calibration_error_after=error))
        assert f"warning: on the others it raises {raised}" in text
    assert "raises" not in as_text.calibration([], harms._replace(loss_after=0.8, calibration_error_after=10.0))
    assert "raises" not in as_text.calibration([], harms._replace(loss_after=0.900001, calibration_error_after=9.001))
    few = answers(*guesses(0, n=10))
    assert fit_temperature(few) is None and "to so few" in as_text.calibration([], None)


def test_a_comparison_counts_each_image_once_and_matches_by_id():
    logits, labels = guesses(4)
    weaker, _ = guesses(5, sure=0.5)
    weaker[torch.arange(400), labels] += 0.3
    first = answers(logits, labels)
    second = answers(weaker, labels)
    every = np.arange(400)
    comparison = Comparison(first, second, (every, every))
    ours = first.right
    theirs = second.right
    parts = (ours & theirs, ours & ~theirs, ~ours & theirs, ~ours & ~theirs)
    assert comparison.counts == tuple(part.sum() for part in parts)
    assert comparison.difference == pytest.approx(summary(second)["top1"] - summary(first)["top1"])
    low, high = comparison.interval
    assert low < comparison.difference < high < 0 and comparison.mcnemar.p < 0.001
    assert "A is better by more than chance" in as_text.compared(comparison, ("one", "two"))
    rows = comparison.rows()
    assert len(rows) == comparison.counts.first + comparison.counts.second == len({row["image"] for row in rows})
    sure = [row["second_probability"] for row in rows if row["right"] == "first"]
    assert sure == sorted(sure, reverse=True)
    for change in comparison.classes:
        members = labels.numpy() == int(change.name)
        assert change[1:] == (members.sum(), (ours & members).sum(), (theirs & members).sum())


def in_groups(seed, groups=40, size=10, sure=1.5):
    """Predictions of ``groups`` with ``size`` images each, whose answers are equal within a group."""
    logits, labels = (each.repeat_interleave(size, 0) for each in guesses(seed, groups, sure=sure))
    names = np.repeat([f"patient {number}" for number in range(groups)], size)
    images = MemoryImages(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), labels, groups=names)
    return dataclasses.replace(answers(logits, labels), images=images)


def test_a_temperature_is_scored_on_other_groups_than_it_is_fitted_on(monkeypatch):
    """Each patient has two images; drawn one by one, most patients would be in both parts."""
    seen = []
    monkeypatch.setattr("scripts.evaluation.summary.decisions", lambda *part: seen.append(part[1]) or part)
    many = in_groups(0, groups=100, size=2)
    labels = torch.arange(100).repeat_interleave(2)  # the patients' numbers
    numbered = dataclasses.replace(
        many, labels=labels, logits=torch.rand(200, 100), classes=tuple(map(str, range(100)))
    )
    found = fit_temperature(numbered)
    fitted, scored = (set(part.tolist()) for part in seen)
    assert not fitted & scored and (found.fitted_on_images, found.scored_on_images) == (100, 100)


def as_if_independent(predictions):
    return dataclasses.replace(predictions, images=dataclasses.replace(predictions.images, groups=None))


def test_images_of_groups_count_as_groups_in_each_interval():
    grouped = in_groups(1)
    apart = as_if_independent(grouped)
    for name in ("top1_interval_wilson", "top1_interval_bootstrap"):
        assert np.ptp(summary(grouped)[name]) > 2.5 * np.ptp(summary(apart)[name]), name
    assert (summary(grouped)["groups"], summary(apart)["groups"]) == (40, None)
    assert "(bootstrap), 40 groups" in as_text.overall(grouped, {}) and "groups" not in as_text.overall(apart, {})
    said = as_text.rejection(Rejection.of(grouped, 0.5))
    assert "(Wilson), 40 groups; " in said and said.count(" groups") == 2
    taken, same = (Rejection.of(of, 0.5).figures() for of in (grouped, apart))
    for name in ("coverage_interval_wilson", "accuracy_interval_wilson"):
        assert np.ptp(taken.pop(name)) > 2.5 * np.ptp(same.pop(name)), name
    assert taken == same
    assert metrics_of(grouped)[0].small != metrics_of(apart)[0].small


def test_two_networks_that_answer_a_few_groups_differently_differ_by_chance():
    """Only the first is right about 6 groups and only the second about 1, of ten images each."""
    first = in_groups(2, sure=9.0)
    logits = {name: first.logits.clone() for name in ("first", "second")}
    logits["first"][:10] = logits["second"][10:70] = torch.nn.functional.one_hot(torch.tensor(6), 7).float()
    one, two = (dataclasses.replace(first, logits=each) for each in logits.values())
    every = np.arange(400)
    comparison = Comparison(one, two, (every, every))
    apart = Comparison(as_if_independent(one), as_if_independent(two), (every, every))
    assert comparison.mcnemar.p == 2 * (1 + 7) / 2**7 and apart.mcnemar.p < 1e-8
    assert comparison.interval[1] > -1 > apart.interval[1]
    text = as_text.compared(comparison, ("one", "two"))
    assert "(bootstrap, 40 groups)" in text and "McNemar's test (exact, 40 groups): p = 0.125; chance alone" in text


def test_the_answers_out_of_fold_have_an_interval_over_groups(tmp_path):
    grouped = in_groups(3)
    lines = []
    for of in (grouped, as_if_independent(grouped)):
        lines.append(_pooled([SimpleNamespace(predictions=of, numbers=of.numbers)], 0, tmp_path / "out.csv"))
    low, high = wilson_interval(grouped.right, grouped.groups)
    assert f"95 % interval {low:.2f} to {high:.2f} (Wilson, 40 groups); out.csv" in lines[0]
    low, high = wilson_interval(grouped.right)
    assert f"95 % interval {low:.2f} to {high:.2f} (Wilson); out.csv" in lines[1]


def printed(capsys, *line):
    capsys.readouterr()
    assert evaluate.main([*map(str, line), *CPU]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("flags", [(), ("--tta", "flip"), ("--amp", "bf16", "--batch-size", "100")], ids=str)
def test_its_last_line_and_its_macro_figures_are_those_of_the_program(digits_run, capsys, flags):
    lines = printed(capsys, digits_run, *flags)
    assert all(word in lines[1] for word in {"flip", "bf16"} & set(flags))
    theirs = [flag.replace("--batch-size", "--val-batch-size") for flag in flags]
    assert program.main(["--evaluate", "--resume", digits_run, *theirs, *CPU]) == 0
    out = capsys.readouterr().out.splitlines()
    assert lines[-1] == out[-1]
    figures = {line[:18].strip(): line[18:].split()[0] for line in lines[:12] if " %" in line[:30]}
    named = next(line for line in out if "macro precision" in line)
    for name in ("macro precision", "macro recall", "macro F1", "balanced accuracy", "calibration error"):
        assert f"{name} {figures[name]}" in named


def test_files_hold_every_image_and_class_and_nothing_else_is_left(digits_run, capsys, tmp_path):
    lines = printed(capsys, digits_run, "--output", tmp_path / "out")
    tables = ("classes", "confusion_matrix", "confusions", "predictions", "reliability")
    names = sorted([*(f"{name}.csv" for name in tables), "evaluation.json"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert f"Files in {tmp_path / 'out'}: {', '.join(names)}" in lines
    table = {name: csv_rows(tmp_path / "out" / name) for name in names if name.endswith("csv")}
    content = json.loads((tmp_path / "out/evaluation.json").read_text(), parse_constant=pytest.fail)
    rows = table["predictions.csv"]
    assert [row["image"] for row in rows] == [f"val[{n}]" for n in range(360)]
    for row in rows:
        assert (row["class"] == row["predicted"]) == (row["right"] == "1") == (row["class_rank"] == "1")
    top1 = 100 * np.mean([row["right"] == "1" for row in rows])
    assert f"val_top1={top1:.4f} " in lines[-1] and content["figures"]["top1"] == pytest.approx(top1)
    loss = -np.mean(np.log([float(row["class_probability"]) for row in rows]))
    assert loss == pytest.approx(content["figures"]["loss"], abs=1e-3)
    assert sum(int(row["images"]) for row in table["reliability.csv"]) == 360
    for number, row in enumerate(table["confusion_matrix.csv"]):
        members = [each for each in rows if each["class"] == str(number)]
        assert row["class"] == str(number)
        assert all(int(row[str(n)]) == sum(each["predicted"] == str(n) for each in members) for n in range(10))


def test_ranks_change_no_bit(digits_run, capsys, tmp_path):
    others = tree_of_digits(tmp_path / "others", {"7": 7, "2": 2})
    flags = (digits_run, "--other-images", others, "--reject-below", "0.6", "--no-progress")
    alone = printed(capsys, *flags, "--output", tmp_path / "one")
    process = Forked(*map(str, flags), "--output", tmp_path / "two", processes=2, program="scripts/evaluate.py")
    assert process.output().replace("two", "one").splitlines() == alone
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def check_other_files(distributed):
    loaded = SimpleNamespace(path=Path("run/best.pt"), progress={"step": 5 + distributed.rank})
    with pytest.raises(UserError, match="the processes have read run/best.pt of step 5 and run/best.pt of step 6; "):
        evaluate.refuse_other_files(distributed, loaded)


def test_ranks_that_have_read_different_checkpoints_of_a_run_under_way_refuse_to_mix_them():
    on_two(check_other_files)


def test_raw_weights_are_evaluated_on_request(digits_run, capsys, tmp_path):
    altered(digits_run, tmp_path / "raw.pt", ema=None)
    raw = printed(capsys, digits_run, "--raw")[-1]
    assert raw == printed(capsys, tmp_path / "raw.pt")[-1] != printed(capsys, digits_run)[-1]


def test_other_class_folders_are_scored_on_what_is_there(digits_run, capsys, tmp_path):
    tree_of_digits(tmp_path / "tree", {"7": 7, "2": 2, "horse": 4}, count=5)
    lines = printed(capsys, digits_run, "--datapath", tmp_path / "tree")
    assert lines[1] == f"10 images: {tmp_path / 'tree'}" and lines[-1].endswith("val_count=10")


def test_the_rows_of_a_table_are_scored_whatever_data_the_run_had(digits_run, capsys, tmp_path):
    tree = tree_of_digits(tmp_path / "tree", {"1": 1, "3": 3})
    rows = [f"{path.relative_to(tree)},{path.parent.name}" for path in sorted(tree.rglob("*.png"))]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    flags = ("--datapath", tree, "--labels", tmp_path / "labels.csv")
    assert any(line.startswith("6 images") for line in printed(capsys, digits_run, *flags))


def test_a_comparison_says_which_is_better_and_shows_where(digits_run, capsys, tmp_path):
    begun = Path(digits_run, "checkpoints/initial.pt")
    lines = printed(capsys, digits_run, "--compare", begun, "--output", tmp_path)
    compared = json.loads((tmp_path / "evaluation.json").read_text())["comparison"]
    assert compared["images"] == 360 and compared["mcnemar_p"] < 1e-9
    rows = csv_rows(tmp_path / "comparison.csv")
    assert len(rows) == compared["first_right"] + compared["second_right"]
    assert all((row["right"] == "first") == (row["first_predicted"] == row["class"]) for row in rows)
    assert f"A  {digits_run}/checkpoints/last.pt" in lines and f"B  {begun}" in lines
    assert any("A is better by more than chance explains" in line for line in lines)
    picture = Image.open(tmp_path / "comparison.png").convert("L")
    assert picture.width > 1000 and picture.height > 600
    shares = [np.mean(np.asarray(part) < 128) for part in (picture.crop((0, 0, picture.width, 300)), picture)]
    assert all(0.1 < share < 0.6 for share in shares), "digits are white on black"
    lines = printed(capsys, digits_run, "--compare", digits_run, "--output", tmp_path)
    assert any("p = 1; chance alone" in line for line in lines)
    assert not (tmp_path / "comparison.png").exists(), "an earlier evaluation's, of other networks"


def test_of_a_comparison_each_network_that_its_images_chose_is_named(digits_run):
    last, best = (dataclasses.replace(load_model(digits_run), path=Path(f"{name}.pt")) for name in ("last", "best"))
    other_images = dataclasses.replace(best, fingerprint="of others")
    for line, other, named in (
        ([], None, []),
        ([], best, ["best.pt"]),
        ([], other_images, []),
        (["--split", "train"], best, []),
        (["--datapath", "there"], best, []),
    ):
        own = evaluate.build_parser().parse_args([digits_run, *line])
        assert evaluate.chosen_by_these_images(own, last, other) == named
    said = {"checkpoint": "best.pt", "arch": "fc", "raw_weights": False, "tta": "none", "amp": "off"}
    said |= {"dataname": "digits", "split": "val", "compared_with": "b/best.pt"}
    heading = as_text.heading({**said, "chosen_by_these_images": ["best.pt", "b/best.pt"]}, 360)
    assert heading.splitlines()[2:] == [
        "chosen by the result on these images, which favours them: best.pt and b/best.pt"
    ]


def test_a_copy_of_best_is_told_to_be_chosen_by_these_images_and_one_of_the_last_is_not(digits_run, tmp_path, capsys):
    said = "was chosen by its result on these images, which favours it"
    for name, favoured in (("best", True), ("last", False)):
        copy = tmp_path / f"{name} copy.pt"
        printed(capsys, Path(digits_run, f"checkpoints/{name}.pt"), "--store", copy)
        assert load_model(copy).is_favoured == favoured
        assert (f"{copy.name} {said}" in printed(capsys, copy)) == favoured


def test_images_of_equal_names_and_other_content_are_not_the_same_and_moved_ones_are(tmp_path):
    labels = torch.arange(3)
    digests = []
    for number, split in enumerate(("val", "test", "moved/val")):
        paths = [tmp_path / split / str(label) / "0001.png" for label in range(3)]
        for path in paths:
            path.parent.mkdir(parents=True)
            path.write_bytes(f"{path.parent.name} {number % 2}".encode())
        made = answers(torch.eye(3), labels)
        images = ImageFiles([*map(str, paths)], labels)
        digests.append(dataclasses.replace(made, ids=images.paths, images=images).digest)
    val, test, moved = digests
    assert same_images(val, moved) and not same_images(val, test)
    assert same_images(val.partition("+")[0], test), "a copy of an older version knows the names alone"


@pytest.mark.parametrize(
    ("splits", "folds", "line", "favoured"),
    [
        (["train", "test"], None, ["--split", "test"], True),  # without a val/, training validates on test/
        (["train", "test"], 5, ["--split", "test"], False),  # but on a fold where there are some
        (["train", "test"], 5, [], True),
        (["train", "test"], 5, ["--datapath", "DATA"], True),
        (["train", "val", "test"], None, ["--split", "test"], False),
        (["train", "val"], None, ["--datapath", "DATA"], True),
        (["train", "val"], None, ["--datapath", "DATA/val"], True),
        (["train", "val"], None, ["--datapath", "DATA/train"], False),
        ([], None, ["--datapath", "DATA"], True),  # a share of one tree, or files of the set's own
    ],
)
def test_the_images_that_chose_best_are_known_under_any_name(digits_run, tmp_path, splits, folds, line, favoured):
    for split in splits:
        (tmp_path / split / "0").mkdir(parents=True)
    best = load_model(Path(digits_run, "checkpoints/best.pt"))
    best.settings.update(datapath=str(tmp_path), folds=folds, fold=folds and 0)
    own = evaluate.build_parser().parse_args([digits_run, *(word.replace("DATA", str(tmp_path)) for word in line)])
    assert bool(evaluate.chosen_by_these_images(own, best, None)) == favoured


def replace_all(images):
    """Other pixels under the same names."""
    for path in images.glob("*/*.png"):
        Image.new("RGB", (8, 8), (int(path.stem), 0, 0)).save(path)


CHANGES = {
    "nothing": lambda data: None,
    "an image is gone": lambda data: next((data / "train" / "a").iterdir()).unlink(),
    "an image of another class": lambda data: next((data / "train" / "a").iterdir()).rename(data / "train/b/new.png"),
    "validation images are gone": lambda data: shutil.rmtree(data / "val"),
    "all training images were replaced": lambda data: replace_all(data / "train"),
}


def test_training_images_that_have_changed_are_warned_of(workplace, capsys):
    data = image_tree(workplace / "data", {"train": 17, "val": 17})
    line = "--dataname folder --image-size 8 --arch fc --epochs 1 -b 34 -w 0 --datapath".split()
    run = trained(workplace / "runs", *line, data)
    kept = data.rename(workplace / "kept")
    for name, change in CHANGES.items():
        shutil.copytree(kept, data)
        change(data)
        for in_place in ([], ["--datapath", "data"]):
            capsys.readouterr()
            assert evaluate.main([str(run), *CPU, "--split", "train", *in_place]) == 0
            assert ("have changed since" in capsys.readouterr().err) is (name != "nothing"), (name, in_place)
        shutil.rmtree(data)


def test_a_test_that_holds_what_the_run_trained_on_is_warned_of(tmp_path, capsys):
    data = image_tree(tmp_path / "data", {"train": 9, "val": 4, "test": 5})
    paths = [path.relative_to(data) for path in sorted(data.glob("*/*/*.png"))]
    rows = [f"{path},{path.parts[1]},{path.parts[0]},p{number}" for number, path in enumerate(paths)]
    table = tmp_path / "labels.csv"
    line = "--dataname folder --image-size 8 --arch fc --epochs 1 -b 6 -w 0 --datapath".split()
    runs = {}
    for name, *flags in (["folders"], ["table", "--labels", table]):
        table.write_text("\n".join(["path,label,split,patient", *rows]) + "\n")
        runs[name] = trained(tmp_path / name, *line, data, *flags)

    def told(run, *line):
        capsys.readouterr()
        assert evaluate.main([str(runs[run]), *CPU, *line]) == 0
        return [text for text in capsys.readouterr().err.splitlines() if "raining" in text or "trained" in text]

    assert told("folders", "--split", "test") == told("table", "--split", "test") == []
    copy = data / "test" / "b" / "copy.png"
    copy.write_bytes((data / "train" / "b" / "4.png").read_bytes())
    said = (
        "last.pt was trained on 1 image of 11 to test on, which makes results too good: test/b/copy.png = train/b/4.png"
    )
    other = altered(runs["folders"], tmp_path / "other.pt", settings={"train_samples": 4, "seed": 2})
    by_path = ["--datapath", str(copy.parent.parent)]
    for flags in (["--split", "test"], by_path):
        (line,) = told("folders", *flags)
        assert said in line and "changed" not in line
    assert len(told("folders", *by_path, "--compare", str(runs["folders"] / "checkpoints/last.pt"))) == 2
    assert len(told("folders", "--split", "test", "--compare", str(other))) == 1, "it trained on four of the images"
    assert told("folders") == told("folders", "--split", "train") == []
    table.write_text(table.read_text().replace(",p0\n", ",p10\n"))
    (line,) = told("table", "--split", "test")
    assert "1 group with images in training and in test, 10.0 % of the test images" in line
    (data / "train" / "b" / "extra.png").write_bytes(b"")
    assert said + " (if it was there then: the data has changed since)" in told("folders", "--split", "test")[0]
    (data / "train" / "b" / "extra.png").unlink()
    data.rename(tmp_path / "elsewhere")
    (line,) = told("folders", "--split", "test", "--datapath", str(tmp_path / "elsewhere"))
    assert "1 image of 11 to test on" in line and "changed" not in line


def test_a_test_that_holds_the_images_which_chose_the_weights_is_warned_of(tmp_path, capsys):
    image_tree(tmp_path / "data", {"train": 3, "val": 3})
    shutil.copytree(tmp_path / "data" / "val", tmp_path / "data" / "test")
    flags = "--dataname folder --image-size 8 --arch fc --epochs 1 -b 6 -w 0 --datapath".split()
    run = trained(tmp_path / "runs", *flags, tmp_path / "data")
    for best, count in ((["--best"], 1), ([], 0)):
        capsys.readouterr()
        assert evaluate.main([str(run), *CPU, *best, "--split", "test"]) == 0
        said = capsys.readouterr().err
        assert said.count("best.pt was chosen by its result on 6 images of 6 to test on") == count
    assert evaluate.main([str(run), *CPU, "--best", "--datapath", str(tmp_path / "data" / "val")]) == 0
    said = capsys.readouterr()
    assert "to test on" not in said.err and "was chosen by its result on these images" in said.out, "told once"
    (tmp_path / "data").rename(tmp_path / "moved")
    assert evaluate.main([str(run), *CPU, "--best", "--datapath", str(tmp_path / "moved")]) == 0
    assert "best.pt was chosen by its result on 6 images of 6 to test on" in capsys.readouterr().err


def test_of_a_comparison_it_is_said_how_each_was_run_where_that_differs(digits_run, capsys, tmp_path):
    altered(digits_run, tmp_path / "flip.pt", settings={"tta": "flip"})
    lines = printed(capsys, digits_run, "--compare", tmp_path / "flip.pt")
    assert f"A  {digits_run}/checkpoints/last.pt (--tta none, --amp off)" in lines
    assert f"B  {tmp_path}/flip.pt (--tta flip, --amp off)" in lines


def test_a_second_network_reads_the_first_ones_columns(digits_run):
    ours = {"dataname": "hf", "datapath": "there", "val_split": None, "image_column": "img", "label_column": "fine"}
    first, second = (
        dataclasses.replace(load_model(digits_run), settings=settings)
        for settings in (ours, {"dataname": "hf", "label_column": "coarse", "arch": "fc"})
    )
    assert with_data_settings_of(second, first).settings == {**ours, "arch": "fc"}


def test_a_second_network_is_shown_each_image_of_the_first_ones_own_division(digits_run, capsys, tmp_path):
    tree = tree_of_digits(tmp_path / "tree", {str(n): n for n in range(10)}, count=6)
    division = DataSettings(dataname="folder", datapath=str(tree), folds=3, fold=0)
    dealt = get_data(division, torch.device("cpu")).folds.state()
    own = {**dealt, "folds": (dealt["folds"] + 1) % 3}  # as of a run that kept an earlier one's
    settings = {"dataname": "folder", "datapath": str(tree), "folds": 3, "fold": 0}
    altered(digits_run, tmp_path / "first.pt", settings=settings, folds=own)
    lines = printed(capsys, tmp_path / "first.pt", "--compare", digits_run)
    assert "20 images: folder, val" in lines and any(line.startswith("On 20 images: ") for line in lines)


def test_networks_with_classes_in_another_order_are_compared_by_name(digits_run, capsys, tmp_path):
    state = torch.load(Path(digits_run, "checkpoints/last.pt"), weights_only=True)
    order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    last = [name for name in state["model"] if len(state["model"][name]) == 10]
    state["ema"]["model"] |= {name: state["ema"]["model"][name][order] for name in last}
    torch.save(state | {"classes": [state["classes"][n] for n in order]}, tmp_path / "other.pt")
    tree = tree_of_digits(tmp_path / "tree", {str(n): n for n in range(10)})
    flags = ("--compare", tmp_path / "other.pt", "--datapath", tree)
    (line,) = (line for line in printed(capsys, digits_run, *flags) if line.startswith("On 30 images"))
    assert "only A on 0, only B on 0" in line


def test_a_comparison_says_which_network_can_go_wrong_by_classes_that_the_other_lacks():
    first, second = guesses(0, classes=4), guesses(1, classes=2)
    places = (np.arange(4), np.arange(4))
    text = as_text.compared(Comparison(answers(*first, "abcd"), answers(*second, "ab"), places), ("one", "two"))
    assert "none shows one of A's 2 other classes (c, d); only A can go wrong by answering them" in text
    text = as_text.compared(Comparison(answers(*first, "abcd"), answers(*first, "abcd"), places), ("one", "two"))
    assert "other classes" not in text


def test_a_thousand_classes_fit_on_a_screen_and_say_what_is_left_out():
    logits, labels = guesses(6, n=5000, classes=1000, sure=2.0)
    names = [f"a rather long name of a class, number {n}" for n in range(1000)]
    figures = answers(logits, labels, names)
    text = "\n".join(
        [as_text.overall(figures, {}), as_text.classes(figures, "; see X"), as_text.pairs(figures, "; see Y")]
    )
    lines = text.splitlines()
    assert len(lines) < 40 and max(map(len, lines)) <= 120
    f1s = [row["f1"] for row in class_rows(figures) if row["images"] or row["predicted"]]
    assert f"(not shown: {len(f1s) - 10:,} more; see X)" in text and "more pairs; see Y)" in text
    assert len({line[:24] for line in as_text.classes(figures, "").splitlines()[3:]}) == 10, "names stay distinct"


def test_the_worst_classes_are_those_that_have_images():
    logits, labels = guesses(7, n=300, classes=40, sure=2.0)
    lines = as_text.classes(answers(logits[labels < 12], labels[labels < 12]), "").splitlines()[3:]
    assert len(lines) == 10 and all(int(line.split()[0]) < 12 for line in lines), "the other 28 are only predicted"
    f1s = [float(line.split()[4]) for line in lines]
    assert f1s == sorted(f1s)


def test_class_names_cannot_write_to_the_terminal():
    figures = answers(*guesses(0, classes=3), ["\x1b[31mred", "two\nlines", "c"])
    text = as_text.classes(figures, "") + as_text.pairs(figures, "")
    assert "\x1b" not in text and "two?lines" in text


def test_nothing_half_written_is_left_where_writing_fails(digits_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "_prediction_rows", Mock(side_effect=OSError(28, "No space left on device")))
    code, said = answer(evaluate, [digits_run, "--output", str(tmp_path / "new"), *CPU], capsys, monkeypatch)
    assert code == 2 and "new: cannot be written (No space left on device)" in said.err
    assert list(tmp_path.iterdir()) == []


def test_files_of_another_program_are_not_replaced(digits_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "predictions.csv").write_text("of predict.py")
    code, said = answer(evaluate, [digits_run, "--output", str(tmp_path), *CPU], capsys, monkeypatch)
    assert code == 2 and "holds predictions.csv but no evaluation.json, so they are another program's" in said.err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of predict.py"]


def test_the_json_file_is_there_only_with_the_files_that_it_tells_of(digits_run, tmp_path, monkeypatch):
    line = [digits_run, "--output", str(tmp_path), *CPU]
    evaluate.main(line)
    earlier = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "coverage.png").mkdir()
    with pytest.raises(UserError, match="coverage.png is a folder there"):
        evaluate.main([*line, "--reject-below", "0.5"])
    (tmp_path / "coverage.png").rmdir()
    assert earlier == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    moved = []
    replace = os.replace

    def watched(source, target):
        moved.append((Path(target).name, Path(tmp_path, "evaluation.json").exists()))
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", watched)
    evaluate.main(line)
    assert sorted(name for name, _ in moved) == sorted(earlier) and not any(there for _, there in moved)
    assert moved[-1][0] == "evaluation.json" and (tmp_path / "evaluation.json").exists()
