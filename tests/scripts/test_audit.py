"""The audit against planted faults and their sound twins, hand-computed cases and plain float64 loops."""

import copy
import json
import math
import re
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional

import main
from models import build_model
from scripts import amp_audit
from scripts.audit.findings import Audit, half_statistics
from scripts.audit.record import Recorder, Runner, compare, together
from scripts.audit.report import HEADERS, as_json, finding_lines, layers, rows
from scripts.common.trained import build_trained, settings_and_point
from tests.helpers import answer
from utils.config.groups.model import ModelSettings
from utils.data.loaders import Batch
from utils.optim.freezing import Freezing
from utils.precision.amp import keep_in_fp32
from utils.runtime.distributed import Distributed
from utils.runtime.process import RankInfo

CPU = torch.device("cpu")
ENTROPY = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def batches(*shape, count=1):
    """Random images of this shape (n, c, h, w) and targets."""
    indices = np.arange(shape[0])
    return [Batch(torch.randn(*shape), torch.randint(0, 10, shape[:1]), indices, 0) for _ in range(count)]


def audit(network, images, criterion=ENTROPY, **options):
    return Audit(Runner(network, images, criterion, CPU), **options).run()


def named(result, kind=None):
    """The layers that findings name, in their order."""
    return [finding.layer for finding in result.findings if kind in (None, finding.kind)]


def layer_of(result, name):
    return next(layer for layer in layers(result) if layer["name"] == name)


# --------------------------------------------------------------------------------- overflowing layers


class Block(nn.Module):
    """A residual block with batch norm; ``gain`` multiplies the first convolution's weights."""

    def __init__(self, width, gain=1.0):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)
        with torch.no_grad():
            self.conv1.weight.mul_(gain)

    def forward(self, x):
        return self.act(x + self.norm2(self.conv2(self.act(self.norm1(self.conv1(x))))))


def residual_network(gain):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        Block(8),
        Block(8, gain),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


@pytest.fixture(scope="module")
def overflowing():
    """An audit of a network whose convolution 3.conv1 overflows. Not to be changed."""
    torch.manual_seed(0)
    return audit(residual_network(1e6), batches(4, 3, 8, 8, count=2))


def test_an_overflowing_convolution_is_named_once_and_alone_and_its_twin_is_cleared(overflowing):
    result = overflowing
    assert [(f.kind, f.layer, f.severity) for f in result.findings] == [("overflow", "3.conv1", "fault")]
    assert list(result.recommendation.keep) == ["3.conv1"]
    assert result.flags.endswith("--fp32-layers 3.conv1")
    assert result.recommendation.trial.finite
    assert layer_of(result, "3.conv1")["non_finite"]["fp16 unscaled"] > 0
    assert layer_of(result, "3.conv1")["non_finite"]["bf16"] == 0
    sound = audit(residual_network(1.0), result.runner.passes)
    assert named(sound) == []
    assert sound.recommendation.keep == {}


def test_layers_that_only_get_too_large_inputs_are_kept_in_float32_but_not_blamed():
    linears = [layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.ReLU())]
    chain = nn.Sequential(nn.Flatten(), *linears, nn.Linear(64, 10))
    with torch.no_grad():
        chain[1].weight.mul_(3e8)
        for linear in chain[3::2]:
            linear.weight.mul_(2)  # so that the values stay large
    result = audit(chain, batches(8, 1, 8, 8))
    reasons = result.recommendation.keep
    assert named(result) == ["1"] and len(reasons) > 16
    assert {reasons[name] for name in reasons if name != "1"} == {"its input exceeds"}
    assert len(result.tried) <= 4, "they are found together"


class Enlarged(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1e6


def test_what_an_operation_takes_and_gives_is_said_of_the_same_batches():
    """The first batch overflows, too; the second one is ten times as large."""
    network = nn.Sequential(nn.Flatten(), Enlarged(3, 10, bias=False), nn.Hardtanh())
    nn.init.ones_(network[1].weight)
    first = replace(*batches(2, 3, 1, 1), images=torch.eye(2, 3).reshape(2, 3, 1, 1))
    (finding,) = audit(network, [first, replace(first, images=10 * first.images)]).findings
    assert finding.what.startswith("its mul of values up to 10 gives up to 1e+07;")


class Sum(nn.Module):
    """Adds two outputs of about 50,000: only the sum is beyond float16."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(64, 64)
        self.other = nn.Linear(64, 64)
        for linear in (self.one, self.other):
            nn.init.constant_(linear.bias, 50_000.0)

    def forward(self, x):
        return self.one(x) + self.other(x)


def test_an_addition_outside_of_any_layer_is_named_by_the_module_that_adds():
    result = audit(nn.Sequential(nn.Flatten(), Sum(), nn.LayerNorm(64), nn.Linear(64, 10)), batches(8, 1, 8, 8))
    assert named(result) == ["1"]
    assert "add" in result.findings[0].what
    assert any("headroom" in note and "1.one" in note for note in result.notes)


def test_an_input_that_comes_too_large_in_float32_is_named_where_it_is_rounded():
    images = batches(8, 1, 8, 8)
    images[0].images[3] *= 1e5
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    with torch.no_grad():
        network[1].weight.mul_(10)
    result = audit(network, images)
    assert named(result) == ["1"] and "an input of" in result.findings[0].what
    assert list(result.recommendation.keep) == ["1", "2", "3"]
    with torch.no_grad():
        network[1].weight.mul_(1e6)
    keep_in_fp32(network, ["1"], CPU)  # so that what overflows is the cast for the layer after it
    assert named(audit(network, batches(8, 1, 8, 8))) == ["2"]


class Ratio(nn.Module):
    """Divides by what float16 rounds to zero, before its last layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.last = nn.Linear(64, 64)

    def forward(self, x):
        y = torch.relu(self.first(x))
        return self.last(y / (y + 1e-9))


def test_what_is_not_finite_though_its_true_values_fit_is_named_too():
    result = audit(nn.Sequential(nn.Flatten(), Ratio(), nn.Linear(64, 10)), batches(8, 1, 8, 8))
    assert (result.findings[0].kind, result.findings[0].layer) == ("not finite", "1")
    assert "1" in result.recommendation.keep or result.recommendation.trial.format != "fp16"
    assert result.recommendation.trial.finite


def over_memory_that_is_not_filled_yet(x):
    used_before = torch.full(x.shape, 1e30)
    del used_before  # its memory is likely the next tensor's
    return x * torch.empty(x.shape).fill_(1.0)


def with_a_mask_that_is_large_on_purpose(x):
    clipped = x.masked_fill(x > 1, 1.0)  # in half precision
    return clipped.float().masked_fill(x < 0, -1e30).softmax(-1)  # in float32


@pytest.mark.parametrize("compute", [over_memory_that_is_not_filled_yet, with_a_mask_that_is_large_on_purpose])
def test_large_numbers_that_no_result_depends_on_say_nothing(compute):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Hand(compute), nn.Linear(64, 10))
    assert named(audit(network, batches(8, 1, 8, 8))) == []


class RootOverflow(nn.Module):
    """The network's own code overflows float16, so that no layer can be kept in float32 for it."""

    def __init__(self, shift):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.last = nn.Linear(64, 10)
        self.shift = shift

    def forward(self, x):
        y = self.first(x.flatten(1))
        return self.last(
            functional.layer_norm((y * 1e6).float(), (64,)) if not self.shift else y + self.shift - self.shift
        )


def test_where_fp16_cannot_be_saved_bf16_is_verified_and_recommended_instead():
    result = audit(RootOverflow(0), batches(8, 1, 8, 8))
    assert named(result) == [""]
    assert result.flags == "--amp bf16"
    assert result.recommendation.trial.format == "bf16" and result.recommendation.trial.finite
    assert result.recommendation.steps[0].startswith("fp16 was given up")


def test_where_bf16_rounds_the_gradient_away_float32_is_recommended():
    result = audit(RootOverflow(1e6), batches(8, 1, 8, 8))
    assert result.flags == "--amp off"
    assert [step.split()[0] for step in result.recommendation.steps] == ["fp16", "bf16"]
    assert "relative error" in result.recommendation.steps[1]


def test_a_network_that_is_not_finite_in_float32_gets_no_recommendation():
    network = residual_network(1.0)
    with torch.no_grad():
        network[2].conv2.weight[0, 0, 0, 0] = math.nan
    result = audit(network, batches(4, 3, 8, 8))
    assert [(finding.kind, finding.layer) for finding in result.findings] == [("reference", "2.conv2")]
    assert result.flags == ""


# ------------------------------------------------------------------------------------- normalisations


class Hand(nn.Module):
    """A normalisation written by hand; its forward is ``compute(x)``, times a weight."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return self.compute(x) * self.weight


def without_autocast(compute):
    def run(x):
        with torch.autocast("cpu", enabled=False):
            return compute(x.half()).float()

    return run


def layer_norm(x):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)


def standard(x):
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3)


def rms_norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rms_norm_by_products(x):
    return x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt()


def rms_norm_with_float_root(x):
    return x * (x.square().mean(-1, keepdim=True).float() + 1e-6).pow(-0.5).to(x.dtype)


FAULTY = {  # each with the reason that the finding gives
    "layer norm by hand": (lambda: Hand(layer_norm), "var in float16"),
    "deviation by hand": (lambda: Hand(standard), "std in float16"),
    "rms norm by hand": (lambda: Hand(rms_norm), "mean of squares in float16 (its rsqrt)"),
    "rms norm by products": (lambda: Hand(rms_norm_by_products), "mean of squares in float16 (its sqrt)"),
    "rms norm, root in float32": (lambda: Hand(rms_norm_with_float_root), "mean of squares in float16 (its pow)"),
    "by hand, autocast off": (lambda: Hand(without_autocast(rms_norm)), "mean of squares in float16 (its rsqrt)"),
    "LayerNorm put to half": (lambda: nn.LayerNorm(64).half(), "weights in float16 (native_layer_norm)"),
    "RMSNorm put to half": (lambda: nn.RMSNorm(64).half(), "weights in float16"),
    "timm's SimpleNorm": (lambda: timm.layers.SimpleNorm(64), "var in float16"),
}
SOUND = {
    "LayerNorm": lambda: nn.LayerNorm(64),
    "RMSNorm": lambda: nn.RMSNorm(64),
    "timm's RmsNorm": lambda: timm.layers.RmsNorm(64),
    "timm's LayerNormFp32": lambda: timm.layers.LayerNormFp32(64),
    "rms norm by hand in float32": lambda: Hand(lambda x: rms_norm(x.float()).to(x.dtype)),
    "layer norm by hand in float32": lambda: Hand(lambda x: layer_norm(x.float()).to(x.dtype)),
    "softmax": lambda: nn.Softmax(-1),
    "a mean that is subtracted": lambda: Hand(lambda x: x - x.mean(-1, keepdim=True)),
}


def with_norm(norm):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), norm, nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 10)
    )


@pytest.mark.parametrize("name", FAULTY)
def test_a_normalisation_in_half_precision_is_named_alone_and_why(name):
    norm, reason = FAULTY[name]
    result = audit(with_norm(norm()), batches(8, 1, 8, 8))
    assert [(f.kind, f.layer, f.severity) for f in result.findings] == [("normalisation", "2", "fault")]
    assert result.findings[0].what == f"normalises in half precision: {reason}"
    its_own_code = "autocast off" in name  # which no --fp32-layers mends
    assert list(result.recommendation.keep) == ([] if its_own_code else ["2"])
    assert ("its own code" in result.findings[0].advice) == its_own_code
    assert bool(half_statistics(result.recommendation.trial)) == its_own_code
    assert result.recommendation.trial.finite


def by_length(x):
    return x / (x.norm(dim=-1, keepdim=True) / 8 + 1e-6)


def test_a_vector_norm_in_half_precision_is_told_and_is_a_fault_only_where_it_costs():
    plain = audit(with_norm(Hand(by_length)), batches(8, 1, 8, 8))
    assert named(plain) == [] and plain.recommendation.keep == {}
    assert any("vector norms are rounded to half precision" in note and note.endswith(" 2") for note in plain.notes)
    network = with_norm(Hand(by_length))
    with torch.no_grad():
        network[1].weight.mul_(14_000)  # values fit, their vectors' lengths of 50,000 to 80,000 do not all
    large = audit(network, batches(32, 1, 8, 8))
    assert {finding.severity for finding in large.findings} == {"fault"}
    assert set(named(large)) == {"2"} and list(large.recommendation.keep) == ["2"]
    assert {finding.kind for finding in large.findings} == {"overflow", "normalisation"}
    with torch.no_grad():
        network[1].weight.mul_(4e-10)
        network[1].bias.zero_()
    small = audit(network, batches(32, 1, 8, 8))
    assert named(small, "normalisation") == ["2"] and "vector norms of at most" in small.findings[0].what


@pytest.mark.parametrize("name", SOUND)
def test_a_normalisation_in_float32_is_cleared(name):
    result = audit(with_norm(SOUND[name]()), batches(8, 1, 8, 8))
    assert named(result) == []
    assert result.flags.startswith("--amp fp16") and not result.recommendation.keep


def test_a_square_that_overflows_inside_a_normalisation_is_found_though_its_output_is_finite():
    class Times(nn.Module):
        def forward(self, x):
            return 3000 * x

    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Times(), Hand(rms_norm), nn.Linear(64, 10))
    result = audit(network, batches(8, 1, 8, 8))
    assert [(finding.kind, finding.layer) for finding in result.findings] == [("overflow", "3"), ("normalisation", "3")]
    assert layer_of(result, "3")["non_finite"]["fp16 unscaled"] == 0
    assert result.recommendation.trial.error < 0.01


@pytest.mark.parametrize(
    "norm", [timm.layers.LayerNorm2d(3), nn.BatchNorm2d(3), nn.GroupNorm(1, 3), timm.layers.BatchNormAct2d(3)]
)
def test_norms_of_pictures_and_global_pooling_are_cleared(norm):
    network = nn.Sequential(nn.Conv2d(3, 3, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))
    assert named(audit(network, batches(4, 3, 8, 8))) == []


def test_weight_standardisation_and_vector_norms_of_attention_are_no_faults():
    class Cosine(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            self.head = nn.Linear(64, 10)

        def forward(self, x):
            q, k, v = self.qkv(x[:, 0]).chunk(3, -1)
            weights = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT
            return self.head((weights.softmax(-1) @ v).flatten(1))

    result = audit(Cosine(), batches(8, 1, 8, 8))
    assert named(result) == [] and any("vector norms" in note for note in result.notes)
    standardised = nn.Sequential(
        timm.layers.StdConv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    assert named(audit(standardised, batches(4, 3, 8, 8))) == []


# -------------------------------------------------------------------------------------------- gradients


class Branch(nn.Module):
    """``main(x) + factor * side(x)``: the side's gradients are ``factor`` times smaller."""

    def __init__(self, factor):
        super().__init__()
        self.main = nn.Linear(64, 64)
        self.inner = nn.Linear(64, 64)
        self.outer = nn.Linear(64, 64)
        self.factor = factor

    def forward(self, x):
        return self.main(x) + self.factor * self.outer(torch.relu(self.inner(x)))


def branched(factor):
    return nn.Sequential(nn.Flatten(), Branch(factor), nn.ReLU(), nn.Linear(64, 10))


def test_gradients_that_underflow_are_named_and_told_that_scaling_mends_them():
    result = audit(branched(1e-7), batches(8, 1, 8, 8))
    assert [(f.kind, f.layer, f.severity) for f in result.findings] == [
        ("underflow", "1.inner", "information"),
        ("underflow", "1.outer", "information"),
    ]
    assert all("needs loss scaling" in finding.advice for finding in result.findings)
    assert "100 % of its gradient's norm" in result.findings[0].what
    assert layer_of(result, "1.inner")["lost"] == {"fp16 unscaled": 1.0, "fp16": pytest.approx(0.0, abs=1e-3)}
    assert result.recommendation.keep == {} and result.faults == []
    assert named(audit(branched(1.0), batches(8, 1, 8, 8))) == []


def test_gradients_that_no_scale_lifts_are_kept_in_float32():
    result = audit(branched(1e-14), batches(8, 1, 8, 8))
    assert [(f.layer, f.severity) for f in result.findings] == [("1.inner", "fault"), ("1.outer", "fault")]
    assert sorted(result.recommendation.keep) == ["1.inner", "1.outer"]
    kept = result.recommendation.trial.gradients
    assert kept["1.inner.weight"].lost_share == 0


def test_a_larger_scale_is_recommended_where_65536_is_not_enough():
    def tiny(output, targets):
        return 1e-11 * ENTROPY(output, targets)

    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    result = audit(network, batches(8, 1, 8, 8), tiny)
    assert 65536 < result.recommendation.trial.scale <= 2**24
    assert math.log2(result.recommendation.trial.scale).is_integer()
    assert {finding.severity for finding in result.findings} == {"information"}


def test_the_scale_leaves_8_to_16_times_to_the_largest_gradient():
    network = branched(1.0)
    images = batches(4, 1, 8, 8)
    result = audit(network, images)
    hidden = network[1](images[0].images.flatten(1))
    hidden.retain_grad()
    logits = network[3](torch.relu(hidden))
    logits.retain_grad()
    ENTROPY(logits, images[0].targets).backward()
    gradients = [hidden.grad, logits.grad, *(parameter.grad for parameter in network.parameters())]
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    assert 8 <= 65504 / (result.recommendation.trial.scale * largest) < 16


def test_the_lost_share_of_a_gradient_known_by_hand():
    """The gradient of each weight is its own factor: 2^-24, the smallest in fp16, 2^-26, which is zero, and 0."""
    factors = torch.tensor([2.0**-24, 2.0**-26, 2.0**-26, 0.0])

    def weighted(output, targets):
        return (output.float() * factors).sum()

    network = nn.Sequential(nn.Linear(1, 4, bias=False))
    batch = [Batch(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64), np.arange(1), 0)]
    for scale, lost in ((4.0, 0.0), (1.0, 1 / 3)):  # of squares 16 + 1 + 1, two are lost
        layer = layer_of(audit(network, batch, weighted, scale=scale), "0")
        assert layer["lost"] == {"fp16 unscaled": pytest.approx(1 / 3), "fp16": pytest.approx(lost)}
        assert layer["largest_gradient"] == 2.0**-24


def test_what_a_parameter_loses_is_counted_by_norm():
    truth = torch.tensor([4.0, 3.0, 0.0, 12.0])
    half = {"a": torch.tensor([8.0, 0.0, 0.0, 26.0])}
    one, missing = compare([(half, {"a": truth, "b": truth[:2]})], scale=2.0).values()
    assert (one.non_finite, one.largest, one.lost_share) == (0, 12, pytest.approx(3 / 13))
    assert one.error == pytest.approx(math.sqrt(3**2 + 1**2) / 13)
    assert missing.lost_share == 1 and together([one, missing]).lost == 9 + 25


def test_gradient_errors_are_those_of_a_loop_written_out():
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    images = batches(8, 3, 8, 8, count=2)
    result = audit(network, images, scale=1024.0)

    def gradients(model, dtype, scale, batch):
        model = copy.deepcopy(model).train()
        with torch.autocast("cpu", dtype=dtype or torch.float16, enabled=dtype is not None):
            loss = ENTROPY(model(batch.images), batch.targets)
        (loss * scale).backward()
        return {name: parameter.grad.double() / scale for name, parameter in model.named_parameters()}

    for run, dtype, scale in (("fp16", torch.float16, 1024.0), ("bf16", torch.bfloat16, 1.0)):
        pairs = [(gradients(network, dtype, scale, b), gradients(network, None, 1.0, b)) for b in images]
        for layer, names in {"0": ["0.weight", "0.bias"], "4": ["4.weight", "4.bias"]}.items():
            signal = [name for name in names if name != "0.bias"]  # before batch norm, a bias's gradient is noise
            off = sum((half[name] - true[name]).square().sum() for half, true in pairs for name in signal)
            norm = sum(true[name].square().sum() for _, true in pairs for name in signal)
            assert layer_of(result, layer)["error"][run] == pytest.approx(float((off / norm).sqrt()), rel=1e-6)
        off = sum((half[name] - true[name]).square().sum() for half, true in pairs for name in true)
        norm = sum(true[name].square().sum() for _, true in pairs for name in true)
        assert result.runs[run].error == pytest.approx(float((off / norm).sqrt()), rel=1e-6)
    assert any("0.bias" in note for note in result.notes)


# -------------------------------------------------------------------------------------- sound networks


@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        ("timm/test_vit", (1, 3, 32, 32)),
        pytest.param("resnet18", (2, 3, 32, 32), marks=pytest.mark.thorough),
        pytest.param("timm/vit_tiny_patch16_224", (2, 3, 32, 32), marks=pytest.mark.thorough),
    ],
)
def test_sound_networks_are_cleared(arch, shape):
    network = build_model(ModelSettings(arch=arch), classes=10, channels=shape[1], image_size=shape[2])
    result = audit(network, batches(*shape))
    assert named(result) == []
    assert result.recommendation.trial.format == "fp16" and result.recommendation.keep == {}
    assert result.recommendation.trial.finite and result.recommendation.trial.error < 0.1
    convolution = next(layer for layer in layers(result) if layer["kind"] == "Conv2d")
    assert convolution["computes_in"] == {"fp16 unscaled": "float16", "bf16": "bfloat16"}


def test_batch_norms_that_keep_their_statistics_are_cleared():
    """On a CPU they hand on statistics of no batch, in float16: each was blamed, and by "nan" where it begins at 0."""
    network = residual_network(1.0)
    nn.init.zeros_(network[2].norm2.weight)
    Freezing(network, all_statistics=True)
    result = audit(network, batches(4, 3, 8, 8))
    assert named(result) == [] and result.recommendation.keep == {}


def test_an_audit_leaves_the_network_as_it_was():
    network = residual_network(1.0).eval()
    before = copy.deepcopy(network.state_dict())
    audit(network, batches(4, 3, 8, 8))
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert not network.training and all(parameter.grad is None for parameter in network.parameters())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in network.modules())


def reference_of(network, images, criterion=ENTROPY):
    """The record in float32 alone, in a fourth of the time of an audit."""
    runner = Runner(network, images, criterion, CPU)
    return runner.record(runner.reference)


def test_losses_of_a_dict_are_added_up():
    def two(output, targets):
        return {"entropy": ENTROPY(output, targets), "size": output.square().mean()}

    images = batches(4, 3, 8, 8)
    network = residual_network(1.0)
    both = reference_of(network, images, two).losses
    with torch.no_grad():
        expected = sum(two(copy.deepcopy(network).train()(images[0].images), images[0].targets).values())
    assert both == [pytest.approx(float(expected), rel=1e-4)]  # some thousand float32 additions, in another order


def test_the_weight_of_a_pass_multiplies_its_gradient():
    images = batches(4, 3, 8, 8)
    network = residual_network(1.0)
    part = [replace(images[0], weight=0.25)]
    whole, quarter = (reference_of(network, passes) for passes in (images, part))
    for name, seen in whole.places["gradients"].items():
        assert quarter.seen("gradients", name).largest == pytest.approx(seen.largest / 4, rel=1e-5)
    assert quarter.losses == whole.losses


def test_random_numbers_are_the_same_in_every_format():
    def draws(dtype):
        torch.manual_seed(5)
        with Recorder(nn.Identity(), wide=False):
            x = torch.ones(1000, dtype=dtype)
            numbers = [torch.rand(1000, dtype=dtype), torch.randn_like(x), torch.empty_like(x).uniform_(), x.normal_()]
            return [functional.dropout(torch.ones_like(x), 0.3) > 0, *(number.float() for number in numbers)]

    full = draws(torch.float32)
    half = draws(torch.float16)
    assert torch.equal(full[0], half[0])
    assert all(torch.allclose(a, b, atol=5e-3) for a, b in zip(full[1:], half[1:], strict=True))


def test_the_reference_stays_wide_whatever_the_network_casts_to():
    x = torch.tensor([1.0 + 2.0**-20], requires_grad=True)
    with Recorder(nn.Identity(), wide=True):
        y = x.half() * torch.ones(1, dtype=torch.bfloat16) + x.to(torch.float16).mean(dtype=torch.float16)
    y.backward()
    assert y.dtype == torch.float32 and y.item() == pytest.approx(2 * (1 + 2.0**-20), abs=1e-7)
    assert x.grad.item() == 2


# ------------------------------------------------------------------------------------------------ report


def test_table_lines_and_json(overflowing):
    result = replace(overflowing, already_kept=["6"])
    table = rows(result, 3)
    assert table[0][0] == "3.conv1" and all(len(row) == len(HEADERS) for row in table)
    assert any(line.startswith("overflow: 3.conv1: a weight of ") for line in finding_lines(result))
    content = json.loads(json.dumps(as_json(result, {"network": "net"}), allow_nan=False))
    assert content["recommendation"]["flags"].endswith("--fp32-layers 6 3.conv1")
    assert content["error"]["fp16"] is None, "JSON has no nan"
    assert {layer["name"] for layer in content["layers"]} >= {"", "0", "3.conv1", "6"}


# ------------------------------------------------------------------------------------------------ script


def dump(path, network, passes, **changes):
    """A file as main.py --dump-bad-batch writes it."""
    content = {
        "format": 1,
        "arch": "conv2",
        "settings": {"arch": "conv2", "dataname": "digits"},
        "classes": [str(n) for n in range(10)],
        "image_shape": [1, 8, 8],
        "model": network.state_dict(),
        "passes": passes,
        "step": 7,
        "epoch": 1,
        "rank": 0,
        "seed": 3,
        "scale": 1024.0,
        "amp": "fp16",
    }
    torch.save({**content, **changes}, path)
    return str(path)


@pytest.fixture
def planted():
    network = build_model(ModelSettings(arch="conv2"), classes=10, channels=1, image_size=8)
    images = torch.rand(4, 1, 8, 8)
    images[2] *= 1e6  # this sample alone overflows
    part = {"targets": torch.tensor([1, 2, 3, 4]), "indices": torch.tensor([11, 22, 33, 44]), "weight": 0.5}
    return network, [{"images": torch.rand(4, 1, 8, 8), **part}, {"images": images, **part}]


def test_a_saved_batch_is_reproduced_and_audited(tmp_path, capsys, planted):
    path = dump(tmp_path / "step.pt", *planted)
    assert amp_audit.main(["--batch", path, "--output", str(tmp_path / "out"), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "reproduced: output of features.0, loss nan, scale 1024, fp16" in out
    assert "samples with such logits: 33\n" in out
    assert "2 batch(es) of 4 images 1x8x8" in out and "before step 7" in out
    content = json.loads((tmp_path / "out" / "amp_audit.json").read_text())
    assert content["scale"] == 1024 and [batch["weight"] for batch in content["batches"]] == [0.5, 0.5]
    assert content["recommendation"]["verification"]["finite"]


def test_a_saved_batch_is_repeated_with_the_weights_of_its_images(tmp_path, capsys, monkeypatch, planted):
    monkeypatch.setattr(Audit, "run", Mock(side_effect=EOFError))  # the step is repeated before, which is enough
    network, passes = planted
    losses = []
    for number, weights in enumerate((None, torch.tensor([1.0, 1, 1, 5]))):
        finite = [{**passes[0], "image_weights": weights}]
        path = dump(tmp_path / f"{number}.pt", network, finite)
        with pytest.raises(EOFError):
            amp_audit.main(["--batch", path, "--output", str(tmp_path), "--device", "cpu"])
        losses.append(float(re.search(r"are finite here \(loss ([\d.]+)", capsys.readouterr().out)[1]))
    with torch.autocast("cpu", torch.float16):
        terms = functional.cross_entropy(network.train()(passes[0]["images"]), passes[0]["targets"], reduction="none")
    expected = [float(terms.detach().mean()), float((terms.detach() * torch.tensor([1.0, 1, 1, 5])).mean())]
    assert losses == pytest.approx(expected, rel=1e-3)


def test_a_run_is_audited_with_what_its_next_epoch_freezes(tmp_path):
    flags = ["--arch", "fc", "--freeze", "*.bias", "--freeze-epoch", "1", "--device", "cpu", "--output", str(tmp_path)]
    assert main.main([*flags, "--epochs", "2", "--max-steps", "23", "--no-progress"]) == 0
    (last,) = tmp_path.rglob("last.pt")
    frozen = []
    for words in (flags, [*flags, "--resume", str(last)]):
        args, point = settings_and_point(words)
        with Distributed(RankInfo(), args.run, args.precision.tf32) as distributed:
            model = build_trained(args, distributed, point)[0].model
        frozen.append({name for name, parameter in model.named_parameters() if not parameter.requires_grad})
    assert frozen[0] == set() and frozen[1] == {name for name, _ in model.named_parameters() if name.endswith(".bias")}


@pytest.mark.parametrize(
    ("settings", "epoch", "frozen"),
    [
        ({"freeze_bn": True}, 1, True),
        ({"freeze": ["bn1"], "freeze_epoch": 1}, 1, False),
        ({"freeze": ["bn1"], "freeze_epoch": 1}, 2, True),
    ],
)
def test_a_saved_batch_is_repeated_with_what_its_epoch_froze(tmp_path, capsys, monkeypatch, settings, epoch, frozen):
    network = build_model(ModelSettings(arch="timm/test_resnet"), classes=10, channels=1, image_size=32)
    part = {"targets": torch.arange(4), "indices": torch.arange(4), "weight": 1.0}
    passes = [{"images": 3 * torch.rand(4, 1, 32, 32), **part}]
    facts = {"arch": "timm/test_resnet", "image_shape": [1, 32, 32], "epoch": epoch, "amp": "off"}
    chosen = {"arch": "timm/test_resnet", "dataname": "digits", **settings}
    path = dump(tmp_path / "step.pt", network, passes, settings=chosen, **facts)
    monkeypatch.setattr(Audit, "run", Mock(side_effect=EOFError))  # the step is repeated before, which is enough
    with pytest.raises(EOFError):
        amp_audit.main(["--batch", path, "--output", str(tmp_path), "--device", "cpu"])
    loss = float(re.search(r"are finite here \(loss ([\d.]+)", capsys.readouterr().out)[1])
    network.train()
    for name, layer in network.named_modules():
        if isinstance(layer, nn.BatchNorm2d) and (name == "bn1" or "freeze_bn" in settings):
            layer.train(not frozen)
    assert loss == pytest.approx(float(ENTROPY(network(passes[0]["images"]), part["targets"]).detach()), rel=1e-5)


def test_a_saved_batch_that_is_finite_is_said_to_be(tmp_path, capsys, planted):
    network, passes = planted
    path = dump(tmp_path / "step.pt", network, passes[:1])
    flags = ["--batch", path, "--output", str(tmp_path), "--device", "cpu", "--top", "0", "--fail-on-findings"]
    assert amp_audit.main(flags) == 0
    out = capsys.readouterr().out
    assert "could not be reproduced" in out and "Findings: none" in out and "Worst layers" not in out


def test_an_audit_that_does_not_fit_into_the_memory_of_a_cpu_is_told_in_a_line(tmp_path, monkeypatch, capsys):
    refused = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    monkeypatch.setattr(Audit, "run", Mock(side_effect=refused))
    line = ["--dataname", "digits", "--arch", "conv2", "--device", "cpu", "--output", str(tmp_path / "new")]
    code, printed = answer(amp_audit, line, capsys, monkeypatch)
    said = "amp_audit.py: out of memory (tried to allocate 8 bytes); a smaller --batch-size needs less"
    assert code == 2 and printed.err.splitlines()[-1] == said and not (tmp_path / "new").exists()


def test_digits_and_conv2_are_cleared_by_the_command(tmp_path, capsys):
    code = amp_audit.main(["--batches", "1", "--batch-size", "4", "--device", "cpu", "--output", str(tmp_path)])
    out = capsys.readouterr().out
    assert code == 0 and "Findings: none" in out and "Recommendation: --amp fp16" in out
    assert [path.name for path in tmp_path.iterdir()] == ["amp_audit.json"]
