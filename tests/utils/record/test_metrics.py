"""Top-1, top-5 and sums against numpy, torch and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import top_k_accuracy_score

from utils.record import metrics
from utils.record.metrics import COUNT, LOSS, TOP1, TOP5, ClassificationMeter, Report, ValidationMeter, target_rank

CPU = torch.device("cpu")


def random_batch(count, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, classes, generator=generator)
    return logits, torch.randint(0, classes, (count,), generator=generator)


def sums_of(logits, targets, loss=0.0):
    meter = ClassificationMeter(1, CPU)
    meter.update(0, torch.tensor(loss), logits, targets)
    return meter.sums[0].tolist()


@pytest.mark.parametrize("classes", [2, 3, 5, 6, 10, 1000])
def test_hits_equal_those_of_torchs_topk(classes):
    logits, targets = random_batch(500, classes)
    for k in (1, min(5, classes)):
        expected = (logits.topk(k).indices == targets[:, None]).any(1)
        assert torch.equal(target_rank(logits, targets) < k, expected)


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


def test_equal_logits_count_as_argmax_counts_them():
    logits = torch.zeros(10, 10)
    targets = torch.arange(10)
    assert ((target_rank(logits, targets) == 0) == (logits.argmax(1) == targets)).all()
    assert sums_of(logits, targets)[TOP1 : TOP5 + 1] == [1, 5]


@pytest.mark.parametrize("classes", [2, 3, 4, 5, 6, 10])
def test_all_nan_logits_are_never_right(classes):
    logits = torch.full((classes, classes), torch.nan)
    targets = torch.arange(classes)
    assert sums_of(logits, targets)[TOP1 : TOP5 + 1] == [0, 0]


@pytest.mark.parametrize("classes", [2, 3, 4, 5, 6, 10])
def test_nan_of_the_target_is_never_right(classes):
    logits, targets = random_batch(50, classes)
    logits[torch.arange(50), targets] = torch.nan
    assert sums_of(logits, targets)[TOP1 : TOP5 + 1] == [0, 0]


def test_nan_of_another_class_is_never_right_at_first_place():
    logits, targets = random_batch(50, 10)
    logits[torch.arange(50), targets] = 100.0
    logits[torch.arange(50), (targets + 3) % 10] = torch.nan
    assert sums_of(logits, targets)[TOP1] == 0


def test_infinite_logits_are_ordered_like_numbers():
    logits = torch.tensor([[torch.inf, 0, -torch.inf], [torch.inf, torch.inf, 0]])
    assert target_rank(logits, torch.tensor([0, 1])).tolist() == [0, 1]
    assert target_rank(logits, torch.tensor([2, 0])).tolist() == [2, 0]


@pytest.mark.parametrize("classes", [1, 2, 4, 5])
def test_with_up_to_five_classes_every_target_is_among_the_top_five(classes):
    logits, targets = random_batch(50, classes)
    assert sums_of(logits, targets)[TOP5] == 50


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


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_have_the_same_bits_however_batches_are_dealt_to_ranks(world_size):
    batches = [random_batch(7, 10, seed) for seed in range(20)]
    losses = [torch.nn.functional.cross_entropy(*batch) for batch in batches]

    def total(ranks):
        meters = [ClassificationMeter(len(batches), CPU) for _ in range(ranks)]
        for row, (batch, loss) in enumerate(zip(batches, losses, strict=True)):
            meters[row % ranks].update(row, loss, *batch)
        reduced = sum(meter.sums for meter in reversed(meters))
        return reduced.sum(0).tolist()

    assert total(world_size) == total(1)


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


def test_report_divides_once_and_gives_percent():
    report = Report.from_sums([10.0, 30.0, 39.0, 40.0])
    assert report == Report(loss=0.25, top1=75.0, top5=97.5, count=40)
    assert str(report) == "top1 75.00  top5 97.50  loss 0.2500"


def test_report_takes_the_first_four_of_more_sums():
    assert Report.from_sums([10.0, 30.0, 39.0, 40.0, 8.0]) == Report.from_sums([10.0, 30.0, 39.0, 40.0])


def test_report_of_nothing_is_not_a_number_nor_an_error():
    report = Report.from_sums([0.0, 0.0, 0.0, 0.0])
    assert report.count == 0 and all(math.isnan(value) for value in (report.loss, report.top1, report.top5))


def test_a_report_reads_with_and_without_its_second_accuracy():
    report = Report(loss=0.25, top1=75.0, top5=97.5, count=40)
    assert report.text() == "top1 75.00  top5 97.50  loss 0.2500"
    assert report.text(with_top5=False) == "top1 75.00  loss 0.2500"
    assert report.text(mixed=True) == "top1 (mixed) 75.00  top5 (mixed) 97.50  loss 0.2500"
