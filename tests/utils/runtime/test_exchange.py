"""What two processes exchange: gradients in bf16, in pieces, or weights every few steps, against loops written out."""

import copy
import os
import shutil
import socket
import traceback

import pytest
import torch
from torch import nn

from tests.end_to_end.forked import Forked, server
from tests.end_to_end.processes import FINAL_LINE, differences, load, train
from utils.config.arguments import parse
from utils.config.settings import UserError
from utils.data.loaders import loaders
from utils.data.sets.datasets import get_data
from utils.optim.criterion import build_criterion
from utils.optim.lr_policy import build_lr_policy
from utils.optim.optimizers import build_optimizer
from utils.precision.amp import build_scaler
from utils.runtime.distributed import Distributed, RankInfo
from utils.runtime.exchange import Exchange
from utils.train_validation import TrainingFailure, TraVal

LR, MOMENTUM = 0.05, 0.9


# ---------------------------------------------------------------------------- on two processes at once


def on_two(function, local=2):
    """Run ``function(distributed)`` on two processes, ``local`` of them on a machine; fails with what one raises."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = server()
    said = context.Queue()
    processes = [context.Process(target=_enter, args=(function, rank, local, port, said)) for rank in range(2)]
    for process in processes:
        process.start()
    texts = [said.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert texts == ["", ""], "\n".join(texts)


def _enter(function, rank, local, port, said):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    try:
        args = parse(["--device", "cpu", "--timeout", "30"])
        with Distributed(RankInfo(rank, 2, rank % local, local), args.run) as distributed:
            function(distributed)
        said.put("")
    except BaseException:
        said.put(traceback.format_exc())
    said.close()
    said.join_thread()
    os._exit(0)  # without the interpreter's teardown, see end_process


def network():
    torch.manual_seed(3)
    convolution = nn.Conv2d(1, 8, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(convolution, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))


def make(distributed, *flags, criterion=None):
    """A TraVal on the digits with SGD, as main.py builds it."""
    flags = ("--device", "cpu", "--augment", "none", "--lr-policy", "constant", "--lr", LR, "--batch-size", 8, *flags)
    args = parse([*map(str, flags)], world_size=2)
    data = get_data(args.data, distributed.device)
    train_loader, validation_loader, _ = loaders(data, args, distributed, channels_last=True)
    model = network()
    return TraVal(
        model, train_loader, build_optimizer(args.optimisation, model), criterion or build_criterion(args.loss),
        build_scaler(args.precision, distributed.device, gradients_differ=args.exchange.local_sgd_steps is not None),
        args, validation_loader, distributed=distributed,
        lr_policy=build_lr_policy(args.optimisation, train_loader.steps_per_epoch),
    )  # fmt: skip


def steps(traval, count):
    """Take ``count`` steps of the first epoch; gives this rank's batches."""
    traval.network.train()
    batches = []
    for batch in traval.train_loader.batches(0, traval.progress.step_in_epoch):
        batches.append(batch)
        traval.training_step([batch])
        if len(batches) == count:
            return batches


def plain(batches, exchange_gradients, average_after=()):
    """The weights after SGD written out; processes average weights after these steps, counted from 1."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=5e-4, fused=True)
    for number, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.images), batch.targets).backward()
        exchange_gradients([parameter.grad for parameter in model.parameters()], number)
        optimizer.step()
        if number in average_after:
            mean([parameter.data for parameter in model.parameters()])
    return model


def mean(tensors, *_):
    for tensor in tensors:
        tensor /= 2
        torch.distributed.all_reduce(tensor)


def mean_in_bf16(tensors, *_):
    for tensor in tensors:
        small = tensor.bfloat16() / 2
        both = [torch.empty_like(small) for _ in range(2)]
        torch.distributed.all_gather(both, small)
        tensor.copy_(both[0] + both[1])


def alone(tensors, number):
    """No exchange."""


def alone_after_two(tensors, number):
    if number <= 2:
        mean(tensors)


def check_steps(distributed):
    cases = {
        (): (mean, ()),
        ("--bucket-mb", 1): (mean, ()),
        ("--grad-compression", "bf16"): (mean_in_bf16, ()),
        ("--local-sgd-steps", 3, "--local-sgd-group", "process"): (alone, (3, 6)),
        ("--local-sgd-steps", 3, "--local-sgd-group", "process", "--grad-compression", "bf16"): (alone, (3, 6)),
        ("--local-sgd-steps", 3): (mean, ()),  # both are on one machine
    }
    for flags, (exchange, average_after) in cases.items():
        traval = make(distributed, *flags)
        expected = plain(steps(traval, 7), exchange, average_after)
        for (name, ours), theirs in zip(traval.model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours, theirs), (flags, name)
    assert traval.model[0].weight.is_contiguous(memory_format=torch.channels_last)


def check_post_local(distributed):
    """Gradients of an epoch are exchanged, here a 2-step one, before weights are; also in bf16."""
    for compression, exact in (("off", True), ("bf16", False)):
        flags = ("--local-sgd-steps", 3, "--local-sgd-group", "process", "--grad-compression", compression)
        traval = make(distributed, *flags, "--local-sgd-after-epochs", 2 / 90)
        assert traval.train_loader.steps_per_epoch == 90
        weights = [*traval.model.parameters()]
        expected = [*plain(steps(traval, 6), alone_after_two, (5,)).parameters()]
        same = all(map(torch.equal, weights, expected))
        assert same == exact
        torch.testing.assert_close(weights, expected, rtol=0.02, atol=0.002)
        assert weights[0].is_contiguous(memory_format=torch.channels_last)


def check_two_passes(distributed):
    """Both gradients of SAM's last step before local ones are exchanged: processes are equal after it."""
    flags = ("--local-sgd-steps", 3, "--local-sgd-group", "process", "--local-sgd-after-epochs", 2 / 90)
    traval = make(distributed, *flags, "--sam-rho", 0.05)
    for count, are_equal in ((2, True), (1, False)):
        steps(traval, count)
        assert torch.equal(*distributed.all_gather(traval.model[-1].weight.detach())) == are_equal


def check_lent_average(distributed):
    """Within ``averaged`` all ranks have the mean of weights and statistics; afterwards each its own, to the bit."""
    traval = make(distributed, "--local-sgd-steps", 4, "--local-sgd-group", "process")
    steps(traval, 3)
    own = copy.deepcopy(traval.model.state_dict())
    both = {name: distributed.all_gather(tensor.contiguous()) for name, tensor in own.items()}
    assert not torch.equal(*both["0.weight"]) and not torch.equal(*both["1.running_mean"])
    with traval.exchange.averaged(traval.model, 3):
        for name, tensor in traval.model.state_dict().items():
            expected = (both[name][0] / 2 + both[name][1] / 2) if tensor.is_floating_point() else both[name][0]
            assert torch.equal(tensor, expected), name
        with traval.exchange.averaged(traval.model, 3):  # a checkpoint on a signal within validation
            groups = traval.exchange.gather(traval.optimizers[0].state_dict(), 3)
    assert all(torch.equal(tensor, own[name]) for name, tensor in traval.model.state_dict().items())
    assert (groups is None) == (distributed.rank == 1)
    for rank, group in enumerate(groups or ()):
        assert all(torch.equal(tensor, both[name][rank]) for name, tensor in group["model"].items())


def check_statistics(distributed):
    """A save in a step that exchanges gradients gives all ranks rank 0's statistics, which must change nothing."""
    flags = ("--local-sgd-steps", 4, "--local-sgd-group", "process", "--local-sgd-after-epochs", 2 / 90)
    ends = []
    for saves in (False, True):
        traval = make(distributed, *flags)
        steps(traval, 1)
        if saves:
            distributed.broadcast_buffers(traval.model)  # as TraVal.save does
        steps(traval, 2)
        ends.append(traval.model[1].running_mean)
    assert torch.equal(*ends) and not torch.equal(*distributed.all_gather(ends[0]))


class OverflowOnRankOne(nn.Module):
    def __init__(self, rank, at):
        super().__init__()
        self.rank, self.at, self.calls = rank, at, 0

    def forward(self, output, targets):
        self.calls += 1
        loss = nn.functional.cross_entropy(output, targets)
        return loss * torch.inf if self.rank == 1 and self.calls == self.at else loss


def check_skip(distributed):
    """What is not finite on one process makes both skip the step, at one scale, or both stop before it."""
    traval = make(
        distributed, "--local-sgd-steps", 2, "--local-sgd-group", "process", "--amp", "fp16", "--init-scale", 1024,
        criterion=OverflowOnRankOne(distributed.rank, at=2),
    )  # fmt: skip
    for count, are_equal in ((2, True), (1, False)):  # weights are averaged after the second step, which is skipped
        steps(traval, count)
        assert (traval.progress.skipped_steps, traval.scaler.get_scale()) == (1, 512)
        assert torch.equal(*distributed.all_gather(traval.model[-1].weight.detach())) == are_equal
    traval = make(
        distributed, "--local-sgd-steps", 4, "--local-sgd-group", "process", "--amp", "off",
        criterion=OverflowOnRankOne(distributed.rank, at=2),
    )  # fmt: skip
    with pytest.raises(TrainingFailure, match="at step 2 "):
        steps(traval, 3)


def test_steps_are_those_of_loops_written_out():
    on_two(check_steps)


def test_local_steps_begin_after_epochs_of_exchanged_gradients():
    on_two(check_post_local)


def test_a_step_of_two_backward_passes_is_exchanged_or_local_as_a_whole():
    on_two(check_two_passes)


def test_the_average_is_lent_and_each_process_goes_on_from_its_own():
    on_two(check_lent_average)


def test_local_steps_begin_with_the_same_statistics_whatever_was_saved_before():
    on_two(check_statistics)


def test_a_step_that_overflows_on_one_process_is_skipped_by_both_or_ends_both():
    on_two(check_skip)


def check_machines(distributed):
    """Two machines of one process each are two groups without a flag."""
    settings = parse(["--local-sgd-steps", "5"]).exchange
    exchange = Exchange(settings, distributed, 10)
    assert exchange.is_local(1)
    stored = [{"model": 0}, {"model": 1}]
    assert exchange.own_state(stored, 3) == {"model": distributed.rank} and exchange.own_state(stored[:1], 3) == {}
    later = parse(["--local-sgd-steps", "5", "--local-sgd-after-epochs", "2"]).exchange
    assert Exchange(later, distributed, 10).own_state(stored, 3) == {}, "equal weights to exchange gradients of"


def test_by_default_a_group_is_a_machine():
    on_two(check_machines, local=1)


# ----------------------------------------------------------------------------------------- whole runs

FLAGS = ("--arch", "timm/test_resnet", "--global-batch-size", 64, "--epochs", 1, "--deterministic", "--no-progress",
         "--save-every-steps", 5, "--local-sgd-steps", 4, "--local-sgd-group", "process")  # fmt: skip


def test_a_run_with_local_steps_stopped_between_two_averages_ends_with_the_same_bits(tmp_path):
    whole = train(*FLAGS, "--output", tmp_path / "whole", processes=2)["run"]
    cut = (*FLAGS, "--output", tmp_path / "cut", "--resume", "auto")
    run = train(*cut, "--max-steps", 10, processes=2)["run"]
    stopped = load(run, "last.pt")
    shutil.copyfile(f"{run}/checkpoints/last.pt", tmp_path / "stopped.pt")
    train(*cut, processes=2)
    assert differences(whole, run) == []
    for name, *both in zip(stopped["model"], *(group["model"].values() for group in stopped["local_sgd"]), strict=True):
        if both[0].is_floating_point():
            assert torch.equal(stopped["model"][name], both[0] / 2 + both[1] / 2) and not torch.equal(*both), name
    # Elsewhere, on one process, the average goes on, and says so.
    process = Forked("--resume", tmp_path / "stopped.pt", "--output", tmp_path, "--no-progress")
    out, err = process.communicate()
    assert process.returncode == 0 and FINAL_LINE.fullmatch(out.splitlines()[-1]), err
    assert "local SGD of 2 groups goes on from the average of their weights" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--ema-decay 0.9", "--ema-decay contradicts --local-sgd-steps"),
        ("--swa-start-epoch 3", "--swa-start-epoch contradicts --local-sgd-steps"),
        ("--lookahead 6 0.5", "--lookahead contradicts --local-sgd-steps"),
        ("--optimizer schedulefree-sgd", "--optimizer schedulefree-sgd contradicts --local-sgd-steps"),
        ("--sync-bn", "--sync-bn contradicts --local-sgd-steps"),
        ("--freeze a --freeze-epoch 2", "--freeze-epoch contradicts --local-sgd-steps"),
    ],
)
def test_what_contradicts_local_steps_is_told_before_the_start(flags, words):
    with pytest.raises(UserError) as error:
        parse(["--local-sgd-steps", "4", *flags.split()])
    (line,) = error.value.mistakes
    assert line.startswith(words)
