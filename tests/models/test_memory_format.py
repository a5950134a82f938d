"""The memory format that --channels-last chooses."""

import pytest
import torch

from models import build_model
from models.memory_format import channels_last_is_faster
from utils.config.groups.model import ModelSettings

CPU = torch.device("cpu")


def build(arch, size=32):
    torch.manual_seed(0)
    return build_model(ModelSettings(arch=arch), classes=4, channels=3, image_size=size).eval()


def test_a_network_without_convolutions_stays_as_it_is():
    assert not channels_last_is_faster(build("fc"), CPU, "off")


@pytest.mark.parametrize("arch", ["conv2", "resnet18"])
def test_the_format_does_not_change_the_answer(arch):
    model = build(arch)
    images = torch.randn(2, 3, 32, 32)
    reference = model(images)
    found = model.to(memory_format=torch.channels_last)(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-5)
