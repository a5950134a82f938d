"""A training that has come to nothing is said so after its last epoch; one that has learned something is not."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

import main
from models.small import FullyConnected
from tests.helpers import trained
from utils.record.doubts import doubts, doubts_of, knows_nothing
from utils.record.metrics import ClassReport, Report, nats_of

TEN = [100] * 10
NO_BINS = np.zeros((3, 16), dtype=int)  # of confidences, which no doubt is about
RNG = np.random.default_rng(0)


def counted(probabilities, labels, step=100):
    """The row of a validation of float (n, classes) probabilities and int (n,) labels."""
    count, classes = probabilities.shape
    answers = probabilities.argmax(1)
    sums = (np.bincount(of, minlength=classes) for of in (labels, answers, labels[answers == labels]))
    of = ClassReport(*sums, NO_BINS)
    return {
        "epoch": 5,
        "step": step,
        "val_count": count,
        "val_top1": 100 * (answers == labels).mean(),
        "val_loss": -np.log(probabilities[np.arange(count), labels]).mean(),
        "guessing_loss": of.guessing_loss,
        "answers_nats": of.answers_nats,
        "commonest_answer": of.commonest_answer,
    }


def softmax(logits):
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


def labels_of(support):
    return np.repeat(np.arange(len(support)), support)


def dead(support, noise=1e-3, bias=None, rng=RNG):
    """The same outputs for all images but for ``noise`` that has nothing to do with them."""
    labels = labels_of(support)
    return softmax((0 if bias is None else np.log(bias)) + noise * rng.normal(size=(len(labels), len(support)))), labels


def alive(support, strength, sure=1.0, rng=RNG):
    """Bayes' answers to unit Gaussians that lie ``strength`` apart from each other, ``sure`` times as certain."""
    labels = labels_of(support)
    seen = rng.normal(size=(len(labels), len(support))) + strength * np.eye(len(support))[labels]
    return softmax(sure * (strength * seen + np.log(np.array(support) / sum(support)))), labels


def signs(row, *before):
    return [doubt.sign for doubt in doubts([*before, row], "cifar10")]


@pytest.mark.parametrize(("support", "right"), [(TEN, [13] * 10), (TEN, [100, 1] + [0] * 8), ([990, 10], [980, 4])])
def test_what_answers_tell_is_the_likelihood_of_a_mixture_with_guessing_at_its_best(support, right):
    support = np.array(support)
    right = np.array(right)
    shares = support / support.sum()
    count = support.sum()

    def lost(s):
        return -((right * np.log((1 - s) + s / shares)).sum() + (count - right.sum()) * np.log1p(-s)) / count

    best = -minimize_scalar(lost, bounds=(0, 1 - 1e-12), method="bounded", options={"xatol": 1e-12}).fun
    assert nats_of(support, right) == pytest.approx(max(best, 0), rel=1e-6, abs=1e-12)


def test_perfect_answers_tell_all_that_labels_hold_and_those_of_one_class_nothing():
    for support in (TEN, [990, 10], [50, 30, 20]):
        entropy = ClassReport(*[np.array(support)] * 3, NO_BINS).guessing_loss
        assert nats_of(np.array(support), np.array(support)) == pytest.approx(entropy, rel=1e-9)
        always = np.zeros_like(support)
        always[0] = support[0]
        assert nats_of(np.array(support), always) == pytest.approx(0, abs=1e-12)
    assert ClassReport(*[np.array(TEN)] * 3, NO_BINS).guessing_loss == pytest.approx(math.log(10), rel=1e-12)


def test_answers_of_classes_without_images_do_not_hide_what_the_others_tell():
    labels = torch.arange(2).repeat_interleave(1000)
    answers = torch.full((2000,), 2)  # no image shows this class
    answers[:180], answers[180:300], answers[1000:1120], answers[1120:1300] = 0, 1, 0, 1  # 60 % of these are right
    of = ClassReport.of(torch.nn.functional.one_hot(answers, 3).float(), labels)
    gain = 0.6 * math.log(1.2) + 0.4 * math.log(0.8)  # of each of the 600: right with 0.6 instead of a half
    assert of.answers_nats == pytest.approx(0.3 * gain)
    constant = ClassReport.of(torch.tensor([[0.0, 0.0, 1.0]]).expand(2000, 3), labels)
    assert constant.answers_nats == 0


@pytest.mark.parametrize("support", [TEN, [9900, 100], [600, 300, 100], [50] * 100, [5] * 200])
@pytest.mark.parametrize("kind", ["uniform", "the shares", "sure of one class", "random answers"])
def test_outputs_that_know_nothing_of_the_images_are_told(support, kind):
    shares = np.array(support) / sum(support)
    rng = np.random.default_rng(1)
    noise, bias = {"uniform": (1e-3, None), "the shares": (1e-3, shares), "random answers": (2.0, shares)}.get(
        kind, (1e-3, np.eye(len(support))[0] + 1e-3)
    )
    drawings = 150 if sum(support) == 1000 and len(support) < 11 else 10
    missed = sum(knows_nothing(counted(*dead(support, noise, bias, rng))) is not True for _ in range(drawings))
    # Random answers pass with 1.6 in 100, which is 2.4 here: more than 8 come up once in 1,000. Constant ones never do.
    assert missed <= (0 if kind == "sure of one class" else 8)


def test_the_run_that_answers_horse_998_times_of_1000_is_told_although_it_beats_a_tenth():
    """Top-1 10.10 %, above the largest class's share, and the loss at ln 10."""
    support, predicted, right = (np.array(of) for of in (TEN, [2] + [0] * 8 + [998], [1] + [0] * 8 + [100]))
    report = Report(2.3026, 10.1, 50.0, 1000, ClassReport(support, predicted, right, NO_BINS))
    (doubt,) = doubts_of(report, 96, "folder")
    assert doubt.sign == (
        "val_loss 2.3026 and val_top1 10.10 after 96 step(s) are no better than guessing by the classes' shares "
        "(loss 2.3026), and 99.80 % of the answers are one class: nothing was learned that holds for these "
        "images"
    )
    assert str(doubt).startswith(f"{doubt.sign}; what usually helps: a lower --lr, more --warmup-epochs")


HONEST = {
    "ten classes": (TEN, 1.0, 1.0), "weak": (TEN, 0.6, 1.0), "far too sure": (TEN, 1.5, 20.0),
    "two classes, 99 to 1": ([9900, 100], 2.0, 1.0), "99 to 1, always the majority": ([9900, 100], 1.0, 1.0),
    "99 to 1, few": ([990, 10], 2.0, 1.0), "a class takes 90 %": ([900, 50, 50], 2.0, 1.0),
    "a hundred classes": ([20] * 100, 1.5, 1.0), "an image a class": ([1] * 300, 3.0, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("case", HONEST)
def test_no_network_that_tells_classes_apart_is_doubted(case):
    rng = np.random.default_rng(2)
    rows = [counted(*alive(*HONEST[case], rng)) for _ in range(20)]
    assert [signs(row) for row in rows] == [[]] * 20
    if case == "far too sure":
        assert min(row["val_loss"] for row in rows) > math.log(10), "a loss above guessing is no sign by itself"


@pytest.mark.parametrize("support", [[9] * 10, [70, 70], [200, 1], [990, 10], [1000], [1] * 90])
def test_few_images_one_class_or_a_rare_one_of_few_images_say_nothing(support):
    for row in (counted(*dead(support)), counted(*alive(support, 1.0))):
        assert signs(row) == []


def test_after_a_few_steps_with_random_labels_or_a_cut_validation_nothing_is_said():
    row = counted(*dead(TEN))
    assert len(signs(row)) == 1
    assert signs(row | {"step": 2}) == signs(row | {"max_val_batches": 1}) == doubts([row], "synthetic") == []


def test_text_of_metrics_csv_is_judged_as_numbers_are_and_a_run_from_before_the_columns_not_at_all():
    row = counted(*dead(TEN))
    assert signs({name: f"{value:.6g}" for name, value in row.items()}) == signs(row) != []
    assert signs({name: value for name, value in row.items() if name not in ("guessing_loss", "answers_nats")}) == []
    assert signs(row | {"guessing_loss": "", "answers_nats": ""}) == []


def test_one_class_with_nearly_all_answers_is_told_of_a_network_that_knows_a_little():
    probabilities, labels = alive(TEN, 1.0)
    probabilities[: 1000 - 40] = np.eye(10)[9] * 0.5 + 0.05  # but the last class's images
    (sign,) = signs(counted(probabilities, labels) | {"answers_nats": 0.1})
    assert "% of the answers are one class, and val_top1" in sign


@pytest.mark.parametrize(
    ("losses", "top1", "val_top1", "told"),
    [
        ((2.31, 2.30), (10.0, 10.4), 30.0, True),
        ((2.31, 2.00), (10.0, 25.0), 30.0, False),
        ((0.05, 0.05), (99.0, 99.0), 99.0, False),
        ((1.45, 1.45), (55.0, 55.2), 95.0, False),  # tuned on, and mixed
        ((1.90, 2.40), (30.0, 12.0), 30.0, True),  # diverged
        ((0.056, 0.056), (99.0, 99.0), 99.0, False),
        ((0.330, 0.325), (10.0, 10.0), 30.0, False),
    ],
)
def test_a_training_loss_that_does_not_fall_is_told_unless_the_network_is_mostly_right(losses, top1, val_top1, told):
    row = counted(*alive(TEN, 1.0)) | {"val_top1": val_top1}
    rows = [
        row | {"epoch": epoch, "train_loss": loss, "train_top1": hits}
        for epoch, loss, hits in zip((1, 9), losses, top1, strict=True)
    ]
    found = [doubt.sign for doubt in doubts(rows, "cifar10")]
    expected = f"the training loss hardly fell: {losses[0]:.4f} to {losses[1]:.4f} in epochs 1 to 9"
    assert found == [expected] * told
    assert doubts(rows[1:], "cifar10") == [], "of one epoch nothing can be compared"


@pytest.mark.parametrize(("loss", "told"), [(10 * math.log(10) - 0.01, 0), (10 * math.log(10) + 0.01, 1)])
def test_a_loss_above_ten_times_that_of_guessing_is_told(loss, told):
    found = doubts([counted(*alive(TEN, 1.5)) | {"val_loss": loss}], "cifar10")
    assert len(found) == told
    assert all("ten times that of guessing (2.303)" in str(one) and "a lower --lr" in str(one) for one in found)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_as_such(loss):
    (sign,) = signs(counted(*dead(TEN)) | {"val_loss": loss, "step": 7})
    assert sign == f"val_loss is {loss} after 7 step(s): the network's outputs are not finite any more"


def test_a_run_that_came_to_nothing_says_so_before_its_last_line_and_in_its_log(tmp_path, capsys):
    weights = FullyConnected(10, 1, 8).state_dict()
    weights["layers.5.weight"].zero_()
    weights["layers.5.bias"].copy_(torch.eye(10)[0] * 1000)  # always the first class, and sure of it
    torch.save(weights, tmp_path / "sure.pt")
    flags = ("--arch", "fc", "--weights", tmp_path / "sure.pt", "--lr", 1e-9, "--epochs", 4, "--global-batch-size", 200)
    run = trained(tmp_path, *flags)
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines[:-1] if line.startswith("warning: val_")]
    assert "sure of wrong answers" in told[0] and "no better than guessing by the classes' shares" in told[1]
    assert "100.00 % of the answers are one class" in told[1] and "after 32 step(s)" in told[-1]
    assert len(told) == 4, "at the end, and once before"
    assert lines[-1].startswith("val_top1=")
    assert all(line in (run / "log.txt").read_text() for line in told)
    assert main.main(["--evaluate", "--resume", f"{run}/checkpoints/final.pt", "--device", "cpu", "--no-progress"]) == 0
    *before, last = capsys.readouterr().out.splitlines()
    assert any("nothing was learned" in line for line in before) and last.startswith("val_top1=")


def test_a_run_that_learns_or_is_cut_after_two_steps_says_nothing(tmp_path, capsys):
    for few in (["--epochs", "1"], ["--max-steps", "2"]):
        trained(tmp_path / few[0], "--arch", "fc", *few)
        assert "warning" not in capsys.readouterr().out
