"""Metrics against numpy, torch and scikit-learn, the calibration error against its formula written out."""

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, precision_score, recall_score, top_k_accuracy_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import main
from tests.end_to_end.processes import rows
from tests.faults.small_run import begin
from tests.helpers import csv_rows
from utils.record import metrics
from utils.record.metrics import (
    COUNT,
    LOSS,
    TOP1,
    TOP5,
    ClassificationMeter,
    ClassReport,
    Report,
    ValidationMeter,
    target_rank,
)
from utils.record.writer import Writer

CPU = torch.device("cpu")


def random_batch(count, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, classes, generator=generator)
    return logits, torch.randint(0, classes, (count,), generator=generator)


def sums_of(logits, targets, loss=0.0):
    meter = ClassificationMeter(1, CPU)
    meter.update(0, torch.tensor(loss), logits, targets)
    return meter.sums[0].tolist()


@pytest.mark.parametrize("classes", [6, 10, 100])
def test_accuracies_equal_those_of_scikit_learn(classes):
    logits, targets = random_batch(400, classes)
    report = Report.from_sums(sums_of(logits, targets))
    for k, percent in ((1, report.top1), (5, report.top5)):
        expected = top_k_accuracy_score(targets.numpy(), logits.numpy(), k=k, labels=np.arange(classes))
        assert percent == pytest.approx(100 * expected, rel=1e-12)


def test_rank_is_the_targets_place_in_a_stable_descending_sort():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 4, (300, 9), generator=generator).float()  # few values, many ties
    targets = torch.randint(0, 9, (300,), generator=generator)
    order = np.argsort(-logits.numpy(), axis=1, kind="stable")
    expected = np.argmax(order == targets.numpy()[:, None], axis=1)
    assert target_rank(logits, targets).tolist() == expected.tolist()
    assert sums_of(logits[:, :5], targets % 5)[TOP5] == 300, "of five classes every one is among the top five"


@pytest.mark.parametrize("classes", [2, 3, 5, 6, 10])
def test_nan_of_all_classes_or_of_the_target_is_never_right_and_of_another_not_at_first_place(classes):
    logits, targets = random_batch(50, classes)
    own = torch.arange(50), targets
    for spoilt in (torch.full_like(logits, torch.nan), logits.index_put(own, torch.tensor(torch.nan))):
        assert sums_of(spoilt, targets)[TOP1 : TOP5 + 1] == [0, 0]
    logits[own] = 100.0
    logits[own[0], (targets + 1) % classes] = torch.nan
    assert sums_of(logits, targets)[TOP1] == 0


def test_infinite_logits_are_ordered_like_numbers():
    logits = torch.tensor([[torch.inf, 0, -torch.inf], [torch.inf, torch.inf, 0]])
    assert target_rank(logits, torch.tensor([0, 1])).tolist() == [0, 1]
    assert target_rank(logits, torch.tensor([2, 0])).tolist() == [2, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_are_float64_whatever_the_logits_are(dtype):
    logits, targets = random_batch(64, 10)
    meter = ClassificationMeter(1, CPU)
    meter.update(0, torch.tensor(0.3, dtype=dtype), logits.to(dtype), targets)
    assert meter.sums.dtype == torch.float64
    assert meter.sums[0, LOSS].item() == 64 * torch.tensor(0.3, dtype=dtype).item()
    assert meter.sums[0, COUNT].item() == 64


def test_forward_passes_of_one_row_add_up():
    logits, targets = random_batch(60, 10)
    meter = ClassificationMeter(1, CPU)
    for part in (slice(0, 13), slice(13, 60)):
        loss = torch.nn.functional.cross_entropy(logits[part].double(), targets[part])
        meter.update(0, loss, logits[part], targets[part])
    whole = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum").item()
    assert meter.sums[0, LOSS].item() == pytest.approx(whole, rel=1e-12)
    assert meter.sums[0, TOP1:].tolist() == sums_of(logits, targets)[TOP1:]


def test_the_largest_share_of_a_mixed_image_is_its_right_answer():
    logits, targets = random_batch(60, 10)
    shares = torch.full((60, 10), 0.05)
    shares[torch.arange(60), targets] = 0.55
    assert sums_of(logits, shares, loss=0.5) == sums_of(logits, targets, loss=0.5)


def test_named_losses_add_up_over_the_samples_of_a_row():
    meter = ClassificationMeter(3, CPU)
    assert meter.column("penalty").tolist() == [0, 0, 0]
    for row, count, value in ((1, 5, 0.25), (1, 3, 2.0), (2, 4, 1.5)):
        meter.update(row, torch.tensor(0.0), *random_batch(count, 3), {"penalty": torch.tensor(value)})
    assert meter.column("penalty").tolist() == [0, 5 * 0.25 + 3 * 2.0, 4 * 1.5]
    assert meter.column("penalty").dtype == torch.float64


def test_named_losses_keep_no_graph():
    meter = ClassificationMeter(1, CPU)
    meter.update(0, torch.tensor(0.0), *random_batch(2, 3), {"penalty": torch.ones((), requires_grad=True)})
    assert not meter.column("penalty").requires_grad


def waiting_after(meter, passes):
    """How many passes of ten logits wait after each of ``passes`` further ones."""
    numbers = []
    for _ in range(passes):
        meter.update(0, torch.tensor(1.0), *random_batch(1, 10))
        numbers.append(len(meter._waiting))
    return numbers


def test_passes_wait_for_as_many_logits_as_may_wait_and_no_longer(monkeypatch):
    monkeypatch.setattr(metrics, "WAITING_NUMBERS", 30)
    meter = ClassificationMeter(1, CPU)
    assert waiting_after(meter, 9) == [1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert meter.sums[0, COUNT] == 9
    assert waiting_after(meter, 4) == [1, 2, 3, 0]
    assert waiting_after(meter, 1) == [1]
    meter.reset()
    assert waiting_after(meter, 4) == [1, 2, 3, 0]
    assert meter.sums[0, COUNT] == 4


@pytest.mark.parametrize("kind", [ClassificationMeter, ValidationMeter])
def test_counting_never_waits_for_the_device(kind, monkeypatch):
    """A tensor on the meta device has no values: whatever looked at one, or came from another device, would raise."""
    meta = torch.device("meta")
    monkeypatch.setattr(metrics, "to_device", torch.Tensor.to)
    meter = kind(2, meta)
    for targets in (torch.empty(5, dtype=torch.int64, device=meta), torch.empty(5, 9, device=meta)):
        meter.update(1, torch.empty((), device=meta), torch.empty(5, 9, device=meta), targets)
    assert (meter.sums.device, meter.sums.shape, meter.sums.dtype) == (meta, (2, 4), torch.float64)


def test_reset_forgets_everything():
    meter = ClassificationMeter(2, CPU)
    for _ in range(2):
        meter.update(1, torch.tensor(1.0), *random_batch(5, 3), {"penalty": torch.tensor(1.0)})
        assert meter.sums.any() and meter.column("penalty").any()
        meter.update(0, torch.tensor(1.0), *random_batch(5, 3))
        meter.reset()
        assert not meter.sums.any() and not meter.column("penalty").any()


def test_report_divides_once_gives_percent_and_reads_with_and_without_its_second_accuracy():
    report = Report.from_sums([10.0, 30.0, 39.0, 40.0])
    assert report == Report(loss=0.25, top1=75.0, top5=97.5, count=40)
    assert str(report) == report.text() == "top1 75.00  top5 97.50  loss 0.2500"
    assert report.text(with_top5=False) == "top1 75.00  loss 0.2500"
    assert report.text(mixed=True) == "top1 (mixed) 75.00  top5 (mixed) 97.50  loss 0.2500"


def test_report_of_nothing_is_not_a_number_nor_an_error():
    report = Report.from_sums([0.0, 0.0, 0.0, 0.0])
    assert report.count == 0 and all(math.isnan(value) for value in (report.loss, report.top1, report.top5))


# --------------------------------------------------------------- by class and by confidence


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
def test_the_calibration_error_is_guos_and_the_bins_are_those_counted_one_by_one(scale):
    logits, targets = uneven_batch(2000)
    logits *= scale
    report = report_of((logits, targets))
    assert report.ece == pytest.approx(calibration_error(logits, targets), rel=1e-5)
    confidence, predicted = logits.softmax(1).max(1)
    for n, one in enumerate(report.reliability):
        inside = (confidence > n / 15) & (confidence <= (n + 1) / 15)
        assert one.images == inside.sum() and (one.low, one.high) == pytest.approx((n / 15, (n + 1) / 15))
        if one.images:
            assert one.confidence == pytest.approx(100 * confidence[inside].mean().item(), abs=1e-3)
            assert one.accuracy == pytest.approx(100 * (predicted == targets)[inside].double().mean().item())


def test_answers_at_hand_have_the_metrics_of_a_validation():
    logits, targets = random_batch(5000, 10)  # more than are counted at a time
    ours = ClassReport.of(logits, targets)
    for name in ("support", "predicted", "right", "bins"):
        assert (getattr(ours, name) == getattr(report_of((logits, targets)), name)).all()


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


def test_nothing_validated_has_no_figures():
    assert ClassReport.from_sums(ValidationMeter(1, CPU).class_sums(10)) is None
    assert ClassReport.from_sums(ValidationMeter(1, CPU).class_sums(0)) is None


def test_a_run_writes_them_in_its_row_its_line_of_evaluation_and_by_class(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = begin(tmp_path, "--max-steps", 23)
    row = rows(run)[-1]
    shown = capsys.readouterr()
    by_class = csv_rows(run / "class_metrics.csv")
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
        writer = Writer(tmp_path, progress=False, resumed=resumed)
        writer.classes([row, row | {"val_count": 0, "val_accuracy": math.nan}], 5)
        writer.close()
    content = (tmp_path / "class_metrics.csv").read_bytes()
    assert content.splitlines()[1] == b'"caf\xe9, ""2""",2,33.3333'
    (point,) = EventAccumulator(str(tmp_path)).Reload().Histograms("Class_Accuracy/Test")
    assert point.step == 5


def test_tensorboard_shows_what_is_said_about_a_tag_at_its_first_point(tmp_path):
    writer = Writer(tmp_path, progress=False)
    writer.describe({"Top1/Training": "of mixed images"})
    for step in (1, 2):
        writer.scalars({"Top1/Training": 5.0, "Top1/Test": 6.0}, step)
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [point.value for point in events.Scalars("Top1/Training")] == [5.0, 5.0]
    assert events.SummaryMetadata("Top1/Training").summary_description == "of mixed images"
    assert set(events.summary_metadata) == {"Top1/Training"}
