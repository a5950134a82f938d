"""Metrics by class against scikit-learn, the calibration error against its formula written out."""

import csv
import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, precision_score, recall_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.processes import rows
from tests.faults.small_run import begin
from tests.utils.record.test_metrics import CPU, random_batch
from utils.record.class_metrics import ClassReport
from utils.record.metrics import ValidationMeter
from utils.record.writer import RunWriter


def meter_of(*batches, rows=None):
    meter = ValidationMeter(len(batches), CPU)
    for row, (logits, targets) in enumerate(batches):
        if rows is None or row in rows:
            meter.update(row, torch.tensor(0.0), logits, targets)
    return meter


def report_of(*batches):
    return ClassReport.from_sums(meter_of(*batches).class_sums(batches[0][0].shape[1]))


def uneven_batch(count=500, classes=8, absent=(2, 5), never_predicted=(3, 5), seed=0):
    """Targets without the classes ``absent``, predictions without ``never_predicted``, better than guesses."""
    logits, targets = random_batch(count, classes, seed)
    targets = torch.where(torch.isin(targets, torch.tensor(absent)), 0, targets)
    logits[torch.arange(count), targets] += 1.5
    logits[:, list(never_predicted)] = -20.0
    return logits, targets


@pytest.mark.parametrize("batch", [uneven_batch(), random_batch(400, 100), random_batch(50, 2)])
def test_macro_averages_are_scikit_learns(batch):
    """Class 5 is neither there nor predicted and left out; 2 is only predicted, and 3 never: both count with 0."""
    report = report_of(batch)
    truth = batch[1].numpy()
    predicted = batch[0].argmax(1).numpy()
    for ours, function in (
        (report.macro_precision, precision_score),
        (report.macro_recall, recall_score),
        (report.macro_f1, f1_score),
    ):
        assert ours == pytest.approx(100 * function(truth, predicted, average="macro", zero_division=0), rel=1e-12)


def test_figures_of_each_class_are_scikit_learns_and_the_accuracy_of_an_absent_one_is_unknown():
    logits, targets = uneven_batch()
    report = report_of((logits, targets))
    truth = targets.numpy()
    predicted = logits.argmax(1).numpy()
    given = {"labels": np.arange(8), "average": None}
    expected = recall_score(truth, predicted, zero_division=np.nan, **given)
    np.testing.assert_allclose(report.accuracy, 100 * expected, rtol=1e-12)
    assert np.isnan(report.accuracy).nonzero()[0].tolist() == [2, 5]
    for ours, function in ((report.precision, precision_score), (report.f1, f1_score)):
        np.testing.assert_allclose(ours, 100 * function(truth, predicted, zero_division=0, **given), rtol=1e-12)


def test_balanced_accuracy_leaves_out_absent_classes_as_scikit_learn_does():
    logits, targets = uneven_batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a class that is predicted and not there
        expected = balanced_accuracy_score(targets.numpy(), logits.argmax(1).numpy())
    report = report_of((logits, targets))
    assert report.balanced_accuracy == pytest.approx(100 * expected, rel=1e-12)
    assert report.balanced_accuracy != pytest.approx(report.macro_recall, rel=1e-3), "macro recall counts class 2"


def calibration_error(logits, targets):
    """Equations 1 to 3 of Guo et al., 15 bins, in percent."""
    confidence, predicted = logits.double().softmax(1).max(1)
    error = 0.0
    for m in range(1, 16):
        inside = (confidence > (m - 1) / 15) & (confidence <= m / 15)
        if inside.any():
            gap = (predicted == targets)[inside].double().mean() - confidence[inside].mean()
            error += inside.double().mean().item() * abs(gap.item())
    return 100 * error


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 50.0])
def test_the_calibration_error_is_guos(scale):
    logits, targets = uneven_batch(2000)
    logits *= scale
    assert report_of((logits, targets)).ece == pytest.approx(calibration_error(logits, targets), rel=1e-5)


def test_a_bin_holds_its_upper_end_and_certainty_belongs_to_the_last():
    """Of two classes with equal logits the confidence is a half, inside the 8th bin; at logit 40 it is 1."""
    logits = torch.tensor([[0.0, 0.0]] * 4 + [[40.0, 0.0]] * 4)
    targets = torch.tensor([0, 0, 0, 1, 0, 0, 1, 1])
    assert report_of((logits, targets)).ece == pytest.approx(100 * (0.5 * 0.25 + 0.5 * 0.5), rel=1e-12)
    fifteen = torch.zeros(5, 15)  # confidence 1 / 15, the upper end of the first bin
    sums = meter_of((fifteen, torch.zeros(5, dtype=torch.int64))).class_sums(15)
    assert sums[45:61].tolist() == [5] + [0] * 15


def test_a_confidence_that_is_not_a_number_makes_the_error_none_and_the_counts_stay():
    logits, targets = random_batch(50, 10)
    logits[7, 3] = math.nan
    report = report_of((logits, targets))
    assert math.isnan(report.ece) and report.support.sum() == 50
    answers = logits.argmax(1)[~logits.isnan().any(1)]  # NaN is no answer, as in evaluate.py
    assert report.predicted.tolist() == torch.bincount(answers, minlength=len(report.predicted)).tolist()
    right = (logits.argmax(1) == targets) & ~logits.isnan().any(1)
    assert report.right.sum() == right.sum()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_confidence_of_half_precision_logits_is_computed_in_float32(dtype):
    logits, targets = random_batch(300, 10)
    halved = logits.to(dtype)
    assert report_of((halved, targets)).ece == report_of((halved.float(), targets)).ece


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_have_the_same_bits_however_batches_are_dealt_to_ranks_and_ranks_may_have_none(world_size):
    batches = [random_batch(7, 10, seed) for seed in range(3)]
    parts = [meter_of(*batches, rows=range(rank, 3, world_size)).class_sums(10) for rank in range(world_size)]
    assert torch.equal(sum(reversed(parts)), meter_of(*batches).class_sums(10))


def test_nothing_validated_has_no_figures():
    assert ClassReport.from_sums(ValidationMeter(1, CPU).class_sums(10)) is None
    assert ClassReport.from_sums(ValidationMeter(1, CPU).class_sums(0)) is None


def test_a_run_writes_them_in_its_row_its_line_of_evaluation_and_by_class(tmp_path, capsys, monkeypatch):
    import main

    monkeypatch.chdir(tmp_path)
    run = begin(tmp_path, "--max-steps", 23)
    row = rows(run)[-1]
    shown = capsys.readouterr()
    with open(run / "class_metrics.csv", newline="") as file:
        by_class = list(csv.DictReader(file))
    assert [line["class"] for line in by_class] == [str(digit) for digit in range(10)]
    assert sum(int(line["val_count"]) for line in by_class) == int(row["val_count"]) == 360
    hits = sum(float(line["val_accuracy"]) * int(line["val_count"]) for line in by_class) / 360
    assert hits == pytest.approx(float(row["val_top1"]), rel=1e-5)
    f1 = np.mean([float(line["val_f1"]) for line in by_class])
    assert f1 == pytest.approx(float(row["val_macro_f1"]), rel=1e-5)
    assert main.main(["--device", "cpu", "--evaluate", "--resume", str(run)]) == 0
    *_, line, last = capsys.readouterr().out.splitlines()
    assert f"macro F1 {float(row['val_macro_f1']):.2f}" in line and last.startswith("val_top1=")
    assert f"calibration error {float(row['val_ece']):.2f}" in line and shown.err == ""


def test_names_that_are_no_text_are_written_and_the_classes_accuracies_charted_once(tmp_path):
    row = {"class": 'caf\udce9, "2"', "val_count": 2, "val_accuracy": 100 / 3}
    for resumed in (None, (0, 0), (0, 5)):
        writer = RunWriter(tmp_path, progress=False, resumed=resumed)
        writer.classes([row, row | {"val_count": 0, "val_accuracy": math.nan}], 5)
        writer.close()
    content = (tmp_path / "class_metrics.csv").read_bytes()
    assert content.splitlines()[1] == b'"caf\xe9, ""2""",2,33.3333'
    (point,) = EventAccumulator(str(tmp_path)).Reload().Histograms("Class_Accuracy/Test")
    assert point.step == 5


def test_tensorboard_shows_what_is_said_about_a_tag_at_its_first_point(tmp_path):
    writer = RunWriter(tmp_path, progress=False)
    writer.describe({"Top1/Training": "of mixed images"})
    for step in (1, 2):
        writer.scalars({"Top1/Training": 5.0, "Top1/Test": 6.0}, step)
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [point.value for point in events.Scalars("Top1/Training")] == [5.0, 5.0]
    assert events.SummaryMetadata("Top1/Training").summary_description == "of mixed images"
    assert set(events.summary_metadata) == {"Top1/Training"}
