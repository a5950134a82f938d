"""--blur-pool: strided convolutions read blurred maps, in training and in everything that loads the network."""

import copy

import pytest
import timm.layers
import torch
from torch import nn

from main import main as train
from models import build_model
from models.load import load_model
from scripts import export
from tests.helpers import QUIETLY, trained
from tests.scripts.test_export_zoo import reloads_in_this_process  # noqa: F401 - a fixture
from utils.config.groups.model import ModelSettings
from utils.config.settings import UserError

SHAPE = {"classes": 10, "channels": 3, "image_size": 32}


def network(**options):
    torch.manual_seed(0)
    return build_model(ModelSettings(arch="torchvision/resnet18", **options), **SHAPE).eval()


class BlurredBefore(nn.Module):
    """timm's blur at stride 1, then the convolution."""

    def __init__(self, convolution):
        super().__init__()
        channels = convolution.in_channels
        self.blur = timm.layers.BlurPool2d(channels, filt_size=3, stride=1, pad_mode="constant")
        self.convolution = convolution

    def forward(self, images):
        return self.convolution(self.blur(images))


def test_resnet18_is_that_of_timms_blur_in_front_of_its_six_strided_convolutions():
    ours = network(blur_pool=True)
    theirs = network()
    names = [*theirs.state_dict()]
    images = torch.randn(2, 3, 32, 32, requires_grad=True)
    plain = theirs(images)
    strided = [
        name
        for name, module in theirs.named_modules()
        if isinstance(module, nn.Conv2d) and module.stride == (2, 2) and name != "conv1"
    ]
    assert len(strided) == 6
    for name in strided:
        theirs.set_submodule(name, BlurredBefore(theirs.get_submodule(name)))
    outputs = ours(images), theirs(images)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(output.square().sum(), images)[0] for output in outputs]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(outputs[0], plain, rtol=1e-2)
    assert [*ours.state_dict()] == names
    copied = copy.deepcopy(ours)
    torch.nn.init.zeros_(ours.layer2[0].conv1.weight)
    torch.testing.assert_close(copied(images), theirs(images), rtol=1e-4, atol=1e-5)


def test_a_network_without_such_a_convolution_is_told(tmp_path, capsys):
    trained(tmp_path, "--arch", "fc", "--max-steps", 1, "--blur-pool")
    said = "--blur-pool does nothing: it needs a strided convolution of 16 or more input channels"
    assert said in capsys.readouterr().err


def test_a_checkpoint_is_evaluated_loaded_and_exported_with_its_blur(tmp_path, capsys):
    # A last scale of 0 would hide from the loss what a block computes.
    flags = ["--arch", "timm/test_resnet", "--model-kwargs", "zero_init_last=false", "--image-size", "72"]
    cut = ["--val-batch-size", "40", "--max-val-batches", "1"]
    flags += ["--batch-size", "8", *cut, *QUIETLY]
    run = trained(tmp_path, *flags, "--blur-pool", "--max-steps", 2)
    shown = capsys.readouterr().out.split("val_loss=")[1].split()[0]
    assert train(["--evaluate", "--resume", str(run), *cut, "--device", "cpu", "--no-progress"]) == 0
    assert f"val_loss={shown}" in capsys.readouterr().out
    weights = [*flags, "--weights", str(run / "checkpoints/final.pt")]
    assert train(["--evaluate", *weights]) == 0 and f"val_loss={shown}" in capsys.readouterr().out
    begin = [*weights, "--max-steps", "1", "--output", str(tmp_path / "tuned")]
    assert train(begin) == 2 and "was trained with --blur-pool; give that flag, too" in capsys.readouterr().err
    assert train([*begin, "--blur-pool"]) == 0
    network = load_model(run).network
    assert sum(hasattr(module, "blur") for module in network.modules()) > 1
    target = tmp_path / "model.safetensors"
    assert export.main([str(run), "--to", "safetensors", "--output", str(target)]) == 0
    with pytest.raises(UserError, match="--blur-pool, which no argument of its library describes"):
        export.main([str(run), "--to", "timm", "--output", str(tmp_path / "timm")])
