"""Networks by name: sizes, stems, channels and answers to what cannot be built."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import timm
import torch
import torchvision
from torch import nn

from models import initialisation
from models.build import OWN, _fit_last_layer, build_model, locate, unknown_arch
from models.prepare import Prepared, channels_last_is_faster
from tests.helpers import equal, mistakes_of
from utils.config.groups.model import ModelSettings
from utils.config.settings import UserError


@pytest.fixture
def shapes_alone():
    """Networks and images have no numbers: nothing is drawn or computed, and a shape that does not fit is an error."""
    with initialisation.shapes_alone():
        yield


def build(arch, *, classes=10, channels=3, image_size=32, **settings):
    torch.manual_seed(0)
    return build_model(ModelSettings(arch=arch, **settings), classes=classes, channels=channels, image_size=image_size)


def parameters_of(model):
    return sum(parameter.numel() for parameter in model.parameters())


def answer(model, channels, size, count=2):
    with torch.no_grad():
        return model.eval()(torch.zeros(count, channels, size, size))


@pytest.mark.parametrize(
    ("arch", "channels", "image_size", "weights", "biases"),
    [
        # 784 x 300 + 300 x 100 + 100 x 10 (LeCun et al., 1998)
        ("fc", 1, 28, 266_200, 300 + 100 + 10),
        # Zhou et al., Deconstructing lottery tickets, 2019, count the weights of these networks on CIFAR-10
        ("conv2", 3, 32, 4_300_992, 2 * 64 + 2 * 256 + 10),
        ("conv4", 3, 32, 2_425_024, 2 * 64 + 2 * 128 + 2 * 256 + 10),
        ("conv6", 3, 32, 2_261_184, 2 * 64 + 2 * 128 + 2 * 256 + 2 * 256 + 10),
        # convolutions 9 x (3 x 64 + 64 x 64) = 38,592, then 9 x (64 x 128 + 128 x 128) = 221,184 and
        # 9 x (128 x 256 + 256 x 256) = 884,736, without bias; one linear layer of 64, 128 or 256 x 10
        ("conv2a", 3, 32, 38_592 + 640, 10),
        ("conv4a", 3, 32, 38_592 + 221_184 + 1_280, 10),
        ("conv6a", 3, 32, 38_592 + 221_184 + 884_736 + 2_560, 10),
        ("conv2a", 1, 28, 9 * 64 + 9 * 64 * 64 + 640, 10),
        # 9 x (1 x 64 + 64 x 64) + 64 x 14 x 14 x 256 + 256 x 256 + 256 x 10
        ("conv2", 1, 28, 37_440 + 3_211_264 + 65_536 + 2_560, 2 * 64 + 2 * 256 + 10),
        # 64 + 300 x 100 ... on 8 x 8 digits
        ("fc", 1, 8, 64 * 300 + 30_000 + 1_000, 410),
    ],
)
def test_own_network_has_the_published_number_of_parameters(shapes_alone, arch, channels, image_size, weights, biases):
    assert parameters_of(build(arch, channels=channels, image_size=image_size)) == weights + biases


@pytest.mark.parametrize(("arch", "shape"), [("conv2a", (64, 14)), ("conv4a", (128, 7)), ("conv6a", (256, 3))])
def test_a_pooled_network_has_the_convolutions_of_the_other_and_averages_what_they_give(shapes_alone, arch, shape):
    model = build(arch, channels=1, image_size=28)
    other = build(arch[:-1], channels=1, image_size=28)
    seen = []
    model.features[-2].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    answer(model, 1, 28)
    width, side = shape
    assert seen[0].shape == (2, width, side, side)
    kernels = [layer.weight.shape for layer in model.features if isinstance(layer, nn.Conv2d)]
    assert kernels == [layer.weight.shape for layer in other.features if isinstance(layer, nn.Conv2d)]
    assert [name for name, _ in model.named_parameters() if name.endswith("bias")] == ["classifier.bias"]
    assert model.classifier.weight.shape == (10, width)


@pytest.mark.parametrize("depth", [11, 13, 16, 19])
def test_small_vgg_is_torchvisions_convolutions_without_biases_and_one_linear_layer(shapes_alone, depth):
    features = torchvision.models.get_model(f"vgg{depth}_bn").features
    biases = sum(layer.bias.numel() for layer in features if isinstance(layer, nn.Conv2d))
    assert parameters_of(build(f"vgg{depth}")) == parameters_of(features) - biases + 512 * 10 + 10


@pytest.mark.parametrize("arch", OWN)
@pytest.mark.parametrize(("channels", "image_size"), [(1, 1), (3, 32)])  # 28 pixels: tests/end_to_end/test_recipes.py
def test_own_network_takes_images_of_any_size_and_colour(arch, channels, image_size):
    with initialisation.shapes_alone() if arch.startswith("vgg") else nullcontext():
        model = build(arch, channels=channels, image_size=image_size, classes=7)
        assert answer(model, channels, image_size).shape == (2, 7)


def size_before_the_first_stage(model, image_size):
    """Height of what a timm residual network hands to its first stage of blocks."""
    seen = []
    model.layer1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-1]))
    answer(model, 3, image_size, count=1)
    return seen[-1]


@pytest.mark.parametrize(
    ("arch", "image_size"),
    [("resnet18.a1_in1k", 64), ("timm/resnet26d", 32), ("seresnet18", 28), ("resnetaa34d", 32)],
)
def test_residual_network_sees_small_images_in_full_size(shapes_alone, arch, image_size):
    assert size_before_the_first_stage(build(arch, image_size=image_size), image_size) == image_size


def test_stem_for_small_images_is_one_3x3_convolution():
    stem = build("resnet18").conv1
    assert (stem.kernel_size, stem.stride, stem.padding, stem.bias) == ((3, 3), (1, 1), (1, 1), None)
    assert stem.weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.1)  # He et al., fan out


def test_deep_stem_keeps_its_three_3x3_convolutions(shapes_alone):
    model = build("resnet50d")
    convolutions = [layer for layer in model.conv1 if isinstance(layer, nn.Conv2d)]
    assert [(layer.kernel_size, layer.stride) for layer in convolutions] == [((3, 3), (1, 1))] * 3


@pytest.mark.parametrize("image_size", [65, 224])
def test_residual_network_keeps_its_own_stem_for_larger_images(shapes_alone, image_size):
    ours = build("resnet18", image_size=image_size)
    theirs = timm.create_model("resnet18", num_classes=10)
    assert str(ours) == str(theirs)
    assert ours.conv1.kernel_size == (7, 7)


@pytest.mark.parametrize(
    ("arch", "channels", "image_size"),
    [
        ("test_resnet", 1, 28),
        ("vit_tiny_patch16_224", 1, 32),
        ("convnext_atto", 1, 32),
        ("torchvision/squeezenet1_1", 1, 32),
        ("torchvision/mobilenet_v3_small", 1, 32),
        ("torchvision/vit_b_16", 1, 32),
        ("torchvision/googlenet", 1, 64),
    ],
)
def test_library_network_takes_grey_and_colour_images_of_this_size(arch, channels, image_size):
    has_statistics = not any(name in arch for name in ("vit", "convnext", "squeezenet"))
    with nullcontext() if has_statistics else initialisation.shapes_alone():
        model = build(arch, channels=channels, image_size=image_size, classes=7)
        assert answer(model, channels, image_size).shape == (2, 7)
    assert model.training is False and build_leaves_statistics_alone(model)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1"])  # without and with a bias in the first layer
def test_a_torchvision_network_for_grey_images_begins_as_the_librarys_on_equal_channels(name):
    torch.manual_seed(0)
    colour = torchvision.models.get_model(name, num_classes=10).eval()
    grey = build(f"torchvision/{name}", channels=1, image_size=32).eval()
    images = torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        expected = colour(images.expand(-1, 3, -1, -1))
        found = grey(images)
    assert expected.std() > 0
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def build_leaves_statistics_alone(model):
    """The trial image that building ends with must not count in batch norm."""
    return all(not value.any() for name, value in model.named_buffers() if name.endswith("num_batches_tracked"))


def test_weights_are_drawn_from_torchs_global_seed():
    first, again = build("conv2"), build("conv2")
    torch.manual_seed(1)
    other = build_model(ModelSettings(arch="conv2"), classes=10, channels=3, image_size=32)
    assert equal(first.state_dict(), again.state_dict()) and not equal(first.state_dict(), other.state_dict())


def test_a_network_without_convolutions_keeps_its_memory_format():
    assert not channels_last_is_faster(build("fc"), torch.device("cpu"), "off")
    assert channels_last_is_faster(build("conv2"), torch.device("cpu"), "off")


def test_model_is_handed_over_in_training_mode():
    assert all(module.training for module in build("test_resnet").modules())


@pytest.mark.parametrize(
    ("arch", "found"),
    [
        ("vgg16", ("own", "vgg16")),
        ("timm/vgg16", ("timm", "vgg16")),
        ("torchvision/vgg16", ("torchvision", "vgg16")),
        ("resnet18", ("timm", "resnet18")),
        ("shufflenet_v2_x1_0", ("torchvision", "shufflenet_v2_x1_0")),
        ("timm/fc", None),
        ("torchvision/timm/vgg16", None),
        ("hub/resnet18", None),
        ("/resnet18", None),
        ("timm/", None),
    ],
)
def test_name_means_our_network_then_timms_then_torchvisions(arch, found):
    assert locate(arch) == found


def test_every_classifier_of_both_libraries_is_found():
    assert all(locate(f"timm/{name}") == ("timm", name) for name in timm.list_models())
    theirs = torchvision.models.list_models(module=torchvision.models)
    assert {"resnet50", "vit_b_16"} <= set(theirs)
    assert all(locate(f"torchvision/{name}") == ("torchvision", name) for name in theirs)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("resnet19", "resnet18"),
        ("conv5", "conv4"),
        ("vgg17", "vgg16"),
        ("timm/mobilenetv3_smal_100", "mobilenetv3_small_100"),
        ("torchvision/resnet19", "resnet18"),
        ("ResNet18", "resnet18"),
        ("VGG16", "vgg16"),
    ],
)
def test_unknown_name_is_answered_with_the_nearest(wrong, near):
    assert mistakes_of(build, wrong) == [unknown_arch(wrong)]
    assert f"--arch '{wrong}'" in unknown_arch(wrong)
    assert near in unknown_arch(wrong).split("did you mean ")[1]


def test_unknown_name_near_to_nothing_is_answered_with_our_own():
    assert "conv2" in unknown_arch("@@@@")
    assert unknown_arch("yolo11n-cls").endswith("such as torchvision/resnet18; yolo's own are not here")


@pytest.mark.parametrize(
    ("arch", "image_size"),
    [("torchvision/alexnet", 32), ("torchvision/vit_b_16", 30), ("vit_tiny_patch16_224", 8)],
)
def test_images_that_do_not_fit_the_network_are_one_line_about_both(shapes_alone, arch, image_size):
    (line,) = mistakes_of(build, arch, image_size=image_size)
    assert f"--arch {arch}" in line and f"{image_size}-pixel images" in line


def test_own_networks_have_no_pretrained_weights():
    with pytest.raises(UserError, match="--pretrained: there are no pretrained weights of conv2"):
        build("conv2", pretrained=True)


def test_multiply_adds_of_attention_are_counted_in_full():
    """torch counts neither all of its fused kernels nor what its fast path for MultiheadAttention computes."""
    size, patch, layers, width, inner, classes = 32, 8, 2, 32, 64, 10
    network = torchvision.models.VisionTransformer(size, patch, layers, 2, width, inner, num_classes=classes)
    tokens = (size // patch) ** 2 + 1
    layer = tokens * width * (4 * width + 2 * tokens + 2 * inner)
    expected = (tokens - 1) * 3 * patch**2 * width + layers * layer + width * classes
    assert Prepared.multiply_adds(SimpleNamespace(model=network), (3, size, size), torch.device("cpu")) == expected


def test_a_last_layer_without_a_bias_gets_none():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1000, bias=False))
    _fit_last_layer(model, 3)
    assert [*model.state_dict()] == ["0.weight", "0.bias", "1.weight"] and model[1].weight.shape == (3, 8)
