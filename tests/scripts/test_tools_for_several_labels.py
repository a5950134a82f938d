"""Tools on networks for several labels an image: figures against scikit-learn's, and files that can be trusted."""

import dataclasses
import io
import json

import numpy as np
import pytest
import torch
from sklearn import metrics

from scripts import evaluate
from scripts.common.label_answers import LabelAnswers, Resampled, intervals, resampled
from scripts.common.predictions import LabelPredictions
from scripts.evaluation import labels_report
from scripts.evaluation.files import JSON_FILE, save, write_all
from scripts.evaluation.result import Evaluation
from scripts.evaluation.several_labels import LabelComparison, class_rows, summary
from scripts.predict import PredictionRow, refuse_separator_in, writer
from scripts.reporting import label_details
from tests.helpers import csv_rows
from utils.config.settings import UserError
from utils.data.formats.readers import MemoryImages
from utils.record.multilabel import MultilabelReport
from utils.record.reading import SeveralLabels

NAMES = ("cat", "dog", "sea", "sky", "tree")


def answers(seed=0, n=120, missing=0.15, sure=1.5, thresholds=(0.5, 0.4, 0.6, 0.5, 0.3)):
    """Predictions of ``n`` images: better than chance, with missing labels, ties, and a class without positives."""
    random = torch.Generator().manual_seed(seed)
    targets = (torch.rand(n, len(NAMES), generator=random) < torch.tensor([0.5, 0.3, 0.1, 0.7, 0.0])).float()
    logits = torch.randn(n, len(NAMES), generator=random) + sure * (targets - 0.5)
    logits = (4 * logits).round() / 4
    targets[torch.rand(n, len(NAMES), generator=random) < missing] = float("nan")
    return LabelPredictions(
        logits=logits,
        labels=targets,
        reading=SeveralLabels(thresholds),
        classes=NAMES,
        ids=[f"val[{place}]" for place in range(n)],
        report=MultilabelReport.of(logits, targets),
        notes=(),
        images=MemoryImages(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), targets),
        numbers=np.arange(n),
    )


DESCRIPTION = {
    "checkpoint": "a.pt",
    "arch": "conv2",
    "raw_weights": False,
    "tta": "none",
    "amp": "off",
    "dataname": "folder",
    "datapath": "data",
    "split": "val",
    "step": 100,
    "chosen_by_these_images": [],
    "compared_with": "b.pt",
    "compared_tta": "none",
    "compared_amp": "off",
    "thresholds_of_these_images": True,
}


def test_figures_of_classes_are_scikit_learns_on_the_labels_that_are_known():
    made = answers()
    rows = class_rows(made)
    for place, row in enumerate(rows):
        known = ~made.labels[:, place].isnan().numpy()
        truth = made.labels[known, place].numpy()
        scores = torch.sigmoid(made.logits[known, place].double()).numpy()
        assert (row["known"], row["positives"]) == (known.sum(), truth.sum())
        if not truth.any():
            assert row["average_precision"] is row["auroc"] is row["f1"] is None
            continue
        assert row["average_precision"] == pytest.approx(100 * metrics.average_precision_score(truth, scores))
        assert row["auroc"] == pytest.approx(100 * metrics.roc_auc_score(truth, scores))
        assert row["f1"] == pytest.approx(100 * metrics.f1_score(truth, scores >= 0.5))
        false, wrong, missed, _ = metrics.confusion_matrix(truth, scores >= row["threshold"]).ravel()
        assert (row["superfluous"], row["missed"]) == (wrong, missed)
        assert row["given"] == len(truth) - false - missed


def test_a_summary_counts_every_known_label_once_and_says_how_many_classes_count():
    made = answers(missing=0)
    found = summary(made)
    truth = made.labels.numpy()
    given = made.scores >= 0.5
    assert found["micro_f1"] == pytest.approx(100 * metrics.f1_score(truth, given, average="micro"))
    ap = metrics.average_precision_score(truth[:, :4], made.scores[:, :4], average=None)
    assert found["map"] == pytest.approx(100 * ap.mean()) and found["classes_with_positives"] == 4
    assert found["exact_match"] == pytest.approx(100 * metrics.accuracy_score(truth, given))
    own = np.stack([made.scores[:, place] >= made.reading.thresholds[place] for place in range(5)], 1)
    assert found["given_micro_f1"] == pytest.approx(100 * metrics.f1_score(truth, own, average="micro"))
    text = labels_report.overall(made, DESCRIPTION)
    assert "the mean of the 4 of 5 classes with positive labels here" in text and "chosen on these images" in text
    assert "F1 at 0.5  F1 tuned  threshold" in labels_report.classes(made, ""), "not at the threshold beside it"


def test_an_image_whose_logits_are_not_a_number_is_no_exact_match_though_it_shows_nothing():
    made = answers(missing=0)
    nothing = torch.zeros(1, len(NAMES))
    unsure = torch.full_like(nothing, float("nan"))
    one_unknown = torch.tensor([[float("nan"), 0.0, 0.0, 0.0, 0.0]])  # a missing label needs no answer
    both = torch.cat([unsure, torch.where(one_unknown.isnan(), float("nan"), -9.0)])
    more = dataclasses.replace(
        made, logits=torch.cat([made.logits, both]), labels=torch.cat([made.labels, nothing, one_unknown])
    )
    before, after = summary(made), summary(more)
    hits, images = before["exact_match"] * before["exact_match_images"] / 100, before["exact_match_images"]
    assert after["exact_match"] == pytest.approx(100 * (hits + 1) / (images + 2))
    assert more.right[-2:].tolist() == [False, True] and images in more.most_mistaken()
    assert "for 2 images the network's output is not finite" in labels_report.overall(more, DESCRIPTION)


def test_the_report_says_what_guessing_reaches_and_which_thresholds_a_figure_has():
    made = answers(missing=0)
    shown = {metric.name: metric for metric in label_details.metrics_of(made)}
    truth = made.labels.numpy()[:, :4]  # the fifth class has no positives
    chance = np.mean([metrics.average_precision_score(column, np.zeros(len(column))) for column in truth.T])
    assert f"guessing: {100 * chance:.1f}" in shown["mAP"].small
    assert shown["Tuned macro F1"].value == f"{made.by_class.tuned_macro_f1:.2f} %"


def test_a_resample_has_the_figures_of_its_images_repeated_and_intervals_cover():
    made = answers(n=40)
    drawn = np.random.default_rng(0).integers(40, size=40)  # the first resample's images, drawn as the module draws
    found = resampled(made.scores, made.targets)
    scores, targets = made.scores[drawn], made.targets[drawn]
    aps = []
    for place in range(5):
        known = targets[:, place] >= 0
        if (targets[known, place] == 1).any():
            aps.append(metrics.average_precision_score(targets[known, place], scores[known, place]))
    first = np.random.default_rng(0).integers(40, size=(1000, 40))[0]
    assert (first == drawn).all(), "numpy draws row by row"
    assert found.map[0] == pytest.approx(100 * np.mean(aps))
    figures = {name: getattr(made.report, name) for name in Resampled._fields}
    for name, (low, high) in intervals(found, figures, 40).items():
        assert low < getattr(made.report, name) < high, name
    again = resampled(made.scores, made.targets)
    both = intervals(
        Resampled(*(one - two for one, two in zip(found, again, strict=True))), dict.fromkeys(figures, 0.0), 40
    )
    assert set(both.values()) == {(0.0, 0.0)}, "a network differs from itself by nothing: images are drawn in pairs"


def test_images_of_groups_count_as_groups_in_each_interval():
    """Twelve copies of each image, as of one patient: the figures stay, and the intervals are those of the patients."""
    few = answers(n=60)
    copies = np.repeat(np.arange(60), 12)
    images = MemoryImages(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), few.labels[copies], groups=copies.astype(str))
    logits, labels = few.logits[copies], few.labels[copies]
    fields = {"ids": [f"val[{place}]" for place in range(720)], "report": MultilabelReport.of(logits, labels)}
    many = dataclasses.replace(few, logits=logits, labels=labels, images=images, numbers=np.arange(720), **fields)
    alone, grouped = summary(few), summary(many)
    apart = summary(dataclasses.replace(many, images=dataclasses.replace(images, groups=None)))
    assert (grouped["groups"], apart["groups"]) == (60, None)
    for name in ("map", "macro_f1", "micro_f1", "exact_match"):
        kind = f"{name}_interval_bootstrap"
        assert grouped[name] == pytest.approx(alone[name]) and np.ptp(apart[kind]) < 0.5 * np.ptp(grouped[kind]), name
        assert grouped[kind] == pytest.approx(alone[kind], abs=2.0), "whole groups are drawn as images were"
    assert "(basic bootstrap, 60 groups)" in labels_report.overall(many, DESCRIPTION)
    shown = {metric.name: metric.small for metric in label_details.metrics_of(many)}
    low, high = grouped["map_interval_bootstrap"]
    assert f"95 %: {low:.1f} to {high:.1f}" in shown["mAP"]
    other = dataclasses.replace(many, logits=answers(seed=1, n=60).logits[copies])
    (spans, independent) = (
        LabelComparison.of(
            *(dataclasses.replace(each, images=dataclasses.replace(images, groups=of)) for each in (many, other))
        ).differences
        for of in (images.groups, None)
    )
    assert np.ptp(spans["map"][1]) > 2 * np.ptp(independent["map"][1])


def test_metrics_of_images_without_a_positive_label_are_undefined_and_so_are_their_intervals():
    some = answers(n=40)
    none = torch.zeros_like(some.labels)
    found = dataclasses.replace(some, labels=none, report=MultilabelReport.of(some.logits, none))
    for row in labels_report.overall(found, DESCRIPTION).splitlines()[:2]:
        assert "  -  " in row and "undefined" in row
    shown = {metric.name: metric for metric in label_details.metrics_of(found)}
    assert shown["mAP"].small == "undefined; guessing: 0.0"
    patient = MemoryImages(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), none, groups=np.full(40, "patient"))
    assert np.isnan(summary(dataclasses.replace(found, images=patient))["map_interval_bootstrap"]).all()
    text = labels_report.compared(LabelComparison.of(found, found), ("a", "b"))
    assert "undefined, because one of the figures is" in text and "nan" not in text


def test_one_group_tells_nothing_about_others():
    one, two = answers(sure=0.5, n=40), answers(sure=3.0, n=40)
    images = MemoryImages(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), one.labels, groups=np.full(40, "patient"))
    one, two = (dataclasses.replace(each, images=images) for each in (one, two))
    found = summary(one)
    assert {found[f"{name}_interval_bootstrap"] for name in ("map", "macro_f1", "exact_match")} == {(0.0, 100.0)}
    assert np.isnan([found["tuned_macro_f1"], found["tuned_micro_f1"]]).all(), "no other half chose thresholds"
    assert "too few images, or groups, to choose thresholds" in labels_report.overall(one, DESCRIPTION)
    text = labels_report.compared(LabelComparison.of(one, two), ("a", "b"))
    assert "-100.00 to +100.00 (basic bootstrap, 1 groups); chance alone" in text and "more than chance" not in text


def test_a_better_network_is_told_from_chance_and_an_equal_one_is_not():
    one, two = answers(sure=0.5, n=400), answers(sure=3.0, n=400)
    better = LabelComparison.of(one, two)
    difference, (low, high) = better.differences["map"]
    assert 0 < low < difference < high
    assert difference == pytest.approx(two.report.map - one.report.map)
    assert [change.name for change in better.classes][-1] != "tree" and len(better.classes) == 4
    text = labels_report.compared(better, ("a", "b"))
    assert "more than chance explains" in text
    assert ["threshold 0.5" in line for line in text.splitlines() if " points, " in line] == [False, True, True]
    assert LabelComparison.of(one, one).differences["map"] == (0.0, (0.0, 0.0))


def test_missed_and_superfluous_labels_leave_out_missing_ones_and_images_are_ordered_by_the_most_confident_mistake():
    logits = torch.tensor([[4.0, -4.0], [-1.0, 1.0], [2.0, -2.0], [-5.0, 5.0]])
    labels = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [float("nan"), 1.0]])
    made = LabelAnswers(logits, labels, SeveralLabels((0.5, 0.5)))
    assert made.missed.tolist() == [[False, False], [True, False], [False, False], [False, False]]
    assert made.superfluous.tolist() == [[False, False], [False, True], [True, False], [False, False]]
    assert made.right.tolist() == [True, False, False, True]
    assert made.most_mistaken().tolist() == [2, 1] and made.least_certain().tolist() == [0, 3]


def test_labels_together_are_counted_where_both_are_known():
    made = answers()
    true, given = made.together
    for one in range(5):
        for two in range(5):
            known = (made.targets[:, one] >= 0) & (made.targets[:, two] >= 0)
            assert true[one, two] == ((made.targets[:, one] == 1) & (made.targets[:, two] == 1)).sum()
            assert given[one, two] == (made.given[:, one] & made.given[:, two] & known).sum()
    apart = [abs(pair.true - pair.given) for pair in made.pairs]
    assert apart == sorted(apart, reverse=True)


def test_files_hold_every_image_and_class_and_missing_labels_stay_missing(tmp_path):
    made = answers()
    (tmp_path / "confusions.csv").write_text("of an earlier evaluation")
    found = Evaluation(made, None, LabelComparison.of(made, answers(sure=3.0)))
    names = save(tmp_path, lambda work: write_all(work, DESCRIPTION, found))
    said = "\n".join(evaluate.parts_of(str(tmp_path), DESCRIPTION, found))
    assert "mAP" in said and "probability labels mean %" in " ".join(said.split()), "each known label is one answer"
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert JSON_FILE in names and "confusions.csv" not in names
    content = json.loads((tmp_path / JSON_FILE).read_text())
    assert content["figures"]["map"] == pytest.approx(made.report.map)
    assert content["classes"][4]["average_precision"] is None, "JSON has no NaN"
    rows = csv_rows(tmp_path / "targets.csv")
    cells = [[-1 if row[name] == "" else int(row[name]) for name in NAMES] for row in rows]
    assert (np.array(cells) == made.targets).all()
    scores = [[float(row[name]) for name in NAMES] for row in csv_rows(tmp_path / "scores.csv")]
    np.testing.assert_allclose(scores, made.scores, rtol=0, atol=5.1e-7)  # six digits


def test_predictions_tell_no_label_from_an_image_that_cannot_be_read():
    rows = [
        PredictionRow("a.png", [], labels=[("cat", 0.9), ("sky", 0.6)]),
        PredictionRow("b.png", [], labels=[]),
        PredictionRow("c.png", [], "is damaged"),
    ]
    table, lines = io.StringIO(), io.StringIO()
    for file, form in ((table, "csv"), (lines, "jsonl")):
        write = writer(file, form, 0, True)
        for row in rows:
            write(row)
    assert table.getvalue().splitlines() == [
        "path,labels,probabilities,error",
        "a.png,cat;sky,0.9;0.6,",
        "b.png,,,",
        "c.png,,,is damaged",
    ]
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [one["labels"] for one in found] == [
        [{"class": "cat", "probability": 0.9}, {"class": "sky", "probability": 0.6}],
        [],
        None,
    ]
    with pytest.raises(UserError, match="'a;b' holds ';'"):
        refuse_separator_in(("cat", "a;b"))


def test_the_likeliest_classes_stand_beside_the_labels_if_they_are_asked_for():
    file = io.StringIO()
    writer(file, "csv", 2, True)(PredictionRow("a.png", [("cat", 0.4), ("sky", 0.1)], labels=[]))
    assert file.getvalue().splitlines() == [
        "path,labels,probabilities,class,probability,class_2,probability_2,error",
        "a.png,,,cat,0.4,sky,0.1,",
    ]
