"""Images that are not square, from the flag to the network: each side is its own, and a square stays one number."""

import math

import numpy as np
import pytest
import timm
import torch
from torchvision.transforms.v2 import functional

from models.build import build_model
from models.load import load_model
from tests.helpers import trained
from utils.config.arguments import parse
from utils.config.groups.model import ModelSettings
from utils.config.image_size import sides, size_of
from utils.config.settings import UserError
from utils.data.augment.base import Samples, Stream
from utils.data.augmentations import Cutout, ResizedCrop, Shift, resized_crop
from utils.data.preprocessing import Preprocessing
from utils.data.transforms import BatchTransform

COUNT = 400
SAMPLES = Samples(0, 0, np.arange(COUNT))
HEIGHT, WIDTH = 12, 20


def coordinates():
    """Images whose two channels are the row and the column of each pixel: uint8 (COUNT, 2, HEIGHT, WIDTH)."""
    rows, columns = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    return (torch.stack([rows, columns]) + 1).to(torch.uint8).expand(COUNT, -1, -1, -1).contiguous()


@pytest.mark.parametrize(
    ("flags", "size"), [(("16",), 16), (("16", "16"), 16), (("12", "20"), (12, 20)), (("20", "12"), (20, 12))]
)
def test_one_number_is_a_square_and_two_are_height_and_width(flags, size, recipe):
    assert parse(["--image-size", *flags], 1).data.image_size == size
    assert parse(["--config", recipe(f"image-size: [{', '.join(flags)}]\n")], 1).data.image_size == size
    assert size_of(*sides(size)) == size


@pytest.mark.parametrize(("reach", "pixels"), [(None, [HEIGHT // 8, WIDTH // 8]), (3, [3, 3])])
def test_a_shift_moves_each_axis_by_up_to_an_eighth_of_its_own_side_unless_told(reach, pixels):
    images = coordinates()
    shift = Shift(reach)
    shifted = shift.apply(images, *shift.prepared(HEIGHT, WIDTH, *shift.draw(SAMPLES, HEIGHT, WIDTH)))
    most = torch.tensor(pixels)
    offsets = (torch.from_numpy(SAMPLES.uniforms(Stream.SHIFT, 2)) * (2 * most + 1)).long() - most
    assert torch.equal(offsets.amax(0), most) and torch.equal(offsets.amin(0), -most)
    for image, moved, (down, across) in zip(images, shifted, offsets.tolist(), strict=True):
        expected = functional.affine(image, angle=0, translate=[-across, -down], scale=1, shear=[0, 0])
        assert torch.equal(moved, expected)


@pytest.mark.parametrize("side", [1, 2, 3, 4, 40])
def test_cutouts_are_squares_with_their_centres_all_over_the_image(side):
    cutout = Cutout(side, (HEIGHT, WIDTH))
    (centres,) = cutout.draw(SAMPLES, 8, 8)  # stored images have another size
    assert torch.equal(centres, (torch.from_numpy(SAMPLES.uniforms(Stream.CUTOUT, 2)) * torch.tensor([12, 20])).long())
    assert centres.amax(0).tolist() == [HEIGHT - 1, WIDTH - 1] and centres.amin(0).tolist() == [0, 0]
    holes = cutout.apply(torch.ones(COUNT, 3, HEIGHT, WIDTH), centres) == 0
    for hole, (row, column) in zip(holes, centres.tolist(), strict=True):
        expected = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.bool)
        top, left = row - side // 2, column - side // 2
        expected[:, max(0, top) : top + side, max(0, left) : left + side] = True
        assert torch.equal(hole, expected)


def test_a_whole_crop_is_the_image_resized_to_height_and_width():
    """At uniform numbers of 1 the box is the image's whole area, with a ratio that it is narrowed to."""
    images = torch.rand(3, 2, 30, 40) * 255
    ratio = math.log(40 / 30) / math.log((4 / 3) ** 2) + 0.5  # the place of the image's own ratio among those drawn
    uniforms = torch.tensor([[1.0, ratio, 0.5, 0.5]]).expand(3, -1)
    expected = torch.nn.functional.interpolate(images, (12, 20), mode="bilinear", align_corners=False)
    # the box is a float32 product of roots, so places are off by about 40 pixels x 1e-6
    torch.testing.assert_close(resized_crop(images, uniforms, (12, 20)), expected, rtol=0, atol=0.05)


def test_evaluation_crops_the_middle_of_each_side():
    """As torchvision: resized to floor(side / share), then the middle."""
    images = torch.randint(0, 256, (5, 3, 10, 14), dtype=torch.uint8)
    shown = BatchTransform((HEIGHT, WIDTH), (0.0,) * 3, (1.0,) * 3, crop_pct=0.8).evaluation(images)
    whole = functional.resize(images.float(), [15, 25], antialias=True)
    torch.testing.assert_close(shown, functional.center_crop(whole, [HEIGHT, WIDTH]) / 255)


@pytest.mark.parametrize("channels_last", [False, True])
def test_training_gives_images_of_height_and_width(channels_last):
    images = torch.randint(0, 256, (8, 3, 24, 24), dtype=torch.uint8)
    steps = (ResizedCrop((HEIGHT, WIDTH)), Cutout(2, (HEIGHT, WIDTH)))
    transform = BatchTransform((HEIGHT, WIDTH), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), steps, channels_last=channels_last)
    shown = transform.training(images, np.arange(8), 0)
    assert shown.shape == (8, 3, HEIGHT, WIDTH) and (shown == 0).all(1).flatten(1).any(1).all(), "of the mean is a hole"
    assert transform.at_size((6, 10)).training(images, np.arange(8), 0).shape == (8, 3, 6, 10)


@pytest.mark.parametrize(
    "arch",
    [
        *("fc", "conv6", "conv6a", "vgg11", "airbench"),  # of each class one that pools most often
        *("timm/test_resnet", "timm/test_vit", "timm/test_convnext", "torchvision/squeezenet1_1"),
    ],
)
def test_networks_are_built_for_images_that_are_not_square(arch):
    size = (32, 48) if "/" in arch else (HEIGHT, 9)
    model = build_model(ModelSettings(arch=arch), classes=3, channels=2 if "/" not in arch else 3, image_size=size)
    assert model.eval()(torch.randn(2, 2 if "/" not in arch else 3, *size)).shape == (2, 3)


def test_a_vision_transformer_is_timms_of_that_height_and_width():
    built = build_model(ModelSettings(arch="vit_tiny_patch16_224"), classes=5, channels=3, image_size=(32, 80))
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=(32, 80))
    assert built.pos_embed.shape == theirs.pos_embed.shape == (1, 1 + 2 * 5, 192)


def test_torchvisions_vision_transformers_are_refused_in_one_line():
    with pytest.raises(UserError, match="square images only, not 32x48"):
        build_model(ModelSettings(arch="torchvision/vit_b_16"), classes=5, channels=3, image_size=(32, 48))


def test_a_run_on_images_that_are_not_square_is_kept_as_it_was(tmp_path):
    flags = "--arch conv2 --image-size 12 20 --epochs 1 --max-steps 2 --cutout 3 --rotation 5 --auto-augment rand"
    run = trained(tmp_path, *flags.split(), *"--mixup 0.2 --cutmix 1 --tta flip-shift".split())
    assert "size12_20" in run.name
    loaded = load_model(run)
    assert loaded.preprocessing.image_size == loaded.preprocessing.val_image_size == (12, 20)
    assert Preprocessing.from_state(loaded.preprocessing.state(), "here") == loaded.preprocessing
    assert loaded.network(torch.zeros(1, 1, 12, 20)).shape == (1, 10)
