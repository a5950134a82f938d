"""Mixup and CutMix against their formulas and torchvision's own."""

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import v2

from utils.arguments import parse
from utils.data.datasets import get_data
from utils.data.loaders import loaders
from utils.data.mixing import Mixing
from utils.data.sample_plan import SamplePlan, Share

CPU = torch.device("cpu")
CLASSES = 6


def share_of(first=0, count=6, epoch=0):
    return Share(epoch, 0, np.arange(first, first + count), count, 1.0, True)


def batch(count=6, channels=3, size=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, channels, size, size, generator=generator), torch.arange(count)


def kept_of(targets, labels):
    """The part that the own label has; neighbours' labels differ here."""
    return targets[torch.arange(len(labels)), labels]


def test_mixup_blends_images_and_labels_with_one_share():
    images, labels = batch()
    mixed = images.clone()
    targets = Mixing(0.4, 0.0, CLASSES, seed=0)(mixed, labels, share_of())
    kept = kept_of(targets, labels)[0]
    torch.testing.assert_close(mixed, kept * images + (1 - kept) * images.roll(1, 0))
    one_hot = torch.eye(CLASSES)[labels]
    torch.testing.assert_close(targets, kept * one_hot + (1 - kept) * one_hot.roll(1, 0))


def test_cutmix_pastes_one_box_and_its_area_is_the_labels_share():
    images, labels = batch()
    mixed = images.clone()
    targets = Mixing(0.0, 1.0, CLASSES, seed=3)(mixed, labels, share_of())
    pasted = (mixed != images).any(1)
    rows, columns = pasted.any(0).any(1), pasted.any(0).any(0)
    assert torch.equal(pasted, (rows[:, None] & columns).expand_as(pasted)) and pasted.any()
    assert torch.equal(mixed, torch.where(pasted[:, None], images.roll(1, 0), images))
    torch.testing.assert_close(kept_of(targets, labels), 1 - pasted.flatten(1).float().mean(1))


@pytest.mark.parametrize(("ours", "theirs"), [((0.3, 0.0), v2.MixUp), ((0.0, 1.0), v2.CutMix)])
def test_label_shares_have_torchvisions_distribution(ours, theirs):
    images, labels = batch(size=32)
    alpha = max(ours)
    mixing = Mixing(*ours, CLASSES, seed=0)
    found = [kept_of(mixing(images.clone(), labels, share_of(first)), labels)[0].item() for first in range(400)]
    torch.manual_seed(0)
    reference = theirs(alpha=alpha, num_classes=CLASSES)
    expected = [kept_of(reference(images, labels)[1], labels)[0].item() for _ in range(400)]
    assert stats.ks_2samp(found, expected).pvalue > 1e-3


def test_both_take_turns():
    images, labels = batch()
    mixing, kinds = Mixing(0.4, 1.0, CLASSES, seed=0), []
    for first in range(300):
        mixed = images.clone()
        mixing(mixed, labels, share_of(first))
        kinds.append(bool((mixed == images).any()))  # a blend leaves no pixel as it was
    assert stats.binomtest(sum(kinds), 300).pvalue > 1e-3


def test_mixing_depends_on_seed_epoch_and_samples_alone():
    def mixed(seed=0, **place):
        images, labels = batch()
        Mixing(0.4, 1.0, CLASSES, seed)(images, labels, share_of(**place))
        return images

    assert torch.equal(mixed(), mixed())
    others = [mixed(seed=1), mixed(epoch=1), mixed(first=6)]
    assert all(not torch.equal(mixed(), other) for other in others)


def test_a_share_that_is_filled_up_mixes_only_what_counts():
    images, labels = batch(2)
    share = Share(0, 0, np.array([4, 9]), 1, 1.0, True)
    mixed = images.clone()
    targets = Mixing(0.4, 0.0, CLASSES, seed=0)(mixed, labels[:1], share)
    torch.testing.assert_close(mixed, images)  # its only neighbour is itself
    torch.testing.assert_close(targets, torch.eye(CLASSES)[labels[:1]])
    empty = Mixing(0.4, 1.0, CLASSES, seed=0)(images.clone(), labels[:0], Share(0, 0, np.array([4, 9]), 0, 0.0, True))
    assert empty.shape == (0, CLASSES)


def test_flags_reach_the_batches_and_a_step_is_repeated_with_the_same_mixing():
    args = parse(["--device", "cpu", "--mixup", "0.2", "--cutmix", "1"])
    data = get_data(args.data, CPU)
    train, validation, _ = loaders(
        data, args.data, CPU, seed=0, channels_last=False, rank=0, world_size=1, progress=False
    )
    first = next(train.batches(2, 3))
    again = train.step_again(2, 3)[0]
    assert first.targets.shape == (64, 10) and torch.equal(first.targets, again.targets)
    torch.testing.assert_close(first.targets.sum(1), torch.ones(64))
    assert torch.equal(first.images, again.images)
    assert next(validation.batches()).targets.dtype == torch.int64
    assert isinstance(train.plan, SamplePlan)
