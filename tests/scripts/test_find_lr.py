"""The range test: its rates, its losses, what it advises, and that it leaves nothing behind but the picture."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from scripts import find_lr
from scripts.lr_range import measure
from scripts.lr_range.advice import RateAdvice, advise
from scripts.lr_range.measure import SMOOTHING, Ramp, RangePoint, RangeTest, run
from tests.helpers import computes_in
from tests.utils.test_train_validation import Overflow, make
from utils.precision import choice

FAST = ["--device", "cpu", "--arch", "fc", "--batch-size", "480", "--no-progress"]


def ranged(*flags, ramp=None, **more):
    """A range test of the digits, and what trained in it."""
    ramp = ramp or Ramp(1e-3, 1.0, 7)
    traval = make(*FAST, "--amp", "off", *flags, **more)
    traval.lr_policy = ramp
    return run(traval, ramp, lambda point: None), traval


def test_steps_and_losses_are_those_of_a_plain_loop_over_more_than_one_epoch():
    test, traval = ranged()
    fresh = make(*FAST, "--amp", "off")
    optimizer = torch.optim.SGD(fresh.model.parameters(), lr=1.0, momentum=0.9, weight_decay=5e-4)
    losses = []
    batches = [batch for epoch in range(3) for batch in fresh.train_loader.batches(epoch)][:7]
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 1e-3 * 10 ** (step / 2)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(fresh.model(batch.images), batch.targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [point.loss for point in test.points] == pytest.approx(losses, rel=1e-5)
    assert [point.lr for point in test.points] == pytest.approx([1e-3 * 10 ** (step / 2) for step in range(7)])
    assert traval.progress.epoch == 2 and test.diverged is None


def test_corrected_weight_decay_is_that_of_a_training_whose_peak_is_the_rate_under_test():
    decay = ["--weight-decay", "0.5", "--lr"]
    expected, _ = ranged("--optimizer", "sgdw", *decay, "0.1")  # at the peak, its decay is the corrected one
    for lr in ("1e-3", "1"):
        test, _ = ranged("--optimizer", "sgdc", *decay, lr)
        assert [point.loss for point in test.points] == pytest.approx([point.loss for point in expected.points])


def test_layers_that_are_released_later_are_said_to_stay_frozen(capsys, monkeypatch):
    flags = ["--freeze", "features", "--unfreeze-epoch", "1", "--arch", "conv2"]
    seen = []
    run = measure.run
    monkeypatch.setattr(measure, "run", lambda *given: seen.append(run(*given)) or seen[-1])
    assert find_lr.main([*FAST, *flags, "--steps", "10", "--start-lr", "1e-3", "--end-lr", "1e-2"]) == 0
    assert [seen[0].points[place].lr for place in (0, -1)] == pytest.approx([1e-3, 1e-2])
    assert capsys.readouterr().out.splitlines()[0].endswith(", frozen throughout as in the first epoch")


def test_the_running_mean_has_the_weights_of_its_closed_formula():
    losses = [3.0, 2.0, 5.0, 1.0]
    test = RangeTest()
    for loss in losses:
        test.add(0.1, loss)
    weights = [SMOOTHING**age for age in reversed(range(4))]
    expected = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert test.points[-1].smoothed == pytest.approx(expected)
    assert test.points[0].smoothed == pytest.approx(3.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_it_there(bad):
    test = RangeTest()
    test.add(0.1, 2.0)
    test.add(0.2, bad)
    assert test.diverged == 0.2 and len(test.points) == 1


def test_it_ends_once_the_smoothed_loss_is_four_times_its_lowest():
    test = RangeTest()
    steps = 0
    while test.diverged is None:
        steps += 1
        test.add(steps, 1.0 if steps < 20 else 100.0)
    assert test.diverged == 20 and steps == 20


def test_without_a_scaler_a_gradient_that_is_not_finite_is_the_divergence():
    test, traval = ranged(criterion=Overflow(at=3))
    assert len(test.points) == 2 and test.diverged == traval.lr_policy(2)


def test_a_step_that_the_scaler_skips_is_taken_again_at_its_rate():
    flags = ("--amp", "fp16", "--batch-size", "480")
    test, traval = ranged(*flags, criterion=Overflow(at=2))
    assert traval.progress.skipped_steps == 1 and len(test.points) == 7
    assert [point.lr for point in test.points] == pytest.approx([1e-3 * 10 ** (step / 2) for step in range(7)])


def curve(losses, **more):
    """A range test with these smoothed losses at 1e-4, 1e-3 ..., ten points a decade."""
    test = RangeTest(**more)
    rates = [1e-4 * 10 ** (place / 10) for place in range(len(losses))]
    test.points = [RangePoint(lr, loss, loss) for lr, loss in zip(rates, losses, strict=True)]
    return test


def test_the_fastest_fall_of_a_logistic_curve_is_at_its_turning_point():
    falling = [2.3 - 2 / (1 + math.exp(-(place - 20) / 3)) for place in range(41)]  # at 1e-2
    advice = advise(curve([*falling, 5.0], diverged=10.0))
    assert advice.steepest == pytest.approx(1e-2) and advice.diverged == pytest.approx(1e-4 * 10**4.1)
    assert advice.rate == 0.01
    words = "--lr 0.01 (the loss falls fastest at 0.01; a tenth of 1.3, where it diverges, is 0.13)"
    assert words in advice.line(1e-4, 1)


def test_a_tenth_of_the_divergence_is_advised_where_it_is_lower():
    assert RateAdvice(steepest=0.5, diverged=1.234).rate == 0.12
    assert RateAdvice(steepest=0.5, diverged=None).rate == 0.5
    assert "does not diverge up to 10" in RateAdvice(steepest=0.5, diverged=None).line(1e-6, 10)


@pytest.mark.parametrize("losses", [[2.3] * 20, [2.3, 2.29] * 10, [2.3 + place for place in range(20)], [2.3, 1.0]])
def test_a_loss_that_never_falls_gives_no_advice(losses):
    advice = advise(curve(losses))
    line = advice.line(1e-4, 1)
    assert advice.rate is None and line.startswith("no advice: the loss falls at no rate between 0.0001 and 1")


def of_batches(means, variation):
    """A range test whose steps' losses differ from these means by this coefficient of variation, ten a decade."""
    generator = np.random.default_rng(0)
    test = RangeTest()
    for place, mean in enumerate(means):
        test.add(1e-4 * 10 ** (place / 10), mean * generator.gamma(variation**-2, variation**2))
    return test


def test_losses_that_only_differ_between_batches_give_no_advice():
    assert advise(of_batches([0.1] * 60, 0.5)).rate is None


def test_the_fastest_fall_is_not_that_from_an_unlucky_first_batch():
    test = of_batches([1.0] * 30 + [1 - 0.09 * place for place in range(1, 11)] + [0.1] * 20, 0.1)
    first, *others = test.points
    test.points = [first._replace(loss=2.0, smoothed=2.0), *others]
    assert 1e-4 * 10**3 < advise(test).steepest < 1e-4 * 10**4.2  # the running mean lags behind the losses


def test_it_prints_advice_and_leaves_nothing_behind_but_the_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = [*FAST, "--amp", "off", "--steps", "30", "--start-lr", "1e-3"]
    line += ["--batch-size", "120", "--accumulate", "2", "--ema-decay", "0.9"]
    assert find_lr.main([*line, "--picture", "lr.png"]) == 0
    first, *steps, last, picture = capsys.readouterr().out.splitlines()
    assert first == "fc on digits, sgd, batch 240" and picture == "Picture: lr.png"
    assert len(steps) in range(3, 11) and steps[0].startswith("step 3  lr 1.")
    assert last.startswith("Advice: --lr ")
    assert [path.name for path in tmp_path.iterdir()] == ["lr.png"]
    assert Image.open("lr.png").size > (800, 400)


def test_it_trains_in_the_format_that_was_measured_for_auto(monkeypatch, capsys):
    trained = []
    monkeypatch.setattr(choice, "has_bf16_units", lambda: True)
    monkeypatch.setattr(choice, "seconds_of_passes", lambda *_: (1.0, 0.5))
    monkeypatch.setattr(measure, "run", lambda traval, *_: trained.append(traval) or RangeTest())
    assert find_lr.main([*FAST, "--amp", "auto"]) == 0
    assert "--amp auto: bf16" in capsys.readouterr().out
    assert trained[0].args.precision.amp == "bf16" and computes_in(trained[0]) == torch.bfloat16


def test_without_a_step_that_succeeded_there_is_advice_and_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    skipping = ["--amp", "fp16", "--init-scale", "1e30", "--max-skipped-steps", "1", "--steps", "20"]
    assert find_lr.main([*FAST, *skipping, "--picture", "lr.png"]) == 0
    advice, picture = capsys.readouterr().out.splitlines()[-2:]
    assert advice.startswith("Advice: no advice") and picture == "Picture: none, for no step succeeded"
    assert not any(tmp_path.iterdir())
