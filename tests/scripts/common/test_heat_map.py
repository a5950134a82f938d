"""Heat maps: right where the answer is known, at the right layer, and a function of the trained weights."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torchvision.models import get_model

from models.small import OWN
from scripts.common.heat_map import explained_layer, heat_map, method, overlay
from utils.config.settings import UserError

SIZE = 16
PATCH = 4


def loaded(network):
    """The part of a ``Loaded`` that ``heat_map`` needs."""
    return SimpleNamespace(network=network.eval())


def striped(count, seed):
    """Noise with a patch of vertical (class 0) or horizontal (class 1) stripes somewhere: images, classes, masks."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.5 * torch.randn(count, 1, SIZE, SIZE, generator=generator)
    classes = torch.randint(2, (count,), generator=generator)
    places = torch.randint(SIZE - PATCH + 1, (count, 2), generator=generator)
    stripes = torch.tensor([1.0, 1.0, -1.0, -1.0]).expand(PATCH, PATCH)
    masks = torch.zeros(count, SIZE, SIZE, dtype=torch.bool)
    for image, label, (top, left), mask in zip(images, classes, places.tolist(), masks, strict=True):
        image[0, top : top + PATCH, left : left + PATCH] += 1.5 * (stripes.T if label else stripes)
        mask[top : top + PATCH, left : left + PATCH] = True
    return images, classes, masks


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


@pytest.fixture(scope="module")
def trained():
    """A network that tells the stripes apart."""
    torch.manual_seed(0)
    network = convolutional()
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    images, classes, _ = striped(2000, seed=1)
    for step in range(100):
        part = slice(20 * step, 20 * step + 20)
        functional.cross_entropy(network(images[part]), classes[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return network.eval()


def test_the_patch_that_decides_the_class_lights_up(trained):
    images, classes, masks = striped(100, seed=2)
    assert (trained(images).argmax(1) == classes).float().mean() > 0.97, "the network has learned the patch"
    maps = torch.from_numpy(heat_map(loaded(trained), images, classes))
    assert maps.dtype == torch.float32 and maps.shape == (100, SIZE, SIZE)
    assert maps.min() >= 0 and torch.equal(maps.amax((1, 2)), torch.ones(100))
    near = functional.max_pool2d(masks[:, None].float(), 3, 1, 1).flatten(1)  # a cell of the map is two pixels wide
    assert near.gather(1, maps.flatten(1).argmax(1, keepdim=True)).mean() > 0.95
    assert ((maps * masks).sum((1, 2)) / maps.sum((1, 2))).mean() > 0.35, "a 16th of the pixels has most of the heat"


def test_it_is_grad_cam_as_its_formula_says(trained):
    images, classes, _ = striped(5, seed=3)
    features = trained[:6](images).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(trained[6:](features).gather(1, classes[:, None]).sum(), features)
    map_ = (gradient.mean((2, 3), keepdim=True) * features).sum(1, keepdim=True).relu()
    map_ = functional.interpolate(map_, (SIZE, SIZE), mode="bilinear")[:, 0].detach()
    expected = (map_ / map_.amax((1, 2), keepdim=True)).numpy()
    np.testing.assert_allclose(heat_map(loaded(trained), images, classes), expected, atol=1e-5)


def test_a_fully_connected_network_gets_the_gradient_of_its_pixels():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    weights = torch.zeros(2, 64)
    weights[1, 8 * 2 + 5], weights[1, 8 * 6 + 1] = -3.0, 1.5  # row 2, column 5; row 6, column 1
    network[1].weight.data = weights
    images = torch.randn(1, 1, 8, 8)
    expected = np.zeros((1, 8, 8), np.float32)
    expected[0, 2, 5] = 1.0
    expected[0, 6, 1] = 0.5
    np.testing.assert_allclose(heat_map(loaded(network), images, [1]), expected)
    assert method(loaded(network), images).startswith("gradient with respect to the pixels")


class Tokens(nn.Module):
    """The same network whose map is laid out as (n, c, h, w), (n, h, w, c), or tokens after two prefix tokens."""

    def __init__(self, layout):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.layout = layout
        self.inside = nn.GELU()
        self.last = nn.Flatten(0, 0)  # does nothing, but is a layer: the one that hands the map over

    def forward(self, images):
        cells = self.inside(self.mix(self.embed(images).permute(0, 2, 3, 1)))
        if self.layout == "nchw":
            return self.head(self.last(cells.permute(0, 3, 1, 2)).mean((2, 3)))
        if self.layout == "nhwc":
            return self.head(self.last(cells).mean((1, 2)))
        prefix = torch.full((len(images), 2, 8), 9.0)
        return self.head(self.last(torch.cat([prefix, cells.flatten(1, 2)], dim=1))[:, 2:].mean(1))


def test_a_map_does_not_depend_on_how_the_network_lays_it_out():
    images = torch.randn(3, 3, 24, 24)
    expected = heat_map(loaded(Tokens("nchw")), images, [0, 1, 2])
    assert expected.max() == 1 and method(loaded(Tokens("nchw")), images) == "Grad-CAM at last"
    for layout in ("nhwc", "tokens"):
        network = Tokens(layout)
        np.testing.assert_allclose(heat_map(loaded(network), images, [0, 1, 2]), expected, atol=1e-5)
        assert method(loaded(network), images) == "HiResCAM of the patch tokens at last"


def hiera(size, **more):
    network = timm.create_model("hiera_tiny_224", img_size=size, embed_dim=24, stages=(1, 1, 1, 1), **more)
    nn.init.normal_(network.head.fc.weight)  # zeros in timm
    return network


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        (lambda: OWN["conv2"](10, 1, 8), (1, 8), "Grad-CAM at features"),
        (lambda: OWN["conv4a"](10, 3, 32), (3, 32), "Grad-CAM at features.9"),  # the last max-pool
        (lambda: OWN["vgg11"](10, 3, 32), (3, 32), "Grad-CAM at features.20"),  # 4 x 4; the last stage has 2 x 2
        (lambda: timm.create_model("test_resnet"), (3, 128), "Grad-CAM at layer4"),
        (lambda: timm.create_model("test_convnext"), (3, 128), "Grad-CAM at stages"),
        (lambda: timm.create_model("mobilenetv3_small_050"), (3, 128), "Grad-CAM at blocks"),
        (lambda: timm.create_model("test_vit"), (3, 160), "HiResCAM of the patch tokens at blocks.5.norm1"),
        (
            lambda: timm.create_model("test_vit", class_token=False, global_pool="avg"),
            (3, 160),
            "HiResCAM of the patch tokens at blocks",
        ),
        (
            lambda: timm.create_model(
                "swin_tiny_patch4_window7_224",
                img_size=64,
                window_size=4,
                patch_size=2,
                embed_dim=24,
                depths=(1, 1, 1, 1),
                num_heads=(1, 2, 3, 4),
            ),
            (3, 64),
            "HiResCAM of the patch tokens at norm",
        ),
        (lambda: hiera(128), (3, 128), "HiResCAM of the patch tokens at blocks.3"),
        (lambda: hiera(64), (3, 64), "Grad-CAM at patch_embed.proj"),  # 2 x 2 tokens at last, before that out of order
        (lambda: nn.Sequential(hiera(64)), (3, 64), "Grad-CAM at 0.patch_embed.proj"),
        (lambda: hiera(128, q_pool=2), (3, 128), "Grad-CAM at patch_embed.proj"),  # never in order
        (lambda: get_model("mobilenet_v3_small"), (3, 128), "Grad-CAM at features"),
        (lambda: get_model("squeezenet1_1"), (3, 96), "Grad-CAM at classifier.2"),  # already a map of each class
    ],
)
def test_the_layer_is_the_last_whose_map_can_be_seen_and_counts(make, shape, expected):
    torch.manual_seed(0)
    network = loaded(make())
    images = torch.randn(1, shape[0], shape[1], shape[1])
    assert method(network, images) == expected
    map_ = heat_map(network, images, [0])
    assert map_.shape == (1, shape[1], shape[1]) and np.isfinite(map_).all()


def test_nothing_is_left_behind_and_the_callers_mode_does_not_matter(trained):
    images, classes, _ = striped(3, seed=6)
    before = trained(images)
    expected = heat_map(loaded(trained), images, classes)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            np.testing.assert_array_equal(heat_map(loaded(trained), images.clone(), classes), expected)
    assert torch.equal(trained(images), before) and all(p.grad is None for p in trained.parameters())
    assert not any(module._forward_hooks for module in trained.modules())


def test_a_class_that_nothing_speaks_for_has_an_empty_map(trained):
    network = convolutional()
    with torch.no_grad():
        network[-1].weight.fill_(-1.0)  # features are never negative
    assert not heat_map(loaded(network), torch.randn(2, 1, SIZE, SIZE), [0, 1]).any()


def test_a_frozen_network_has_its_map_and_one_that_passes_no_gradient_on_none(trained):
    images, classes, _ = striped(2, seed=4)
    frozen = copy.deepcopy(trained).requires_grad_(False)
    np.testing.assert_array_equal(heat_map(loaded(frozen), images, classes), heat_map(loaded(trained), images, classes))

    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = trained[:-1]
            self.head = trained[-1]

        def forward(self, images):
            with torch.no_grad():
                features = self.backbone(images)
            return self.head(features)

    with pytest.raises(UserError, match="no heat map: the network passes no gradient on to its images"):
        heat_map(loaded(Probe()), images, classes)


def test_outputs_that_are_not_finite_are_refused(trained):
    with pytest.raises(UserError, match="not finite"):
        heat_map(loaded(trained), torch.full((1, 1, SIZE, SIZE), torch.nan), [0])


def test_the_overlay_shows_the_image_where_it_is_cold_and_covers_where_it_is_hot():
    pixels = torch.rand(3, 6, 5)
    heat = np.zeros((6, 5), np.float32)
    heat[4, 1] = 1
    picture = np.asarray(overlay(pixels, heat)).astype(int)
    image = pixels.permute(1, 2, 0).mul(255).round().int().numpy()
    changed = np.abs(picture - image).max(2) > 0
    assert isinstance(overlay(pixels, heat), Image.Image) and np.argwhere(changed).tolist() == [[4, 1]]
    assert np.asarray(overlay(torch.rand(1, 6, 5), heat)).shape == (6, 5, 3), "grey images are shown, too"


def test_the_map_of_images_that_are_not_square_has_their_shape():
    images = torch.randn(2, 3, 64, 96)
    vit = timm.create_model("test_vit", num_classes=2, img_size=(64, 96)).eval()
    layer = explained_layer(vit, images)
    assert layer.layout == "tokens" and layer.prefix == 1
    tokens = torch.arange(1 + 4 * 6.0).view(1, -1, 1).expand(2, -1, 8)
    assert torch.equal(layer.to_map(tokens)[0, 0], torch.arange(1.0, 25).view(4, 6))
    resnet = timm.create_model("test_resnet", num_classes=2).eval()
    assert explained_layer(resnet, images).layout == "nchw"
    assert heat_map(loaded(resnet), images, [0, 1]).shape == (2, 64, 96)
