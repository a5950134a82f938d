"""What has no deterministic algorithm is a line before a run begins, not a traceback in its first step."""

from contextlib import nullcontext

import pytest
import timm
import torch
import torchvision
from torch import nn

import main
import models.build
from models import build_model
from tests.helpers import mistakes_of
from tests.utils.test_train_validation import parameters
from utils.config.arguments import parse
from utils.runtime.determinism import refuse_without_determinism

IMAGES = torch.zeros(2, 1, 8, 8)


@pytest.fixture(autouse=True)
def deterministic():
    """As --deterministic sets it; put back afterwards."""
    benchmark = torch.backends.cudnn.benchmark
    cudnn = torch.backends.cudnn.deterministic
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.deterministic = cudnn


def put(numbers):
    """The same numbers; put_ is the operation that has no deterministic algorithm on a CPU either."""
    return numbers.clone().put_(torch.arange(numbers.numel()), numbers.detach().flatten())


class PutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numbers):
        return numbers.clone()

    @staticmethod
    def backward(ctx, gradient):
        return put(gradient)


class Network(nn.Module):
    """One linear layer, and ``put_`` in the pass that ``place`` names."""

    def __init__(self, place, classes=10):
        super().__init__()
        self.place = place
        self.linear = nn.Linear(64, classes)
        self.norm = nn.BatchNorm1d(classes)

    def forward(self, images):
        logits = self.norm(self.linear(images.flatten(1)))
        if self.place == "backward":
            return PutBackward.apply(logits)
        return put(logits) if self.place == ("training" if self.training else "evaluation") else logits


def refused(model, images=IMAGES, training=True, autocast=None):
    (line,) = mistakes_of(refuse_without_determinism, model, images, autocast or nullcontext(), training)
    return line


@pytest.mark.parametrize("place", ["training", "evaluation", "backward"])
def test_the_operation_is_named_in_one_line_with_what_to_do(place):
    line = refused(Network(place))
    assert line.startswith("--deterministic: the network needs put_, which torch ")
    assert "on cpu; remove the flag or choose another --arch" in line


@pytest.mark.parametrize("place", ["training", "backward"])
def test_evaluation_does_not_need_what_only_training_computes(place):
    refuse_without_determinism(Network(place), IMAGES, nullcontext(), training=False)
    assert "put_" in refused(Network("evaluation"), training=False)


def test_the_trial_leaves_the_network_as_it_was():
    model = Network("nowhere").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    refuse_without_determinism(model, torch.randn(2, 1, 8, 8), torch.autocast("cpu", torch.bfloat16), training=True)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert len(parameters(model)) == 4


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        refuse_without_determinism(Network("nowhere"), torch.zeros(2, 1, 9, 9), nullcontext(), training=True)


@pytest.mark.parametrize("flags", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_a_run_is_refused_before_anything_is_made(monkeypatch, tmp_path, capfd, flags):
    monkeypatch.setitem(models.build.OWN, "putting", lambda classes, channels, size: Network("backward", classes))
    flags = ["--device", "cpu", "--arch", "putting", "--output", str(tmp_path / "runs"), *flags]
    assert main.main([*flags, "--deterministic"]) == 2
    error = capfd.readouterr().err
    assert error.startswith("main.py: --deterministic: the network needs put_") and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.gpu  # a CPU has a way for each of these
@pytest.mark.parametrize("amp", [None, torch.float16])
def test_adaptive_pooling_to_several_places_is_refused_on_a_gpu_and_to_one_place_is_not(amp):
    autocast = torch.autocast("cuda", amp, enabled=amp is not None)
    images = torch.zeros(2, 3, 64, 64, device="cuda")
    line = refused(torchvision.models.vgg11(num_classes=10).cuda(), images, autocast=autocast)
    assert "adaptive_avg_pool2d_backward_cuda" in line and "on cuda" in line
    vgg = build_model(parse(["--arch", "vgg11"]).model, classes=10, channels=3, image_size=64)
    for model in (vgg, timm.create_model("resnet18"), torchvision.models.resnet18()):
        refuse_without_determinism(model.cuda(), images, autocast, training=True)
