"""TraVal's step and validation against loops written out in plain PyTorch."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from models import build_model
from utils.config.arguments import parse
from utils.data.datasets import get_data
from utils.data.loaders import Batch, loaders
from utils.optim.criterion import build_criterion
from utils.optim.ema import build_average
from utils.optim.lr_policy import LRPolicy
from utils.optim.optimizers import build_optimizers
from utils.precision.amp import build_scaler
from utils.runtime.distributed import Distributed, RankInfo
from utils.train_validation import Extras, TraVal

CPU = torch.device("cpu")


def make(*flags, model=None, criterion=None, device="cpu", writer=None, distributed=None, channels_last=False, **more):
    """A TraVal on the embedded digits, built as main.py builds it; ``more`` goes to its extras."""
    fixed = ("--device", device, "--augment", "none", "--lr-policy", "constant")
    args = parse([*fixed, *flags], distributed.world_size if distributed else 1)
    distributed = distributed or Distributed(RankInfo(), args.run)
    device = torch.device(device)
    data = get_data(args.data, device)
    train_loader, validation_loader, _ = loaders(data, args, distributed, channels_last=channels_last)
    torch.manual_seed(0)
    model = (model or build_model(args.model, classes=10, channels=1, image_size=8)).to(device)
    optimizers = build_optimizers(args.optimisation, model)
    return TraVal(
        model,
        train_loader,
        optimizers,
        criterion or build_criterion(args.loss),
        build_scaler(args.precision, device),
        args,
        validation_loader,
        writer=writer,
        extras=Extras(
            distributed=distributed,
            ema=build_average(model, args.average, args.optimisation.epochs, optimizers),
            lr_policy=LRPolicy(args.optimisation, train_loader.steps_per_epoch, args.average),
            **more,
        ),
    )


def steps(traval, count):
    """Run ``count`` training steps, each verdict read in the next; gives the batches of each."""
    done = []
    for _ in range(count):
        plan = traval.train_loader.plan
        shares = plan.micro_batches(0, traval.progress.step)
        first = next(
            index for index, b in enumerate(traval.train_loader.batches(0)) if b.number == traval.progress.step
        )
        batches = list(traval.train_loader.batches(0))[first : first + len(shares)]
        traval.training_step(batches)
        done.append(batches)
    traval.settle()
    return done


def test_what_the_signature_leaves_out_is_one_process_and_each_groups_own_rate():
    """As an outside program makes it: with nothing but what stands before the star."""
    args = parse("--device cpu --arch fc --augment none --lr-policy constant --epochs 1 --lr 0.05".split())
    data = get_data(args.data, CPU)
    weights = []
    for ours in (False, True):
        distributed = Distributed(RankInfo(), args.run)
        train_loader, validation_loader, _ = loaders(data, args, distributed, channels_last=False)
        torch.manual_seed(0)
        model = build_model(args.model, classes=10, channels=1, image_size=8)
        criterion = nn.CrossEntropyLoss()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        bias, rest = ([p for p in model.parameters() if (p.ndim == 1) is small] for small in (True, False))
        groups = [{"params": rest}, {"params": bias, "lr": 0.1, "lr_scale": 2.0}]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        more = {}
        if ours:
            policy = LRPolicy(args.optimisation, train_loader.steps_per_epoch, args.average)
            more = {"extras": Extras(distributed=distributed, lr_policy=policy)}
        traval = TraVal(model, train_loader, optimizer, criterion, scaler, args, validation_loader, **more)
        report = traval.fit()
        assert report.count == 360 and report.top1 > 50
        weights.append(parameters(model))
    assert all(map(torch.equal, *weights)), "a policy that is constant does the same"
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]
    one, other = (TraVal(model, None, None, criterion, scaler, args, None) for _ in range(2))
    assert one.hooks is not other.hooks, "a hook of one loop is not called by another"


def parameters(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_close(model, reference, **tolerance):
    for a, b in zip(parameters(model), parameters(reference), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def plain_loop(model, batches):
    """The loop that every tutorial has: no autocast, no scaler."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True)
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.images), batch.targets).backward()
        optimizer.step()


def test_without_mixed_precision_the_weights_are_bit_for_bit_those_of_a_plain_loop():
    traval = make("--amp", "off")
    plain = copy.deepcopy(traval.model)
    done = steps(traval, 5)
    plain_loop(plain, [batch for batches in done for batch in batches])
    assert all(torch.equal(a, b) for a, b in zip(parameters(traval.model), parameters(plain), strict=True))


@pytest.mark.parametrize("amp", ["fp16", "bf16"])
def test_mixed_precision_follows_the_plain_loop_within_the_format(amp):
    traval = make("--amp", amp, "--arch", "fc")
    plain = copy.deepcopy(traval.model)
    start = nn.utils.parameters_to_vector(parameters(plain))
    done = steps(traval, 5)
    plain_loop(plain, [batch for batches in done for batch in batches])
    ours, exact = (nn.utils.parameters_to_vector(parameters(model)) for model in (traval.model, plain))
    error = (ours - exact).norm() / (exact - start).norm()
    assert 0 < error < {"fp16": 0.01, "bf16": 0.08}[amp]  # 11 and 8 significant bits, over five steps


def test_a_parameter_group_with_a_factor_of_its_own_moves_at_that_part_of_the_learning_rate():
    traval = make("--arch", "fc", "--momentum", "0", "--weight-decay", "0", "--lr", "0.5", "--warmup-epochs", "1")
    (optimizer,) = traval.optimizers
    (group,) = optimizer.param_groups
    slow = [group["params"].pop() for _ in range(2)]  # the last layer's
    optimizer.add_param_group({**group, "params": slow, "lr_scale": 0.25})
    before = parameters(traval.model)
    ((batch,),) = steps(traval, 1)
    rate = traval.lr_policy(0)
    assert 0 < rate < 0.5 and [group["lr"] for group in optimizer.param_groups] == [rate, 0.25 * rate]

    plain = make("--arch", "fc").model  # the same weights
    nn.functional.cross_entropy(plain(batch.images), batch.targets).backward()
    factors = [1.0] * (len(before) - 2) + [0.25] * 2
    for found, old, parameter, factor in zip(
        parameters(traval.model), before, plain.parameters(), factors, strict=True
    ):
        torch.testing.assert_close(found, old - rate * factor * parameter.grad, rtol=1e-6, atol=1e-8)
        assert not torch.equal(found, old)


def test_a_remainder_of_one_image_does_not_spoil_a_network_with_batch_norm():
    def top1(batch_size):
        torch.manual_seed(0)
        layers = []
        for channels in (1, 8, 8):
            layers += [nn.Conv2d(channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))
        traval = make("--batch-size", str(batch_size), "--arch", "fc", model=model)
        for epoch in range(4):
            traval.train(epoch)
            traval.progress.finish_epoch()
        return traval.validation(4, report=False).top1

    assert len(get_data(parse([]).data, CPU).train) % 359 == 1
    assert top1(359) > top1(360) - 5 > 50


class Overflow(nn.Module):
    """Cross entropy that becomes infinite at one call."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.calls = 0

    def forward(self, output, targets):
        self.calls += 1
        loss = nn.functional.cross_entropy(output, targets)
        return loss * math.inf if self.calls == self.at else loss


def test_a_skipped_step_moves_neither_weights_nor_average_nor_learning_rate_and_is_counted():
    flags = "--amp fp16 --init-scale 1024 --arch fc --ema-decay 0.9 --lr-policy cosine"
    traval = make(*flags.split(), criterion=Overflow(at=2))
    initial = parameters(traval.model)
    steps(traval, 1)
    weights = parameters(traval.model)
    average = parameters(traval.ema.module)
    steps(traval, 1)
    assert all(torch.equal(a, b) for a, b in zip(weights, parameters(traval.model), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(average, parameters(traval.ema.module), strict=True))
    assert (traval.progress.step, traval.progress.skipped_steps, traval.progress.updates) == (2, 1, 1)
    assert traval.scaler.get_scale() == 512
    steps(traval, 1)
    lrs = [lr for lr, _, _ in traval.sums.pending]
    assert lrs[2] == lrs[1] == traval.lr_policy(1)
    assert not torch.equal(weights[0], parameters(traval.model)[0])
    # Decays 1/10 and 2/11, as if the step between had not been: with 3/12 for the third the sum would be another.
    moved = zip(traval.ema.module.parameters(), initial, weights, parameters(traval.model), strict=True)
    for average, first, one, three in moved:
        torch.testing.assert_close(average, 2 / 11 * (0.1 * first + 0.9 * one) + 9 / 11 * three)
    assert traval.progress.moved_steps == 2


def test_with_a_rate_per_epoch_a_skipped_step_moves_none_of_its_changes_into_an_epoch():
    flags = "--amp fp16 --init-scale 1024 --arch fc --train-samples 48 --batch-size 16 --epochs 3 --lr-policy linear"
    traval = make(*flags.split(), "--lr-per-epoch", criterion=Overflow(at=2))
    rates = []
    for epoch in range(3):
        add = traval.sums.end_step
        traval.sums.end_step = lambda lr, *others, add=add: (rates.append(lr), add(lr, *others))
        traval.train(epoch)
        traval.sums.end_step = add
        traval.progress.finish_epoch()
    assert traval.progress.skipped_steps == 1 and (traval.progress.step, traval.progress.updates) == (9, 8)
    assert rates == [traval.lr_policy(step) for step in (0, 0, 0, 3, 3, 3, 6, 6, 6)] and len(set(rates)) == 3


def test_a_share_without_samples_adds_nothing_and_keeps_gradients_finite():
    traval = make("--arch", "fc", "--weight-decay", "0", "--momentum", "0")
    before = parameters(traval.model)
    images = torch.randn(2, 1, 8, 8)
    traval.training_step([Batch(images, torch.empty(0, dtype=torch.int64), np.empty(0, np.int64), 0, weight=0.0)])
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(traval.model), strict=True))
    assert traval.sums.meter.sums[0].tolist() == [0, 0, 0, 0]


def test_until_its_first_epoch_the_average_is_the_weights_themselves():
    traval = make("--ema-decay", "0.5", "--no-ema-warmup", "--ema-start-epoch", "3", "--arch", "fc")
    for epoch in range(2):
        traval.train(epoch)
        assert all(map(torch.equal, parameters(traval.ema.module), parameters(traval.model)))
        traval.progress.finish_epoch()
    expected = parameters(traval.model)
    for batch in itertools.islice(traval.train_loader.batches(2), 3):
        traval.training_step([batch])
        traval.settle()
        expected = [0.5 * (old + new) for old, new in zip(expected, parameters(traval.model), strict=True)]
    torch.testing.assert_close(parameters(traval.ema.module), expected)
