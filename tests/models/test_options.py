"""Options of the libraries' constructors, gradient checkpointing, and what cannot be had is one line."""

import copy

import pytest
import timm
import torch
import torchvision
import yaml
from torch import nn

from models import build_model, load_model
from models.layers import checkpoint_gradients
from tests.faults.small_run import told
from tests.helpers import QUIETLY, mistakes_of
from utils.config import arguments
from utils.config.groups.model import ModelSettings
from utils.config.keywords import read_keyword

CUT = ("--val-batch-size", "40", "--max-val-batches", "1")
FLAGS = (*QUIETLY, *CUT, "--max-steps", "2", "--batch-size", "8")


def build(arch, size=32, **settings):
    torch.manual_seed(0)
    return build_model(ModelSettings(arch=arch, **settings), classes=10, channels=3, image_size=size)


def rates(model, kind):
    return [
        module.p if hasattr(module, "p") else module.drop_prob for module in model.modules() if isinstance(module, kind)
    ]


def test_timms_networks_are_built_as_timm_builds_them_with_these_options():
    ours = build("timm/test_vit", drop=0.3, drop_path=0.2, model_kwargs=("qk_norm=true", "init_values=1e-3"))
    theirs = timm.create_model(
        "test_vit", num_classes=10, img_size=32, drop_rate=0.3, drop_path_rate=0.2, qk_norm=True, init_values=1e-3
    )
    assert str(ours) == str(theirs) and 0.3 in rates(ours, nn.Dropout)
    assert rates(ours, timm.layers.DropPath)[-1] == pytest.approx(0.2)
    assert ours.blocks[0].ls1.gamma.unique().tolist() == pytest.approx([1e-3])


def test_lists_and_mappings_are_given_by_flags_and_recipes(recipe):
    options = {"layers": [1, 2, 1, 1], "block_args": {"attn_layer": "se"}}
    flags = ["--model-kwargs", "layers=[1,2,1,1]", 'block_args={"attn_layer": "se"}']
    path = recipe(yaml.safe_dump({"model-kwargs": options}))
    for words in (flags, ["--config", path]):
        settings = arguments.parse([*words, "--arch", "timm/resnet10t", "--dataname", "digits"]).model
        ours = build("timm/resnet10t", size=128, model_kwargs=settings.model_kwargs)
        assert str(ours) == str(timm.create_model("resnet10t", num_classes=10, **options))
    assert read_keyword("--opt-kwargs", 'a={"b": [1e-5, "x"]}') == ("a", {"b": [1e-5, "x"]})


@pytest.mark.parametrize(
    ("name", "flags", "options"),
    [
        ("mobilenet_v3_small", {"drop": 0.45}, {"dropout": 0.45}),
        ("efficientnet_b0", {"drop": 0.45, "drop_path": 0.15}, {"dropout": 0.45, "stochastic_depth_prob": 0.15}),
        ("densenet121", {"drop": 0.45}, {"drop_rate": 0.45}),
        ("mobilenet_v2", {"model_kwargs": ("width_mult=0.5",)}, {"width_mult": 0.5}),
    ],
)
def test_so_are_torchvisions(name, flags, options):
    ours = build(f"torchvision/{name}", **flags)
    theirs = torchvision.models.get_model(name, weights=None, num_classes=10, **options)
    assert str(ours) == str(theirs)
    drops = [getattr(layer, "drop_rate", None) for layer in ours.modules()]
    assert drops == [getattr(layer, "drop_rate", None) for layer in theirs.modules()]


def test_own_networks_take_their_own_arguments():
    assert sum(isinstance(m, nn.Conv2d) for m in build("vgg11", model_kwargs=("depth=13",)).modules()) == 10


@pytest.mark.parametrize(
    ("arch", "settings", "words"),
    [
        ("conv2", {"drop": 0.1}, "--drop 0.1: conv2 has no dropout to set"),
        ("torchvision/resnet18", {"drop": 0.1}, "--drop 0.1: torchvision/resnet18 has no dropout"),
        ("torchvision/resnet18", {"drop_path": 0.1}, "has no stochastic depth to set"),
        ("vgg11", {"drop_path": 0.1}, "--drop-path 0.1: vgg11 has no stochastic depth"),
        ("timm/vgg11", {"drop_path": 0.1}, "has no stochastic depth"),
        ("timm/test_vit", {"model_kwargs": ("qk_nrm=true",)}, "takes no qk_nrm; did you mean qk_norm"),
        ("timm/test_vit", {"model_kwargs": ("num_classes=3",)}, "the data set says that; leave it out here"),
        ("timm/test_vit", {"model_kwargs": ("img_size=240",)}, "--image-size says that; leave it out here"),
        ("timm/test_vit", {"model_kwargs": ("checkpoint_path=a",)}, "takes no checkpoint_path"),
        ("timm/test_vit", {"model_kwargs": ("qk_norm",)}, "--model-kwargs qk_norm: write NAME=VALUE"),
        ("timm/test_vit", {"model_kwargs": ("depth=[1, x]",)}, "--model-kwargs depth=[1, x]: is not JSON"),
        ("timm/test_vit", {"drop": 0.1, "model_kwargs": ("drop_rate=0.2",)}, "drop_rate is given twice"),
        ("torchvision/swin_t", {"drop_path": 0.1}, "stochastic_depth_prob"),  # its builder sets it
    ],
)
def test_what_a_network_does_not_take_is_one_line(arch, settings, words):
    (line,) = mistakes_of(build, arch, **settings)
    assert words in line


def test_a_checkpoint_is_loaded_evaluated_and_resumed_with_its_options(workplace, capsys):
    options = "--arch timm/test_vit --image-size 32 --drop 0.1 --drop-path 0.1 --model-kwargs qk_norm=true"
    assert told(capsys, (*FLAGS, *options.split())) == (0, [])
    (run,) = workplace.glob("runs/digits/*/*")
    assert "blocks.0.attn.q_norm.weight" in load_model(run).network.state_dict()
    assert told(capsys, (*FLAGS[:3], *CUT, "--resume", run, "--max-steps", 3)) == (0, [])
    assert told(capsys, (*FLAGS[:3], *CUT, "--evaluate", "--resume", run)) == (0, [])


@pytest.mark.parametrize("arch", ["timm/test_resnet", "timm/test_vit", "timm/test_convnext"])
def test_checkpointed_gradients_and_statistics_are_bit_for_bit_those_without(arch):
    plain = build(arch, drop=0.2)
    model = copy.deepcopy(plain)
    checkpoint_gradients(arch, model)
    images = torch.randn(4, 3, 32, 32)
    targets = torch.randint(10, (4,))
    calls = {}
    for network in (plain, model):
        count = []
        for layer in network.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                layer.register_forward_hook(lambda *_, count=count: count.append(1))
        torch.manual_seed(1)
        network.train()
        nn.functional.cross_entropy(network(images), targets).backward()
        calls[network] = len(count)
    assert calls[model] > calls[plain], "nothing was computed again"
    grads = [[parameter.grad for parameter in network.parameters()] for network in (plain, model)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    state = plain.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("arch", ["conv2", "torchvision/squeezenet1_1"])
def test_networks_without_such_blocks_are_refused(arch, workplace, capsys):
    code, (line,) = told(capsys, (*FLAGS, "--arch", arch, "--image-size", "32", "--grad-checkpointing"))
    assert code == 2 and f"--grad-checkpointing: {arch} cannot; networks of timm" in line


def test_synchronised_batch_norm_needs_gpus(workplace, capsys):
    code, (line,) = told(capsys, (*FLAGS, "--arch", "vgg11", "--sync-bn"))
    assert code == 2 and "--sync-bn needs GPUs" in line


@pytest.mark.parametrize("arch", ["vgg11", "timm/test_resnet", "timm/test_efficientnet"])
def test_on_a_gpu_every_batch_norm_is_synchronised_and_keeps_its_names(arch):
    from models.prepare import synchronised

    model = build(arch)
    names = set(model.state_dict())
    made = synchronised(model, torch.device("cuda"))
    norms = [layer for layer in made.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    assert norms and all(isinstance(layer, nn.SyncBatchNorm) for layer in norms)
    assert set(made.state_dict()) == names
