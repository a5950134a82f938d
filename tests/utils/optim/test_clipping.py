"""Clipping, above all over several optimizers under one scaler: what one of them skips changes nothing for another."""

import copy
import math

import pytest
import timm
import torch
from timm.utils import adaptive_clip_grad
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils._python_dispatch import TorchDispatchMode

from tests.utils.precision.test_mixed_precision import HALF, logged, on_each_device
from tests.utils.test_train_validation import make, parameters, steps
from utils.config.groups.optimisation import OptimisationSettings
from utils.optim import clipping
from utils.optim.clipping import GradientClipper, clip_adaptively
from utils.optim.head import output_layers
from utils.train_validation import TrainingFailure

WAYS = {
    "none": ("--max-skipped-steps", 9, lambda *_: None),
    "norm": ("--clip-grad-norm", 0.05, clip_grad_norm_),
    "value": ("--clip-grad-value", 0.002, clip_grad_value_),
    "agc": ("--clip-grad-agc", 0.01, adaptive_clip_grad),
}
each_way = pytest.mark.parametrize("way", WAYS)


def muon(*flags, amp="fp16", device="cpu"):
    """Muon and AdamW on a small network: quick also where half precision is emulated."""
    flags = ("--amp", amp, "--arch", "fc", "--batch-size", "16", *flags)
    return make("--optimizer", "muon", "--init-scale", "1024", *flags, device=device)


def taken_by(optimizer):
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def broken(traval, which):
    """Has a gradient of optimizer ``which`` overflow in all steps to come; gives the parameter's name."""
    mine = taken_by(traval.optimizers[which])
    name, parameter = [(name, p) for name, p in traval.model.named_parameters() if id(p) in mine][-1]
    parameter.register_hook(lambda gradient: gradient * torch.where(torch.arange(len(gradient)) == 0, math.inf, 1)[0])
    return name


def alone(model, batch, optimizer, chosen, clip, size):
    """A step of ``optimizer`` over the ``chosen`` parameters of ``model``, as if there were no others; their norm."""
    kind = next(model.parameters()).device.type
    scaler = torch.amp.GradScaler(kind, init_scale=1024.0)
    with torch.autocast(kind, dtype=HALF):
        loss = nn.functional.cross_entropy(model(batch.images), batch.targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in chosen]))
    clip(chosen, size)
    scaler.step(optimizer)
    return norm


# -------------------------------------------------------------------------- several optimizers, one scaler


@on_each_device
@each_way
@pytest.mark.parametrize("overflowed", [0, 1], ids=["Muon overflows", "AdamW overflows"])
def test_after_an_overflow_in_one_optimizer_which_is_told_the_other_steps_as_if_it_were_alone(
    way, overflowed, device, muon_in_bf16
):
    flag, size, clip = WAYS[way]
    traval = muon(flag, str(size), device=device)
    model = copy.deepcopy(traval.model)
    before = parameters(model)
    lines, texts = logged(traval)
    name = broken(traval, overflowed)
    ((batch,),) = steps(traval, 1)
    skipped = type(traval.optimizers[overflowed]).__name__
    assert lines[-1][0].startswith(f"step 1 skipped by {skipped}, not finite: gradient of {name}; loss scale 1024")
    text = texts["AMP/non_finite", 1]
    assert text.startswith("step 1, epoch 1, loss scale 1024\n")
    assert f"parameters with such a gradient: {name}\n" in text, "before it was clipped"

    mine = taken_by(traval.optimizers[1 - overflowed])
    taken = [id(parameter) in mine for parameter in traval.model.parameters()]
    chosen = [parameter for parameter, is_taken in zip(model.parameters(), taken, strict=True) if is_taken]
    if overflowed == 0:
        optimizer = torch.optim.AdamW(chosen, lr=1e-3, weight_decay=5e-4, betas=(0.9, 0.95), fused=True)
    else:
        optimizer = timm.optim.Muon(chosen, lr=1e-3, weight_decay=5e-4)
    if way == "agc":  # leaves the last layer alone
        last = {id(parameter) for parameter in output_layers(model)[0].parameters()}
        clip = lambda chosen, share: adaptive_clip_grad([p for p in chosen if id(p) not in last], share)  # noqa: E731
    norm = alone(model, batch, optimizer, chosen, clip, size)

    expected = parameters(model)
    progress = traval.progress
    assert (progress.step, progress.skipped_steps, progress.partly_skipped_steps) == (1, 0, 1)
    assert traval.scaler.get_scale() == 512
    ((_, recorded, _),) = traval.sums.pending
    torch.testing.assert_close(recorded, norm)
    for found, wanted, old, moves in zip(parameters(traval.model), expected, before, taken, strict=True):
        if not moves:
            assert torch.equal(found, old)
        elif device == "cpu":
            assert torch.equal(found, wanted) and not torch.equal(found, old)
        else:  # a GPU's convolutions add up in any order
            torch.testing.assert_close(found, wanted, rtol=0.05, atol=1e-3)


def test_the_norm_of_a_step_that_all_optimizers_skip_is_not_finite():
    traval = muon("--clip-grad-norm", "1")
    before = parameters(traval.model)
    broken(traval, 0)
    broken(traval, 1)
    steps(traval, 1)
    ((_, norm, _),) = traval.sums.pending
    assert not math.isfinite(norm) and traval.progress.skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(traval.model), strict=True))


def test_without_an_overflow_the_norm_is_that_of_the_whole_gradient():
    traval = muon("--clip-grad-norm", "0.05")
    seen = []
    traval.optimizers[1].register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in traval.clip.parameters))
    model = copy.deepcopy(traval.model)
    ((batch,),) = steps(traval, 1)
    with torch.autocast("cpu", dtype=HALF):
        loss = nn.functional.cross_entropy(model(batch.images), batch.targets)
    (loss * 1024).backward()
    for parameter in model.parameters():
        parameter.grad /= 1024
    norm = clip_grad_norm_(model.parameters(), 0.05)
    # The same gradients, to the bit; only the order in which their squares are added differs: 16 roundings of float32.
    torch.testing.assert_close(traval.sums.pending[0][1], norm, rtol=1e-6, atol=0)
    assert norm > 0.05
    for found, parameter in zip(seen, model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-6, atol=1e-12)


@each_way
def test_without_a_scaler_an_overflow_in_one_optimizer_ends_the_run(way):
    flag, size, _ = WAYS[way]
    traval = muon(flag, str(size), amp="off")
    before = parameters(traval.model)
    broken(traval, 1)
    with pytest.raises(TrainingFailure, match="the gradient is (inf|nan) at step 1"):
        steps(traval, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(traval.model), strict=True))


def test_a_part_whose_norm_alone_overflows_becomes_zero_as_with_torch_and_leaves_the_other_part_alone():
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizers = [torch.optim.SGD(layer.parameters()) for layer in model]
    clip = GradientClipper(OptimisationSettings(clip_grad_norm=1.0), model, optimizers, each_skips=True)
    model[0].weight.grad = torch.full((2, 3), 1e30)
    model[1].weight.grad = torch.full((2, 2), 4.0)
    assert clip() == 8
    assert torch.equal(model[0].weight.grad, torch.zeros(2, 3))
    torch.testing.assert_close(model[1].weight.grad, torch.full((2, 2), 0.5))


def test_each_process_clips_its_part_of_a_sharded_gradient_by_the_norm_over_all(monkeypatch):
    """Here two processes in turn, of which each has half of the rows."""
    model, whole = (with_gradients(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), 1) for _ in range(2))
    norm = clip_grad_norm_(whole.parameters(), 0.05)
    parts = [[p.grad.chunk(2)[rank].flatten() for p in model.parameters()] for rank in range(2)]
    norms = [torch.linalg.vector_norm(torch.cat(part)) for part in parts]
    monkeypatch.setattr(clipping, "is_sharded", lambda model: True)
    for rank in range(2):
        monkeypatch.setattr(clipping, "local", lambda gradient, rank=rank: gradient.chunk(2)[rank])
        settings = OptimisationSettings(clip_grad_norm=0.05)
        clip = GradientClipper(settings, model, [], each_skips=False, over_ranks=norms[1 - rank].hypot)
        torch.testing.assert_close(clip(), norm)
    for own, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)


class Operations(TorchDispatchMode):
    """Counts torch's operations inside, views left out."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def test_the_optimizer_whose_step_is_the_shortest_goes_first():
    traval = muon()
    order = []
    for optimizer in traval.optimizers:
        optimizer.register_step_post_hook(lambda moved, *_: order.append(type(moved).__name__))
    steps(traval, 1)
    assert order == ["AdamW", "Muon"]


# --------------------------------------------------------------------------------------- adaptive clipping


SHAPES = [(5,), (), (4, 3), (2, 3, 4), (6, 2, 3, 3), (1, 7, 5), (2, 1, 2, 2, 2), (3,)]
KINDS = {"all": SHAPES, "weights": SHAPES[2:-1], "vectors": [(5,), (), (3,), (7,)]}


class Shapes(nn.Module):
    """Parameters of all numbers of dimensions."""

    def __init__(self, shapes=SHAPES):
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])


def with_gradients(model, seed):
    """``model`` with random gradients of many sizes, so that some units are clipped and others are not."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        size = 10.0 ** torch.randint(-4, 1, (), generator=generator)
        gradient = torch.empty_like(parameter)  # in the same memory format
        parameter.grad = gradient.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model


@on_each_device
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("arch", [*KINDS, "test_resnet", "test_vit"])
def test_adaptive_clipping_is_timms_to_the_bit(arch, memory_format, device):
    torch.manual_seed(0)
    model = Shapes(KINDS[arch]) if arch in KINDS else timm.create_model(arch, num_classes=10)
    model = model.to(memory_format=memory_format) if arch not in KINDS else model
    ours, theirs = (with_gradients(copy.deepcopy(model).to(device), 1) for _ in range(2))
    untouched = [parameter.grad.clone() for parameter in ours.parameters()]
    for other in (ours, theirs):
        next(other.parameters()).grad = None
    clip_adaptively(ours.parameters(), 0.01)
    adaptive_clip_grad(theirs.parameters(), 0.01)
    for a, b in zip(list(ours.parameters())[1:], list(theirs.parameters())[1:], strict=True):
        assert torch.equal(a.grad, b.grad)
    same = [torch.equal(a, p.grad) for a, p in zip(untouched[1:], list(ours.parameters())[1:], strict=True)]
    assert True in same and False in same
    assert next(ours.parameters()).grad is None


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_adaptive_clipping_does_not_hide_what_is_not_finite(value):
    ours = with_gradients(Shapes(), 2)
    theirs = with_gradients(Shapes(), 2)
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model.tensors[2].grad[1, 1] = model.tensors[0].grad[0] = value
    clip_adaptively(ours.parameters(), 0.01)
    adaptive_clip_grad(theirs.parameters(), 0.01)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0, equal_nan=True)
    assert not ours.tensors[2].grad.isfinite().all() and not ours.tensors[0].grad.isfinite().all()


def test_adaptive_clipping_takes_three_operations_a_weight_one_a_vector_and_a_few_for_all():
    model = with_gradients(timm.create_model("test_resnet", num_classes=10), 3)
    with Operations() as ours:
        clip_adaptively(model.parameters(), 0.01)
    views = {"view", "detach", "split_with_sizes", "select", "alias"}
    done = sum(count for name, count in ours.counts.items() if name not in views)
    weights = sum(parameter.ndim > 1 for parameter in model.parameters())
    assert done <= 2 * weights + 15  # the multiplications are one call, a kernel a parameter


def test_a_network_of_one_layer_has_nothing_to_clip_adaptively():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    traval = make("--clip-grad-agc", "0.01", model=model)
    steps(traval, 1)
    assert traval.progress.step == 1
