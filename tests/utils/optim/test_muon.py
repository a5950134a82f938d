"""Muon by shapes: timm's bits and state where each matrix is orthogonalised alone, few operations where they are not."""

import math

import pytest
import timm.optim
import torch
from timm.optim.muon import _COEFFICIENTS, resolve_ns_coefficients, zeropower_via_newtonschulz
from torch import nn

from tests.helpers import equal
from utils.optim import muon
from utils.optim.muon import Muon, keep_norms

AIRBENCH = {"momentum": 0.6, "nesterov": True, "ns_steps": 3, "ns_coefficients": "original", "adjust_lr_fn": "original"}


def network(memory_format=torch.contiguous_format):
    """Matrices that are wide, tall, and three of one shape, one of which is too narrow for Muon."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), *(nn.Conv2d(8, 8, 3) for _ in range(3)), nn.Conv2d(8, 1, 1), nn.Linear(8, 32)]
    return nn.Sequential(*layers).to(memory_format=memory_format)


def weights(model):
    return [layer.weight for layer in model]


def steps(optimizer, parameters, of=range(5)):
    """Take steps, in each of which other parameters have no gradient."""
    for number in of:
        generator = torch.Generator().manual_seed(number)
        for place, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.grad = torch.empty_like(parameter).copy_(gradient) if (place + number) % 4 else None
        optimizer.step()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "given", [AIRBENCH, {"weight_decay": 0.05}, {"nesterov": False}, {"algo": "adamuon"}, {"conv_mode": "batched"}]
)
def test_weights_and_state_are_timms_to_the_bit_on_a_cpu_with_units_for_bf16(given, memory_format, muon_in_bf16):
    ours, theirs = (weights(network(memory_format)) for _ in range(2))
    optimizer = Muon(ours, lr=0.1, **given)
    reference = timm.optim.Muon(theirs, lr=0.1, **given)
    steps(optimizer, ours)
    steps(reference, theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert equal(optimizer.state_dict(), reference.state_dict())


def test_on_a_cpu_that_would_emulate_bf16_matrices_are_those_of_timms_iteration_in_float32(monkeypatch):
    monkeypatch.setattr(muon, "has_bf16_units", lambda: False)
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(64, 16, 3, 3))
    optimizer = Muon([parameter], lr=1.0, **AIRBENCH | {"adjust_lr_fn": None})
    parameter.grad = torch.randn_like(parameter)
    before = parameter.detach().clone()
    optimizer.step()
    exact = zeropower_via_newtonschulz(  # of the first step's direction, a multiple of the gradient
        parameter.grad.flatten(1),
        3,
        [resolve_ns_coefficients("original", _COEFFICIENTS)[0]] * 3,
        dtype=torch.float64,
    )
    moved = (before - parameter.detach()).flatten(1).double()
    # Three iterations of three products, each with an error of up to 2^-24 in each of 144 terms, of entries below 1.
    torch.testing.assert_close(moved, exact, rtol=0, atol=9 * 144 * 2**-24)


def test_a_hook_is_called_once_a_step():
    timm.optim.Muon(weights(network()), lr=0.1)  # from now on torch calls hooks in this class's step as well
    optimizer = Muon(parameters := weights(network()), lr=0.1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    steps(optimizer, parameters)
    assert len(calls) == 5


@pytest.mark.parametrize("small", [muon.SMALL, 0], ids=["padded", "each shape for itself"])
def test_matrices_orthogonalised_together_are_those_orthogonalised_alone(small, monkeypatch):
    """Wide ones, tall ones, and of each height some narrower ones, which may be padded."""
    monkeypatch.setattr(muon, "SMALL", small)
    torch.manual_seed(0)
    shapes = [(8, 72), (32, 8), (16, 4, 3, 3), (32, 4, 1, 1), (8, 8, 1, 3), (16, 36)]
    group = Muon([nn.Parameter(torch.zeros(8, 8))], lr=0.1).param_groups[0]
    tensors = [[torch.randn(shape) for _ in range(3 - place % 3)] for place, shape in enumerate(shapes)]
    alone, together = (muon.orthogonalised(tensors, group, each) for each in (False, True))
    for shape, one, other in zip(shapes, alone, together, strict=True):
        assert one.shape == other.shape == (len(one), shape[0], math.prod(shape[1:]))
        # Five iterations of three products round to bfloat16's 8 bits, of entries below 1; sums of up to 72 have more.
        torch.testing.assert_close(other.float(), one.float(), rtol=0, atol=15 * 2**-8 * 0.5)


def test_small_matrices_of_one_height_take_one_product(monkeypatch):
    heights = []

    def orthogonal(matrices, *_, **__):
        heights.append(matrices.shape)
        return matrices

    monkeypatch.setattr(muon, "zeropower_via_newtonschulz", orthogonal)
    group = Muon([nn.Parameter(torch.zeros(8, 8))], lr=0.1).param_groups[0]
    shapes = [[torch.ones(64, 216)], [torch.ones(64, 576)], [torch.ones(256, 2304)] * 3, [torch.ones(256, 576)]]
    muon.orthogonalised(shapes, group, together=True)
    assert heights == [(2, 64, 576), (4, 256, 2304)]
    heights.clear()
    muon.orthogonalised([*shapes, [torch.ones(256, 2304 * 4)]], group, together=True)
    assert heights == [(2, 64, 576), (3, 256, 2304), (1, 256, 576), (1, 256, 9216)]


def test_norms_are_kept_as_one_after_the_other():
    parameters = [parameter for parameter in network().parameters() if parameter.ndim > 1]
    expected = []
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        factor = len(parameter) ** 0.5 / torch.linalg.vector_norm(parameter).clamp(min=1e-12)
        expected.append(parameter.detach() * factor)
    keep_norms(torch.optim.SGD(parameters))
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
