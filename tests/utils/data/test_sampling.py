"""Epochs other than of each sample once: repeated, balanced and fewer samples, alike on any ranks and passes."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from timm.data.distributed_sampler import RepeatAugSampler

import main
from tests.helpers import image_tree
from tests.utils.data import loading
from utils.data.sample_plan import SamplePlan, sample_uniforms
from utils.data.sampling import Sampling

few = settings(max_examples=40, deadline=None)


@st.composite
def samplings(draw, kinds=("repeated", "balanced", "fewer")):
    """Any of the kinds, for up to 120 samples of up to 5 classes of very different sizes."""
    count = draw(st.integers(2, 120))
    seed = draw(st.integers(0, 2**31 - 1))
    kind = draw(st.sampled_from(kinds))
    available = np.sort(np.random.default_rng(seed).permutation(200)[:count])
    if kind == "balanced":
        labels = np.array(draw(st.lists(st.sampled_from([0, 0, 0, 1, 1, 3, 4]), min_size=count, max_size=count)))
        return Sampling(seed, available, labels=labels)
    return Sampling(seed, available, repeats=draw(st.integers(2, 5)) if kind == "repeated" else 1)


def ranks_of(sampling, global_batch_size, world_size=1, accumulate=1, pairs=False):
    sizes = sampling.num_samples, global_batch_size, -(-global_batch_size // (world_size * accumulate))
    return [
        SamplePlan(*sizes, sampling.seed, rank, world_size, pairs=pairs, sampling=sampling)
        for rank in range(world_size)
    ]


def step_of(ranks, epoch, step):
    """(sample, copy) of one step that count, over all passes and ranks in order."""
    passes = zip(*(plan.micro_batches(epoch, step) for plan in ranks), strict=True)
    parts = [part for of_pass in passes for part in of_pass]
    assert all(part.copies is None or len(part.copies) == len(part.indices) for part in parts)
    return [
        (index, 0 if part.copies is None else int(part.copies[place]))
        for part in parts
        for place, index in enumerate(part.indices[: part.count].tolist())
    ]


# ------------------------------------------------------------------------------ any ranks and passes


@few
@given(samplings(), st.integers(1, 40), st.integers(0, 1000), st.booleans())
def test_each_step_has_the_same_samples_and_copies_in_the_same_order_on_any_ranks_and_passes(
    sampling, batch_size, epoch, pairs
):
    alone = ranks_of(sampling, batch_size, pairs=pairs)
    for step in range(alone[0].steps_per_epoch):
        expected = step_of(alone, epoch, step)
        assert [index for index, _ in expected] == alone[0].step_indices(epoch, step).tolist()
        for world_size, accumulate in ((1, 3), (2, 1), (3, 2)):
            assert step_of(ranks_of(sampling, batch_size, world_size, accumulate, pairs), epoch, step) == expected


@few
@given(samplings(), st.integers(1, 40), st.integers(0, 1000))
def test_the_steps_hold_the_whole_epoch_and_no_copy_twice(sampling, batch_size, epoch):
    ranks = ranks_of(sampling, batch_size, 2)
    seen = [one for step in range(ranks[0].steps_per_epoch) for one in step_of(ranks, epoch, step)]
    samples, copies = sampling.epoch(epoch)
    copies = np.zeros(len(samples), dtype=int) if copies is None else copies
    assert sorted(seen) == sorted(zip(samples.tolist(), copies.tolist(), strict=True))
    assert len(set(seen)) == len(seen) == sampling.num_samples and {index for index, _ in seen} <= set(
        sampling.available
    )


# ------------------------------------------------------------------------------ repeated augmentation


@pytest.mark.parametrize("repeats", [2, 3, 4])
@pytest.mark.parametrize("world_size", [1, 4])
def test_samples_are_repeated_as_by_the_sampler_of_timm_and_torchvision(repeats, world_size):
    count = 1024
    theirs = []
    for rank in range(world_size):
        sampler = RepeatAugSampler(range(count), num_replicas=world_size, rank=rank, num_repeats=repeats)
        theirs += list(sampler)
    ours, copies = Sampling(0, np.arange(count), repeats=repeats).epoch(0)
    assert len(ours) == len(theirs) == count
    histogram = Counter(Counter(ours.tolist()).values())
    assert histogram == Counter(Counter(theirs).values())
    # As torchvision's RASampler: a random n / R of the samples R times each, the rest not at all in this epoch.
    assert histogram[repeats] == count // repeats and len(histogram) <= 2
    assert all(sorted(copies[ours == index]) == list(range((ours == index).sum())) for index in set(ours.tolist()))
    epochs = [
        set(Sampling(seed, np.arange(count), repeats).epoch(epoch)[0].tolist()) for seed, epoch in ((0, 1), (1, 0))
    ]
    assert all(len(other & set(ours.tolist())) < 0.8 * count / repeats for other in epochs), "others in each"


def test_a_samples_copies_are_in_one_step_on_different_ranks_and_no_neighbours():
    sampling = Sampling(0, np.arange(960), repeats=4)
    ranks = ranks_of(sampling, 96, world_size=4, pairs=True)
    for step in range(10):
        parts = [plan.micro_batches(3, step)[0] for plan in ranks]
        assert all(len(set(part.indices.tolist())) == 24 for part in parts), "no rank has a sample twice"
        assert all(set(part.indices.tolist()) == set(parts[0].indices.tolist()) for part in parts)
        assert [set(part.copies.tolist()) for part in parts] == [{0}, {1}, {2}, {3}]


@few
@given(st.integers(30, 200), st.integers(2, 4), st.integers(24, 60), st.integers(0, 99))
def test_two_neighbours_that_are_mixed_are_different_samples(count, repeats, batch_size, epoch):
    (plan,) = ranks_of(Sampling(1, np.arange(count), repeats=repeats), batch_size, pairs=True)
    for step in range(plan.steps_per_epoch):
        order = plan.step_indices(epoch, step)
        assert all(first != second for first, second in zip(order[::2], order[1::2], strict=False))


def test_each_copy_has_random_numbers_of_its_own_and_the_first_those_of_its_sample():
    sampling = Sampling(0, np.arange(300), repeats=3)
    (plan,) = ranks_of(sampling, 300)
    (whole,) = plan.micro_batches(5, 0)
    numbers = sample_uniforms(7, 5, whole.keys, 3, 2)
    assert len(np.unique(numbers, axis=0)) == 300
    first = whole.copies == 0
    np.testing.assert_array_equal(numbers[first], sample_uniforms(7, 5, whole.indices[first], 3, 2))
    # The same sample and copy has the same numbers in whatever company.
    for world_size in (2, 3):
        for part in (share for plan in ranks_of(sampling, 100, world_size) for share in plan.micro_batches(5, 1)):
            places = [np.flatnonzero(whole.keys == key)[0] for key in part.keys]
            np.testing.assert_array_equal(sample_uniforms(7, 5, part.keys, 3, 2), numbers[places])


# ----------------------------------------------------------------------------------------- balanced


@few
@given(samplings(kinds=("balanced",)), st.integers(0, 50))
def test_each_class_is_met_equally_often_and_its_samples_too(sampling, epoch):
    class_of = dict(zip(sampling.available.tolist(), sampling.labels.tolist(), strict=True))
    samples, _ = sampling.epoch(epoch)
    met = Counter(class_of[index] for index in samples.tolist())
    classes = set(class_of.values())
    assert set(met) == classes and len(set(met.values())) == 1
    assert met[next(iter(classes))] == len(class_of) // len(classes) == sampling.num_samples // len(classes)


@few
@given(samplings(kinds=("balanced",)), st.integers(1, 30))
def test_over_the_epochs_no_sample_of_a_class_is_met_twice_more_than_another(sampling, epochs):
    met = Counter(np.concatenate([sampling.epoch(epoch)[0] for epoch in range(epochs)]).tolist())
    for label in set(sampling.labels.tolist()):
        counts = [met[index] for index in sampling.available[sampling.labels == label].tolist()]
        assert max(counts) - min(counts) <= 1


def test_balanced_classes_are_spread_over_the_epoch():
    labels = np.repeat([0, 1, 2, 3], 1000)
    sampling = Sampling(0, np.arange(4000), labels=labels)
    firsts = np.bincount(labels[sampling.epoch(2)[0][:1000]], minlength=4)
    assert stats.chisquare(firsts).pvalue > 1e-3


def test_it_says_what_an_epoch_holds():
    available = np.arange(90)
    assert str(Sampling(0, available, repeats=3)) == "30 images an epoch, 3 times each, not each once"
    assert str(Sampling(0, available, labels=available % 2)) == (
        "45 images of each class an epoch, not each image exactly once"
    )
    assert str(Sampling(0, available)) == "each image once an epoch"


# ------------------------------------------------------------------------------- through the loader


ALIKE = ("--workers", 0, "--seed", 3)


def make(*flags):
    return loading.make(*ALIKE, *flags)[0]


@pytest.mark.parametrize(
    "technique",
    [
        ("--repeated-augmentation", 3, "--mixup", 0.2, "--cutmix", 1, "--mixup-prob", 0.7, "--mixup-off-epoch", 9),
        ("--balanced-sampler",),
        ("--train-samples", 200, "--repeated-augmentation", 2),
    ],
)
def test_images_and_targets_are_the_same_bits_on_any_ranks_passes_and_loader_and_from_any_step(technique):
    flags = (*ALIKE, "--augment", "shift", "flip", "--global-batch-size", 90, *technique)
    assert len(loading.steps_in_any_way(*flags, ways=((2, 1, "stream"), (3, 2, "resident")))) > 2


@pytest.mark.parametrize("loader", ["resident", "stream"])
def test_copies_of_an_image_are_augmented_differently_by_either_loader(loader):
    train = make("--repeated-augmentation", 4, "--augment", "shift", "--loader", loader, "-b", 64)
    batch = next(train.batches(0))
    assert Counter(Counter(batch.indices.tolist()).values()) == {4: 16}
    same = [batch.images[batch.indices == index] for index in set(batch.indices.tolist())]
    different = [len({image.numpy().tobytes() for image in copies}) for copies in same]
    assert np.mean(different) > 3  # of nine possible shifts, two copies may have the same


def test_files_are_cropped_differently_for_each_copy(tmp_path):
    image_tree(tmp_path, {"train": 1, "val": 1}, size=40)
    flags = ("--dataname", "folder", "--datapath", tmp_path, "--image-size", 16, "--augment", "resized-crop")
    train = make(*flags, "--repeated-augmentation", 2, "-b", 2)
    batch = next(train.batches(0))
    assert len(set(batch.indices.tolist())) == 1 and not torch.equal(*batch.images)


def test_the_first_samples_are_those_of_the_first_epochs_plan_and_no_others():
    train = make("--train-samples", 100)
    order = SamplePlan(1437, 64, 64, seed=3).order(0)
    for epoch in (0, 5):
        seen = [index for batch in train.batches(epoch) for index in batch.indices.tolist()]
        assert sorted(seen) == sorted(order[:100].tolist())
    with pytest.raises(ValueError, match="--train-samples 5,000: there are 1,437 training images"):
        make("--train-samples", 5000)


def test_the_plan_says_how_many_images_of_each_class_are_left(capsys, workplace):
    assert main.main(["--dry-run", "--device", "cpu", "--arch", "fc", "--train-samples", "100"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Sampling"))
    assert "of 100 of the 1,437 training images: " in row
    counts = [int(part.split()[0]) for part in row.partition("images: ")[2].split(", ")]
    assert len(counts) == 10 and sum(counts) == 100
