"""The mixed-precision walk-through: the published numbers of a single layer, and verdicts that can turn red."""

import dataclasses
import re

import pytest
import timm
import torch
import torchvision
from torch import nn

from scripts.amp_walkthrough import is_about_network, without_dropout
from scripts.amp_walkthrough import main as walk_through
from scripts.audit import walkthrough
from scripts.audit.walkthrough import Agreement, Start, Step, network, relative_error, single_layer, tolerance
from utils.config.arguments import parse
from utils.config.groups.precision import PrecisionSettings
from utils.precision.amp import Scaler

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def cells(text, label):
    """The values of the table rows with this ``label``, a list a row."""
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    return [row[row.index(label) + 1 :] for row in rows if label in row]


def start_of(model, images, loss, lr=0.1):
    def forward(model, images):
        output = model(images)
        return output, loss(output)

    return Start(model, images, forward, lr, CPU)


def smooth():
    """A network without units that switch, and its start; its tolerance is narrow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    return start_of(model, torch.randn(8, 16), lambda output: output.float().square().mean())


# -------------------------------------------------------------------------------- the single layer


@pytest.mark.parametrize("device", DEVICES)
def test_the_script_prints_the_published_numbers_and_ends_with_0(device, capsys):
    assert walk_through(["--device", device]) == 0
    text = capsys.readouterr().out
    first, second = text.split("Step 2")

    assert "The input is -0.0591" in first
    assert cells(first, "weight") == [["-0.8939"], ["-0.8348"]]
    assert cells(first, "bias") == [["-0.9002"], ["-1.9002"]]
    assert cells(first, "output = loss") == [["-0.8473"]]
    assert cells(first, "gradient of weight") == [["-0.0591"]]
    assert cells(first, "gradient of bias") == [["1"]]

    assert "fp16 (scale 4096)" in second
    assert [row[1] for row in cells(second, "weight")] == ["-0.8348", "-0.7756"]
    assert [row[1] for row in cells(second, "bias")] == ["-1.9002", "-2.9002"]
    assert [row[1] for row in cells(second, "output = loss")] == ["-1.8506"]
    assert cells(second, "dtype") == [["float32"] * 3, ["float32", "float16", "bfloat16"], ["float32"] * 3]
    assert [row[:2] for row in cells(second, "scaled gradient of weight")] == [["-0.0591", "-242.25"]]
    assert cells(second, "scaled gradient of bias") == [["1", "4096", "1"]]
    assert cells(second, "gradient of weight") == [["-0.0591"] * 3]
    assert cells(second, "gradient of bias") == [["1"] * 3]
    assert text.splitlines()[-1] == "verdict: fp16 and bf16 agree with fp32"
    assert max(map(len, text.splitlines())) <= 100


def test_a_scale_beyond_fp16_shows_infinite_gradients_and_a_skipped_step_and_ends_with_1(capsys):
    assert walk_through(["--device", "cpu", "--init-scale", "1e30"]) == 1
    second = capsys.readouterr().out.split("Step 2")[1]
    assert cells(second, "scaled gradient of weight") == [["-0.0591", "-inf", "-0.0591"]]
    assert cells(second, "6 optimizer step") == [["taken", "skipped", "taken"]]
    assert [row[1] for row in cells(second, "weight")] == ["-0.8348", "-0.8348"], "nothing moved"
    assert "fp16: DISAGREES (step skipped: 2 gradient values not finite at scale 1e+30" in second
    assert "bf16: agrees" in second
    assert second.splitlines()[-1] == "verdict: fp16 disagrees with fp32"
    assert max(map(len, second.splitlines())) <= 100


# ----------------------------------------------------------------------------------- real networks


def test_a_network_of_the_flags_is_compared_and_conv2_on_digits_agrees(capsys):
    assert walk_through(["--device", "cpu", "--no-progress", "--batch-size", "16"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("conv2 on digits, on cpu; weights from --seed 0\n")
    assert cells(text, "dtype of the output") == [["float32", "float16", "bfloat16"]]
    assert "fp16: agrees" in text and "bf16: agrees" in text
    assert text.splitlines()[-1] == "verdict: fp16 and bf16 agree with fp32"
    assert max(map(len, text.splitlines())) <= 100


def test_a_flag_about_network_data_or_step_asks_for_a_network_and_no_other_does():
    for flag, value in (("--arch", "conv2"), ("--dataname", "digits"), ("--batch-size", "16"), ("--lr", "0.2")):
        assert is_about_network(parse([flag, value])), flag
    assert is_about_network(parse(["--fp32-layers", "0"]))
    assert not is_about_network(parse(["--device", "cpu", "--no-progress", "--init-scale", "1024", "--seed", "1"]))


def test_resume_compares_the_weights_of_the_run(digits_run, capsys):
    last = f"{digits_run}/checkpoints/last.pt"
    assert walk_through(["--device", "cpu", "--arch", "fc", "--batch-size", "48"]) == 0  # as of the run
    fresh = capsys.readouterr().out
    assert walk_through(["--device", "cpu", "--resume", last]) == 0
    resumed = capsys.readouterr().out
    assert f"weights of {last}" in resumed
    assert cells(resumed, "loss") != cells(fresh, "loss")


def test_a_step_of_sgd_is_taken_and_the_model_stays_as_it_was():
    start = smooth()
    before = {name: value.clone() for name, value in start.model.state_dict().items()}
    step = Step(start, PrecisionSettings(amp="off"))

    _, loss = start.forward(start.model, start.images)
    loss.backward()
    torch.optim.SGD(start.model.parameters(), lr=start.lr).step()
    torch.testing.assert_close(step.after, dict(start.model.named_parameters()))
    torch.testing.assert_close(step.before, before, rtol=0, atol=0)


# -------------------------------------------------------------------------------------- red verdicts


def wrong_unscale(monkeypatch, factor):
    """``unscale_`` gives ``factor(scale)`` times the true gradient."""
    original = Scaler._unscale_grads_

    def planted(self, optimizer, inv_scale, found_inf, allow_fp16):
        return original(self, optimizer, inv_scale * factor(1 / inv_scale), found_inf, allow_fp16)

    monkeypatch.setattr(Scaler, "_unscale_grads_", planted)


def test_a_missing_unscale_is_red(monkeypatch, capsys):
    wrong_unscale(monkeypatch, lambda scale: scale)
    assert walk_through(["--device", "cpu"]) == 1
    assert cells(capsys.readouterr().out, "gradient of weight")[1][1] == "-242.25"
    assert walk_through(["--device", "cpu", "--no-progress", "--batch-size", "16"]) == 1
    assert "verdict: fp16 disagrees with fp32" in capsys.readouterr().out


def test_a_gradient_off_by_5_percent_is_red_where_no_unit_switches_and_by_half_a_percent_in_the_layer(monkeypatch):
    wrong_unscale(monkeypatch, lambda _: 1.05)
    _, agreements = network(smooth(), PrecisionSettings(), halve=True)
    assert [a.agrees for a in agreements] == [False, True]
    monkeypatch.undo()
    _, agreements = network(smooth(), PrecisionSettings(), halve=True)
    assert [a.agrees for a in agreements] == [True, True]

    wrong_unscale(monkeypatch, lambda _: 1.005)
    _, _, (full, fp16, _) = single_layer(CPU, 4096.0)
    assert not Agreement(fp16, full).agrees


def test_gradients_that_underflow_in_fp16_are_red_without_a_scale_and_agree_with_one():
    start = smooth()
    tiny = dataclasses.replace(start, forward=lambda m, x: (m(x), 1e-7 * start.forward(m, x)[1]))

    reference, (fp16, bf16) = network(tiny, PrecisionSettings(init_scale=1.0), halve=True)
    assert walkthrough.underflow(fp16.step, reference) > 0.5
    assert not fp16.agrees
    assert bf16.agrees, "bf16 has float32's range"
    reference, (fp16, _) = network(tiny, PrecisionSettings(init_scale=2.0**20), halve=True)
    assert walkthrough.underflow(fp16.step, reference) < 0.01
    assert fp16.agrees


def test_activations_beyond_fp16_are_red_at_every_scale():
    start = smooth()

    def forward(model, images):
        output = model[2](model[1](model[0](images)) * 1e5)
        return output, output.float().mean()

    large = dataclasses.replace(start, forward=forward)
    _, (fp16, bf16) = network(large, PrecisionSettings(init_scale=1024.0), halve=True)
    assert fp16.step.skipped and not fp16.agrees
    assert len(fp16.step.too_large) == walkthrough.HALVINGS
    assert "so it is not the scale" in fp16.line()
    assert bf16.agrees


def test_a_scale_that_is_too_large_is_halved_as_in_training_unless_it_was_given():
    start = smooth()
    _, (fp16, _) = network(start, PrecisionSettings(init_scale=2.0**20), halve=True)
    assert fp16.agrees
    assert fp16.step.too_large[0] == 2.0**20
    assert fp16.step.scale == fp16.step.too_large[-1] / 2
    _, (fp16, _) = network(start, PrecisionSettings(init_scale=2.0**20), halve=False)
    assert fp16.step.skipped and not fp16.agrees


@pytest.mark.parametrize("factor, told", [(0.0, "the norm 0"), (float("nan"), "the norm nan")])
def test_nothing_to_compare_with_is_red(factor, told):
    start = smooth()
    empty = dataclasses.replace(start, forward=lambda m, x: (m(x), factor * m(x).float().sum()))
    _, agreements = network(empty, PrecisionSettings(), halve=False)
    assert not any(a.agrees for a in agreements)
    assert all(told in a.line() for a in agreements)


# ------------------------------------------------------------------------------------- its measures


def test_the_tolerance_grows_with_the_roots_of_layers_and_stays_below_a_lost_update():
    assert tolerance("fp16", 1) == 2 * 2.0**-11
    assert tolerance("bf16", 1) == 2 * 2.0**-8
    assert tolerance("fp16", 100) == pytest.approx(10 * tolerance("fp16", 1))
    assert tolerance("fp16", 1, nudged=0.03) == pytest.approx(tolerance("fp16", 1) + 0.06)
    assert tolerance("bf16", 10**6) == tolerance("fp16", 1, nudged=float("nan")) == 0.5


def test_the_error_is_relative_to_all_parameters_together():
    reference = {"a": torch.tensor([3.0]), "b": torch.tensor([[0.0, 4.0]])}
    update = {"a": torch.tensor([3.0]), "b": torch.tensor([[0.5, 4.0]])}
    assert relative_error(update, reference) == pytest.approx(0.1)
    assert relative_error(reference, reference) == 0


def test_dropout_of_every_library_is_switched_off():
    model = nn.Sequential(
        nn.Dropout(0.5),
        nn.Dropout1d(0.1),
        nn.AlphaDropout(0.1),
        timm.layers.DropPath(0.1),
        torchvision.ops.StochasticDepth(0.2, "row"),
        nn.Dropout(0.0),
        nn.Linear(4, 4),
    )
    model[-1].drop_rate = 0.3  # as of timm's networks, for functional.dropout
    assert without_dropout(model) == 6 and model[-1].drop_rate == 0
    images = torch.randn(2, 3, 4)
    torch.testing.assert_close(model.train()(images), model[-1](images), rtol=0, atol=0)
