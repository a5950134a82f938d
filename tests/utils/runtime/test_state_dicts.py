"""Weights without the versions of their layers are those of the layers at hand."""

import pytest
import torch
import torchvision
from torch import nn

from utils.runtime.state_dicts import load_state_dict


def test_a_network_that_asks_for_versions_takes_plain_weights():
    torch.manual_seed(0)
    first, second = (torchvision.models.mnasnet0_5(num_classes=3) for _ in range(2))
    plain = dict(first.state_dict())
    with pytest.raises(ValueError, match="version"):
        second.load_state_dict(plain)
    load_state_dict(second, plain)
    assert all(torch.equal(value, plain[name]) for name, value in second.state_dict().items())


def test_weights_that_do_not_fit_are_an_error():
    with pytest.raises(RuntimeError, match="weight"):
        load_state_dict(nn.Linear(2, 3), {"bias": torch.zeros(3)})
