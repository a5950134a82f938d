"""The moving average against its closed formula, buffer by buffer."""

import copy
import math

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from utils.config.groups.average import AverageSettings
from utils.optim.ema import MovingAverage, build_average


def network():
    """Float and integer buffers of a batch norm, and a constant one that arithmetic would spoil."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 10))
    model[3].register_buffer("mask", torch.tensor([0.0, -math.inf]))
    return model.double()


def set_all(model, value):
    """Each weight and running statistic becomes ``value``."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
        for buffer in (model[1].running_mean, model[1].running_var):
            buffer.fill_(value)


# Below, the decays are 1/10, 2/11, 3/12, 4/13, 5/14 (0.36), 6/15 (0.4) ..., as long as they are lower than the flag's.
@pytest.mark.parametrize(
    ("decay", "warmup", "decays"),
    [
        (0.999, True, [1 / 10, 2 / 11, 3 / 12, 4 / 13, 5 / 14]),
        (0.2, True, [1 / 10, 2 / 11, 0.2, 0.2, 0.2]),
        (0.999, False, [0.999] * 5),
    ],
)
def test_weights_and_running_statistics_are_averaged_by_the_closed_formula(decay, warmup, decays):
    initial = 4.0
    values = [1.0, 3.0, -2.0, 5.0, 0.5]
    model = network()
    set_all(model, initial)
    average = build_average(model, AverageSettings(ema_decay=decay, ema_warmup=warmup), epochs=1)
    for updates, value in enumerate(values):
        set_all(model, value)
        average.update(updates)
    # The initial weights have the product of all decays, a step's weights 1 - d and the product of the later ones.
    expected = math.prod(decays) * initial
    expected += sum((1 - decays[k]) * math.prod(decays[k + 1 :]) * value for k, value in enumerate(values))
    for tensor in (*average.module.parameters(), average.module[1].running_mean, average.module[1].running_var):
        assert tensor.flatten()[-1].item() == pytest.approx(expected, rel=1e-12)


def test_buffers_that_are_no_running_statistics_are_copied_bit_for_bit():
    model = network()
    average = MovingAverage(model, AverageSettings(ema_decay=0.9))
    for updates in range(3):
        model(torch.randn(8, 1, 5, 5, dtype=torch.float64))
        average.update(updates)
    assert average.module[1].num_batches_tracked == 3
    assert torch.equal(average.module[3].mask, torch.tensor([0.0, -math.inf], dtype=torch.float64))
    assert not torch.equal(average.module[1].running_mean, model[1].running_mean)


def test_without_warm_up_and_statistics_computed_anew_the_average_is_timms():
    """What main.py answers on timm's --model-ema: --no-ema-warmup --ema-bn-batches 0."""
    model = network()
    average = MovingAverage(model, AverageSettings(ema_decay=0.9, ema_warmup=False, ema_bn_batches=0))
    timms = ModelEmaV3(model, decay=0.9)
    for updates in range(5):
        model(torch.randn(8, 1, 5, 5, dtype=torch.float64))
        set_all(model, float(updates))
        average.update(updates)
        timms.update(model)
    expected = timms.module.state_dict()
    del expected["3.mask"]  # infinite numbers, which timm averages to NaN
    for name, tensor in expected.items():
        assert torch.allclose(average.module.state_dict()[name], tensor, rtol=1e-12), name


def test_the_average_has_tensors_of_its_own():
    model = network()
    untouched = copy.deepcopy(model.state_dict())
    average = MovingAverage(model, AverageSettings(ema_decay=0.5))
    average.update(0)
    set_all(average.module, 7.0)
    assert all(torch.equal(value, untouched[name]) for name, value in model.state_dict().items())


def test_weights_of_several_types_are_averaged_each_in_its_own():
    types = {"0": torch.bfloat16, "1": torch.float32, "2": torch.complex64}
    model = nn.Sequential(*(nn.Linear(3, 3, dtype=dtype) for dtype in types.values()))
    average = MovingAverage(model, AverageSettings(ema_decay=0.9))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    before = copy.deepcopy(average.module)
    average.update(0)
    for (name, value), old in zip(average.module.named_parameters(), before.parameters(), strict=True):
        assert value.dtype == types[name[0]]
        torch.testing.assert_close(value, 0.9 + 0.1 * old, rtol=1e-2 if name.startswith("0") else 1e-6, atol=1e-6)
