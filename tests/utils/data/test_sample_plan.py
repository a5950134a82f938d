"""The samples, their order and their random numbers: properties of pure functions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.data.sample_plan import SamplePlan, hashed, sample_uniforms, step_seed

few = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**31 - 1)
epochs = st.integers(0, 10**6)


@st.composite
def plans(draw, max_world=4, max_accumulate=4, drop_last=(False,), pairs=(False, True)):
    """The plans of all ranks of one run, as the arguments make them (batch size from the global one)."""
    num_samples = draw(st.integers(1, 200))
    global_batch_size = draw(st.integers(1, 64))
    world_size = draw(st.integers(1, max_world))
    accumulate = draw(st.integers(1, max_accumulate))
    seed = draw(seeds)
    batch_size = -(-global_batch_size // (world_size * accumulate))
    more = draw(st.sampled_from(drop_last)), draw(st.sampled_from(pairs))
    return [
        SamplePlan(num_samples, global_batch_size, batch_size, seed, rank, world_size, *more)
        for rank in range(world_size)
    ]


def sizes(plan):
    """Samples in each step of an epoch."""
    return [len(plan.step_indices(0, step)) for step in range(plan.steps_per_epoch)]


def counted(plan, epoch, step):
    """The samples that count in one step on one rank."""
    return [index for share in plan.micro_batches(epoch, step) for index in share.indices[: share.count].tolist()]


# ----------------------------------------------------------------------------------------- order


@few
@given(plans(), epochs)
def test_every_sample_counts_exactly_once_an_epoch(ranks, epoch):
    steps = range(ranks[0].steps_per_epoch)
    seen = [index for plan in ranks for step in steps for index in counted(plan, epoch, step)]
    assert sorted(seen) == list(range(ranks[0].num_samples))


@few
@given(plans(), epochs)
def test_steps_are_slices_of_one_permutation(ranks, epoch):
    plan = ranks[0]
    parts = [plan.step_indices(epoch, step) for step in range(plan.steps_per_epoch)]
    np.testing.assert_array_equal(np.concatenate(parts), plan.order(epoch))
    assert all(len(part) == plan.global_batch_size for part in parts[:-2])


@given(st.integers(1, 10**7), st.integers(1, 10**5))
def test_no_step_is_smaller_than_half_of_the_global_batch_unless_the_whole_set_is(num_samples, global_batch_size):
    plan = SamplePlan(num_samples, global_batch_size, global_batch_size, seed=0)
    bounds = [plan._start(step) for step in range(max(0, plan.steps_per_epoch - 4), plan.steps_per_epoch + 1)]
    found = np.diff(bounds)
    assert bounds[-1] == num_samples and bounds[0] == max(0, plan.steps_per_epoch - 4) * global_batch_size
    assert found.max() <= global_batch_size and 2 * found.min() >= min(global_batch_size, 2 * num_samples)
    assert all(found[:-2] == global_batch_size) and plan.steps_per_epoch == -(-num_samples // global_batch_size)
    assert len(set(found) - {global_batch_size}) <= 2


@pytest.mark.parametrize(
    ("num_samples", "global_batch_size", "expected"),
    [
        (1437, 359, [359, 359, 359, 180, 180]),
        (1437, 360, [360, 360, 360, 357]),
        (13, 4, [4, 4, 3, 2]),
        (14, 4, [4, 4, 4, 2]),
        (12, 4, [4, 4, 4]),
        (5, 4, [3, 2]),
        (3, 4, [3]),
        (9, 8, [5, 4]),
        (3, 2, [2, 1]),
    ],
)
def test_a_small_remainder_is_shared_out_over_the_last_two_steps(num_samples, global_batch_size, expected):
    assert sizes(SamplePlan(num_samples, global_batch_size, global_batch_size, seed=0)) == expected


@few
@given(plans(drop_last=(True,)), epochs)
def test_without_the_remainder_all_steps_are_full_and_no_sample_counts_twice(ranks, epoch):
    full = ranks[0].num_samples // ranks[0].global_batch_size
    assert sizes(ranks[0]) == [ranks[0].global_batch_size] * full
    seen = [index for plan in ranks for step in range(full) for index in counted(plan, epoch, step)]
    assert sorted(seen) == sorted(ranks[0].order(epoch)[: full * ranks[0].global_batch_size].tolist())


def test_the_remainder_that_is_left_out_is_another_one_in_each_epoch():
    plan = SamplePlan(100, 30, 30, seed=0, drop_last=True)
    left = [frozenset(plan.order(epoch)[90:].tolist()) for epoch in range(20)]
    assert len(set(left)) == 20 and len(frozenset.union(*left)) > 80


@pytest.mark.parametrize(
    ("num_samples", "global_batch_size", "drop_last", "words"),
    [
        (1437, 359, False, "180 and 180 in the last two steps of an epoch"),
        (1437, 360, False, "357 in the last step of an epoch"),
        (1438, 359, False, "181 and 180 in the last two steps of an epoch"),
        (1437, 2000, False, "1,437 in the only step of an epoch"),
        (1437, 479, False, ""),
        (1437, 479, True, ""),
        (1437, 359, True, "1 image(s) of each epoch left out"),
        (1437, 1437, False, ""),
    ],
)
def test_the_remainder_is_told_in_words(num_samples, global_batch_size, drop_last, words):
    plan = SamplePlan(num_samples, global_batch_size, global_batch_size, seed=0, drop_last=drop_last)
    assert plan.remainder == words


def test_order_is_numpys_permutation_under_a_counter_based_generator_of_that_key():
    for seed, epoch in ((0, 0), (3, 7), (2**31 - 1, 10**6)):
        expected = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(50)
        order = SamplePlan(50, 4, 4, seed).order(epoch)
        assert order.dtype == np.int64 and order.tolist() == expected.tolist()
    assert SamplePlan(8, 4, 4, seed=1).order(2).tolist() == [7, 0, 5, 4, 6, 2, 3, 1]  # on every platform


def test_order_cannot_be_changed_by_a_caller():
    with pytest.raises(ValueError, match="read-only"):
        SamplePlan(10, 4, 4, seed=0).order(0)[0] = 5


# ---------------------------------------------------------------------------------------- shares


@few
@given(plans(), epochs)
def test_all_ranks_make_the_same_number_of_passes_and_only_the_last_ends_the_step(ranks, epoch):
    for step in range(ranks[0].steps_per_epoch):
        shares = [plan.micro_batches(epoch, step) for plan in ranks]
        assert len({len(of_rank) for of_rank in shares}) == 1
        for of_rank in shares:
            assert [share.ends_step for share in of_rank] == [False] * (len(of_rank) - 1) + [True]
            assert all((share.epoch, share.step) == (epoch, step) for share in of_rank)


@few
@given(plans(), epochs)
def test_no_share_reads_fewer_than_two_images_nor_counts_more_than_a_batch(ranks, epoch):
    for plan in ranks:
        most = max(3, plan.batch_size + plan.batch_size % 2) if plan.pairs else plan.batch_size
        for step in range(plan.steps_per_epoch):
            for share in plan.micro_batches(epoch, step):
                assert 0 <= share.count <= most and len(share.indices) == max(2, share.count)
                assert plan.num_samples == 1 or len(set(share.indices.tolist())) == len(share.indices)


@few
@given(plans(max_accumulate=1, pairs=(False,)), epochs)
def test_a_rank_has_at_least_half_of_a_full_steps_share_in_every_step(ranks, epoch):
    for plan in ranks:
        for step in range(plan.steps_per_epoch if plan.num_samples >= plan.global_batch_size else 0):
            (share,) = plan.micro_batches(epoch, step)
            assert share.count >= plan.global_batch_size // plan.world_size // 2


@few
@given(plans(max_accumulate=1), epochs)
def test_a_rank_meets_at_most_three_sizes_of_batches(ranks, epoch):
    for plan in ranks:
        found = {
            len(share.indices) for step in range(plan.steps_per_epoch) for share in plan.micro_batches(epoch, step)
        }
        assert len(found) <= 3


@few
@given(plans(pairs=(True,)), epochs)
def test_neighbours_of_a_step_stay_in_one_share_where_they_are_mixed(ranks, epoch):
    plan = ranks[0]
    for step in range(plan.steps_per_epoch):
        shares = [of_rank.micro_batches(epoch, step) for of_rank in ranks]
        parts = [part.indices[: part.count].tolist() for passes in zip(*shares, strict=True) for part in passes]
        whole = [index for part in parts for index in part]
        assert whole == plan.step_indices(epoch, step).tolist()
        odd = [part for part in parts if len(part) % 2]
        assert len(odd) == len(whole) % 2
        assert not odd or odd[0] == [part for part in parts if part][-1]
        assert not odd or len(odd[0]) >= min(3, len(whole))


@few
@given(plans(), epochs, st.randoms(use_true_random=False))
def test_weighted_means_averaged_over_ranks_and_summed_over_passes_are_the_mean_of_the_step(ranks, epoch, random):
    values = np.array([random.uniform(-1, 1) for _ in range(ranks[0].num_samples)])
    for step in range(ranks[0].steps_per_epoch):
        total = 0.0
        for plan in ranks:
            for share in plan.micro_batches(epoch, step):
                mean = values[share.indices[: share.count]].mean() if share.count else 123.0
                total += share.weight * mean / len(ranks)
        assert total == pytest.approx(values[ranks[0].step_indices(epoch, step)].mean(), abs=1e-12)


def test_a_full_step_makes_accumulate_passes_of_the_batch_size():
    plan = SamplePlan(100, 24, 4, seed=0, rank=1, world_size=2)  # 2 ranks x 3 passes x 4 images
    assert [(share.count, share.weight) for share in plan.micro_batches(0, 0)] == [(4, 2 * 4 / 24)] * 3


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "world_size", "expected"),
    [(1, 8, 1, [2, 2, 2, 2]), (3, 4, 1, [4, 4, 4]), (15, 1, 4, [16, 16, 14, 14]), (6, 2, 1, [6, 6])],
)
def test_where_pairs_stay_together_an_odd_batch_size_is_rounded_up(batch_size, accumulate, world_size, expected):
    whole = batch_size * accumulate * world_size
    ranks = [SamplePlan(whole, whole, batch_size, 0, rank, world_size, pairs=True) for rank in range(world_size)]
    passes = zip(*(plan.micro_batches(0, 0) for plan in ranks), strict=True)
    assert [share.count for of_pass in passes for share in of_pass] == expected


# -------------------------------------------------------------------------------- random numbers


def splitmix64(state, count):
    """The next ``count`` numbers after ``state``, in Python's integers."""
    numbers = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        number = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
        numbers.append(number ^ number >> 31)
    return numbers


PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def test_the_reference_below_gives_the_published_sequence_of_splitmix64():
    assert splitmix64(1234567, 5) == PUBLISHED


@few
@given(st.lists(st.integers(0, 2**63 - 1), max_size=5))
def test_a_key_hashes_its_parts_one_after_the_other(parts):
    key = 0
    for part in parts:
        (key,) = splitmix64(key ^ part, 1)
    assert hashed(*parts) == key


@few
@given(seeds, epochs, st.integers(0, 2**40), st.integers(0, 100), st.integers(1, 8))
def test_random_numbers_of_a_sample_are_the_upper_bits_of_splitmix64_from_its_own_state(
    seed, epoch, index, stream, count
):
    (state,) = splitmix64(index ^ hashed(seed, epoch, stream), 1)
    expected = [(number >> 40) / 2**24 for number in splitmix64(state, count + 1)[1:]]
    assert sample_uniforms(seed, epoch, np.array([index]), stream, count)[0].tolist() == expected


@few
@given(seeds, epochs, st.lists(st.integers(0, 2**40), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_random_numbers_of_a_sample_do_not_depend_on_its_company(seed, epoch, indices, random):
    whole = sample_uniforms(seed, epoch, np.array(indices), 1, 4)
    places = list(range(len(indices)))
    random.shuffle(places)
    np.testing.assert_array_equal(sample_uniforms(seed, epoch, np.array(indices)[places], 1, 4), whole[places])
    alone = [sample_uniforms(seed, epoch, np.array([index]), 1, 4)[0] for index in indices]
    np.testing.assert_array_equal(np.stack(alone), whole)
    np.testing.assert_array_equal(sample_uniforms(seed, epoch, np.array(indices), 1, 2), whole[:, :2])


def test_seed_of_a_step_is_its_own_for_each_seed_step_and_rank():
    found = {step_seed(seed, step, rank) for seed in range(10) for step in range(50) for rank in range(8)}
    assert len(found) == 10 * 50 * 8
    assert min(found) >= 0 and 2**62 < max(found) < 2**63
