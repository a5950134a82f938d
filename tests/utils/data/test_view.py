"""The view of a photograph in evaluation is that of timm's evaluation transform."""

import math

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.helpers import difference
from utils.data.images.decoding import decode_crop
from utils.data.images.gpu_decoding import decode_batch, read_for_gpu
from utils.data.images.view import LONGEST, View

PHOTOGRAPHS = [Image.fromarray(pixels) for pixels in load_sample_images().images]
SHAPES = [(500, 375), (320, 400), (333, 333), (90, 61), (640, 100), (64, 48)]
CPU = torch.device("cpu")
MEAN = (0.485, 0.456, 0.406)
# Rounding: torch's weights have 16 bits. Pillow 13 resizes the height first where it shrinks much more than the width,
# as no Pillow before and we do not: then the levels of 'squash' and 'border' are further apart at sharp edges.
MOST = {"center": (2, 0.08), "squash": (12, 0.3), "border": (12, 0.3)}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    paths = []
    for number, shape in enumerate(SHAPES):
        path = folder / f"{number}.jpg"
        PHOTOGRAPHS[number % 2].crop((20, 10, 620, 410)).resize(shape, Image.Resampling.LANCZOS).save(path, quality=92)
        paths.append(str(path))
    return paths


def timms(view, path):
    """The pixels that timm's evaluation transform makes of a file."""
    transform = timm.data.create_transform(
        view.size,
        is_training=False,
        crop_pct=view.crop_pct,
        crop_mode=view.crop_mode,
        interpolation=view.interpolation,
        mean=MEAN,
        normalize=False,
    )
    return torch.as_tensor(transform(Image.open(path).convert("RGB")))


def view_of(size, share, mode, interpolation):
    return View(size, share, mode, interpolation, tuple(round(255 * mean) for mean in MEAN))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("size", "share", "mode"),
    [
        (224, 0.875, "center"),
        (224, 0.9, "center"),
        (160, 0.95, "center"),
        (288, 1.0, "center"),
        (112, 1.15, "center"),
        (8, 1.1, "center"),
        (96, 0.888, "center"),
        (128, 0.9, "squash"),
        (224, 1.0, "squash"),
        (112, 1.0, "border"),
        (112, 0.9, "border"),
        ((96, 160), 0.9, "squash"),
        ((160, 96), 0.9, "border"),
    ],
)
def test_the_view_is_that_of_timms_evaluation_transform(photographs, size, share, mode, interpolation):
    view = view_of(size, share, mode, interpolation)
    for path in photographs:
        largest, mean = difference(decode_crop(path, view, "RGB"), timms(view, path))
        most, most_mean = MOST[mode]
        assert largest <= most and mean <= most_mean


@pytest.mark.parametrize(("size", "share"), [((96, 160), 0.875), ((160, 96), 1.0), ((224, 120), 0.9)])
def test_the_view_of_a_size_that_is_not_square_is_timms(photographs, size, share):
    """timm resizes by bilinear there, whatever it is told."""
    for path in photographs:
        largest, mean = difference(decode_crop(path, View(size, share), "RGB"), timms(View(size, share), path))
        assert largest <= MOST["squash"][0] and mean <= MOST["squash"][1]  # it rounds sides, so it shrinks unevenly


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("size", "share"), [(224, 0.875), (64, 0.5), (400, 0.7)])
def test_only_the_pixels_that_are_needed_count(interpolation, size, share):
    pixels = torch.from_numpy(np.array(PHOTOGRAPHS[0])).permute(2, 0, 1)
    view = View(size, share, "center", interpolation)
    place = view.place(640, 427)

    def shown(left, top, right, bottom):
        """With all pixels outside of a box turned to their opposite."""
        changed = 255 - pixels
        changed[:, top:bottom, left:right] = pixels[:, top:bottom, left:right]
        return view.show(changed, place._replace(columns=0, rows=0))

    left, top, right, bottom = place.box
    assert (right - left) * (bottom - top) < 640 * 427
    expected = view.show(pixels, place._replace(columns=0, rows=0))
    assert torch.equal(view.show(pixels[:, top:bottom, left:right], place), expected)
    assert torch.equal(shown(left, top, right, bottom), expected)
    for narrower in ((4, 0, 0, 0), (0, 4, 0, 0), (0, 0, -4, 0), (0, 0, 0, -4)):
        box = [edge + change for edge, change in zip(place.box, narrower, strict=True)]
        assert not torch.equal(shown(*box), expected)


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 600), st.floats(0.2, 1.2))
def test_a_view_of_any_image_lies_inside_and_is_as_large_as_asked_for(mode, width, height, size, share):
    if math.floor(size / share) == 0:
        return
    place = View(size, share, mode).place(width, height)
    target = math.floor(size / share)
    left, top, right, bottom = place.box
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    across = place.columns + right - left
    down = place.rows + bottom - top
    made = math.floor(across * place.across), math.floor(down * place.down)
    for length, offset in zip(made, (place.left, place.top), strict=True):
        assert length <= LONGEST * target
        if mode != "border":
            assert length >= min(size, target)
        assert offset + size <= length if length >= size else offset == -((size - length) // 2)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 2), (3, 1), (1, 5000), (5000, 1), (4000, 3), (3, 4000)])
def test_of_an_image_without_end_the_middle_is_shown_in_little_memory(tmp_path, width, height):
    pixels = np.zeros((height, width, 3), np.uint8)
    rows, columns = (
        slice(side // 2 - side // 8, side // 2 + side // 8 + 1) if side > 3 else slice(None)
        for side in pixels.shape[:2]
    )
    pixels[rows, columns] = 200
    Image.fromarray(pixels).save(tmp_path / "a.png")
    view = View(32)
    place = view.place(width, height)
    left, top, right, bottom = place.box
    across = place.columns + right - left
    down = place.rows + bottom - top
    assert across * place.across * down * place.down <= LONGEST * 37**2
    shown = decode_crop(str(tmp_path / "a.png"), view, "RGB")
    assert shown.shape == (3, 32, 32) and (shown == 200).all()


@pytest.mark.parametrize(
    ("mode", "interpolation"), [("center", "bicubic"), ("squash", "bilinear"), ("border", "bilinear")]
)
def test_a_device_shows_the_same_view(photographs, mode, interpolation):
    view = view_of(96, 0.9, mode, interpolation)
    found = decode_batch(read_for_gpu(photographs, view, "RGB", [None] * len(photographs)), CPU)
    expected = torch.stack([decode_crop(path, view, "RGB") for path in photographs])
    largest, mean = difference(found, expected)  # floats are rounded once, bytes after each direction
    assert largest <= 12 and mean <= 0.25
