"""Weight gradients as matrix products are the library's, and where they are used is chosen and recorded."""

import copy

import pytest
import torch
from torch import nn

import main
from models.layers.weight_gradients import chosen_layers, takes_products, use_matrix_products, weight_gradient
from tests.end_to_end.processes import load
from utils.config.settings import UserError


@pytest.mark.parametrize("shape", [(2, 3, 5, 4, 7), (1, 8, 8, 1, 1), (3, 2, 4, 6, 5)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_is_that_of_autograd(shape, layout):
    count, channels, filters, height, width = shape
    torch.manual_seed(0)
    images = torch.randn(count, channels, height, width, dtype=torch.float64).contiguous(memory_format=layout)
    gradient = torch.randn(count, filters, height, width, dtype=torch.float64).contiguous(memory_format=layout)
    weight = torch.randn(filters, channels, 3, 3, dtype=torch.float64, requires_grad=True)
    nn.functional.conv2d(images, weight, padding=1).backward(gradient)
    torch.testing.assert_close(weight_gradient(images, gradient), weight.grad)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 4, 1)
    )


@pytest.mark.parametrize(("amp", "tolerance"), [(False, 1e-5), (True, 2e-2)])
def test_a_network_trains_as_before_also_under_autocast(amp, tolerance):
    ours = network()
    theirs = network()
    names = [*ours.state_dict()]
    use_matrix_products(ours, ["0", "2"])
    assert [*ours.state_dict()] == names and isinstance(copy.deepcopy(ours)[2], nn.Conv2d)
    images = torch.randn(4, 3, 6, 6)
    for model in (ours, theirs):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out = model(images)
        assert out.dtype == (torch.bfloat16 if amp else torch.float32)
        out.float().square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad.dtype == torch.float32
        assert (a.grad - b.grad).norm() <= tolerance * b.grad.norm()


def test_a_frozen_first_layer_needs_no_gradient_of_its_images():
    model = network()
    model[0].weight.requires_grad_(False)
    use_matrix_products(model, ["0"])
    model(torch.randn(2, 3, 4, 4)).sum().backward()
    assert model[0].weight.grad is None and model[0].bias.grad is not None


@pytest.mark.parametrize("name", ["3", "1", "nothing"])
def test_another_layer_is_a_mistake(name):
    with pytest.raises(UserError, match=f"--matmul-weight-grad {name}: no 3x3 convolution of stride 1"):
        use_matrix_products(network(), [name])


@pytest.mark.parametrize(
    "options",
    [{"stride": 2}, {"dilation": 2}, {"padding": 0}, {"groups": 2}, {"padding_mode": "reflect"}, {"kernel_size": 5}],
)
def test_other_convolutions_are_left_to_the_library(options):
    assert takes_products(nn.Conv2d(4, 4, kernel_size=3, padding=1))
    assert not takes_products(nn.Conv2d(4, 4, **({"kernel_size": 3, "padding": 1} | options)))


def test_auto_takes_the_layers_that_are_faster_and_changes_nothing(monkeypatch):
    model = network()
    autocast = torch.autocast("cpu", torch.bfloat16)
    monkeypatch.setattr("models.layers.weight_gradients._products_are_faster", lambda images, out: images.shape[1] == 8)
    assert chosen_layers(model, torch.randn(2, 3, 6, 6), autocast) == ("2",)
    assert all(parameter.grad is None for parameter in model.parameters())


FLAGS = ["--device", "cpu", "--matmul-weight-grad", "auto", "--epochs", "1", "--no-progress", "--resume", "auto"]


def test_a_run_says_and_records_its_layers_and_a_resume_keeps_them(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "models.layers.weight_gradients._products_are_faster", lambda images, out: images.shape[1] == 64
    )
    assert main.main([*FLAGS, "--max-steps", "2"]) == 0
    assert "--matmul-weight-grad auto: features.2 (measured)" in capsys.readouterr().out
    (run,) = tmp_path.glob("runs/digits/conv2/*")
    assert load(run, "last.pt")["settings"]["matmul_weight_grad"] == ["features.2"]
    monkeypatch.setattr("models.layers.weight_gradients._products_are_faster", lambda images, out: True)
    assert main.main([*FLAGS, "--max-steps", "3"]) == 0
    assert "--matmul-weight-grad auto" not in capsys.readouterr().out
    assert load(run, "last.pt")["settings"]["matmul_weight_grad"] == ["features.2"]
    assert load(run, "last.pt")["progress"]["step"] == 3


def test_where_nothing_is_faster_the_run_is_that_without_the_flag(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("models.layers.weight_gradients._products_are_faster", lambda images, out: False)
    assert main.main([*FLAGS, "--max-steps", "2"]) == 0
    (run,) = tmp_path.glob("runs/digits/conv2/*")
    assert load(run, "last.pt")["settings"]["matmul_weight_grad"] is None
