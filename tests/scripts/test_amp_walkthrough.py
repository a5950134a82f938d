"""The walk-through of one 1x1 linear layer, in float32 and in mixed precision, through TraVal's own step.

torch.manual_seed(47), Linear(1, 1), input torch.randn(1, 1), SGD with learning rate 1, the output itself as
loss: a float32 step, then a mixed-precision step with a first loss scale of 4096. The numbers are the
published ones, to the last printed digit.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from utils.config.arguments import parse
from utils.data.loaders import Batch
from utils.precision.amp import build_scaler
from utils.runtime.distributed import Distributed, RankInfo
from utils.train_validation import Extras, TraVal

PRINTED = 5e-5  # half of the last printed digit


class Recorder(nn.Module):
    """The loss is the output; remembers its dtype and value."""

    def forward(self, output, targets):
        self.output = output.detach().clone()
        return output.mean()


def make(layer, amp):
    args = parse(["--amp", amp, "--init-scale", "4096", "--device", "cpu"])
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    device = torch.device("cpu")
    return TraVal(
        layer,
        SimpleNamespace(image_shape=(1,)),
        optimizer,
        Recorder(),
        build_scaler(args.precision, device),
        args,
        None,
        extras=Extras(distributed=Distributed(RankInfo(), args.run)),
    )


def step(traval, images):
    """One training step; gives (gradients as backward left them, gradients that the optimizer saw)."""
    scaled = {}
    unscaled = {}
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: scaled.update({name: p.grad.item()}))
        for name, parameter in traval.model.named_parameters()
    ]
    hooks.append(
        traval.optimizers[0].register_step_pre_hook(
            lambda *_: unscaled.update({name: p.grad.item() for name, p in traval.model.named_parameters()})
        )
    )
    traval.training_step([Batch(images, torch.zeros(1, dtype=torch.int64), None, 0)])
    for hook in hooks:
        hook.remove()
    return scaled, unscaled


@pytest.fixture
def layer_and_input():
    torch.manual_seed(47)
    return nn.Linear(1, 1), torch.randn(1, 1)


def test_float32_step_then_fp16_step_with_scale_4096_print_the_published_numbers(layer_and_input):
    layer, images = layer_and_input

    full = make(layer, "off")
    scaled, unscaled = step(full, images)
    assert full.criterion.output.dtype == torch.float32
    assert full.criterion.output.item() == pytest.approx(-0.8473, abs=PRINTED)
    assert scaled == unscaled, "without a scaler the gradient is the gradient"
    assert scaled["weight"] == pytest.approx(-0.0591, abs=PRINTED)
    assert scaled["bias"] == 1
    assert layer.weight.item() == pytest.approx(-0.8348, abs=PRINTED)
    assert layer.bias.item() == pytest.approx(-1.9002, abs=PRINTED)

    mixed = make(layer, "fp16")
    scaled, unscaled = step(mixed, images)
    assert mixed.criterion.output.dtype == torch.float16
    assert mixed.criterion.output.item() == pytest.approx(-1.8506, abs=PRINTED)
    assert scaled == {"weight": -242.25, "bias": 4096}
    assert unscaled["weight"] == pytest.approx(-0.0591, abs=PRINTED)
    assert unscaled["bias"] == 1
    assert layer.weight.dtype == torch.float32
    assert layer.weight.item() == pytest.approx(-0.7756, abs=PRINTED)
    assert layer.bias.item() == pytest.approx(-2.9002, abs=PRINTED)
