"""Which samples in which order with which random numbers: properties of pure functions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from utils.data.sample_plan import _GOLDEN, SamplePlan, _mix, sample_uniforms, step_seed, validation_batches

few = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**31 - 1)
epochs = st.integers(0, 10**6)


@st.composite
def plans(draw, max_world=4):
    """The plans of all ranks of one run, as the arguments make them (batch size from the global one)."""
    num_samples, global_batch_size = draw(st.integers(1, 200)), draw(st.integers(1, 64))
    world_size, accumulate, seed = draw(st.integers(1, max_world)), draw(st.integers(1, 4)), draw(seeds)
    batch_size = -(-global_batch_size // (world_size * accumulate))
    return [
        SamplePlan(num_samples, global_batch_size, batch_size, seed, rank, world_size) for rank in range(world_size)
    ]


def counted(plan, epoch, step):
    """The samples that count in one step on one rank."""
    return [index for share in plan.shares(epoch, step) for index in share.indices[: share.count].tolist()]


# ----------------------------------------------------------------------------------------- order


@few
@given(plans(), epochs)
def test_every_sample_counts_exactly_once_an_epoch(ranks, epoch):
    steps = range(ranks[0].steps_per_epoch)
    seen = [index for plan in ranks for step in steps for index in counted(plan, epoch, step)]
    assert sorted(seen) == list(range(ranks[0].num_samples))


@few
@given(st.integers(1, 200), st.integers(1, 64), seeds, epochs)
def test_a_step_sees_the_same_samples_on_any_number_of_ranks(num_samples, global_batch_size, seed, epoch):
    for step in range(-(-num_samples // global_batch_size)):
        unions = []
        for world_size in (1, 2, 3, 4):
            batch_size = -(-global_batch_size // world_size)
            ranks = [
                SamplePlan(num_samples, global_batch_size, batch_size, seed, r, world_size) for r in range(world_size)
            ]
            unions.append(sorted(index for plan in ranks for index in counted(plan, epoch, step)))
        assert unions[0] == unions[1] == unions[2] == unions[3]
        assert len(unions[0]) == min(global_batch_size, num_samples - step * global_batch_size)


@few
@given(plans(), epochs)
def test_steps_are_slices_of_one_permutation(ranks, epoch):
    plan = ranks[0]
    parts = [plan.step_indices(epoch, step) for step in range(plan.steps_per_epoch)]
    np.testing.assert_array_equal(np.concatenate(parts), plan.order(epoch))
    assert all(len(part) == plan.global_batch_size for part in parts[:-1])


def test_order_depends_on_seed_and_epoch_only():
    a = SamplePlan(1000, 64, 64, seed=3)
    b = SamplePlan(1000, 10, 5, seed=3, rank=1, world_size=2)
    np.testing.assert_array_equal(a.order(7), b.order(7))
    orders = [SamplePlan(1000, 64, 64, seed).order(epoch) for seed in range(3) for epoch in range(3)]
    assert len({order.tobytes() for order in orders}) == 9


def test_order_of_many_epochs_puts_every_sample_at_every_place_alike():
    plan = SamplePlan(10, 4, 4, seed=0)
    places = np.stack([plan.order(epoch) for epoch in range(3000)])
    counts = np.stack([np.bincount(places[:, place], minlength=10) for place in range(10)])
    assert stats.chisquare(counts.ravel()).pvalue > 1e-3


def test_order_cannot_be_changed_by_a_caller():
    with pytest.raises(ValueError, match="read-only"):
        SamplePlan(10, 4, 4, seed=0).order(0)[0] = 5


# ---------------------------------------------------------------------------------------- shares


@few
@given(plans(), epochs)
def test_all_ranks_make_the_same_number_of_passes_and_only_the_last_ends_the_step(ranks, epoch):
    for step in range(ranks[0].steps_per_epoch):
        shares = [plan.shares(epoch, step) for plan in ranks]
        assert len({len(of_rank) for of_rank in shares}) == 1
        for of_rank in shares:
            assert [share.ends_step for share in of_rank] == [False] * (len(of_rank) - 1) + [True]
            assert all((share.epoch, share.step) == (epoch, step) for share in of_rank)


@few
@given(plans(), epochs)
def test_no_share_reads_fewer_than_two_images_nor_counts_more_than_a_batch(ranks, epoch):
    for plan in ranks:
        for step in range(plan.steps_per_epoch):
            of_step = set(plan.step_indices(epoch, step).tolist())
            for share in plan.shares(epoch, step):
                assert 2 <= len(share.indices) <= max(2, plan.batch_size)
                assert 0 <= share.count <= plan.batch_size
                assert set(share.indices.tolist()) <= of_step


@few
@given(plans(), epochs, st.randoms(use_true_random=False))
def test_weighted_means_averaged_over_ranks_and_summed_over_passes_are_the_mean_of_the_step(ranks, epoch, random):
    values = np.array([random.uniform(-1, 1) for _ in range(ranks[0].num_samples)])
    for step in range(ranks[0].steps_per_epoch):
        total = 0.0
        for plan in ranks:
            for share in plan.shares(epoch, step):
                mean = values[share.indices[: share.count]].mean() if share.count else 123.0
                total += share.weight * mean / len(ranks)
        assert total == pytest.approx(values[ranks[0].step_indices(epoch, step)].mean(), abs=1e-12)


def test_a_full_step_makes_accumulate_passes_of_the_batch_size():
    plan = SamplePlan(100, 24, 4, seed=0, rank=1, world_size=2)  # 2 ranks x 3 passes x 4 images
    assert [(share.count, share.weight) for share in plan.shares(0, 0)] == [(4, 2 * 4 / 24)] * 3


@few
@given(st.integers(0, 300), st.integers(1, 70))
def test_validation_batches_hold_every_sample_exactly_once(num_samples, batch_size):
    batches = validation_batches(num_samples, batch_size)
    assert [index for batch in batches for index in batch.tolist()] == list(range(num_samples))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert all(0 < len(batch) <= batch_size for batch in batches)


# -------------------------------------------------------------------------------- random numbers


def test_mix_gives_the_published_sequence_of_splitmix64():
    steps = np.arange(5, dtype=np.uint64)
    with np.errstate(over="ignore"):
        states = np.uint64(1234567) + steps * _GOLDEN
        numbers = _mix(states)
    assert numbers.tolist() == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821
    ]  # fmt: skip


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


@few
@given(seeds, epochs, st.integers(0, 100), st.integers(1, 30))
def test_random_numbers_lie_in_the_half_open_unit_interval(seed, epoch, stream, count):
    numbers = sample_uniforms(seed, epoch, np.arange(50), stream, count)
    assert numbers.dtype == np.float32 and numbers.shape == (50, count)
    assert numbers.min() >= 0 and numbers.max() < 1


def test_random_numbers_do_not_depend_on_the_integer_type_of_the_index():
    narrow, wide = np.arange(20, dtype=np.int32), np.arange(20, dtype=np.int64)
    np.testing.assert_array_equal(sample_uniforms(1, 2, narrow, 3, 4), sample_uniforms(1, 2, wide, 3, 4))


def test_random_numbers_differ_between_seeds_epochs_streams_and_columns():
    keys = [(seed, epoch, stream) for seed in range(4) for epoch in range(4) for stream in range(4)]
    columns = np.concatenate([sample_uniforms(s, e, np.arange(500), t, 3) for s, e, t in keys], axis=1)
    correlations = np.corrcoef(columns.T) - np.eye(columns.shape[1])
    assert np.abs(correlations).max() < 6 / np.sqrt(500)  # 6 sigma; the same column twice would give 1


@pytest.mark.parametrize(
    "numbers",
    [
        sample_uniforms(0, 0, np.arange(20_000), 1, 1)[:, 0],
        sample_uniforms(0, 0, np.arange(20_000) * 1000, 2, 22)[:, 21],
        sample_uniforms(12345, 99, np.array([7]), 3, 20_000)[0],
        np.concatenate([sample_uniforms(1, epoch, np.arange(10), 1, 2)[:, 1] for epoch in range(2000)]),
        np.concatenate([sample_uniforms(seed, 0, np.arange(10), 1, 1)[:, 0] for seed in range(2000)]),
    ],
    ids=["indices", "distant indices", "columns", "epochs", "seeds"],
)
def test_random_numbers_are_uniform(numbers):
    distance = stats.kstest(numbers, "uniform").statistic
    assert distance < 1.95 / np.sqrt(len(numbers))  # Kolmogorov-Smirnov's bound at a level of 0.1 %


def test_seed_of_a_step_is_its_own_for_each_seed_step_and_rank():
    found = {step_seed(seed, step, rank) for seed in range(10) for step in range(50) for rank in range(8)}
    assert len(found) == 10 * 50 * 8
    assert min(found) >= 0 and max(found) < 2**63
