"""Intervals and the test of two networks: right for independent images, and wider for images in groups."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binomtest, norm, t

from scripts.common.uncertainty import bootstrap_interval, divided, drawn, sign_flip_test, wilson_interval


def shares(hits, count):
    return np.arange(count) < hits


def alone_right(first, second):
    return np.array([-1] * first + [1] * second + [0] * 7)


def grouped(correlation, groups=30, seeds=300, share=0.8):
    """Yield whether images are right, and their groups, with a given correlation within each group."""
    random = np.random.default_rng(0)
    for _ in range(seeds):
        sizes = random.integers(1, 20, groups)
        group = np.repeat(np.arange(groups), sizes)
        strength = 1 / correlation - 1
        yield random.random(len(group)) < random.beta(share * strength, (1 - share) * strength, groups)[group], group


# ------------------------------------------------------------------------------------------ independent images


@pytest.mark.parametrize(("hits", "count"), [(0, 7), (7, 7), (3, 8), (353, 360)])
def test_wilsons_interval_is_scipys(hits, count):
    interval = binomtest(hits, count).proportion_ci(0.95, method="wilson")
    assert wilson_interval(shares(hits, count)) == pytest.approx((100 * interval.low, 100 * interval.high))


def test_the_bootstrap_interval_is_that_of_resampling():
    right = shares(200, 250)
    means = np.random.default_rng(1).choice(right, (4000, 250)).mean(1)
    wider = math.sqrt(250 / 249) * t.ppf(0.975, 249) / norm.ppf(0.975)
    expected = 80 + wider * (100 * np.percentile(means, [2.5, 97.5]) - 80)
    assert bootstrap_interval(right) == pytest.approx(expected, abs=0.4)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 6), (5, 15), (300, 340)])
def test_the_test_of_few_differences_is_the_binomial_sum(first, second):
    n = first + second
    tail = sum(math.comb(n, k) for k in range(min(first, second) + 1)) / 2**n
    assert sign_flip_test(alone_right(first, second)) == (pytest.approx(min(1.0, 2 * tail)), True)


def test_the_test_of_many_differences_is_the_chi_squared_of_edwards():
    statistic = (abs(600 - 700) - 1) ** 2 / 1300
    p = math.erfc(math.sqrt(statistic / 2))  # of one degree of freedom
    assert sign_flip_test(alone_right(600, 700)) == (pytest.approx(p), False)
    assert sign_flip_test(alone_right(700, 700)) == (1, False)


# ------------------------------------------------------------------------------------------ images in groups


@pytest.mark.parametrize(("correlation", "share"), [(0.3, 0.97), (0.9, 0.5)])
def test_an_interval_over_groups_holds_the_truth_where_one_over_images_does_not(correlation, share):
    """Of 1,500 such sets each, intervals over groups held it in 88 to 96 %, over images in 32 to 66 %."""
    held = np.zeros(2)
    for right, group in grouped(correlation, share=share):
        for place, (low, high) in enumerate((wilson_interval(right, group), wilson_interval(right))):
            held[place] += low <= 100 * share <= high
    # Of 300, with three standard deviations beyond these shares.
    assert held[0] >= 0.88 * 300 - 17 and held[1] <= 0.66 * 300 + 25


def test_a_bootstrap_over_groups_holds_the_truth():
    spans = (bootstrap_interval(right, group) for right, group in grouped(0.3, seeds=100))
    assert sum(low <= 80 <= high for low, high in spans) >= 82  # 92 % of 1,500 did


def test_equal_networks_on_few_groups_are_told_apart_hardly_more_often_than_on_many():
    """Percentiles of resamples alone tell them apart in 43 % of sets of two groups."""
    random = np.random.default_rng(1)
    apart = 0
    for _ in range(200):
        group = np.repeat([0, 1], random.integers(10, 60, 2))
        one, two = (random.random(len(group)) < random.beta(8, 2, 2)[group] for _ in range(2))
        low, high = bootstrap_interval(two.astype(int) - one, group, least=-1.0)
        apart += not low <= 0 <= high
    assert apart <= 30  # 8 % of 600; with more than three standard deviations


def test_images_of_groups_that_always_agree_tell_as_much_as_one_of_each():
    right = np.random.default_rng(0).random(40) < 0.7
    alone = wilson_interval(right)
    many = wilson_interval(np.repeat(right, 25), np.repeat(np.arange(40), 25))
    assert np.ptp(alone) < np.ptp(many) < 1.06 * np.ptp(alone), "the sample's variance, and Student's t"
    assert np.ptp(wilson_interval(np.repeat(right, 25))) < 0.25 * np.ptp(alone)


def test_the_names_of_groups_and_the_order_of_images_do_not_matter():
    right, group = next(grouped(0.5))
    names = np.array([f"patient {-number}" for number in group])
    order = np.random.default_rng(0).permutation(len(right))
    assert wilson_interval(right[order], names[order]) == pytest.approx(wilson_interval(right, group))


@pytest.mark.parametrize("right", [[True] * 6, [True] * 3 + [False] * 3])
def test_one_group_tells_nothing_about_others(right):
    assert wilson_interval(np.array(right), np.zeros(6)) == (0.0, 100.0)
    assert bootstrap_interval(np.array(right), np.zeros(6)) == (0.0, 100.0)
    assert bootstrap_interval(np.array(right), np.zeros(6), least=-1.0) == (-100.0, 100.0)


def test_all_right_counts_as_one_answer_of_each_group_and_even_groups_as_their_images():
    group = np.repeat(np.arange(10), 8)
    low, high = wilson_interval(np.ones(80, bool), group)
    assert low < wilson_interval(np.ones(10, bool))[0] and high == 100
    even = np.tile([True, True, True, False], 20)  # each group has the same share, so nothing varies between them
    quantiles = (1.959964, 2.262157)  # of the normal and of Student's distribution with 9 degrees of freedom
    low, high = wilson_interval(even, group)
    width = np.ptp(wilson_interval(even))
    assert width < high - low < 1.1 * quantiles[1] / quantiles[0] * width


def test_a_resample_of_groups_holds_each_group_whole():
    group = np.array([2, 0, 2, 1, 1, 2])
    (times,) = drawn(6, 50, group)
    assert times.shape == (50, 6) and (times[:, 0] == times[:, 2]).all() and (times[:, 3] == times[:, 4]).all()
    assert (times[:, [0, 1, 3]].sum(1) == 3).all(), "three groups are drawn"
    (images,) = drawn(6, 50)
    assert (images.sum(1) == 6).all() and (images[:, 0] != images[:, 2]).any()


@pytest.mark.parametrize("first", [1, 60, 110])
def test_no_group_is_in_both_parts_of_divided_images(first):
    """Up to ten images more than asked for, which a group of up to eleven brings with it."""
    group = np.random.default_rng(0).permutation(np.repeat(np.arange(21), [*range(1, 11), *range(1, 12)]))
    parts = divided(len(group), first, 0, group)
    assert sorted(np.concatenate(parts)) == list(range(len(group)))
    assert not set(group[parts[0]]) & set(group[parts[1]]) and first <= len(parts[0]) <= first + 10
    others = divided(len(group), first, 1, group)
    assert set(others[0]) != set(parts[0]), "the seed counts"


def test_images_without_groups_are_divided_as_asked():
    parts = divided(20, 7, 0)
    assert [len(part) for part in parts] == [7, 13] and sorted(np.concatenate(parts)) == list(range(20))


def test_the_test_of_groups_flips_whole_groups():
    """All 2^4 signs of the groups' sums 3, -1, 2 and 0, by hand."""
    differences = np.array([1, 1, 1, 0, -1, 1, 1, 1, -1])
    group = np.array([0, 0, 0, 0, 1, 2, 2, 3, 3])
    sums = [abs(np.dot(signs, (3, -1, 2, 0))) >= 4 for signs in itertools.product((1, -1), repeat=4)]
    assert sign_flip_test(differences, group) == (pytest.approx(np.mean(sums)), True)
    assert sign_flip_test(differences).p == pytest.approx(2 * (1 + 8 + 28) / 2**8), "as if images were independent"


def test_a_few_large_groups_are_not_taken_for_normal():
    sums = (300, 280, 260, 240)
    assert sign_flip_test(np.ones(sum(sums), dtype=int), np.repeat(range(4), sums)) == (2 / 2**4, True)


def test_equal_networks_seldom_seem_different_by_groups_but_often_by_images():
    found = {True: 0, False: 0}
    for one, group in grouped(0.9, seeds=200):
        swapped = np.random.default_rng(len(one)).random(30)[group] < 0.5
        other = np.roll(one, 5)
        differences = np.where(swapped, 1, -1) * (one.astype(int) - other)
        for by_group in found:
            found[by_group] += sign_flip_test(differences, group if by_group else None).p < 0.05
    assert found[True] <= 20 < 40 < found[False]  # 10 are expected; more than 20 in one of 1,000 cases
