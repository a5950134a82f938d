"""Every optimizer that can be named steps, and is held still by a flag that its launch does not read."""

import math

import pytest
import timm.optim
import torch
from torch import nn

from tests.helpers import equal
from utils.config.groups.optimisation import OptimisationSettings
from utils.config.settings import UserError
from utils.optim.held import HeldByHost, HeldByKernel, HeldBySelection, held
from utils.optim.optimizers import OWN, build_optimizers, match_strides, unknown_optimizer
from utils.precision import buffers

GPU = torch.device("cuda")
CPU = torch.device("cpu")
NAMES = [*OWN, *(name for name in timm.optim.list_optimizers() if name not in OWN)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 4, 10))


def built(name, **settings):
    """A network and its optimizers; the test of a name that cannot be built here is skipped with the reason."""
    model = network()
    settings = OptimisationSettings(**{"optimizer": name, "lr": 0.01, "weight_decay": 0.01, **settings})
    try:
        optimizers = build_optimizers(settings, model)
    except UserError as error:
        assert len(error.mistakes) == 1 and f"--optimizer {name}" in error.mistakes[0]
        pytest.skip(str(error))
    return model, optimizers


def trained(name, skipped, by_flag, **settings):
    """Weights and states after eight steps, ``skipped`` ones with a gradient that is not finite."""
    model, optimizers = built(name, **settings)
    holds = [held(optimizer, GPU) for optimizer in optimizers]
    for step in range(8):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = 0.1 * torch.randn(parameter.shape, generator=generator)
        if step in skipped:
            for parameter in model.parameters():
                parameter.grad.view(-1)[0] = math.inf
        torch.default_generator.manual_seed(step)  # torch.manual_seed keeps the stack of each call for devices
        for optimizer, hold in zip(optimizers, holds, strict=True):
            if by_flag:
                hold.found_inf = torch.tensor(float(step in skipped))
                hold.step()
                hold.settle(step in skipped)
            elif step not in skipped:
                optimizer.step()
    return [*model.parameters()], [optimizer.state_dict() for optimizer in optimizers]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_moves_every_weight_and_one_that_the_flag_holds_leaves_no_trace(name):
    assert unknown_optimizer(name) is None
    weights, states = trained(name, (0, 4, 5), by_flag=True)
    assert all(torch.isfinite(weight).all() for weight in weights)
    assert not any(torch.equal(*pair) for pair in zip(weights, network().parameters(), strict=True))
    assert all(group["lr"] == 0.01 for state in states for group in state["param_groups"])
    expected_weights, expected_states = trained(name, (0, 4, 5), by_flag=False)
    assert equal(weights, expected_weights) and equal(states, expected_states)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "muon"])
def test_neither_do_the_slow_weights_of_lookahead(name):
    """The third step that counts brings the slow weights on: a count of those that the flag holds would be early."""
    assert equal(*(trained(name, (0, 2, 3), by_flag, lookahead=(3.0, 0.5)) for by_flag in (True, False)))


def test_a_flag_holds_each_in_the_cheapest_way_that_it_allows():
    kinds = {name: [type(held(optimizer, GPU)) for optimizer in built(name)[1]] for name in ("sgd", "adamw", "lion")}
    assert kinds == {"sgd": [HeldByKernel], "adamw": [HeldByKernel], "lion": [HeldBySelection]}
    (dampened,) = built("sgd", opt_kwargs=("dampening=0.1",))[1]
    (slow,) = built("sgd", lookahead=(3.0, 0.5))[1]
    assert type(held(dampened, GPU)) is type(held(slow, GPU)) is HeldBySelection
    (kron,) = built("kron")[1]
    assert type(held(kron, GPU)) is HeldByHost
    assert type(held(built("adamw")[1][0], CPU)) is HeldByHost, "where reading costs nothing"


def test_a_process_that_holds_nothing_of_a_sharded_parameter_takes_part():
    parameters = [nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(2, 3))]
    hold = held(torch.optim.SGD(parameters, lr=0.5), GPU)
    assert isinstance(hold, HeldBySelection)
    for flag, expected in ((1.0, 1.0), (0.0, 0.5)):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        hold.found_inf = torch.tensor(flag)
        hold.step()
        assert torch.equal(parameters[1], torch.full((2, 3), expected)) and len(parameters[0]) == 0


def test_small_tensors_are_selected_together_up_to_a_size_and_a_large_one_alone(monkeypatch):
    """Packing takes memory, and for a large tensor more time than a launch."""
    monkeypatch.setattr(buffers, "ALONE", 16)
    monkeypatch.setattr(buffers, "TOGETHER", 24)
    tensors = [torch.zeros(size) for size in (5, 2, 3, 1, 2)]
    vectors = buffers.Vectors(tensors)
    assert [[*map(len, part)] for part in vectors.tensors] == [[1, 2, 2], [3], [5]]
    before = vectors.copied()
    for flag in (0.0, 1.0):
        for tensor in tensors:
            tensor.fill_(7)
        vectors.restore_where(torch.tensor(flag), before)
        assert all((tensor == 7 * (1 - flag)).all() for tensor in tensors)


class Foreign(torch.optim.SGD):
    """Of a package that cannot be tried here."""


def test_an_optimizer_of_another_package_has_its_flag_read():
    Foreign.__module__ = "bitsandbytes.optim"
    optimizer = Foreign(network().parameters(), lr=0.1)
    assert type(held(optimizer, GPU)) is HeldByHost


def test_an_entry_of_the_state_that_belongs_to_no_parameter_is_left_alone():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state["k"] = torch.ones(1)
    hold = HeldByHost(optimizer)
    hold.found_inf = torch.tensor(0.0)
    hold.step()
    match_strides(optimizer)
    assert torch.equal(parameter.detach(), torch.tensor([0.9, 0.9])) and optimizer.state["k"] == 1


def test_what_is_read_by_the_host_would_not_hold_still(monkeypatch):
    """Otherwise it need not stand in the list."""
    monkeypatch.setattr("utils.optim.held.READ_BY_HOST", ())
    assert not equal(*(trained("kron", (3, 4), by_flag) for by_flag in (True, False)))


def test_the_momentum_of_a_held_first_step_is_nothing_that_was_in_memory():
    """torch's fused SGD makes it by ``empty_like`` and leaves it as it is when the flag is set."""
    parameter = nn.Parameter(torch.ones(1000))
    hold = held(torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True), GPU)
    parameter.grad = torch.full_like(parameter, math.inf)
    hold.found_inf = torch.ones(())
    for _ in range(50):
        torch.full((1000,), 123.0)
    hold.step()
    assert torch.equal(hold.optimizer.state[parameter]["momentum_buffer"], torch.zeros(1000))
    assert torch.equal(parameter, torch.ones(1000))
