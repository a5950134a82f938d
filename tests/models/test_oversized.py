"""A linear layer that photographs make absurdly large is told, and published networks are not."""

import pytest
from torch import nn

from models.build import OWN, _timm, _torchvision
from models.initialisation import shapes_alone
from models.prepare import MOST_WEIGHTS, oversized_layer
from tests.faults.small_run import told
from utils.config.groups.model import ModelSettings


def built(arch, size, classes=10):
    with shapes_alone():
        if arch in OWN:
            return OWN[arch](classes, 3, size)
        library, _, name = arch.partition("/")
        return (_timm if library == "timm" else _torchvision)(name, ModelSettings(arch=arch), classes, 3, size)


@pytest.mark.parametrize(
    ("arch", "size", "layer", "weights"),
    [
        ("conv2", 224, "classifier.1", 64 * 112 * 112 * 256),
        ("conv4", 224, "classifier.1", 128 * 56 * 56 * 256),
        ("conv6", 224, "classifier.1", 256 * 28 * 28 * 256),
        ("fc", 224, "layers.1", 3 * 224 * 224 * 300),
    ],
)
def test_a_layer_on_flattened_photographs_is_named_with_its_size(arch, size, layer, weights):
    line = oversized_layer(arch, built(arch, size), size)
    assert f"--arch {arch}: of its " in line and f"{weights:,} are weights of the one layer {layer}," in line
    assert f"{size}-pixel images" in line and "--arch resnet18" in line and "\n" not in line


@pytest.mark.parametrize(
    ("arch", "size", "classes"),
    [
        ("conv2", 32, 10),
        ("conv2", 64, 10),
        ("fc", 28, 10),
        ("vgg16", 224, 10),
        ("torchvision/vgg16", 224, 1000),
        ("torchvision/alexnet", 224, 1000),
        ("timm/resnet18", 224, 10),
        ("timm/vit_tiny_patch16_224", 224, 10),
        ("timm/mobilenetv3_small_050", 224, 100_000),  # nearly all of it are the classes
    ],
)
def test_published_networks_and_many_classes_pass(arch, size, classes):
    assert oversized_layer(arch, built(arch, size, classes), size) is None


def test_the_bound_is_a_share_and_a_number():
    large = nn.Linear(MOST_WEIGHTS // 1000 + 1, 1000, device="meta")
    assert oversized_layer("x", nn.Sequential(large), 8) is not None
    assert oversized_layer("x", nn.Sequential(nn.Linear(MOST_WEIGHTS // 1000, 1000, device="meta")), 8) is None
    assert oversized_layer("x", nn.Sequential(large, nn.Linear(3_000_000, 1, device="meta")), 8) is None


def test_it_is_told_before_training_begins(capsys):
    flags = ("--device", "cpu", "--arch", "fc", "--image-size", 300, "--dry-run")
    code, (line,) = told(capsys, flags)
    assert code == 0 and line.startswith("main.py: warning: --arch fc: of its 27,0") and "layers.1" in line
