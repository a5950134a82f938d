"""What two processes exchange: gradients in float32 or bf16, in pieces, against loops written out."""

import os
import socket
import traceback

import pytest
import torch
from timm.optim import kron
from torch import nn

from tests.end_to_end.forked import server
from tests.utils.test_train_validation import make
from utils.config.arguments import parse
from utils.config.groups.run import RunSettings
from utils.optim.build import build_optimizer_parts
from utils.optim.freezing import build_freezing
from utils.optim.held import HeldBySelection
from utils.runtime.distributed import Distributed, RankInfo

LR = 0.05
MOMENTUM = 0.9


def on_two(function):
    """Run ``function(distributed)`` on two processes; fails with what one raises."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = server()
    said = context.Queue()
    processes = [context.Process(target=_enter, args=(function, rank, port, said)) for rank in range(2)]
    for process in processes:
        process.start()
    texts = [said.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert texts == ["", ""], "\n".join(texts)


def _enter(function, rank, port, said):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    try:
        args = parse(["--device", "cpu", "--timeout", "30"])
        with Distributed(RankInfo(rank, 2, rank, 2), args.run) as distributed:
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


def steps(traval, count):
    """Take ``count`` steps of the first epoch; gives this rank's batches."""
    traval.network.train()
    batches = []
    for batch in traval.train_loader.batches(0, traval.progress.step_in_epoch):
        batches.append(batch)
        traval.training_step([batch])
        if len(batches) == count:
            return batches


def plain(batches, exchange_gradients):
    """The weights after SGD written out."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=5e-4, fused=True)
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.images), batch.targets).backward()
        exchange_gradients([parameter.grad for parameter in model.parameters()])
        optimizer.step()
    return model


def mean(tensors):
    for tensor in tensors:
        tensor /= 2
        torch.distributed.all_reduce(tensor)


def mean_in_bf16(tensors):
    for tensor in tensors:
        small = tensor.bfloat16() / 2
        both = [torch.empty_like(small) for _ in range(2)]
        torch.distributed.all_gather(both, small)
        tensor.copy_(both[0] + both[1])


def check_steps(distributed):
    cases = {(): mean, ("--bucket-mb", 1): mean, ("--grad-compression", "bf16"): mean_in_bf16}
    for flags, exchange in cases.items():
        settings = map(str, ("--lr", LR, "--batch-size", 8, *flags))
        traval = make(*settings, model=network(), distributed=distributed, channels_last=True)
        expected = plain(steps(traval, 7), exchange)
        for (name, ours), theirs in zip(traval.model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours, theirs), (flags, name)
    assert traval.model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_steps_are_those_of_loops_written_out():
    on_two(check_steps)


class Optimistic(torch.optim.Optimizer):
    """Steps along twice the gradient less the one before, which it keeps in place: nothing zeroes it."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": LR})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            before = self.state[parameter].get("before", parameter.grad)
            parameter.sub_(2 * parameter.grad - before, alpha=LR)
            self.state[parameter]["before"] = parameter.grad.detach()


def check_an_optimizer_that_keeps_the_gradient(distributed):
    for device in ("cpu", "cuda"):  # the ways in which the two hold an optimizer still
        traval = make("--batch-size", "8", model=network(), distributed=distributed)
        traval.optimizers = (Optimistic(traval.model.parameters()),)
        traval._prepare_trainable()
        (hold,) = traval.active
        if device == "cuda":
            hold = HeldBySelection(hold.optimizer)
        expected = network()
        optimizer = Optimistic(expected.parameters())
        for batch in [*traval.train_loader.batches(0)][:3]:
            for model, step in ((traval.network, hold.step), (expected, optimizer.step)):
                nn.functional.cross_entropy(model(batch.images), batch.targets).backward()
                if model is expected:
                    mean([parameter.grad for parameter in model.parameters()])
                hold.found_inf = torch.tensor(0.0)
                step()
                for parameter in model.parameters():
                    parameter.grad = None
        assert all(map(torch.equal, traval.model.parameters(), expected.parameters())), device


def test_an_optimizer_that_keeps_the_gradient_finds_that_of_the_step_before():
    """DDP's gradients lie in its buckets, which the next backward pass fills anew."""
    on_two(check_an_optimizer_that_keeps_the_gradient)


def check_an_optimizer_that_draws_random_numbers(distributed):
    kron.has_dynamo = False  # compiling it takes a minute; this process ends with the test
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    traval = make("--optimizer", "kron", "--batch-size", "8", model=model, distributed=distributed)
    steps(traval, 3)
    assert torch.equal(*distributed.all_gather(model[1].weight.detach()))


def test_an_optimizer_that_draws_random_numbers_draws_the_same_on_all_processes():
    """timm's Kron moves its preconditioners by noise; the processes exchange gradients alone, never weights."""
    on_two(check_an_optimizer_that_draws_random_numbers)


@pytest.mark.parametrize(("device", "ends"), [("cpu", [None, ValueError]), ("cuda", [None])])
def test_groups_of_a_gpu_are_left_to_the_end_of_a_process_that_has_an_error(device, ends, monkeypatch):
    """Taking NCCL's down waits for the other processes, which may wait for this one."""
    taken_down = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    here = Distributed(RankInfo(), RunSettings(device="cpu"))
    here.device = torch.device(device)
    for kind in (None, ValueError):
        monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda kind=kind: taken_down.append(kind))
        here.__exit__(kind, None, None)
    assert taken_down == ends


def _copy_weights(distributed):
    torch.manual_seed(distributed.rank)
    model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(4))
    args = parse(["--ema-decay", "0.9", "--lookahead", "5", "0.5"])
    parts = build_optimizer_parts(args, model, build_freezing(args.model, model), distributed)
    slow = vars(parts.optimizers[0])["lookahead_state"]["slow"]
    of_ranks = distributed.gather([value.tolist() for value in (*parts.ema.module.state_dict().values(), *slow)])
    assert of_ranks[0] == of_ranks[1]


def test_average_and_slow_weights_begin_as_rank_0s_whatever_a_network_was_initialised_with():
    on_two(_copy_weights)
