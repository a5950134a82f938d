"""Each operation of the policies against torchvision's own, to the pixel, at each magnitude of its tables."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from tests.utils.data import loading
from utils.data.augment.operations import Canvas, apply_layers, whole_levels

SPACES = {
    "RandAugment": (v2.RandAugment(), 31),
    "TrivialAugmentWide": (v2.TrivialAugmentWide(), 31),
    "AutoAugment": (v2.AutoAugment(), 10),
    "AugMix": (v2.AugMix(), 10),
}
RELATIVE = ("Brightness", "Color", "Contrast", "Sharpness")  # torchvision adds one to their magnitude


def images_of(*shape):
    images = loading.images_of(*shape)
    images[1::4] = 40 + images[1::4] // 3  # little contrast
    images[2::4, :, : shape[2] // 2] = 0  # few levels
    images[3::4] = 77  # a single one
    return images


def cases_of(space, height, width):
    """All (operation, magnitude) of a table of torchvision."""
    transform, bins = SPACES[space]
    for name, (magnitudes, signed) in transform._AUGMENTATION_SPACE.items():
        table = magnitudes(bins, height, width)
        for magnitude in [0.0] if table is None else table.tolist():
            yield from ((name, sign * magnitude) for sign in ((1, -1) if signed else (1,)))


def argument_of(name, magnitude):
    if name.startswith("Translate"):
        return float(int(magnitude))
    return 1 + magnitude if name in RELATIVE else 255 * magnitude if name == "Solarize" else magnitude


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 28, 28), (3, 13, 18)])
def test_each_operation_at_each_magnitude_is_torchvisions_to_the_pixel(space, channels, height, width):
    check(SPACES[space][0], list(cases_of(space, height, width)), channels, height, width)


@pytest.mark.parametrize(
    ("height", "width", "fill"), [(190, 200, (10, 200, 77)), (20, 30, ()), (20, 30, (10, 200, 77))]
)
def test_large_images_and_colours_outside_too(height, width, fill):
    """Large images are worked on one by one, and places far outside are of the colour, too."""
    cases = [case for k, case in enumerate(cases_of("RandAugment", height, width)) if k % 11 == 0]
    cases += [
        ("AutoContrast", 0.0),
        ("Equalize", 0.0),
        ("TranslateX", 0.2),
        ("TranslateX", 500.0),
        ("TranslateY", -7.0),
    ]
    assert {name for name, _ in cases} == set(SPACES["RandAugment"][0]._AUGMENTATION_SPACE)
    check(v2.RandAugment(fill=list(fill) or None), cases, 3, height, width, fill)


def check(transform, cases, channels, height, width, fill=()):
    images = images_of(len(cases), channels, height, width)
    given = images.clone()
    names = sorted({name for name, _ in cases})
    interpolation = str(getattr(transform.interpolation, "value", transform.interpolation))
    arguments = np.array([[argument_of(name, magnitude)] for name, magnitude in cases])
    choices = np.array([[names.index(name)] for name, _ in cases])
    found = apply_layers(images, names, choices, arguments, Canvas(interpolation, fill))
    assert torch.equal(images, given)
    for (name, magnitude), image, one in zip(cases, images, found, strict=True):
        expected = transform._apply_image_or_video_transform(
            image, name, magnitude, transform.interpolation, transform._fill
        )
        assert torch.equal(one, expected), (name, magnitude, (one != expected).sum())


def test_layers_of_large_images_follow_each_other():
    names = ["Equalize", "Rotate", "Invert", "Identity"]
    images = images_of(3, 3, 190, 200)
    choices = np.array([[1, 0], [2, 1], [-1, 3]])
    arguments = np.full((3, 2), 12.0)
    found = apply_layers(images.contiguous(memory_format=torch.channels_last), names, choices, arguments, Canvas())
    for layer in (0, 1):
        images = apply_layers(images, names, choices[:, [layer]], arguments[:, [layer]], Canvas())
    assert torch.equal(found, images)


def test_levels_beyond_the_range_are_cut_off_and_do_not_wrap_around():
    assert whole_levels(torch.tensor([-3.0, 0.4, 254.6, 260.0])).tolist() == [0, 0, 255, 255]
