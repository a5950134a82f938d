"""The memory format that --channels-last chooses."""

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
