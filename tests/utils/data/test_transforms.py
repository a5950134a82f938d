"""Augmentation and normalisation against torchvision's own functions."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch._dynamo.testing import CompileCounterWithBackend
from torchvision.transforms import RandomResizedCrop, v2
from torchvision.transforms.v2 import functional as vision

from tests.utils.data import loading
from utils.config.groups.augmentation import AUGMENTATIONS as CHOICES
from utils.config.groups.augmentation import AugmentationSettings
from utils.data import augmentations, transforms
from utils.data.augment.base import Stream
from utils.data.augmentations import (
    AUGMENTATIONS,
    BY_FLAG,
    Context,
    ResizedCrop,
    build_augmentations,
    mirrored,
    resized_crop,
)
from utils.data.images.decoding import CROP_NUMBERS, CROP_RATIO, random_box
from utils.data.images.view import LEAST_AREA
from utils.data.sample_plan import sample_uniforms
from utils.data.transforms import BatchTransform


def transform(augment=(), **changes):
    """A transform that by default only makes floats of 8-pixel images."""
    settings = AugmentationSettings(
        **{name: changes.pop(name) for name in ("shift_padding", "cutout") if name in changes}
    )
    max_shift = changes.pop("max_shift", 2)
    values = {"size": 8, "mean": (0.0,), "std": (1.0,)} | changes
    return BatchTransform(
        augmentations=build_augmentations(augment, Context(settings, max_shift, values["size"])), **values
    )


def images_of(count, channels=1, size=8):
    return loading.images_of(count, channels, size)


def as_floats(images):
    return images.float() / 255


# -------------------------------------------------------------------------------- shift and flip


def test_the_middles_of_much_enlarged_images_are_the_same_a_few_at_a_time(monkeypatch):
    shown = BatchTransform(16, (0.0,), (1.0,), interpolation="bicubic", crop_pct=0.1)
    images = torch.randint(0, 256, (7, 1, 8, 8), dtype=torch.uint8)
    whole = shown.evaluation(images)
    sizes = []
    resized = BatchTransform._resized
    monkeypatch.setattr(BatchTransform, "_resized", lambda *given: (sizes.append(len(given[1])), resized(*given))[1])
    monkeypatch.setattr(transforms, "ENLARGED_PIXELS", 3 * 160**2)
    assert torch.equal(shown.evaluation(images), whole) and sizes == [3, 3, 1]
    assert shown.evaluation(images[:0]).shape == (0, 1, 16, 16)


@pytest.mark.parametrize(("name", "axis"), [("flip", 3), ("vertical-flip", 2)])
def test_a_flip_is_torchs_for_half_of_the_images_and_nothing_for_the_others(name, axis):
    images = images_of(2000)
    found = transform((name,)).training(images, np.arange(2000), 0)
    flipped = (found == as_floats(images.flip(axis))).flatten(1).all(1)
    unchanged = (found == as_floats(images)).flatten(1).all(1)
    assert (flipped ^ unchanged).all()
    assert stats.binomtest(int(flipped.sum()), 2000).pvalue > 1e-3


def test_without_augmentation_training_and_evaluation_see_the_same():
    images = images_of(5)
    assert torch.equal(transform().training(images, np.arange(5), 3), transform().evaluation(images))


def test_alternating_flip_shows_every_image_both_ways_in_two_epochs():
    images = images_of(400)
    first, second, third = (transform(("alternating-flip",)).training(images, np.arange(400), e) for e in range(3))
    assert torch.equal(first.flip(3), second) and torch.equal(first, third)
    flipped = (first != as_floats(images)).flatten(1).any(1)
    assert stats.binomtest(int(flipped.sum()), 400).pvalue > 1e-3


@pytest.mark.parametrize("reach", [1, 3])
def test_reflect_padding_is_torchs(reach):
    images = images_of(300)
    shown = transform(("shift",), max_shift=reach, shift_padding="reflect").training(images, np.arange(300), 0)
    padded = torch.nn.functional.pad(as_floats(images), (reach,) * 4, mode="reflect")
    places = [(top, left) for top in range(2 * reach + 1) for left in range(2 * reach + 1)]
    crops = torch.stack([padded[:, :, top : top + 8, left : left + 8] for top, left in places])
    hits = (crops == shown).flatten(2).all(2)
    assert hits.any(0).all()
    assert stats.chisquare(hits.sum(1).numpy()).pvalue > 1e-3


def test_reflect_padding_goes_on_beyond_an_image():
    assert mirrored(torch.arange(-7, 9), 3).tolist() == [1, 2, 1, 0, 1, 2, 1, 0, 1, 2, 1, 0, 1, 2, 1, 0]
    assert mirrored(torch.arange(-2, 3), 1).tolist() == [0, 0, 0, 0, 0]


def test_compiled_augmentation_is_one_graph_and_shows_the_same(monkeypatch):
    # Traced and lowered as for the default backend, but without that one's C++ compiler, which takes most of a minute.
    backend = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()  # other tests may have compiled the same functions for other shapes
    images = images_of(10, 3)
    values = {"mean": (0.4,) * 3, "std": (0.3,) * 3, "cutout": 3}
    plain, compiled = (
        transform(("shift", "flip", "resized-crop"), compiled=on, **values).training(images, np.arange(10), 0)
        for on in (False, True)
    )
    assert backend.frame_count == 1
    torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------- the registry


def test_the_registry_holds_exactly_the_augmentations_that_can_be_set():
    assert tuple(AUGMENTATIONS) == CHOICES, "that of utils/config/groups/augmentation.py names the same in one order"


@pytest.mark.parametrize("name", [*AUGMENTATIONS, "cutout"])
def test_each_augmentation_draws_rows_that_belong_to_the_sample_and_leaves_pixel_levels_alone(name):
    names, cutout = ((), 3) if name == "cutout" else ((name,), 0)
    (augmentation,) = build_augmentations(names, Context(AugmentationSettings(cutout=cutout), 2, 8))
    images = images_of(40, 3)
    indices = np.arange(100, 140)
    whole = augmentation.draw(augmentations.Samples(0, 1, indices), 8, 8)
    some = augmentation.draw(augmentations.Samples(0, 1, indices[7:9]), 8, 8)
    assert whole and all(torch.equal(left[7:9], right) for left, right in zip(whole, some, strict=True))
    assert str(augmentation).startswith(name)
    given = images.float() if augmentation.normalised else images
    before = given.clone()
    numbers = augmentation.prepared(8, 8, *whole)
    assert not torch.equal(augmentation.apply(given, *numbers).float(), before.float())
    assert augmentation.normalised or torch.equal(given, before)


def test_each_augmentation_draws_from_a_random_stream_of_its_own(monkeypatch):
    """Otherwise it would depend on what another one draws. The two flips are alternatives, and share one."""
    on = {"rotation": 9.0, "auto_augment": "ra", "color_jitter": (0.4,), "grayscale_prob": 0.5}
    on |= {"gaussian_blur_prob": 0.5, "random_erase": 0.5, "cutout": 2}
    assert set(on) == set(BY_FLAG)
    context = Context(AugmentationSettings(**on), 2, 8, mean=(0.5,) * 3)
    names = [name for name in AUGMENTATIONS if name != "alternating-flip"]
    streams = []
    monkeypatch.setattr(
        augmentations.Samples,
        "uniforms",
        lambda own, stream, count: streams.append(stream) or sample_uniforms(0, 0, own.indices, stream, count),
    )
    owners = {}
    for augmentation in build_augmentations(names, context):
        streams.clear()
        augmentation.draw(augmentations.Samples(0, 0, np.arange(3)), 8, 8)
        for stream in set(streams):
            owners.setdefault(stream, []).append(str(augmentation))
    assert {stream: names for stream, names in owners.items() if len(names) > 1} == {}
    assert len(owners) >= len(names) + len(on)


@pytest.mark.parametrize("padding", ["zero", "reflect"])
def test_a_flip_as_part_of_a_shift_is_the_shift_and_then_the_flip(padding):
    images = images_of(60)
    samples = augmentations.Samples(0, 1, np.arange(60))
    shift = augmentations.Shift(2, padding)
    flip = augmentations.Flip()
    (both,) = augmentations.fused((shift, flip))
    shifted = shift.apply(images, *shift.prepared(8, 8, *shift.draw(samples, 8, 8)))
    expected = flip.apply(shifted, *flip.draw(samples, 8, 8))
    numbers = both.prepared(8, 8, *both.draw(samples, 8, 8))
    assert torch.equal(both.apply(images, *numbers), expected)
    upside_down = augmentations.Flip(vertical=True)
    assert augmentations.fused((shift, upside_down, flip)) == (both, upside_down)
    assert not torch.equal(upside_down.draw(samples, 8, 8)[0], flip.draw(samples, 8, 8)[0]), "each has its own stream"


# -------------------------------------------------------------------------- normalisation and size


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("changes", [{}, {"crop_pct": 0.8}, {"interpolation": "bicubic"}])
@pytest.mark.parametrize("stored", [8, 9])
def test_a_batch_whose_images_are_all_unreadable_is_an_empty_one(channels_last, changes, stored):
    made = transform(mean=(0.5,) * 3, std=(0.5,) * 3, channels_last=channels_last, **changes)
    assert made.evaluation(torch.empty(0, 3, stored, stored, dtype=torch.uint8)).shape == (0, 3, 8, 8)


@pytest.mark.parametrize("channels_last", [False, True])
def test_normalisation_equals_torchvisions(channels_last):
    images = images_of(10, 3)
    mean = (0.49, 0.48, 0.45)
    std = (0.25, 0.24, 0.26)
    ours = BatchTransform(8, mean, std, channels_last=channels_last)
    theirs = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])
    found = ours.evaluation(images)
    torch.testing.assert_close(found, theirs(images), rtol=0, atol=2e-6)
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    assert found.dtype == torch.float32 and found.is_contiguous(memory_format=wanted)


@pytest.mark.parametrize("size", [5, 8, 13, 32])
def test_another_size_equals_torchvisions_resize(size):
    images = images_of(4, 3)
    found = transform(size=size, mean=(0.0,) * 3, std=(1.0,) * 3).evaluation(images)
    expected = vision.resize(images.float(), [size, size], antialias=True) / 255
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_to_pixels_undoes_the_normalisation():
    images = images_of(6, 3)
    ours = transform(mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))
    torch.testing.assert_close(ours.to_pixels(ours.evaluation(images)), as_floats(images), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------- random-resized-crop


@pytest.mark.parametrize("size", [8, 4, 2])
def test_batched_crop_of_a_central_box_equals_torchvisions_crop_and_resize(size):
    images = images_of(3, 3, size=16).float()
    area = (0.25 - LEAST_AREA) / (1 - LEAST_AREA)  # a quarter of the area: a box of 8 pixels
    found = resized_crop(images, torch.tensor([[area, 0.5, 0.5, 0.5]]).expand(3, -1), size)
    expected = vision.resized_crop(images, 4, 4, 8, 8, [size, size], antialias=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


def boxes_of_batched_crop(uniforms, width, height, least, size=8):
    """(left, top, width, height) of each box, read off from a picture whose pixels say where they are."""
    columns, rows = torch.meshgrid(torch.arange(width) + 0.5, torch.arange(height) + 0.5, indexing="xy")
    picture = torch.stack([columns, rows]).float().expand(len(uniforms), -1, -1, -1)
    seen = ResizedCrop(size, least_area=least).apply(picture, uniforms)
    across = seen[:, 0, 0]
    down = seen[:, 1, :, 0]
    # inner pixels: no border is in play
    pitch_x = across[:, 4] - across[:, 3]
    pitch_y = down[:, 4] - down[:, 3]
    middle_x = (across[:, 4] + across[:, 3]) / 2
    middle_y = (down[:, 4] + down[:, 3]) / 2
    return torch.stack(
        [middle_x - size / 2 * pitch_x, middle_y - size / 2 * pitch_y, size * pitch_x, size * pitch_y], dim=1
    ).double()


@pytest.mark.parametrize("least", [LEAST_AREA, 0.35])
def test_boxes_of_the_batched_crop_are_inside_with_the_asked_area_and_ratio(least):
    uniforms = torch.from_numpy(sample_uniforms(0, 0, np.arange(3000), Stream.CROP, 4))
    left, top, width, height = boxes_of_batched_crop(uniforms, 64, 64, least).T
    assert min(left.min(), top.min()) > -0.01 and max((left + width).max(), (top + height).max()) < 64.01
    area = width * height / 64**2
    ratio = width / height
    narrowed = (width > 63.99) | (height > 63.99)
    wanted = least + (1 - least) * uniforms[:, 0]
    torch.testing.assert_close(area[~narrowed], wanted[~narrowed].double(), rtol=1e-3, atol=1e-3)
    assert 0.74 < ratio.min() < 0.76 and 1.32 < ratio.max() < 1.35
    shares = ((left / (64 - width))[~narrowed], (top / (64 - height))[~narrowed])
    for share in shares:
        assert stats.kstest(share.clamp(0, 1).numpy(), "uniform").pvalue > 1e-3


def boxes(width, height, count=3000, least=LEAST_AREA):
    draws = sample_uniforms(0, 0, np.arange(count), Stream.CROP, CROP_NUMBERS)
    return np.array([random_box(width, height, draw, least) for draw in draws])


@pytest.mark.parametrize(("width", "height", "least"), [(500, 375, 0.08), (100, 300, 0.05)])
def test_random_box_has_the_distribution_of_torchvisions(width, height, least):
    torch.manual_seed(0)
    blank = torch.empty(1, height, width)
    theirs = np.array([RandomResizedCrop.get_params(blank, [least, 1], list(CROP_RATIO)) for _ in range(3000)])
    left, top, right, bottom = boxes(width, height, least=least).T
    ours = np.stack([top, left, bottom - top, right - left], axis=1)
    for column in range(4):
        assert stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3
    areas = [found[:, 2] * found[:, 3] / (width * height) for found in (ours, theirs)]
    assert np.mean(areas[0]) == pytest.approx(np.mean(areas[1]), abs=0.02)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 10**6))
def test_random_box_lies_inside_an_image_of_any_shape(width, height, index):
    draw = sample_uniforms(0, 0, np.array([index]), Stream.CROP, CROP_NUMBERS)[0]
    left, top, right, bottom = random_box(width, height, draw)
    assert 0 <= left < right <= width and 0 <= top < bottom <= height


@pytest.mark.parametrize(("width", "height", "box"), [(1000, 10, (13, 10)), (10, 1000, (10, 13)), (1, 1, (1, 1))])
def test_random_box_falls_back_to_the_middle_like_torchvision(width, height, box):
    too_large = np.full(CROP_NUMBERS, 0.999, dtype=np.float32)
    left, top, right, bottom = random_box(width, height, too_large)
    assert (right - left, bottom - top) == box
    assert (left, top) == ((width - box[0]) // 2, (height - box[1]) // 2)


def test_random_box_reaches_both_borders_at_the_ends_of_the_place_numbers():
    draw = np.full(CROP_NUMBERS, 0.25, dtype=np.float32)
    draw[-2:] = 0
    assert random_box(200, 100, draw)[:2] == (0, 0)
    draw[-2:] = 1 - 2**-24
    assert random_box(200, 100, draw)[2:] == (200, 100)
