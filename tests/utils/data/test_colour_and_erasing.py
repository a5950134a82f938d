"""Colour jitter, grey, blur, rotation and random erasing against torchvision's and timm's own."""

from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from timm.data.random_erasing import RandomErasing as TimmErasing
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as vision

from tests.utils.data import loading
from tests.utils.data.loading import augmented, is_the_same_in_any_batch_and_memory_format, samples_of
from utils.config.groups.augmentation import AugmentationSettings
from utils.data.augment.colour import JITTER, ColorJitter
from utils.data.augment.erasing import RandomErasing
from utils.data.augment.operations import Canvas, apply_layers
from utils.data.augmentations import Context, build_augmentations
from utils.data.transforms import BatchTransform

COUNT = 4000
MEAN = (0.49, 0.48, 0.45)


def images_of(count, *shape):
    images = loading.images_of(count, *shape)
    images[0] = images[0, :1]  # grey
    return images


def only(**settings):
    """The one augmentation that these settings switch on."""
    (augmentation,) = build_augmentations((), Context(AugmentationSettings(**settings), 2, 32, mean=MEAN))
    return augmentation


# ------------------------------------------------------------------------------------------ colour


@pytest.mark.parametrize("size", [(32, 32), (13, 20)])
def test_hue_is_torchvisions_to_the_pixel(size):
    shifts = np.linspace(-0.5, 0.5, 21)[:, None]
    images = images_of(21, 3, *size)
    found = apply_layers(images, ["Hue"], np.zeros((21, 1), int), shifts, Canvas())
    for image, one, shift in zip(images, found, shifts[:, 0], strict=True):
        assert torch.equal(one, vision.adjust_hue(image, float(shift)))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(32, 32), (20, 28)])
def test_blur_is_torchvisions_but_for_ties(channels, size):
    sigmas = np.array([0.1, 0.3, 0.7, 1.0, 1.5, 2.0])[:, None]
    images = images_of(6, channels, *size)
    found = apply_layers(images, ["GaussianBlur"], np.zeros((6, 1), int), sigmas, Canvas())
    for image, one, sigma in zip(images, found, sigmas[:, 0], strict=True):
        differences = (one.int() - vision.gaussian_blur(image, [23, 23], [float(sigma)] * 2).int()).abs()
        assert differences.max() <= 1 and differences.float().mean() < 0.005


def test_blur_takes_images_smaller_than_its_reach():
    blurred = augmented(only(gaussian_blur_prob=1.0), images_of(10, 1, 4, 3))
    assert blurred.shape == (10, 1, 4, 3)


def test_color_jitter_is_torchvisions_with_the_same_factors_in_the_same_order():
    images = images_of(60)
    jitter = ColorJitter((0.4, 0.5, 1.2, 0.1))
    orders, factors = jitter.draw(samples_of(60), 32, 32)
    adjust = {
        "Brightness": vision.adjust_brightness,
        "Contrast": vision.adjust_contrast,
        "Color": vision.adjust_saturation,
        "Hue": vision.adjust_hue,
    }
    for image, one, order, values in zip(images, jitter.apply(images, orders, factors), orders, factors, strict=True):
        for which, value in zip(order, values, strict=True):
            image = adjust[JITTER[which]](image, float(value))
        assert torch.equal(one, image)


def test_color_jitter_draws_as_torchvision_does():
    amounts = (0.4, 0.0, 1.2, 0.1)
    jitter = ColorJitter(amounts, 0.7)
    theirs = v2.ColorJitter(*amounts)
    orders, factors = jitter.draw(samples_of(COUNT), 32, 32)
    applied = (orders >= 0).any(1)
    assert stats.binomtest(int(applied.sum()), COUNT, 0.7).pvalue > 1e-3
    assert ((orders[applied] >= 0).sum(1) == 3).all()  # contrast never
    torch.manual_seed(0)
    reference = [theirs.make_params([]) for _ in range(1500)]
    names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
    for which, name in enumerate(names):
        if which != 1:
            mine = factors[orders == which]
            assert stats.ks_2samp(mine, [one[name] for one in reference]).pvalue > 1e-3
    sequences = [tuple(which for which in row if which >= 0) for row in orders[applied].tolist()]
    counts = [sequences.count(each) for each in set(sequences)]
    assert len(counts) == 6 and stats.chisquare(counts).pvalue > 1e-3


def test_one_amount_is_for_brightness_contrast_and_saturation_as_in_timm():
    assert ColorJitter.of((0.4,), 1.0).amounts == (0.4, 0.4, 0.4, 0.0)
    assert ColorJitter.of((0.4, 0.3, 0.2), 1.0).amounts == (0.4, 0.3, 0.2, 0.0)
    assert ColorJitter.of((0.4, 0.3, 0.2, 0.1), 1.0).amounts == (0.4, 0.3, 0.2, 0.1)


def test_grayscale_is_torchvisions_for_the_asked_fraction_and_nothing_for_the_others():
    images = images_of(1000)[1:]
    found = augmented(only(grayscale_prob=0.3), images)
    grey = (found == vision.rgb_to_grayscale(images, 3)).flatten(1).all(1)
    same = (found == images).flatten(1).all(1)
    assert (grey ^ same).all() and stats.binomtest(int(grey.sum()), 999, 0.3).pvalue > 1e-3


def test_rotation_is_torchvisions_of_any_angle_up_to_the_limit():
    images = images_of(60)
    rotation = only(rotation=20.0)
    choices, angles = rotation.draw(samples_of(60), 32, 32)
    for image, one, angle in zip(images, rotation.apply(images, choices, angles), angles[:, 0], strict=True):
        assert torch.equal(one, vision.rotate(image, float(angle)))
    _, angles = rotation.draw(samples_of(COUNT), 32, 32)
    assert stats.kstest(angles[:, 0], stats.uniform(-20, 40).cdf).pvalue > 1e-3


# ----------------------------------------------------------------------------------------- erasing


def erased(mode, probability=1.0, count=1, images=COUNT, channels=1, size=(24, 32), level=9.0):
    ones = torch.full((images, channels, *size), level)
    return augmented(RandomErasing(probability, mode, count), ones)


def sides_of(images):
    """(area, top, left, height, width) of the one box in each image of nines; those without are left out."""
    found = []
    for mask in (images[:, 0] != 9).numpy():
        rows = np.flatnonzero(mask.any(1))
        columns = np.flatnonzero(mask.any(0))
        if len(rows):
            height = rows[-1] - rows[0] + 1
            width = columns[-1] - columns[0] + 1
            assert mask.sum() == height * width  # a box
            found.append((height * width, rows[0], columns[0], height, width))
    return np.array(found)


def test_boxes_have_the_distribution_of_timms():
    theirs = TimmErasing(0.8, mode="const", device="cpu")
    reference = sides_of(theirs(torch.full((2500, 1, 24, 32), 9.0)))
    mine = sides_of(erased("const", 0.8))
    assert stats.binomtest(len(mine), COUNT, len(reference) / 2500).pvalue > 1e-4
    for column in range(5):
        assert stats.ks_2samp(mine[:, column], reference[:, column]).pvalue > 1e-3


def test_several_boxes_share_the_area_as_in_timm():
    theirs = TimmErasing(1.0, mode="const", device="cpu", max_count=3)
    reference = (theirs(torch.full((2500, 1, 24, 32), 9.0)) != 9).sum((1, 2, 3))
    mine = (erased("const", count=3) != 9).sum((1, 2, 3))
    assert stats.ks_2samp(mine.numpy(), reference.numpy()).pvalue > 1e-3


def test_a_constant_box_is_the_mean_a_random_one_has_one_colour_and_pixels_are_noise():
    assert set(erased("const").unique().tolist()) == {0.0, 9.0}
    colours = erased("rand", channels=3)
    assert sides_of(colours).shape[0] > 0.99 * COUNT
    boxes = [image[:, (image != 9).all(0)] for image in colours]
    firsts = torch.stack([box[:, 0] for box in boxes if box.numel()])
    assert all((box == box[:, :1]).all() for box in boxes)
    assert abs(np.corrcoef(firsts.T.numpy()) - np.eye(3)).max() < 0.06
    noise = erased("pixel", channels=3, images=300)
    flat = noise[noise != 9].numpy()
    for values in (firsts.flatten().numpy(), flat[::5]):
        assert stats.kstest(values, "norm").pvalue > 1e-3
    assert len(np.unique(flat)) > 0.5 * 2**16  # pixels, channels and images differ
    assert abs(np.corrcoef(flat[:-1], flat[1:])[0, 1]) < 0.01


def test_erasing_applies_to_what_the_network_sees():
    values = {"size": 16, "mean": MEAN, "std": (0.25,) * 3}
    images = images_of(50, 3, 24, 24)
    numbers = np.arange(50)
    plain = BatchTransform(**values).training(images, numbers, 0)
    shown = BatchTransform(**values, augmentations=(RandomErasing(1.0),)).training(images, numbers, 0)
    changed = shown != plain
    assert changed.flatten(1).any(1).float().mean() > 0.95 and (shown[changed] == 0).all()


# -------------------------------------------------------------------------------------- all of them

ALL = {
    "color_jitter": (0.4, 0.4, 0.4, 0.1),
    "grayscale_prob": 0.5,
    "gaussian_blur_prob": 0.5,
    "rotation": 30.0,
    "random_erase": 0.7,
}


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_a_sample_is_the_same_in_any_batch_and_memory_format(mode):
    settings = AugmentationSettings(**ALL, random_erase_mode=mode, random_erase_count=2)
    chosen = build_augmentations(("vertical-flip",), Context(settings, 2, 16, mean=MEAN))
    assert len(chosen) == 6
    transform = BatchTransform(16, MEAN, (0.25,) * 3, chosen)
    assert is_the_same_in_any_batch_and_memory_format(transform, images_of(40, 3, 16, 16))


def test_compiled_policies_and_erasing_show_the_same(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # the graphs are what is tested
    settings = AugmentationSettings(auto_augment="ra", random_erase=0.5, random_erase_mode="pixel")
    chosen = build_augmentations(("flip",), Context(settings, 2, 16, mean=MEAN))
    images = images_of(10, 3, 16, 16)
    numbers = np.arange(10)
    plain, compiled = (
        BatchTransform(16, MEAN, (0.25,) * 3, chosen, compiled=on).training(images, numbers, 0) for on in (False, True)
    )
    torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-5)
