"""Which layers make the logits: all heads of a network, for Muon, which leaves them to AdamW, and adaptive clipping."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from models import build_model
from models.initialisation import shapes_alone
from utils.config.arguments import parse
from utils.config.groups.optimisation import OptimisationSettings
from utils.optim.clipping import GradientClipper
from utils.optim.head import output_layers
from utils.optim.optimizers import build_optimizers

CLASSES = 7  # so few outputs has no other layer of these networks

HEADS = {
    "pit_s_distilled_224": ["head", "head_dist"],
    "deit_tiny_distilled_patch16_224": ["head", "head_dist"],
    "efficientformer_l1": ["head", "head_dist"],
    "efficientformerv2_s0": ["head", "head_dist"],
    "swiftformer_xs": ["head", "head_dist"],
    "levit_128s": ["head.linear", "head_dist.linear"],
    "repvit_m0_9": ["head.head.l", "head.head_dist.l"],
    "crossvit_tiny_240": ["head.0", "head.1"],
    "volo_d1_224": ["aux_head", "head"],
    "efficientvim_m1": ["heads.0", "heads.1", "heads.2", "heads.3"],
}
if not timm.is_model("efficientvim_m1"):
    del HEADS["efficientvim_m1"]  # timm 1.0.27 has no such network
ORDINARY = {
    "resnet18": "fc",
    "vit_tiny_patch16_224": "head",
    "mobilenetv3_small_050": "classifier",
    "convnext_atto": "head.fc",  # a NormMlpClassifierHead
    "hiera_tiny_224": "head.fc",  # a ClNormMlpClassifierHead
    "maxvit_rmlp_pico_rw_256": "head.fc",
    "davit_tiny": "head.fc",
    "caformer_s18": "head.fc.fc2",  # has a hidden layer, which is no output
    "dla34": "fc",  # a convolution
    "inception_v4": "last_linear",
    "mixer_s32_224": "head",
}
# Their classifiers are of the kinds of others.
ALIKE = {"efficientformer_l1", "efficientformerv2_s0", "swiftformer_xs", "maxvit_rmlp_pico_rw_256", "mixer_s32_224"}


def on_no_device(name, **options):
    with shapes_alone():
        return timm.create_model(name, **{"num_classes": CLASSES, **options})


def names(model, layers):
    return [name for name, module in model.named_modules() if any(module is layer for layer in layers)]


@pytest.mark.parametrize(
    "arch", [pytest.param(one, marks=[pytest.mark.thorough] * (one in ALIKE)) for one in (*HEADS, *ORDINARY)]
)
def test_the_output_layers_are_all_that_give_a_number_a_class(arch):
    model = on_no_device(arch)
    expected = HEADS.get(arch) or [ORDINARY[arch]]
    assert names(model, output_layers(model)) == expected
    widths = {
        name: len(layer.weight) for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)
    }
    assert [name for name, width in widths.items() if width == CLASSES] == expected


def test_a_class_that_is_put_over_the_networks_changes_no_output_layer():
    """As torch's FSDP does."""
    model = on_no_device("volo_d1_224")
    model.__class__ = type("Sharded", (type(model),), {"__module__": "elsewhere"})
    assert names(model, output_layers(model)) == HEADS["volo_d1_224"]


@pytest.mark.parametrize("arch", ["resnet18", "vgg11", "squeezenet1_0", "mobilenet_v3_small", "vit_b_16", "swin_t"])
def test_a_network_of_torchvision_has_one_its_last_linear_layer_or_convolution(arch):
    with shapes_alone():
        (layer,) = output_layers(torchvision.models.get_model(arch, num_classes=CLASSES))
    assert len(layer.weight) == CLASSES


@pytest.mark.parametrize("arch", ["fc", "conv2", "vgg11"])
def test_so_has_an_own_network(arch):
    (layer,) = output_layers(build_model(parse(["--arch", arch]).model, classes=CLASSES, channels=1, image_size=8))
    assert len(layer.weight) == CLASSES


def test_where_the_classifier_is_nothing_the_last_layer_counts():
    model = on_no_device("resnet18", num_classes=0)
    assert isinstance(model.get_classifier(), nn.Identity)
    assert names(model, output_layers(model)) == ["layer4.1.conv2"]


@pytest.mark.parametrize("arch", ["deit_tiny_distilled_patch16_224", "crossvit_tiny_240"])
def test_muon_leaves_all_heads_to_adamw(arch):
    model = on_no_device(arch)
    muon, adamw = build_optimizers(OptimisationSettings(optimizer="muon", lr=0.01), model)
    taken = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in (muon, adamw)]
    heads = [parameter for name in HEADS[arch] for parameter in model.get_submodule(name).parameters()]
    assert all(id(parameter) in taken[1] and id(parameter) not in taken[0] for parameter in heads)
    assert len(taken[0]) > 10


def test_adaptive_clipping_leaves_all_heads_alone():
    torch.manual_seed(0)
    model = timm.create_model("crossvit_tiny_240", num_classes=CLASSES)
    optimizer = torch.optim.SGD(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    GradientClipper(OptimisationSettings(clip_grad_agc=0.01), model, [optimizer], each_skips=False)()
    alone = [name for name, parameter in model.named_parameters() if (parameter.grad == 1).all()]
    assert alone == ["head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias"]
