"""Layer-wise decay of the learning rate against timm's groups, and what a run does with them."""

import copy
import dataclasses

import pytest
import timm
import timm.optim
import torch
import torchvision

import main
from models import build_model
from models.initialisation import shapes_alone
from tests.helpers import QUIETLY, trained
from tests.utils.test_train_validation import make, parameters
from utils.config.groups.model import ModelSettings
from utils.config.groups.optimisation import OptimisationSettings
from utils.optim.groups import layer_numbers, lr_scales, parameter_groups
from utils.optim.optimizers import build_optimizers

SETTINGS = OptimisationSettings(lr=0.1, weight_decay=0.05, decay_norm_bias=False, layer_decay=0.7)
TIMM = ["test_resnet", "test_vit", "test_convnext", "test_efficientnet", "swin_tiny_patch4_window7_224", "resnet18"]


def described(groups, model):
    """Each group as its parameters' names, scale and weight decay."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        (tuple(names[id(p)] for p in group["params"]), group["lr_scale"], group["weight_decay"]) for group in groups
    }


@pytest.mark.parametrize("arch", TIMM)
def test_groups_are_timms(arch):
    with shapes_alone():
        model = timm.create_model(arch)
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    expected = timm.optim.param_groups_layer_decay(
        model, weight_decay=0.05, layer_decay=0.7, no_weight_decay_list=exempt
    )
    found = parameter_groups(SETTINGS, model)
    assert described(found, model) == described(expected, model) and len(found) == len(expected) > 4


@pytest.mark.parametrize("layer_decay", [0.7, None])
def test_of_a_vision_transformer_the_position_embedding_does_not_decay_unless_everything_does(layer_decay):
    model = timm.create_model("test_vit")
    settings = dataclasses.replace(SETTINGS, layer_decay=layer_decay)
    decay_of = {id(p): group["weight_decay"] for group in parameter_groups(settings, model) for p in group["params"]}
    assert decay_of[id(model.pos_embed)] == 0 and decay_of[id(model.blocks[0].attn.qkv.weight)] == 0.05
    everything = parameter_groups(dataclasses.replace(settings, decay_norm_bias=True), model)
    assert {group["weight_decay"] for group in everything} == {0.05}


def blocks(model):
    """The beginnings of the names of each layer's parameters."""
    numbers = layer_numbers(model)
    assert list(numbers) == [name for name, _ in model.named_parameters()]
    layers = [set() for _ in range(max(numbers.values()) + 1)]
    for name, number in numbers.items():
        layers[number].add(name.rpartition(".")[0])
    return layers


def test_layers_of_torchvisions_resnet_are_those_of_timms():
    """The same network under the same names, but that timm's declares its layers itself."""
    with shapes_alone():
        ours = torchvision.models.resnet18()
        declared = timm.create_model("resnet18")
    assert layer_numbers(ours) == layer_numbers(declared)


def test_layers_of_other_networks_are_their_blocks_in_order():
    with shapes_alone():
        transformer = blocks(torchvision.models.vit_b_16())
    assert (
        len(transformer) == 14 and transformer[0] == {"", "conv_proj", "encoder"} and transformer[-1] == {"heads.head"}
    )
    assert all(name.startswith("encoder.layers.encoder_layer_4.") for name in transformer[5])
    assert "encoder.ln" in transformer[12], "the last norm is part of the block before it"
    own = build_model(ModelSettings(arch="fc"), classes=10, channels=1, image_size=8)
    assert blocks(own) == [{"layers.1"}, {"layers.3"}, {"layers.5"}]
    vgg = build_model(ModelSettings(arch="vgg11"), classes=10, channels=1, image_size=8)
    assert blocks(vgg)[0] == {"features.0", "features.1"} and len(blocks(vgg)) == 9


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "muon"])
@pytest.mark.parametrize("arch", ["test_vit", "test_resnet"])
def test_every_trainable_parameter_is_stepped_with_once_at_the_rate_of_its_layer(name, arch):
    model = timm.create_model(arch)
    model.get_parameter("norm.weight" if arch == "test_vit" else "bn1.weight").requires_grad_(False)
    built = build_optimizers(dataclasses.replace(SETTINGS, optimizer=name), model)
    groups = [group for each in built for group in each.param_groups]
    scale_of = [(id(parameter), group["lr_scale"]) for group in groups for parameter in group["params"]]
    layers = layer_numbers(model)
    last = max(layers.values())
    expected = [(id(p), 0.7 ** (last - layers[name])) for name, p in model.named_parameters() if p.requires_grad]
    assert sorted(scale_of) == sorted(expected)
    assert list(lr_scales(built).values()) == sorted({scale for _, scale in expected})


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_the_rate_of_each_layer_is_charted(name, monkeypatch):
    traval = make("--optimizer", name, "--arch", "fc", "--lr", "0.1", "--layer-decay", "0.5", "--print-freq", "1")
    charted = []
    monkeypatch.setattr(traval.writer, "scalars", lambda points, step: charted.append(points))
    traval.train(0)
    points = charted[0]
    layers = {tag: value for tag, value in points.items() if "lr_group" in tag}
    assert points["Optim/lr"] == 0.1
    assert layers == pytest.approx({f"Optim/lr_group_layer_{n}": 0.1 * 0.5 ** (2 - n) for n in range(3)})


def test_groups_of_a_users_optimizer_may_have_names_without_a_scale():
    weight = torch.nn.Parameter(torch.zeros(2))
    assert lr_scales([torch.optim.SGD([{"params": [weight], "name": "mine"}], lr=0.1)]) == {}


@pytest.mark.parametrize(
    ("arch", "head"),
    [("conv2", "classifier.5"), ("timm/test_vit", "head"), ("torchvision/squeezenet1_1", "classifier.1")],
)
def test_head_and_backbone_step_at_their_own_rates(arch, head):
    flags = ("--arch", arch, "--image-size", "32", "--batch-size", "4", "--lr", "0.1", "--lr-policy", "constant")
    torch.manual_seed(3)
    model = build_model(ModelSettings(arch=arch), classes=10, channels=1, image_size=32).eval()
    traval = make(*flags, "--backbone-lr-scale", "0.25", model=model)
    assert lr_scales(traval.optimizers) == {"backbone": 0.25, "head": 1.0}
    plain = copy.deepcopy(model)
    last = []
    rest = []
    for name, parameter in plain.named_parameters():
        (last if name.startswith(f"{head}.") else rest).append(parameter)
    assert len(last) == 2
    groups = [{"params": rest, "lr": 0.1 * 0.25}, {"params": last, "lr": 0.1}]
    reference = torch.optim.SGD(groups, momentum=0.9, weight_decay=5e-4, fused=True)
    batch = next(iter(traval.train_loader.batches(0)))
    torch.nn.functional.cross_entropy(plain(batch.images), batch.targets).backward()
    reference.step()
    traval.training_step([batch])
    torch.testing.assert_close(parameters(model), [p.detach() for p in plain.parameters()], rtol=1e-6, atol=1e-7)


def test_another_scale_by_override_is_what_the_run_goes_on_with(workplace, capsys):
    flags = [*QUIETLY, "--arch", "fc", "--max-steps"]
    run = trained(workplace / "runs", *flags, 2, "--backbone-lr-scale", 0.5)
    line = [*flags[:3], "--resume", str(run), "--resume-override", "--backbone-lr-scale", "0.25", "--max-steps", "3"]
    assert main.main(line) == 0
    state = torch.load(run / "checkpoints/last.pt", weights_only=True)
    assert [group["lr_scale"] for group in state["optimizer"]["param_groups"]] == [0.25, 1.0]


def test_a_factor_that_an_override_takes_away_is_gone(workplace):
    flags = [*QUIETLY, "--arch", "fc", "--max-steps"]
    line = [*flags, "2", "--weight-decay-except", "*.bias", "--lr-scale", "*.bias=2"]
    assert main.main(line) == 0
    (run,) = workplace.glob("runs/digits/fc/*")
    line = [*flags[:3], "--resume", str(run), "--resume-override", "--lr-scale", "none", "--max-steps", "3"]
    assert main.main(line) == 0
    groups = torch.load(run / "checkpoints/last.pt", weights_only=True)["optimizer"]["param_groups"]
    assert len(groups) == 2 and groups[0]["lr"] == groups[1]["lr"]


@pytest.mark.parametrize(
    ("begun", "other"),
    [
        # groups of the same sizes, but of other parameters: their momentum would be another's
        (("--weight-decay-except", "layers.1.weight"), ("--weight-decay-except", "layers.3.weight")),
        (("--lr-scale", "layers.1.bias=2"), ("--lr-scale", "layers.3.bias=2")),
    ],
)
def test_other_groups_of_parameters_are_refused_by_an_override(begun, other, workplace, capsys):
    flags = [*QUIETLY, "--arch", "fc", "--max-steps"]
    run = trained(workplace / "runs", *flags, 2, *begun)
    before = torch.load(run / "checkpoints/last.pt", weights_only=True)["optimizer"]["state"]
    capsys.readouterr()
    line = [*flags[:3], "--resume", str(run), "--resume-override", *other, "--max-steps", "3"]
    assert main.main(line) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert other[0] in said and "its state fits no other groups of parameters, not even with --resume-override" in said
    after = torch.load(run / "checkpoints/last.pt", weights_only=True)["optimizer"]["state"]
    assert all(torch.equal(before[n]["momentum_buffer"], after[n]["momentum_buffer"]) for n in before)
    assert main.main([*line[:6], *begun, "--weight-decay", "0.001", "--max-steps", "3"]) == 0


def test_of_many_layers_a_dozen_are_charted_first_and_last_among_them():
    from utils.record.reporter import MOST_RATES, _spread

    scales = {f"layer_{n}": 0.9 ** (62 - n) for n in range(63)}
    shown = list(_spread(scales, MOST_RATES))
    assert len(shown) == 12 and (shown[0], shown[-1]) == ("layer_0", "layer_62")
