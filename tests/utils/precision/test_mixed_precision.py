"""The patterns of mixed precision, each against a loop written out in plain PyTorch (its documented examples)."""

import copy
import math

import pytest
import timm
import torch
from torch import nn

from models import build_model
from models.small import Conv
from tests.utils.test_train_validation import CPU, Overflow, assert_close, make, parameters, steps
from utils.config.arguments import parse
from utils.config.groups.average import AverageSettings
from utils.config.settings import UserError
from utils.optim.ema import MovingAverage
from utils.optim.gradient_penalty import refuse_without_second_derivative
from utils.optim.head import output_layers
from utils.precision.amp import keep_in_fp32
from utils.precision.buffers import BufferCopy, make_dense
from utils.precision.diagnosis import too_many_skips

HALF = torch.float16
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def recipe_loop(model, batches, *, clip=None, penalty=0.0, autocast=True, scale=1024.0, lr=0.1):
    """PyTorch's documented loop: autocast, scaled backward, unscale, clip, step, update."""
    kind = next(model.parameters()).device.type
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4, fused=True)
    scaler = torch.amp.GradScaler(kind, init_scale=scale, enabled=scale is not None)
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=HALF, enabled=autocast):
            loss = nn.functional.cross_entropy(model(batch.images), batch.targets)
        if penalty:
            scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
            inverse = 1.0 / scaler.get_scale()
            loss = loss + penalty * sum((gradient * inverse).pow(2).sum() for gradient in scaled).sqrt()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip:
            clip(model)
        scaler.step(optimizer)
        scaler.update()
    return scaler


@on_each_device
@pytest.mark.parametrize("amp", ["off", "fp16"])
@pytest.mark.parametrize(
    ("flag", "size", "clip"),
    [
        ("--clip-grad-norm", 0.05, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05)),
        ("--clip-grad-value", 0.002, lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.002)),
        (
            "--clip-grad-agc",
            0.01,
            lambda model: timm.utils.adaptive_clip_grad(
                [p for p in model.parameters() if all(p is not q for q in output_layers(model)[0].parameters())], 0.01
            ),
        ),
    ],
)
def test_clipping_after_unscaling_is_that_of_torch_and_timm(flag, size, clip, amp, device):
    traval = make(flag, str(size), "--amp", amp, "--init-scale", "1024", "--arch", "fc", device=device)
    clipped = copy.deepcopy(traval.model)
    free = copy.deepcopy(traval.model)
    batches = [batch for passes in steps(traval, 3) for batch in passes]
    recipe_loop(clipped, batches, clip=clip, autocast=amp == "fp16")
    recipe_loop(free, batches, autocast=amp == "fp16")
    assert_close(traval.model, clipped, rtol=1e-6, atol=1e-7)
    with pytest.raises(AssertionError):  # the clipping did something
        assert_close(traval.model, free, rtol=1e-3, atol=1e-5)


@on_each_device
@pytest.mark.parametrize(("amp", "scale"), [("off", None), ("fp16", 1024.0)])
def test_gradient_penalty_follows_the_documented_loop(amp, scale, device):
    traval = make("--grad-penalty", "0.1", "--amp", amp, "--init-scale", "1024", "--arch", "fc", device=device)
    plain = copy.deepcopy(traval.model)
    without = copy.deepcopy(traval.model)
    batches = [batch for passes in steps(traval, 3) for batch in passes]
    recipe_loop(plain, batches, penalty=0.1, autocast=amp == "fp16", scale=scale or 1.0)
    recipe_loop(without, batches, autocast=amp == "fp16", scale=scale or 1.0)
    # Differentiated twice, products in fp16 round more than once, on a GPU in an order of its own.
    tolerance = {"rtol": 1e-3, "atol": 1e-5} if amp == "fp16" else {"rtol": 1e-4, "atol": 1e-6}
    assert_close(traval.model, plain, **tolerance)
    with pytest.raises(AssertionError):
        assert_close(traval.model, without, **tolerance)


def test_a_network_with_fused_attention_can_be_penalised():
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, num_classes=10, depth=1, embed_dim=24, num_heads=2
    )
    traval = make("--grad-penalty", "0.1", model=model)
    before = parameters(model)
    steps(traval, 1)
    assert not torch.equal(before[0], parameters(model)[0])


def test_a_last_layer_alone_can_be_penalised():
    refuse_without_second_derivative(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), (1, 8, 8), CPU)


class TwoLosses(nn.Module):
    def forward(self, output, targets):
        return {"entropy": nn.functional.cross_entropy(output, targets), "size": 0.01 * output.pow(2).mean()}


class TheirSum(nn.Module):
    def forward(self, output, targets):
        return sum(TwoLosses()(output, targets).values())


def test_several_named_losses_are_minimised_together_and_logged_each():
    several = make("--arch", "fc", criterion=TwoLosses())
    one = make("--arch", "fc", criterion=TheirSum())
    points = {}
    rows = []
    several.writer.scalars = lambda values, step: points.update(values)
    several.writer.epoch = rows.append
    several.train(0)
    one.train(0)
    assert all(torch.equal(a, b) for a, b in zip(parameters(several.model), parameters(one.model), strict=True))
    assert set(points) >= {"Loss/Training_entropy", "Loss/Training_size"}
    total = points["Loss/Training_entropy"] + points["Loss/Training_size"]
    assert points["Loss/Training"] == pytest.approx(total, rel=1e-6)
    several.validation(0)
    assert rows[0]["train_loss"] == pytest.approx(rows[0]["train_entropy"] + rows[0]["train_size"], rel=1e-6)
    assert rows[0]["train_size"] > 0


def muon_loop(model, batches, traval):
    """Two optimizers under one scaler, as documented: each is unscaled and stepped, then one update."""
    inner = {id(p) for p in traval.optimizers[0].param_groups[0]["params"]}
    places = [id(p) in inner for p in traval.model.parameters()]
    matrices = [p for p, taken in zip(model.parameters(), places, strict=True) if taken]
    others = [p for p, taken in zip(model.parameters(), places, strict=True) if not taken]
    optimizers = [
        timm.optim.Muon(matrices, lr=1e-3, weight_decay=5e-4),
        torch.optim.AdamW(others, lr=1e-3, weight_decay=5e-4, betas=(0.9, 0.95), fused=True),
    ]
    kind = next(model.parameters()).device.type
    scaler = torch.amp.GradScaler(kind, init_scale=1024.0)
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast(kind, dtype=HALF):
            loss = nn.functional.cross_entropy(model(batch.images), batch.targets)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return scaler


def muon(*flags, device="cpu"):
    """With a narrow network: a CPU takes seconds for the backward pass of a wide convolution in fp16."""
    torch.manual_seed(0)
    model = Conv(10, 1, 8, widths=(4,))
    line = ("--optimizer", "muon", "--amp", "fp16", "--init-scale", "1024", *flags)
    return make(*line, model=model, device=device)


def test_muon_takes_the_hidden_matrices_and_filters_and_adamw_the_rest():
    traval = muon()
    names = {id(parameter): name for name, parameter in traval.model.named_parameters()}
    taken = [{names[id(p)] for group in o.param_groups for p in group["params"]} for o in traval.optimizers]
    assert taken[0] == {"features.0.weight", "features.2.weight", "classifier.1.weight", "classifier.3.weight"}
    assert taken[1] == set(names.values()) - taken[0]
    assert "classifier.5.weight" in taken[1]


@on_each_device
def test_two_optimizers_under_one_scaler_follow_the_documented_loop(device, muon_in_bf16):
    traval = muon(device=device)
    plain = copy.deepcopy(traval.model)
    batches = [batch for passes in steps(traval, 3) for batch in passes]
    scaler = muon_loop(plain, batches, traval)
    # A GPU's convolutions add up in any order, and Muon computes in bfloat16.
    assert_close(
        traval.model, plain, **({"rtol": 1e-4, "atol": 1e-6} if device == "cpu" else {"rtol": 0.05, "atol": 1e-3})
    )
    assert scaler.get_scale() == traval.scaler.get_scale() == 1024


def test_layers_kept_in_float32_compute_in_it_and_their_neighbours_do_not():
    args = parse(["--arch", "conv2"])
    model = build_model(args.model, classes=10, channels=1, image_size=8)
    weights = copy.deepcopy(model.state_dict())
    keep_in_fp32(model, ["features.2"], CPU)
    assert list(model.state_dict()) == list(weights) and isinstance(model.features[2], nn.Conv2d)
    seen = {}
    for name in ("features.0", "features.2", "classifier.1"):
        model.get_submodule(name).register_forward_hook(
            lambda m, i, o, name=name: seen.update({name: (i[0].dtype, o.dtype)})
        )
    with torch.autocast("cpu", dtype=HALF):
        model(torch.randn(2, 1, 8, 8))
    assert seen == {
        "features.0": (torch.float32, HALF),
        "features.2": (HALF, torch.float32),
        "classifier.1": (torch.float32, HALF),
    }


def test_a_network_that_moves_to_another_device_keeps_its_float32_layers_there():
    model = nn.Sequential(nn.Linear(2, 2))
    for device in ("cuda", "cpu"):
        keep_in_fp32(model, ["0"], torch.device(device))
    with torch.autocast("cpu", dtype=HALF):
        assert model(torch.ones(1, 2)).dtype == torch.float32


def test_a_copy_of_a_network_with_float32_layers_uses_its_own_weights():
    model = nn.Sequential(nn.Linear(2, 2))
    keep_in_fp32(model, ["0"], CPU)
    average = MovingAverage(model, AverageSettings(ema_decay=0.9))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    assert average.module(torch.ones(1, 2)).abs().sum() > 0


def test_an_unknown_layer_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"--fp32-layers featurs\.0: .*did you mean features\.0"):
        keep_in_fp32(build_model(parse([]).model, classes=10, channels=1, image_size=8), ["featurs.0"], CPU)


def batch_norm_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


@on_each_device
def test_a_step_skipped_for_an_overflow_in_the_forward_pass_leaves_the_buffers_as_they_were(device):
    traval = make("--amp", "fp16", "--init-scale", "1", model=batch_norm_network(), device=device)
    steps(traval, 1)
    before = copy.deepcopy(traval.model.state_dict())
    with torch.no_grad():
        traval.model[1].weight *= 1e6
    steps(traval, 1)
    assert traval.progress.skipped_steps == 1
    after = traval.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if name != "1.weight")


def logged(traval):
    lines = []
    texts = {}
    traval.writer.log = lambda text, to_console=True: lines.append((text, to_console))
    traval.writer.text = lambda tag, text, step=0: texts.update({(tag, step): text})
    return lines, texts


@on_each_device
def test_a_skipped_step_names_the_first_layer_of_the_forward_pass_the_scale_the_step_and_the_samples(device):
    traval = make("--amp", "fp16", "--init-scale", "256", model=batch_norm_network(), device=device)
    lines, texts = logged(traval)
    with torch.no_grad():
        traval.model[1].weight *= 1e6
    ((batch,),) = steps(traval, 1)
    assert lines[-1][1] and lines[-1][0].startswith("step 1 skipped, not finite: output of 1; first layers: 1, 2, 3; ")
    assert "loss scale 256" in lines[-1][0] and f"samples with such logits {batch.indices[0]} " in lines[-1][0]
    text = texts["AMP/non_finite", 1]
    assert "step 1, epoch 1, loss scale 256" in text
    assert text.split("samples with such logits: ")[1].split() == [str(index) for index in batch.indices]


def test_a_skipped_step_names_the_samples_of_all_its_passes():
    traval = make("--amp", "fp16", "--accumulate", "2", model=batch_norm_network())
    _, texts = logged(traval)
    with torch.no_grad():
        traval.model[1].weight *= 1e6
    (passes,) = steps(traval, 1)
    indices = [str(index) for batch in passes for index in batch.indices]
    assert len(passes) == 2 and texts["AMP/non_finite", 1].split("samples with such logits: ")[1].split() == indices


def test_a_skipped_steps_loss_does_not_spoil_the_epochs_mean():
    traval = make("--amp", "fp16", "--init-scale", "64", "--arch", "fc", criterion=Overflow(at=3))
    report = traval.train(0)
    assert math.isfinite(report.loss) and report.count == 1437 - 64
    assert traval.progress.samples_seen == 1437 and traval.progress.skipped_steps == 1


def test_without_a_bad_step_no_layer_is_watched(monkeypatch):
    traval = make("--amp", "fp16", "--init-scale", "64", "--arch", "fc")
    monkeypatch.setattr("utils.loop.non_finite_step.examine", None)
    steps(traval, 3)
    assert traval.progress.skipped_steps == 0
    assert all(not module._forward_hooks for module in traval.model.modules())


@pytest.mark.parametrize(("count", "scale", "words"), [(1, 5e29, "1 step in a row"), (21, 0.03, "21 steps in a row")])
def test_the_advice_after_too_many_skips_depends_on_where_the_scale_has_come_to(count, scale, words):
    line = too_many_skips(count, 30, 2, scale)
    assert line.startswith(words) and "the last step 30 (epoch 2)" in line and "last.pt" in line
    assert ("lower --init-scale" in line) == (scale > 1) and ("lower --lr" in line) == (scale < 1)


def test_buffers_that_are_views_with_gaps_are_copied_and_restored_whole():
    model = torch.nn.Module()
    turns = torch.polar(torch.ones(3, 4), torch.arange(12.0).view(3, 4))
    model.register_buffer("cosines", turns.real)
    model.register_buffer("filters", torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
    model.weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4)[:, :2])
    places = model.filters.data_ptr()
    make_dense(model)
    assert torch.equal(model.cosines, turns.real) and model.filters.data_ptr() == places, "what is dense stays"
    assert model.weight.is_contiguous() and model.weight.tolist() == [[0, 1], [4, 5], [8, 9]]
    kept = BufferCopy(model)
    model.cosines.add_(1)
    kept.restore()
    assert torch.equal(model.cosines, turns.real)


def test_a_buffer_in_whose_place_a_network_puts_a_new_tensor_is_named():
    class Mean(torch.nn.Module):
        def __init__(self, in_place):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.in_place = in_place

        def forward(self, images):
            mean = 0.9 * self.mean + 0.1 * images.mean(0)
            if self.in_place:
                self.mean.copy_(mean)
            else:
                self.mean = mean
            return images - self.mean

    for in_place, names in ((True, []), (False, ["mean"])):
        model = Mean(in_place)
        kept = BufferCopy(model)
        assert kept.replaced() == []
        model(torch.ones(2, 3))
        assert kept.replaced() == names
