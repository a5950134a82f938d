"""Mixup and CutMix against their formulas and timm's class; alike on any ranks and passes."""

import numpy as np
import pytest
import torch
from scipy import stats
from timm.data import mixup as timm_mixup

from tests.utils.data import loading
from utils.config.groups.augmentation import MIX_MODES, AugmentationSettings
from utils.data.formats.readers import MemoryImages
from utils.data.images.unreadable import REPLACE
from utils.data.loaders import TrainLoader
from utils.data.mixing import Mixing, boxes
from utils.data.sample_plan import MicroBatch, SamplePlan
from utils.data.sources import ResidentSource

CPU = torch.device("cpu")
CLASSES = 6


def mixing_of(mixup, cutmix, classes, seed, prob=1.0, switch=0.5, mode="pair"):
    chosen = AugmentationSettings(
        mixup=mixup, cutmix=cutmix, mixup_prob=prob, mixup_switch_prob=switch, mixup_mode=mode
    )
    return Mixing(chosen, classes, seed)


def share_of(first=0, count=6, epoch=0, filled=0):
    return MicroBatch(epoch, 0, np.arange(first, first + count + filled), count, 1.0, True)


def batch(count=6, channels=3, size=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, channels, size, size, generator=generator), torch.arange(count) % CLASSES


def mixed(mixing, images, labels, *shares):
    return mixing(images.clone(), labels, shares or [share_of(count=len(labels))])[:2]


def kept_of(targets, labels):
    """The part that the own label has, where the partner's is another one."""
    return targets[torch.arange(len(labels)), labels]


PARTNERS = {2: [1, 0], 3: [1, 2, 0], 6: [1, 0, 3, 2, 5, 4], 7: [1, 0, 3, 2, 5, 6, 4]}


# --------------------------------------------------------------------------------------- one batch


@pytest.mark.parametrize("count", PARTNERS)
def test_mixup_blends_the_images_and_labels_of_a_pair_with_its_own_share(count):
    images, labels = batch(count)
    result, targets = mixed(mixing_of(0.4, 0.0, 7, seed=0), images, torch.arange(count))
    kept = kept_of(targets, torch.arange(count))
    partner = PARTNERS[count]
    weight = kept[:, None, None, None]
    torch.testing.assert_close(result, weight * images + (1 - weight) * images[partner])
    one_hot = torch.eye(7)[:count]
    torch.testing.assert_close(targets, kept[:, None] * one_hot + (1 - kept[:, None]) * one_hot[partner])
    assert torch.equal(
        kept, kept[[index - index % 2 if index < count // 2 * 2 else count - 3 for index in range(count)]]
    )
    assert len(set(kept.tolist())) == count // 2 and labels.dtype == torch.int64


@pytest.mark.parametrize("count", PARTNERS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_cutmix_pastes_one_box_a_pair_and_its_area_is_the_labels_share(count, memory_format):
    images = batch(count)[0].contiguous(memory_format=memory_format)
    labels = torch.arange(count)
    partner = PARTNERS[count]
    result, targets = mixed(mixing_of(0.0, 1.0, 7, seed=3), images, labels)
    assert result.is_contiguous(memory_format=memory_format)
    pasted = (result != images).any(1)
    rows = pasted.any(2)
    columns = pasted.any(1)
    assert torch.equal(pasted, rows[:, :, None] & columns[:, None, :]) and pasted.any()
    assert torch.equal(result, torch.where(pasted[:, None], images[partner], images))
    torch.testing.assert_close(kept_of(targets, labels), 1 - pasted.flatten(1).float().mean(1))
    torch.testing.assert_close(targets.sum(1), torch.ones(count))
    assert torch.equal(pasted[0], pasted[1]) and (count < 6 or not torch.equal(pasted[0], pasted[2]))


def test_a_box_on_images_that_are_no_square_is_where_it_was_drawn():
    mixing = mixing_of(0.0, 1.0, 7, seed=3)
    images = torch.randn(6, 3, 8, 20)
    result, _ = mixed(mixing, images, torch.arange(6))
    blend = mixing.draw([share_of()], 8, 20)
    for own, other, shown, (top, bottom, left, right) in zip(
        images, images[PARTNERS[6]], result, blend.box, strict=True
    ):
        own = own.clone()
        own[:, top:bottom, left:right] = other[:, top:bottom, left:right]
        assert torch.equal(shown, own)


def test_what_fills_up_a_share_and_a_single_image_stay_as_they_are():
    images, labels = batch(6)
    mixing = mixing_of(0.4, 1.0, CLASSES, seed=0)
    for share, still in ((share_of(count=1, filled=1), [0, 1]), (share_of(count=0, filled=2), [0, 1])):
        result, targets = mixed(mixing, images[:2], labels[:2], share)
        assert torch.equal(result[still], images[still]) and torch.equal(targets, torch.eye(CLASSES)[labels[:2]])
    result, _ = mixed(mixing, images, labels, share_of(count=4), share_of(first=4, count=1, filled=1))
    assert torch.equal(result[4:], images[4:]) and not torch.equal(result[:4], images[:4])


# ------------------------------------------------------------------------------------ distributions


class GivenNumbers(timm_mixup.Mixup):
    """timm's ``Mixup`` with the numbers of a blend, the same for all images, instead of random ones."""

    def __init__(self, blend, mode):
        super().__init__(1.0, 1.0, mode=mode, num_classes=CLASSES, label_smoothing=0.0)
        self.by_box = blend.opacity[0] == 1
        self.share = (blend.kept if self.by_box else blend.opacity)[0]

    def _params_per_elem(self, batch_size):
        return np.full(batch_size, self.share), np.full(batch_size, self.by_box)

    def _params_per_batch(self):
        return self.share, self.by_box


@pytest.mark.parametrize("mode", MIX_MODES)
def test_images_and_targets_are_those_of_timm_for_the_same_share_and_box(monkeypatch, mode):
    images, labels = batch(40, size=16)
    order = torch.tensor([place for one in range(20) for place in (one, 39 - one)])  # timm's pairs as neighbours
    mixing = mixing_of(0.4, 1.0, CLASSES, seed=0, prob=0.7, mode=mode)
    kinds = set()
    for number in range(20):
        if mode == "pair":
            share = share_of(2 * number, count=2)
            order = torch.arange(2)
            images, labels = (of[2 * number : 2 * number + 2] for of in batch(40, size=16))
        else:
            share = MicroBatch(0, number, np.arange(40), 40, 1.0, True)
        blend = mixing.draw([share], 16, 16)
        assert all(len(np.unique(numbers, axis=0)) == 1 for numbers in (blend.opacity, blend.box, blend.kept))
        given = tuple(blend.box[0].tolist()), blend.kept[0]
        monkeypatch.setattr(timm_mixup, "cutmix_bbox_and_lam", lambda *_, given=given, **__: given)
        expected, targets = GivenNumbers(blend, mode)(images.clone(), labels)
        found = mixed(mixing, images[order], labels[order], share)
        torch.testing.assert_close(found[0], expected[order])
        torch.testing.assert_close(found[1], targets[order].float())
        kinds.add((blend.opacity[0] < 1, blend.kept[0] < 1))
    assert len(kinds) == 3  # blended, with a box, and left alone


@pytest.mark.parametrize(
    ("mixup", "cutmix", "prob", "switch"),
    [
        (0.8, 1.0, 0.8, 0.3),
        (0.8, 1.0, 1.0, 0.5),
        (0.8, 0.0, 0.5, 0.5),
        (0.0, 1.0, 0.3, 0.5),
        (0.8, 1.0, 1.0, 0.0),
        (0.8, 1.0, 1.0, 1.0),
    ],
)
def test_shares_and_choices_have_the_distribution_of_timms(mixup, cutmix, prob, switch):
    # so large that it matters little how halves of pixels are rounded
    pairs = 4000
    size = (4096, 6144)
    blend = mixing_of(mixup, cutmix, CLASSES, 0, prob, switch).draw([share_of(count=2 * pairs)], *size)
    np.random.seed(0)  # timm's generator
    reference = timm_mixup.Mixup(mixup, cutmix, prob=prob, switch_prob=switch, num_classes=CLASSES)
    shares, by_box = reference._params_per_elem(pairs)
    kept = [
        timm_mixup.cutmix_bbox_and_lam((3, *size), share)[1] if box and share != 1 else share
        for share, box in zip(shares, by_box, strict=True)
    ]
    assert stats.ks_2samp(blend.kept[::2], kept).pvalue > 1e-3
    ours = blend.opacity[::2]
    theirs = np.where(by_box, 1, shares)
    assert stats.fisher_exact([[(of < 1).sum(), (of == 1).sum()] for of in (ours, theirs)]).pvalue > 1e-3
    assert stats.ks_2samp(ours, theirs).pvalue > 1e-3


def test_by_batch_the_numbers_depend_on_seed_epoch_and_step_alone():
    def kept(seed=0, epoch=0, step=0, count=6):
        share = MicroBatch(epoch, step, np.arange(count), count, 1.0, True)
        (found,) = set(mixing_of(0.4, 1.0, CLASSES, seed, mode="batch").draw([share], 64, 64).kept)
        return found

    assert kept() == kept(count=4) and len({kept(), kept(seed=1), kept(epoch=1), kept(step=1)}) == 4


def test_from_the_off_epoch_on_no_pair_is_mixed_and_nothing_is_drawn(monkeypatch):
    train, _ = make("--mixup-off-epoch", 2)
    plain, _ = make("--mixup", 0, "--cutmix", 0)
    mixes = next(train.batches(1))
    assert mixes.targets.shape == (64, 10) and not torch.equal(mixes.images, next(plain.batches(1)).images)
    monkeypatch.setattr(Mixing, "draw", None)
    for epoch in (2, 3):
        found = next(train.batches(epoch))
        assert loading.same_batches([found], [next(plain.batches(epoch))]) and found.targets.dtype == torch.int64
    forever, _ = make("--mixup-off-epoch", 0)
    assert all(forever.mixing.settings.mixes(epoch) for epoch in (0, 10**6))
    both = "mixup alpha 0.2, cutmix alpha 1; CutMix with probability 0.5, otherwise mixup"
    assert (str(train.mixing), str(forever.mixing)) == (f"{both}; off after 2 epochs", both)


def test_a_probability_leaves_the_numbers_of_the_pairs_that_are_mixed_as_they_were():
    share = share_of(count=2000)
    alone = mixing_of(0.4, 1.0, CLASSES, seed=0).draw([share_of(count=2000)], 16, 16)
    rarely = mixing_of(0.4, 1.0, CLASSES, seed=0, prob=0.25).draw([share], 16, 16)
    left = (rarely.kept == 1) & (rarely.opacity == 1)
    assert stats.binomtest(int(left[::2].sum()), 1000, 0.75).pvalue > 1e-6  # and a few boxes without a pixel
    np.testing.assert_array_equal(rarely.kept[~left], alone.kept[~left])
    np.testing.assert_array_equal(rarely.box[~left], alone.box[~left])


@pytest.mark.parametrize(("size", "share"), [((100, 200), 0.75), ((33, 48), 0.4), ((8, 8), 0.9)])
def test_a_box_has_the_asked_area_around_any_pixel_and_ends_at_the_image(size, share):
    """As in the code of the paper: sides and halves are rounded down."""
    steps = (np.arange(100) + 0.5) / 100
    centres = np.stack(np.meshgrid(steps, steps, indexing="ij"), axis=-1).reshape(-1, 2)
    found = boxes(*size, np.full(10_000, share), centres).reshape(-1, 2, 2)
    for axis, side in enumerate(size):
        half = int(side * np.sqrt(1 - share)) // 2
        place = (centres[:, axis] * side).astype(int)
        np.testing.assert_array_equal(found[:, axis], np.clip([place - half, place + half], 0, side).T)


def test_each_sample_meets_every_other_alike_over_the_epochs():
    plan = SamplePlan(9, 9, 9, seed=0, pairs=True)
    mixing = mixing_of(1.0, 0.0, CLASSES, seed=0)
    met = np.zeros((9, 9))
    for epoch in range(1500):
        (share,) = plan.micro_batches(epoch, 0)
        np.add.at(met, (share.indices, share.indices[mixing.draw([share], 8, 8).partner]), 1)
    assert (np.diag(met) == 0).all() and (met.sum(0) == 1500).all() and (met.sum(1) == 1500).all()
    others = met[~np.eye(9, dtype=bool)]
    assert stats.chisquare(others).pvalue > 1e-3


def test_the_numbers_of_a_pair_depend_on_seed_epoch_and_its_samples_alone():
    def kept(seed=0, **place):
        return mixing_of(0.4, 1.0, CLASSES, seed).draw([share_of(**place)], 16, 16).kept

    np.testing.assert_array_equal(kept(), kept())
    np.testing.assert_array_equal(kept(count=6)[2:], kept(first=2, count=4))
    assert all((kept() != other).any() for other in (kept(seed=1), kept(epoch=1), kept(first=6)))


# ---------------------------------------------------------------------------------- through the loader


MIXES = ("--mixup", 0.2, "--cutmix", 1)


def make(*flags, **place):
    return loading.make(*MIXES, *flags, **place)[:2]


@pytest.mark.parametrize(("batch_size", "mode"), [(60, "pair"), (61, "batch"), (719, "pair")])
def test_mixed_images_and_targets_are_the_same_bits_on_any_ranks_passes_and_loader(batch_size, mode):
    flags = ("--global-batch-size", batch_size, "--mixup-mode", mode)
    ways = ((1, 2, "resident"), (1, 3, "stream"), (2, 1, "stream"), (3, 2, "resident"))
    alone = loading.steps_in_any_way(*MIXES, *flags, ways=ways)
    plain = loading.steps_of("--global-batch-size", batch_size)
    assert all(torch.equal(alone[step][0], plain[step][0]) for step in alone)
    untouched = torch.cat([(alone[step][1] == plain[step][1]).flatten(1).all(1) for step in alone])
    assert untouched.float().mean() < 0.2  # of boxes, some have no pixel


def test_an_image_that_stands_in_for_a_bad_one_is_mixed_with_the_numbers_of_the_planned_one():
    train, _ = make("--augment", "shift", "flip")
    digits = train.source.pixels, train.source.labels
    bad = 5
    copied = [
        whole.index_select(0, torch.arange(len(whole)).where(torch.arange(len(whole)) != bad, bad + 1))
        for whole in digits
    ]
    of_copy, of_damaged = (
        TrainLoader(ResidentSource(images, CPU, REPLACE), train.plan, train.transform, train.mixing).batches(1)
        for images in (MemoryImages(*copied), MemoryImages(*digits, {bad: "bad.png"}))
    )
    replaced = 0
    for expected, found in zip(of_copy, of_damaged, strict=True):
        assert torch.equal(expected.images, found.images) and torch.equal(expected.targets, found.targets)
        replaced += found.replaced
    assert replaced == 1


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.gpu
def test_a_gpu_gives_the_bits_of_the_cpu(memory_format):
    images, labels = batch(63)
    images = images.contiguous(memory_format=memory_format)
    mixing = mixing_of(0.2, 1.0, CLASSES, seed=0)
    expected = mixed(mixing, images, labels)
    found = mixed(mixing, images.cuda(), labels.cuda())
    assert found[0].is_contiguous(memory_format=memory_format)
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(("flags", "world_size"), [(("-b", 1), 1), (("--global-batch-size", 3), 2)])
def test_a_batch_without_a_pair_for_each_process_is_refused(flags, world_size):
    with pytest.raises(ValueError, match=rf"--mixup mixes pairs of images: --global-batch-size {flags[1]} "):
        make(*flags, world_size=world_size)
