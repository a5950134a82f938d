"""Which networks cannot be spread over processes, told before anything is."""

import pytest
import torch
from torch import nn

from tests.helpers import mistakes_of
from utils.runtime.sharding import spread


class Gain(nn.Module):
    """As timm's networks without normalisation have it (``skipinit_gain``)."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.0))


def tied():
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[1].weight = network[0].weight
    return network


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (nn.Sequential(nn.Linear(2, 2), Gain()), "--shard-model: torch cannot spread 1.gain, a single number"),
        (tied(), "--shard-model: the network uses a parameter in several places"),
    ],
)
def test_a_network_that_torch_cannot_spread_is_refused_in_one_line(network, words):
    (line,) = mistakes_of(spread, network, torch.device("cpu"), None, with_copy=False)
    assert line.startswith(words)
