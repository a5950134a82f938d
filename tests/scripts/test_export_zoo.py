"""Exports of many families of networks: each loads again and predicts the same, and another network is noticed.

The networks of many families have random weights with which each layer matters.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from models.build import build_model
from models.small import OWN
from scripts.common.trained import open_run
from scripts.exporting import checking, reload, steps
from scripts.exporting.formats import FORMATS
from scripts.exporting.images import noise
from scripts.exporting.subject import Subject
from utils.checkpoint import checkpoint
from utils.config.groups.model import ModelSettings
from utils.config.settings import UserError
from utils.data.preprocessing import Preprocessing
from utils.optim.head import output_layers

CLASSES = 7
OWN_SIZE = 32  # pixels
# One of the smallest of each family, with the size in pixels of its images.
FAMILIES = {
    "timm/resnet18": 96,
    "timm/resnet18d": 64,  # with the stem for small images
    "timm/convnext_atto": 96,
    "timm/densenet121": 96,
    "timm/edgenext_xx_small": 128,
    "timm/efficientnet_b0": 96,
    "timm/efficientvit_b0": 96,
    "timm/fastvit_t8": 128,
    "timm/ghostnet_050": 96,
    "timm/levit_128s": 224,
    "timm/maxvit_rmlp_pico_rw_256": 256,
    "timm/mixer_s32_224": 224,
    "timm/mobilenetv3_small_050": 96,
    "timm/mobilevit_xxs": 128,
    "timm/poolformer_s12": 96,
    "timm/regnety_002": 96,
    "timm/repvgg_a0": 96,
    "timm/swin_tiny_patch4_window7_224": 224,
    "timm/vit_tiny_patch16_224": 64,
    "torchvision/alexnet": 96,
    "torchvision/convnext_tiny": 96,
    "torchvision/densenet121": 96,
    "torchvision/efficientnet_b0": 96,
    "torchvision/googlenet": 96,
    "torchvision/inception_v3": 128,
    "torchvision/maxvit_t": 224,
    "torchvision/mobilenet_v2": 96,
    "torchvision/mobilenet_v3_small": 96,
    "torchvision/regnet_y_400mf": 96,
    "torchvision/resnet18": 96,
    "torchvision/shufflenet_v2_x0_5": 96,
    "torchvision/squeezenet1_1": 96,
    "torchvision/swin_t": 96,
    "torchvision/vgg11_bn": 96,
    "torchvision/vit_b_32": 96,
}
ZOO = {**dict.fromkeys(OWN, OWN_SIZE), **FAMILIES}


def shown_at(size: int) -> Preprocessing:
    """Photographs in ``size`` pixels, as ImageNet's are shown."""
    return Preprocessing(
        size,
        size,
        (0.485, 0.456, 0.406),
        (0.229, 0.224, 0.225),
        crop_pct=0.875,
        crop_mode="center",
        interpolation="bilinear",
    )


def save_checkpoint(arch: str, shown: Preprocessing, path: Path) -> None:
    """A checkpoint, as far as exporting needs it, of ``arch`` with random weights, for images ``shown`` so."""
    torch.manual_seed(0)
    network = build_model(
        ModelSettings(arch=arch), classes=CLASSES, channels=shown.channels, image_size=shown.image_size
    )
    randomise(network, noise((shown.channels, shown.val_image_size, shown.val_image_size)))
    torch.save(
        {
            "format": checkpoint.FORMAT,
            "arch": arch,
            "classes": [f"class {number}" for number in range(CLASSES)],
            "preprocessing": shown.state(),
            "settings": {"dataname": "synthetic"},
            "model": network.state_dict(),
            "ema": None,
        },
        path,
    )


@torch.no_grad()
def randomise(network: nn.Module, images: torch.Tensor) -> None:
    """Give ``network`` random weights with which each layer matters, and outputs that differ between ``images`` by 1.

    Networks begin with norms of 0 or 1, layer scales of 1e-6, last layers of zeros, or weights so small that a deep
    network without norms gives the same for all images. An export without such layers would then go unnoticed.

    Nor may the weights multiply rounding errors, or float32 differs from float64 more than an export from its network:
    batch norm gets the statistics of ``images``, as training leaves it, and positive biases, which leave most of the
    units behind it at work; scales below 1 keep attention from becoming all or nothing.
    """
    for name, parameter in network.named_parameters():
        if parameter.ndim == 1 and not name.endswith("bias"):
            parameter.uniform_(0.25, 0.75)
        elif parameter.ndim == 1:
            parameter.normal_(0, 0.1)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.modules.batchnorm._NormBase):
            module.momentum = 1.0
            if module.bias is not None:
                module.bias.add_(0.5)
    network.train()(images)
    spread = network.eval()(images).std(0).mean()
    for layer in output_layers(network):
        layer.weight.div_(spread)


@pytest.fixture(autouse=True)
def reloads_in_this_process(request, monkeypatch):
    """Loads exports again here, which saves seconds of imports, except in tests that take ``fresh_process``."""

    start = subprocess.run

    def run(line, **options):
        if reload.__name__ not in line:
            return start(line, **options)
        with monkeypatch.context() as here:
            here.chdir(options["cwd"])
            try:
                reload.main(line[-1])
            except SystemExit as reason:
                return subprocess.CompletedProcess(line, 1, stderr=str(reason))
        return subprocess.CompletedProcess(line, 0)

    if "fresh_process" not in request.fixturenames:
        monkeypatch.setattr(checking.subprocess, "run", run)


def largest_difference(arch, name, folder):
    """Of the outputs of ``arch`` exported to format ``name`` and loaded again; None if the format cannot hold it."""
    path = folder / name / FORMATS[name].file
    path.parent.mkdir(parents=True)
    save_checkpoint(arch, shown_at(ZOO[arch]), folder / "checkpoint.pt")
    subject = Subject.of(open_run(str(folder / "checkpoint.pt"), device="cpu"), raw=False, inside=False)
    images = noise(subject.shape)
    assert np.ptp(steps.expected_outputs(subject, images.numpy()), axis=0).max() > 0.1, (
        "a thousand times the difference that is allowed, or nothing is compared"
    )
    try:
        steps.refuse_other_networks(name, subject)
    except UserError:
        return None
    steps.write(name, subject, path, images)
    return steps.check(name, subject, path, images).largest


def test_a_network_gives_the_same_in_each_format_that_can_hold_it(tmp_path):
    assert largest_difference("fc", "safetensors", tmp_path) == 0
    assert largest_difference("fc", "torchvision", tmp_path) is None
    assert largest_difference("torchvision/squeezenet1_1", "torchvision", tmp_path / "another") == 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("arch", ZOO)
def test_each_network_gives_the_same_in_each_format(arch, name, tmp_path):
    largest_difference(arch, name, tmp_path)
