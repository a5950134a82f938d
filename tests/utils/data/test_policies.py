"""Augmentation policies against torchvision's and timm's own, which are given the same random numbers."""

import random
from collections import deque

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from timm.data import auto_augment as timm_augment
from torchvision.transforms import v2

from tests.utils.data.loading import (
    augmented,
    images_of,
    is_the_same_in_any_batch_and_memory_format,
    samples_of,
)
from utils.config.auto_augment import CHOICES, policy_check, read_policy
from utils.data.augment import libraries, policies
from utils.data.augment.base import Samples, Stream
from utils.data.augment.libraries import build_policy
from utils.data.augment.operations import NEED_COLOUR, Canvas, apply_layers
from utils.data.transforms import BatchTransform

MEAN = (0.49, 0.48, 0.45)
COUNT = 4000


class Fed:
    """torch's random functions as torchvision calls them, which give what was put in."""

    def __init__(self, monkeypatch):
        self.numbers = deque()
        monkeypatch.setattr(torch, "rand", lambda *_: torch.tensor(self.numbers.popleft()))
        monkeypatch.setattr(torch, "randint", self.randint)

    def randint(self, *bounds, low=0, high=None, size=()):
        high = bounds[0] if bounds else high
        return torch.full(size, low + int(self.numbers.popleft() * (high - low)))

    def shown(self, transform, image, numbers):
        self.numbers.extend(map(float, numbers))
        result = transform(image)
        assert not self.numbers
        return result


def asks_for(space, name, number_of_bin):
    """Numbers that torchvision draws for an operation: a magnitude, if there is a choice, and a sign, if it has one."""
    magnitudes, signed = space[name]
    has_level = magnitudes(10, 32, 32) is not None
    return [
        *([number_of_bin] if has_level and number_of_bin is not None else []),
        *([0.0] if has_level and signed else []),
    ]


@pytest.mark.parametrize(("name", "transform"), [("ra", v2.RandAugment()), ("ta_wide", v2.TrivialAugmentWide())])
@pytest.mark.parametrize("channels", [1, 3])
def test_random_operations_are_torchvisions_of_the_same_random_numbers(monkeypatch, name, transform, channels):
    images = images_of(100, channels)
    policy = build_policy(name, MEAN)
    fed = Fed(monkeypatch)
    uniforms = samples_of(100).uniforms(Stream.POLICY, policy.layers * 5)
    first = uniforms[:, : policy.layers]
    others = uniforms[:, policy.layers :].reshape(100, policy.layers, 4)
    for image, one, chosen, rest in zip(images, augmented(policy, images), first, others, strict=True):
        numbers = []
        for which, (_, sign, level, _) in zip(chosen, rest, strict=True):
            operation = policy.operations.names[int(which * 14)]
            asked = asks_for(transform._AUGMENTATION_SPACE, operation, level if name == "ta_wide" else None)
            has_sign = transform._AUGMENTATION_SPACE[operation][1]
            numbers += [which, *(asked[:-1] if has_sign else asked), *([sign] if has_sign else [])]
        assert torch.equal(fed.shown(transform, image, numbers), one)


@pytest.mark.parametrize("name", ["imagenet", "cifar10", "svhn"])
def test_auto_augment_is_torchvisions_of_the_same_random_numbers(monkeypatch, name):
    images = images_of(150)
    policy = build_policy(name, MEAN)
    fed = Fed(monkeypatch)
    transform = v2.AutoAugment(v2.AutoAugmentPolicy(name))
    uniforms = samples_of(150).uniforms(Stream.POLICY, 9)
    for image, one, row in zip(images, augmented(policy, images), uniforms, strict=True):
        numbers = [row[0]]
        sequence = transform._policies[int(row[0] * 25)]
        for (operation, probability, _), (applied, sign, *_) in zip(sequence, row[1:].reshape(2, 4), strict=True):
            signed = transform._AUGMENTATION_SPACE[operation][1]
            numbers += [applied, *([sign] if signed and applied < probability else [])]
        assert torch.equal(fed.shown(transform, image, numbers), one)


def test_augmix_is_torchvisions_of_the_same_random_numbers(monkeypatch):
    images = images_of(50)
    policy = build_policy("augmix", MEAN)
    fed = Fed(monkeypatch)
    transform = v2.AugMix()
    drawn = policy.draw(samples_of(50), 32, 32)
    weights = drawn[-1]
    uniforms = samples_of(50).uniforms(Stream.POLICY, 3 * 16).reshape(50, 3, 16)
    for image, one, row, weight in zip(images, policy.apply(images, *drawn), uniforms, weights, strict=True):
        dirichlet = iter([[weight[0], 1 - weight[0]], weight[1:]])
        transform._sample_dirichlet = lambda _, own=dirichlet: torch.tensor(np.array([next(own)]), dtype=torch.float32)
        numbers = []
        for chain in row:
            numbers.append(chain[0])
            for _, sign, level, _, which in chain[1:].reshape(3, 5)[: 1 + int(chain[0] * 3)]:
                entry = transform._AUGMENTATION_SPACE[policy.operations.names[int(which * 13)]]
                has_level = entry[0](10, 32, 32) is not None
                numbers += [which, *([level] if has_level else []), *([sign] if entry[1] else [])]
        assert torch.equal(fed.shown(transform, image, numbers), one)


@pytest.mark.parametrize("alpha", ["0.001", "0.002", "0.01"])
def test_augmix_with_a_small_alpha_shows_nearly_one_chain_and_never_black(alpha):
    policy = build_policy(f"augmix-a{alpha}", MEAN)
    samples = Samples(0, 0, np.arange(2000))
    numbers = policy.draw(samples, 8, 8)
    weights = numbers[-1][:, 1:]
    np.testing.assert_allclose(weights.sum(1), 1)
    assert (weights.max(1) > 0.9).mean() > 0.95
    assert np.abs((weights > 0.5).mean(0) - 1 / 3).max() < 0.04, "each chain as often"
    choices = np.full_like(numbers[0], -1)  # so that all chains show the image
    images = torch.full((2000, 3, 8, 8), 128, dtype=torch.uint8)
    assert policy.apply(images, choices, *numbers[1:]).min() >= 127


def test_the_logarithms_of_small_variates_continue_those_that_floats_hold(monkeypatch):
    uniforms = np.random.default_rng(0).random((1000, 3)) ** 8 + 1e-6
    expected = policies.dirichlet(0.01, uniforms)
    monkeypatch.setattr(policies, "LEAST_GAMMA", 1e-8)
    np.testing.assert_allclose(policies.dirichlet(0.01, uniforms), expected, rtol=1e-5, atol=1e-12)


def test_augmix_weights_have_the_papers_distributions():
    for alpha in (1.0, 0.4):
        policy = build_policy(f"augmix-a{alpha}", MEAN)
        weights = policy.draw(samples_of(COUNT), 32, 32)[-1]
        assert stats.kstest(weights[:, 0], stats.beta(alpha, alpha).cdf).pvalue > 1e-3
        for chain in range(3):
            assert stats.kstest(weights[:, 1 + chain], stats.beta(alpha, 2 * alpha).cdf).pvalue > 1e-3


# ------------------------------------------------------------------------------------------- timm


@pytest.mark.parametrize("name", libraries._timm_ranges(0.45))
def test_levels_mean_what_they_mean_in_timm(monkeypatch, name):
    levels = np.concatenate([np.linspace(0, 10, 41), [3.3, 12.0]])
    function = timm_augment.LEVEL_TO_ARG[name]
    for number, negate in ((0.2, True), (0.7, False)):
        monkeypatch.setattr(random, "random", lambda negate=negate: float(negate))
        monkeypatch.setattr(random, "uniform", lambda low, high, part=number: low + part * (high - low))
        found = libraries._timm_ranges(0.45)[name](levels, np.full(len(levels), number), 50, 40)
        expected = [function(level, timm_augment._HPARAMS_DEFAULT)[0] if function else 0 for level in levels]
        if name.startswith("Translate"):
            expected = [part * (40 if "X" in name else 50) for part in expected]
        if name == "GaussianBlurRand":
            expected = [0.1 + number * (2.0 * factor - 0.1) for factor in expected]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "text",
    ["rand-m9-mstd0.5-inc1", "rand-n3-p0.3", "rand-m7-mstd101-mmax12", "rand-tweights", "rand-t3a"],
)
def test_rand_augment_draws_operations_and_magnitudes_as_timm_does(text):
    theirs = timm_augment.rand_augment_transform(text, dict(timm_augment._HPARAMS_DEFAULT))
    ours = build_policy(text, MEAN)
    assert len(ours.operations.names) == len(theirs.ops) and ours.layers == theirs.num_layers
    seen = []
    for place, op in enumerate(theirs.ops):
        op.level_fn = lambda level, _, place=place: seen.append((place, level)) or ()
        op.aug_fn = lambda image, **_: image
    random.seed(0)
    np.random.seed(0)
    applied = []
    for _ in range(COUNT):
        before = len(seen)
        theirs(None)
        applied.append(len(seen) - before)
    choices, levels, _ = ours.draw(samples_of(COUNT), 32, 32)
    mine = np.bincount(choices[choices >= 0], minlength=len(theirs.ops))
    reference = np.bincount([place for place, _ in seen], minlength=len(theirs.ops))
    both = np.stack([mine, reference])
    assert stats.chi2_contingency(both[:, both.sum(0) > 20]).pvalue > 1e-3
    counts = [np.bincount(each, minlength=4) for each in ((choices >= 0).sum(1), applied)]
    counts = np.stack(counts)
    assert stats.chi2_contingency(counts[:, counts.sum(0) > 0]).pvalue > 1e-3
    reference = np.array([level for _, level in seen])
    assert stats.ks_2samp(levels[choices >= 0], reference).pvalue > 1e-3
    if ours.weights:  # never the same twice
        applied = choices[(choices >= 0).all(1)]
        assert all(len(set(row)) == len(row) for row in applied.tolist())


@pytest.mark.parametrize("text", ["original", "v0r-mstd0.5", "3a"])
def test_auto_augment_draws_sequences_and_magnitudes_as_timm_does(text):
    theirs = timm_augment.auto_augment_transform(text, dict(timm_augment._HPARAMS_DEFAULT))
    ours = build_policy(text, MEAN)
    seen = []
    for sequence in theirs.policy:
        for op in sequence:
            op.level_fn = lambda level, _, op=op: seen.append((op.name, level)) or ()
            op.aug_fn = lambda image, **_: image
    random.seed(1)
    for _ in range(COUNT):
        theirs(None)
    choices, levels, _ = ours.draw(samples_of(COUNT), 32, 32)
    names = [name for name, _ in seen]
    for ending in ("Increasing", "Original", "Rel", "Rand"):
        names = [name.removesuffix(ending) for name in names]
    found = [int((choices == place).sum()) for place in range(len(ours.operations.names))]
    counts = np.stack([found, [names.count(name) for name in ours.operations.names]])
    assert stats.chi2_contingency(counts[:, counts.sum(0) > 20]).pvalue > 1e-3
    solarized = np.array(
        [level for name, level in zip(names, [level for _, level in seen], strict=True) if name == "Solarize"]
    )
    mine = levels[choices == ours.operations.names.index("Solarize")]
    assert stats.ks_2samp(mine, solarized).pvalue > 1e-3


def smooth(count, size=48):
    """Pictures as smooth as photographs, so that the ways to interpolate agree."""
    coarse = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(0)) * 255
    fine = torch.nn.functional.interpolate(coarse, size, mode="bicubic", align_corners=False)
    return fine.clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("name", [name for name in libraries._timm_ranges(0.45) if name != "GaussianBlurRand"])
def test_operations_look_like_timms_on_pillow_images(monkeypatch, name):
    images = smooth(6)
    fill = tuple(round(255 * level) for level in MEAN)
    monkeypatch.setattr(random, "random", lambda: 1.0)  # timm negates
    operations = libraries._timm_operations([name], Canvas("bilinear", fill))
    for level in (3.0, 6.0, 9.0):
        op = timm_augment.AugmentOp(name, 1.0, level, {"img_mean": fill, "interpolation": Image.BILINEAR})
        zeros = np.zeros((6, 1))
        details = zeros + (0.9 if name.startswith("Translate") else 0.1)  # torchvision's point the other way
        found = operations.apply(images, zeros.astype(int), zeros + level, details)
        for image, one in zip(images, found, strict=True):
            expected = torch.from_numpy(np.array(op(Image.fromarray(image.permute(1, 2, 0).numpy())))).permute(2, 0, 1)
            differences = (one.float() - expected.float()).abs()  # Pillow does not blend an image's edge with the fill
            assert differences.median() <= 1 and differences.mean() < 2.5, level


# ------------------------------------------------------------------------------- all of them


POLICIES = [*CHOICES, "rand-m9-mstd0.5-inc1", "rand-t3aw", "augmix-m5-w2-d2", "v0r-mstd1"]


@pytest.mark.parametrize("name", POLICIES)
def test_a_sample_is_the_same_in_any_batch_and_memory_format(name):
    images = images_of(48, height=16)
    transform = BatchTransform(16, MEAN, (0.25,) * 3, (build_policy(name, MEAN),))
    assert is_the_same_in_any_batch_and_memory_format(transform, images)
    assert not torch.equal(*(transform.training(images, np.arange(48), epoch) for epoch in (1, 2)))


@pytest.mark.parametrize("name", ["ra", "rand-m9-mstd0.5-inc1", "augmix"])
def test_images_of_one_channel_and_any_size_keep_their_shape(name):
    for size in (1, 2, 5, 8):
        images = images_of(60, 1, size)
        assert augmented(build_policy(name, (0.5,)), images).shape == images.shape


def test_operations_that_need_colour_leave_grey_images_alone():
    images = images_of(3, 1)
    for name in NEED_COLOUR:
        found = apply_layers(images, [name], np.zeros((3, 1), int), np.full((3, 1), 0.3), Canvas())
        assert torch.equal(found, images)


def test_floats_of_a_crop_before_a_policy_are_rounded():
    policy = build_policy("ra", MEAN)
    images = images_of(20)
    numbers = policy.draw(samples_of(20), 32, 32)
    assert torch.equal(policy.apply(images.float() + 0.4, *numbers), policy.apply(images, *numbers))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rnd", "choose from ra, ta_wide"),
        ("ta_wid", "did you mean ta_wide?"),
        ("ra-m5", "takes no options"),
        ("rand-m11", "m11 is more than the largest magnitude, 10"),
        ("rand-q1", "'q1' is no option of rand"),
        ("rand-m", "no option"),
        ("rand-m9.5", "must be a whole number"),
        ("rand-p2", "from 0 to 1"),
        ("rand-m5-m6", "twice"),
        ("rand-tfoo", "tweights, t3a, t3aw"),
        ("original-m5", "no option of original"),
        ("augmix-b1", "no option"),
        ("rand-n0", "from 1 to 16"),
        ("rand-mstd1.2.3", "must be a number"),
        ("", "choose from"),
    ],
)
def test_a_wrong_policy_is_refused_with_a_reason(text, words):
    assert words in policy_check(text)


def test_what_timm_takes_is_taken_with_its_defaults():
    for (
        text
    ) in "rand-m9-mstd0.5-inc1 rand-mstd1-tweights rand-m9-n3-mstd0.5 augmix-m5-w4-d2 original-mstd0.5 v0 3a".split():
        assert policy_check(text) is None
    assert read_policy("rand").options == {"m": 10, "n": 2, "p": 0.5, "mstd": 0.0, "mmax": 10, "inc": 0, "t": ""}
    assert read_policy("rand-m5-mstd200").options["mstd"] == float("inf")
    assert read_policy("augmix").library == "torchvision" and read_policy("augmix-m3").library == "timm"
