"""Exports of many families of networks: each loads again and predicts the same, and another network is noticed."""

import subprocess

import numpy as np
import pytest
import torch
from torch import nn

from models.build import build_model, locate
from models.small import OWN
from scripts.common.trained import open_run
from scripts.exporting import checking, reload, steps
from scripts.exporting.formats import FORMATS
from scripts.exporting.images import noise
from scripts.exporting.subject import Subject
from tests.scripts.export_zoo import FAMILIES, ZOO, randomise, save_checkpoint, shown_at
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


def largest_difference(arch, name, folder):
    """Of the outputs of ``arch`` exported to format ``name`` and loaded again; None if the format cannot hold it."""
    path = folder / name / FORMATS[name].file
    path.parent.mkdir(parents=True)
    save_checkpoint(arch, shown_at(ZOO[arch]), folder / "checkpoint.pt")
    subject = Subject.of(open_run(str(folder / "checkpoint.pt"), device="cpu"), raw=False, inside=False)
    images = noise(subject.shape)
    expected = steps.expected_outputs(subject, images.numpy())
    assert np.ptp(expected, axis=0).max() > 0.1, (
        "a thousand times the difference that is allowed, or nothing is compared"
    )
    try:
        steps.refuse_other_networks(name, subject)
    except UserError:
        return None
    steps.write(name, subject, path, images)
    (outputs,) = checking.reloaded([steps.request(name, subject, path)], [images.numpy()])
    return checking.compare(name, outputs, expected).largest


def test_a_network_gives_the_same_in_each_format_that_can_hold_it(tmp_path):
    assert largest_difference("fc", "safetensors", tmp_path) == 0
    assert largest_difference("fc", "torchvision", tmp_path) is None
    assert largest_difference("torchvision/squeezenet1_1", "torchvision", tmp_path / "another") == 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("arch", ZOO)
def test_each_network_gives_the_same_in_each_format(arch, name, tmp_path):
    largest_difference(arch, name, tmp_path)
