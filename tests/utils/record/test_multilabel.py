"""Figures of several labels an image: scikit-learn's, on any number of ranks, without what is missing."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve, roc_auc_score
from torch.nn import functional

from utils.record.metrics import Report
from utils.record.multilabel import (
    MultilabelClasses,
    MultilabelMeter,
    MultilabelReport,
    ValidationAnswers,
    best_thresholds,
    counts_at,
    f1_of,
    known_targets,
    report_of,
    scores_of,
)

CLASSES = 7  # the sixth has no positive label, the last no negative one


def answers(count=500, missing=0.2, ties=False, seed=0):
    """Logits float32 and targets float32 with NaN for missing, (count, CLASSES) each."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, CLASSES, generator=generator) * 3
    logits = logits.round() if ties else logits
    targets = (torch.rand(count, CLASSES, generator=generator) < 0.3 + 0.05 * logits).float()
    targets[:, 5] = 0
    targets[:, 6] = 1
    targets[torch.rand(count, CLASSES, generator=generator) < missing] = math.nan
    return logits, targets


def cells(logits, targets, number):
    """Scores and labels of a class that are known, as scikit-learn takes them."""
    known = ~targets[:, number].isnan()
    return targets[known, number].numpy(), torch.sigmoid(logits[known, number].double()).numpy()


@pytest.mark.parametrize("missing", [0.0, 0.2, 0.9])
@pytest.mark.parametrize("ties", [False, True])
def test_the_figures_are_scikit_learns_and_classes_without_a_positive_label_are_in_no_mean(missing, ties):
    logits, targets = answers(missing=missing, ties=ties)
    report = MultilabelReport.of(logits, targets)
    found = report.by_class
    precision, areas, f1 = [], [], []
    for number in (0, 1, 2, 3, 4, 6):
        labels, scores = cells(logits, targets, number)
        precision.append(100 * average_precision_score(labels, scores))
        f1.append(100 * f1_score(labels, scores >= 0.5))
        if number != 6:
            areas.append(100 * roc_auc_score(labels, scores))
            assert found.auroc_by_class[number] == pytest.approx(areas[-1], abs=1e-6)
        assert found.average_precision[number] == pytest.approx(precision[-1], abs=1e-6)
        assert found.f1[number] == pytest.approx(f1[-1], abs=1e-6)
    assert math.isnan(found.average_precision[5]) and math.isnan(found.f1[5]) and math.isnan(found.auroc_by_class[5])
    assert math.isnan(found.auroc_by_class[6]), "without a negative label there is no false alarm"
    assert report.map == pytest.approx(np.mean(precision), abs=1e-6)
    assert report.macro_f1 == pytest.approx(np.mean(f1), abs=1e-6)
    assert found.auroc == pytest.approx(np.mean(areas), abs=1e-6)
    assert found.counted_classes == 6
    assert "means of 6 of 7 classes" in str(found)
    known = ~targets.isnan()
    labels, scores = targets[known].numpy(), torch.sigmoid(logits[known].double()).numpy()
    assert report.micro_f1 == pytest.approx(100 * f1_score(labels, scores >= 0.5), abs=1e-6)
    loss = functional.binary_cross_entropy_with_logits(logits[known].double(), targets[known].double())
    assert report.loss == pytest.approx(loss.item(), rel=1e-12)  # the same terms in another order
    assert report.count == 500


def test_thresholds_are_the_best_of_all_and_score_images_that_did_not_choose_them():
    logits, targets = answers(200)
    scores, labels = scores_of(logits), known_targets(targets)
    thresholds = best_thresholds(scores, labels)
    for number in range(5):
        own = labels[:, number] >= 0
        precision, recall, _ = precision_recall_curve(labels[own, number], scores[own, number])
        reached = f1_score(labels[own, number], scores[own, number] >= thresholds[number])
        assert reached == pytest.approx(np.nanmax(2 * precision * recall / (precision + recall)))
    assert thresholds[5] == 0.5, "a class without a positive label has nothing to choose by"
    order = np.random.Generator(np.random.Philox(key=[0, 2])).permutation(200)
    counts = 0
    for scored, choosing in ((order[::2], order[1::2]), (order[1::2], order[::2])):
        counts = counts + counts_at(scores[scored], labels[scored], best_thresholds(scores[choosing], labels[choosing]))
    assert (MultilabelClasses.of(scores, labels).tuned_counts == counts).all()


def test_labels_without_any_relation_to_the_scores_are_not_flattered_by_the_thresholds():
    """Thresholds chosen on the scored images themselves would find some; a rare class shows it."""
    generator = np.random.default_rng(0)
    scores, targets = generator.random((400, 40)), (generator.random((400, 40)) < 0.02).astype(np.int8)
    own = np.nanmean(f1_of(counts_at(scores, targets, best_thresholds(scores, targets))))
    assert own > MultilabelClasses.of(scores, targets).tuned_macro_f1 + 3


def test_copies_of_an_image_do_not_choose_the_thresholds_that_the_image_is_scored_at():
    """Ten images of each patient, with labels without any relation to the scores, as above."""
    generator = np.random.default_rng(0)
    patients = np.repeat(np.arange(60), 10)
    scores, targets = generator.random((60, 40)), (generator.random((60, 40)) < 0.1).astype(np.int8)
    alone = MultilabelClasses.of(scores, targets).tuned_macro_f1
    apart, grouped = (
        MultilabelClasses.of(scores[patients], targets[patients], groups).tuned_macro_f1
        for groups in (None, patients.astype(str))
    )
    assert apart > grouped + 5 and grouped == pytest.approx(alone, abs=3)


class Ranks:
    """Stands for ``Distributed`` on rank 0 of several, whose other ranks' parts are given."""

    def __init__(self, others):
        self.others = others

    def gather(self, mine):
        return [mine, *self.others]

    def run_on_rank0(self, function):
        return function()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_report_has_the_same_bits_on_any_number_of_ranks(world_size):
    logits, targets = answers(101)
    parts = [np.arange(first, min(first + 7, 101)) for first in range(0, 101, 7)]
    groups = np.array([str(number % 23) for number in range(101)])
    kept = [ValidationAnswers(groups) for _ in range(world_size)]
    for number, part in enumerate(parts):
        kept[number % world_size].update(part, logits[part], targets[part])
    others = [[(i, log.numpy(), tar.numpy()) for i, log, tar in rank._parts] for rank in kept[1:]]
    report = kept[0].report(Ranks(others))
    alone = MultilabelReport.of(logits, targets, groups)
    assert report == alone  # floats to the bit
    assert (report.by_class.tuned_counts == alone.by_class.tuned_counts).all()
    assert report.count == 101


def test_a_score_that_is_not_a_number_makes_the_means_of_precision_nan_and_the_loss_too():
    logits, targets = answers(50, missing=0)
    logits[3, 0] = math.nan
    report = MultilabelReport.of(logits, targets)
    assert math.isnan(report.loss) and math.isnan(report.map)


def test_of_no_image_and_of_no_known_label_nothing_is_known():
    logits, targets = answers(10)
    assert MultilabelReport.of(logits[:0], targets[:0]).count == 0
    nothing = MultilabelReport.of(logits, torch.full_like(targets, math.nan))
    assert math.isnan(nothing.map) and math.isnan(nothing.micro_f1) and nothing.by_class.counted_classes == 0


@pytest.mark.parametrize("kind", ["one", "several"])
def test_a_checkpoint_keeps_a_validations_numbers_and_what_they_are(kind):
    report = Report(0.5, 60.0, 90.0, 12) if kind == "one" else MultilabelReport(0.5, 60.0, 50.0, 40.0, 12)
    assert report_of([float(number) for number in report.numbers]) == report


def test_trainings_micro_f1_is_scikit_learns_without_missing_labels_and_in_any_number_of_passes():
    logits, targets = answers(60)
    known = ~targets.isnan()
    expected = 100 * f1_score(targets[known].numpy(), logits[known].numpy() >= 0)
    for passes in (1, 4):
        meter = MultilabelMeter(1, torch.device("cpu"))
        for part in zip(logits.chunk(passes), targets.chunk(passes), strict=True):
            meter.update(0, torch.tensor(0.7), *part)
        report = MultilabelReport.from_sums(meter.sums[0].tolist())
        assert report.micro_f1 == pytest.approx(expected)
        assert report.loss == pytest.approx(0.7)
        assert report.count == 60
