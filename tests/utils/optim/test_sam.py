"""Sharpness-aware minimisation against loops written out in plain PyTorch."""

import copy
import math

import pytest
import torch
from torch import nn

from tests.utils.test_train_validation import Overflow, assert_close, make, parameters, steps
from utils.optim.freezing import Freezing

FC = ("--arch", "fc", "--batch-size", "48")


def foret_loop(model, windows, *, rho=0.05, adaptive=False, clip=None, scale=None):
    """Foret et al., 2021, algorithm 1 (adaptive: Kwon et al., 2021, algorithm 1), with momentum SGD as the base."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)

    def gradient(batches):
        optimizer.zero_grad()
        size = sum(len(batch.targets) for batch in batches)
        for batch in batches:
            with torch.autocast("cpu", dtype=torch.float16, enabled=scale is not None):
                loss = nn.functional.cross_entropy(model(batch.images), batch.targets)
            scaler.scale(loss * (len(batch.targets) / size)).backward()
        return [parameter.grad / scaler.get_scale() for parameter in model.parameters()]

    for batches in windows:
        before = parameters(model)
        g = gradient(batches)
        with torch.no_grad():
            t = [p.abs() if adaptive else torch.ones_like(p) for p in model.parameters()]
            norm = sum((a * b).pow(2).sum() for a, b in zip(t, g, strict=True)).sqrt()
            for parameter, a, b in zip(model.parameters(), t, g, strict=True):
                parameter += rho * a * a * b / norm
        gradient(batches)
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old)
        scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(
    ("accumulate", "adaptive", "clip"), [(1, False, None), (3, True, None), (1, True, 0.05), (3, False, 0.05)]
)
def test_steps_are_those_of_the_papers_algorithm(accumulate, adaptive, clip):
    rho = 1.0 if adaptive else 0.2
    flags = ["--sam-rho", str(rho), "--accumulate", str(accumulate), *(["--sam-adaptive"] if adaptive else [])]
    traval = make(*FC, *flags, *(["--clip-grad-norm", str(clip)] if clip else []))
    reference = copy.deepcopy(traval.model)
    without = copy.deepcopy(traval.model)
    windows = steps(traval, 4)
    assert len(windows[0]) == accumulate
    foret_loop(reference, windows, rho=rho, adaptive=adaptive, clip=clip)
    foret_loop(without, windows, rho=0, clip=clip)
    assert_close(traval.model, reference, rtol=1e-4, atol=1e-6)
    with pytest.raises(AssertionError):  # the detour did something
        assert_close(traval.model, without, rtol=1e-2, atol=1e-4)


def test_under_a_scaler_the_ascent_is_along_the_true_gradient():
    traval = make(*FC, "--sam-rho", "0.2", "--amp", "fp16", "--init-scale", "1024")
    reference = copy.deepcopy(traval.model)
    foret_loop(reference, steps(traval, 3), rho=0.2, scale=1024.0)
    assert_close(traval.model, reference, rtol=1e-4, atol=1e-5)


class Noisy(nn.Module):
    """Records the dropout masks and batch-norm statistics of each pass."""

    def __init__(self):
        super().__init__()
        self.flat = nn.Flatten()
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout()
        self.last = nn.Linear(64, 10)
        self.masks = []

    def forward(self, images):
        x = self.norm(self.flat(images))
        kept = self.drop(torch.ones_like(x))  # the normalised pixels may be zero themselves
        self.masks.append(kept == 0)
        return self.last(kept * x)


@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_dropout_is_the_same_in_both_passes_and_batch_norm_moves_only_in_the_first(accumulate):
    sam = make(*FC, "--sam-rho", "0.3", "--accumulate", accumulate, model=Noisy())
    plain = make(*FC, "--accumulate", accumulate, model=Noisy())
    plain.model.load_state_dict(sam.model.state_dict())
    steps(sam, 1)
    steps(plain, 1)
    for (name, ours), theirs in zip(sam.model.named_buffers(), plain.model.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    half = int(accumulate)
    assert len(sam.model.masks) == 2 * half
    for first, second in zip(sam.model.masks[:half], sam.model.masks[half:], strict=True):
        assert torch.equal(first, second) and 0.3 < first.float().mean() < 0.7


def test_loss_accuracy_and_samples_are_counted_once_and_those_of_the_weights_themselves():
    sam = make(*FC, "--sam-rho", "0.5")
    plain = make(*FC)
    steps(sam, 1)
    steps(plain, 1)
    assert torch.equal(sam.sums.meter.sums[0], plain.sums.meter.sums[0])


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
@pytest.mark.parametrize("at", [2, 3], ids=["first gradient", "second gradient"])
def test_a_gradient_that_is_not_finite_skips_the_step_and_leaves_weights_and_statistics(at, optimizer):
    flags = ("--sam-rho", "0.1", "--amp", "fp16", "--init-scale", "1024", "--optimizer", optimizer)
    traval = make(*FC, *flags, criterion=Overflow(at=at + 1))
    lines = []
    traval.writer.log = lambda line, to_console=True: lines.append(line)
    steps(traval, 1)  # two calls of the criterion
    traval.criterion.calls = 2
    before = parameters(traval.model)
    buffers = [buffer.clone() for buffer in traval.model.buffers()]
    steps(traval, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(traval.model), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(buffers, traval.model.buffers(), strict=True))
    assert traval.progress.skipped_steps == 1 and traval.scaler.get_scale() == 512
    assert any("step 2 skipped" in line for line in lines)
    steps(traval, 1)
    assert traval.progress.skipped_steps == 1 and not torch.equal(before[0], parameters(traval.model)[0])


def test_where_only_the_weights_uphill_overflow_the_log_says_so():
    traval = make(*FC, "--sam-rho", "1e30", "--amp", "fp16", "--init-scale", "2")
    lines = []
    traval.writer.log = lambda line, to_console=True: lines.append(line)
    before = parameters(traval.model)
    steps(traval, 1)
    assert any("SAM's second gradient" in line for line in lines)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(traval.model), strict=True))


def test_the_optimizer_steps_from_the_very_weights_before():
    traval = make(*FC, "--sam-rho", "0.7", "--momentum", "0", "--weight-decay", "0", "--lr", "1e-30")
    before = parameters(traval.model)
    steps(traval, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(traval.model), strict=True))
    assert math.isfinite(traval.sums.pending[0][1])


def test_parameters_that_begin_to_train_later_take_part_in_both_passes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    flags = ("--sam-rho", "0.2", "--momentum", "0", "--batch-size", "1437", "--epochs", "2")
    traval = make(*flags, model=model, freezing=Freezing(model, ["1"], end=1))
    frozen = model[1].weight.detach().clone()
    traval.train(0)
    assert torch.equal(model[1].weight, frozen)
    traval.progress.finish_epoch()
    reference = copy.deepcopy(model)
    traval.train(1)
    for parameter in reference.parameters():
        parameter.requires_grad_(True)
    foret_loop(reference, [list(traval.train_loader.batches(1))], rho=0.2)
    assert_close(model, reference, rtol=1e-4, atol=1e-6)
    assert not torch.equal(model[1].weight, frozen)
