"""The zoo of exports: what it holds, and that it notices an export that predicts something else."""

import subprocess

import pytest
import torch
from torch import nn

from models.build import build_model, locate
from models.small import OWN
from scripts import export_zoo
from scripts.exporting import checking, reload, steps
from scripts.exporting.images import noise
from scripts.exporting.zoo import FAMILIES, ZOO, randomise
from utils.config.groups.model import ModelSettings
from utils.config.settings import UserError


@pytest.fixture(autouse=True)
def reloads_in_this_process(monkeypatch):
    """A fresh process imports for seconds; ``test_export.py`` starts some."""

    def run(line, **_):
        reload.main(line[-1])
        return subprocess.CompletedProcess(line, 0)

    monkeypatch.setattr(checking.subprocess, "run", run)


def test_the_zoo_holds_all_own_networks_and_fifteen_families_of_each_library():
    assert set(OWN) <= set(ZOO)
    libraries = [locate(arch)[0] for arch in FAMILIES]
    assert libraries.count("timm") >= 15 and libraries.count("torchvision") >= 15


@pytest.mark.parametrize("arch", ["vgg11", "test_convnext"])
@torch.no_grad()
def test_random_weights_leave_no_layer_without_effect(arch):
    network = build_model(ModelSettings(arch=arch), classes=7, channels=3, image_size=32)
    images = torch.randn(4, 3, 32, 32)
    randomise(network, images)
    outputs = network.eval()(images)
    assert outputs.std(0).mean().item() == pytest.approx(1, rel=0.05)
    for layer in [module for module in network.modules() if isinstance(module, nn.Conv2d | nn.Linear)]:
        kept = layer.weight.detach().clone()
        layer.weight.data.mul_(1.1)
        assert (network(images) - outputs).abs().max() > 1e-3
        layer.weight.data.copy_(kept)


@torch.no_grad()
def test_random_weights_do_not_make_a_network_multiply_rounding_errors():
    network = build_model(ModelSettings(arch="timm/levit_128s"), classes=7, channels=3, image_size=224)
    images = noise((3, 224, 224))
    randomise(network, images)
    outputs = network.eval()(images)
    assert (network.double()(images.double()) - outputs).abs().max() < 3e-5


def test_a_network_passes_in_each_format_that_can_hold_it(capsys):
    assert export_zoo.main(["--only", "fc", "torchvision/squeezenet1_1", "--to", "safetensors", "torchvision"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["network", "safetensors", "torchvision"]
    assert out[2].split()[:3] == ["fc", "0e+00", "-"] and out[3].split()[1:3] == ["0e+00", "0e+00"]
    assert out[-1].startswith("2 of 2 networks")


@pytest.mark.thorough
@pytest.mark.parametrize("arch", ZOO)
def test_each_network_passes(arch):
    assert export_zoo.main(["--only", arch]) == 0


def test_an_export_with_other_weights_fails(monkeypatch, capsys):
    right = steps.write

    def wrong(name, subject, path, images):
        weight = next(subject.loaded.network.parameters())
        with torch.no_grad():
            weight.mul_(1.5)
            right(name, subject, path, images)
            weight.div_(1.5)

    monkeypatch.setattr(steps, "write", wrong)
    assert export_zoo.main(["--only", "fc", "--to", "safetensors"]) == 1
    assert "failed: the outputs of safetensors" in capsys.readouterr().out


def test_a_network_that_it_does_not_hold_is_one_line():
    with pytest.raises(UserError, match="--only resnet1: is not in the zoo"):
        export_zoo.main(["--only", "resnet1"])
