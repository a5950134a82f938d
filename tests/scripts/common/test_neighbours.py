"""Neighbours, votes and near duplicates against scikit-learn and against planted copies."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

from scripts.common.features import Features
from scripts.common.neighbours import TEMPERATURE, near_duplicates, nearest, unit, votes
from scripts.reporting.feature_page import alike_words
from utils.data.formats.readers import read_digits


def random_features(count, seed):
    return np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)


def test_neighbours_are_scikit_learns_by_cosine():
    train, other = random_features(300, 0), random_features(70, 1)
    places, cosines = nearest(unit(train), unit(other), 9)
    distances, expected = (
        NearestNeighbors(n_neighbors=9, metric="cosine", algorithm="brute").fit(train).kneighbors(other)
    )
    assert np.array_equal(places, expected)
    assert np.abs(1 - cosines - distances).max() < 1e-5  # 8 products in float32


def test_an_image_is_no_neighbour_of_itself_even_among_exact_copies():
    train = np.repeat(random_features(5, 0), 6, axis=0)  # each six times: an own place is not always the first
    places, cosines = nearest(unit(train), None, 5)
    assert not (places == np.arange(30)[:, None]).any()
    assert (places // 6 == np.arange(30)[:, None] // 6).all() and cosines.min() > 0.9999
    everyone = nearest(unit(train), None, 1000)[0]
    assert everyone.shape == (30, 29)


def test_votes_are_scikit_learns_with_the_stated_weights():
    train, other = random_features(200, 0), random_features(50, 1)
    labels = np.random.default_rng(2).integers(0, 4, 200)
    shares = votes(*nearest(unit(train), unit(other), 20), labels, 4)
    reference = KNeighborsClassifier(
        20, metric="cosine", algorithm="brute", weights=lambda distances: np.exp((1 - distances) / TEMPERATURE)
    )
    # a cosine is right to 1e-6 or so, and its weight to that over 0.07
    assert np.abs(shares - reference.fit(train, labels).predict_proba(other)).max() < 1e-4


def test_a_row_of_zeros_stays_one():
    assert not unit(np.zeros((2, 4), np.float32)).any()


# ------------------------------------------------------------------------------------- duplicates


def photograph(generator):
    """Smooth random colours with some detail, 64 x 64."""
    coarse = generator.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    image = np.asarray(Image.fromarray(coarse).resize((64, 64), Image.Resampling.BICUBIC)).astype(np.int64)
    return Image.fromarray(np.clip(image + generator.integers(-25, 26, image.shape), 0, 255).astype(np.uint8))


def as_jpeg(image):
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", quality=50)
    return Image.open(io.BytesIO(buffer.getvalue()))


COPIES = (
    lambda image: image,
    as_jpeg,
    lambda image: image.resize((40, 40)).resize((64, 64)),
    lambda image: ImageEnhance.Brightness(image).enhance(0.8),
    lambda image: ImageEnhance.Contrast(image).enhance(1.2),
    lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
)


def features_of(split, images):
    """Features of a random projection of each image and its mirror image, which a network learns to take for one."""
    pixels = torch.stack([torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) for image in images]) / 255
    small = torch.nn.functional.adaptive_avg_pool2d(pixels, 16)
    seen = (small + small.flip(3)).flatten(1).numpy()
    projection = np.random.default_rng(0).normal(size=(seen.shape[1], 32))
    return Features(
        split,
        ((seen - 1) @ projection).astype(np.float32),
        small.mean(1).flatten(1).numpy(),
        np.zeros(len(images), np.int64),
        np.arange(len(images)),
        [str(place) for place in range(len(images))],
        ("a", "b"),
        images,
    )


@pytest.mark.parametrize("copies", [COPIES, COPIES[::-1]], ids=["in order", "backwards"])
def test_planted_copies_across_splits_are_all_found_and_nothing_else(copies):
    generator = np.random.default_rng(1)
    train = [photograph(generator) for _ in range(150)]
    other = [photograph(generator) for _ in range(60)]
    planted = {place: 7 * place for place in range(18)}
    for place, match in planted.items():
        other[place] = copies[place % len(copies)](train[match])
    found = near_duplicates(features_of("train", train), features_of("val", other))
    assert {one.second: one.first for one in found} == planted
    assert [one.likeness for one in found] == sorted((one.likeness for one in found), reverse=True)


def test_plain_images_are_like_none():
    plain = [Image.new("RGB", (64, 64), (shade, shade, shade)) for shade in range(10, 200, 10)]
    assert near_duplicates(features_of("train", plain), features_of("val", plain)) == []


def test_images_that_differ_in_few_pixels_are_no_copies_but_their_copies_are():
    digits = read_digits()
    images = {
        split: [Image.fromarray(pixels[0]).resize((64, 64)) for pixels in part.pixels.numpy()[:300]]
        for split, part in (("train", digits.train), ("val", digits.validation))
    }
    for place in range(20):
        images["val"][place] = as_jpeg(images["train"][5 * place])
    found = near_duplicates(*(features_of(split, part) for split, part in images.items()))
    assert {(one.second, one.first) for one in found} >= {(place, 5 * place) for place in range(20)}
    assert len(found) <= 20 + 0.05 * 300  # handwriting of one person may be as alike


def test_copies_across_splits_are_found_if_most_training_images_have_copies_among_these():
    generator = np.random.default_rng(1)
    originals = [photograph(generator) for _ in range(60)]
    train = [copy(image) for image in originals for copy in COPIES[:3]]
    smaller = [image.resize((24, 24)) for image in originals[:10]]
    found = near_duplicates(
        features_of("train", train),
        features_of("val", [image.resize((64, 64)) for image in smaller] + [photograph(generator) for _ in range(20)]),
    )
    assert {one.second: one.first // 3 for one in found} == {place: place for place in range(10)}


def test_copies_across_splits_are_found_among_the_frames_of_long_bursts():
    frames = 200
    generator = np.random.default_rng(1)
    scenes = [photograph(generator) for _ in range(2)]

    def frame(scene):
        noise = generator.integers(-8, 9, (64, 64, 3))
        return Image.fromarray(np.clip(np.asarray(scene) + noise, 0, 255).astype(np.uint8))

    train = [frame(scene) for scene in scenes for _ in range(frames)] + [photograph(generator) for _ in range(420)]
    other = [frame(scene) for scene in scenes for _ in range(20)] + [photograph(generator) for _ in range(20)]
    found = near_duplicates(features_of("train", train), features_of("val", other))
    assert {one.second: one.first // frames for one in found} == {place: place // 20 for place in range(40)}


def test_few_kinds_of_images_that_look_alike_are_no_copies_of_each_other():
    generator = np.random.default_rng(1)
    directions = [np.asarray(photograph(generator)).astype(float) - 127 for _ in range(8)]
    products = [np.asarray(photograph(generator)).astype(float) for _ in range(3)]

    def shot(product):
        changes = sum(
            strength * change for strength, change in zip(generator.normal(0, 0.03, 8), directions, strict=True)
        )
        return Image.fromarray(np.clip(product + changes, 0, 255).astype(np.uint8))

    train, other = ([shot(product) for product in products for _ in range(count)] for count in (60, 20))
    features = features_of("train", train)
    assert len(near_duplicates(features, features_of("val", other))) <= 6
    study = SimpleNamespace(parts={"train": features}, duplicates={("train", "val"): []})
    assert alike_words(study).startswith("The training images look alike")
