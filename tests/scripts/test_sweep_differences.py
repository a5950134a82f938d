"""Differences over the same seeds are scipy's paired t test, corrected as Holm says, and tables are valid text."""

import dataclasses
import math

import pytest
from scipy import stats

from scripts.common.runs import RunResult
from scripts.sweeps import tables
from scripts.sweeps.differences import best_first, detectable, differences, holm, paired, remarks, rows
from scripts.sweeps.grid import trials

FIGURES = {"0.05": [91.0, 92.5, 93.1, 92.2], "0.1": [93.4, 93.3, 95.1, 94.0], "0.2": [91.2, 92.4, 93.0, 92.6]}


def results_of(figures, folds=None, seeds=4, **images):
    """Results of a sweep with these top-1, in the order of the trainings."""
    planned = trials("digits/fc", [f"lr={','.join(figures)}"], seeds, [], folds)
    values = [value for each in figures.values() for value in each]
    pairs = zip(planned, values, strict=True)
    made = (RunResult(None, trial.args, "", "", 1, "top1", value, value, 1.0, **images) for trial, value in pairs)
    return dict(zip(planned, made, strict=True))


def test_each_pair_of_points_is_compared_over_the_same_seeds_as_scipy_does():
    results = results_of(FIGURES)
    found = differences(results)
    assert len(found) == 3
    for each in found:
        one, other = (FIGURES[point[0].partition("=")[2]] for point in (each.one, each.other))
        expected = stats.ttest_rel(one, other)
        interval = expected.confidence_interval(0.95)
        assert each.mean == pytest.approx(sum(one) / 4 - sum(other) / 4) and each.mean > 0
        assert (each.low, each.high, each.p) == pytest.approx((interval.low, interval.high, expected.pvalue))
    assert [each.corrected for each in found] == holm([each.p for each in found])
    assert {each.one for each in best_first(found, results)} == {("lr=0.1",)}
    assert [each.other for each in best_first(found, results)] == [("lr=0.2",), ("lr=0.05",)]


def test_only_seeds_that_both_points_have_are_compared():
    results = results_of(FIGURES)
    dropped = [trial for trial in results if (trial.point, trial.seed) == (("lr=0.1",), 2)]
    found = differences({trial: result for trial, result in results.items() if trial not in dropped})
    first = next(each for each in found if {each.one, each.other} == {("lr=0.05",), ("lr=0.1",)})
    assert first.values == pytest.approx((2.4, 0.8, 1.8))
    alone = {trial: result for trial, result in results.items() if trial.seed == 0}
    assert differences(alone) == [] and remarks([], 0) == []


def test_where_seeds_are_missing_the_point_with_the_highest_mean_is_the_one_compared():
    """It need not be the better one over the seeds that both have; and one with few seeds may beat no other."""
    nan = math.nan
    figures = {"0.05": [90.0, nan, 85.0, 86.0], "0.1": [91.0, 81.0, 85.5, 87.0], "0.2": [nan, 95.0, 80.0, 80.0]}
    results = {trial: one for trial, one in results_of(figures).items() if not math.isnan(one.final)}
    found = differences(results)
    best = best_first(found, results)
    assert [(each.one, each.other) for each in best] == [(("lr=0.05",), (f"lr={lr}",)) for lr in ("0.1", "0.2")]
    expected = stats.ttest_rel([90.0, 85.0, 86.0], [91.0, 85.5, 87.0])
    interval = expected.confidence_interval(0.95)
    assert (best[0].mean, best[0].low, best[0].high, best[0].p) == pytest.approx(
        (-2.5 / 3, interval.low, interval.high, expected.pvalue)
    )
    assert rows(best)[0][3] == "-0.83"
    equal = results_of({"0.05": [97.5, 98.2], "0.1": [97.6, 98.1]}, seeds=2)
    assert [row[:4] for row in rows(best_first(differences(equal), equal))] == [["lr=0.05", "lr=0.1", "2", "+0.00"]]
    assert best_first([], equal) == []


def test_folds_have_nadeau_and_bengios_variance_as_their_images_are_mostly_the_same():
    results = results_of({"0.05": [90.0, 91.0, 89.0, 92.0], "0.1": [91.0, 93.0, 91.5, 92.5]}, folds=4, seeds=1)
    (found,) = differences(results)
    values = [1.0, 2.0, 2.5, 0.5]
    error = math.sqrt((1 / 4 + 1 / 3) * stats.tstd(values) ** 2)
    assert found.p == pytest.approx(2 * stats.t.sf(1.5 / error, 3))
    assert found.high - found.mean == pytest.approx(stats.t.ppf(0.975, 3) * error)
    assert "the same folds, with Nadeau and Bengio's variance" in remarks([found], 1)[0]


def test_of_folds_that_train_or_validate_on_a_part_the_variance_is_that_of_the_images_used():
    """With --train-samples 100 and --max-val-batches, 64 images are validated on."""
    values = {"0.05": [90.0, 91.0, 89.0, 92.0], "0.1": [91.0, 93.0, 91.5, 92.5]}
    (found,) = differences(results_of(values, folds=4, seeds=1, trained=100, validated=64))
    error = math.sqrt((1 / 4 + 0.64) * stats.tstd([1.0, 2.0, 2.5, 0.5]) ** 2)
    assert found.high - found.mean == pytest.approx(stats.t.ppf(0.975, 3) * error)


def test_holms_correction_is_that_of_r():
    """R: p.adjust(c(0.01, 0.04, 0.03, 0.005), 'holm')."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_equal_differences_claim_no_certainty():
    same = paired(("a",), ("b",), [0.5, 0.5, 0.5])
    assert math.isnan(same.p) and "-" in rows([same])[0]
    assert any("whose spread is unknown" in line for line in remarks([same], 1))
    assert paired(("a",), ("b",), [0.0, 0.0]).p == 1.0
    assert math.isnan(holm([0.01, math.nan])[1]) and holm([0.01, math.nan])[0] == 0.02


def test_how_little_few_seeds_can_show_is_said():
    found = differences(results_of(FIGURES))
    text = "\n".join(remarks(found, 2))
    assert "for all 3 comparison(s), intervals are not corrected; 1 more in differences.csv" in text
    assert "a test of signs, which does not, gives p = 0.125 at best" in text
    many = [dataclasses.replace(found[0], values=found[0].values * 2)]
    assert "test of signs" not in "\n".join(remarks(many, 1))


@pytest.mark.parametrize("pairs", [2, 3, 6, 30, 1000])
def test_a_difference_of_detectable_size_is_significant_in_four_of_five_repetitions_as_the_noncentral_t_says(pairs):
    critical = stats.t.ppf(0.975, pairs - 1)
    power = stats.nct.sf(critical, pairs - 1, detectable(critical, pairs))  # with a standard error of 1
    assert power == pytest.approx(0.8, abs=1e-6)
    assert stats.nct.sf(critical, pairs - 1, critical) < 0.7  # the half-width itself is no such difference


def test_the_smallest_significant_difference_is_told_apart_from_the_one_that_is_found():
    values = [0.0, 1.0, 2.0, 0.5, 1.5, 1.0]
    width = stats.t.ppf(0.975, 5) * stats.sem(values)
    line = remarks([paired(("a",), ("b",), values)], 1)[1]
    assert f"a difference must reach about {width:.2f} points for p < 0.05" in line
    assert f"a true one of {width * 3.5139 / 2.5706:.2f} is found four times out of five" in line  # noncentral t


def test_where_seeds_are_missing_the_difference_to_reach_is_that_of_as_many_pairs_as_are_named():
    few = paired(("a",), ("b",), [0.0, 4.0])
    many = [paired(("a",), (other,), [0.0, 1.0, 2.0, 0.5, 1.5, 1.0]) for other in "cde"]
    width = stats.t.ppf(0.975, 1) * stats.sem([0.0, 4.0])
    assert f"with 2 pairs, a difference must reach about {width:.2f} points" in remarks([few, *many], 4)[1]


def test_tables_are_escaped_for_markdown_and_latex():
    headers, cells = ("setting", "final top-1"), [["augment=a|b_c", "92.2 +- 1.1"], ["50%", r"\x"]]
    assert tables.markdown(headers, cells).splitlines() == [
        "| setting | final top-1 |",
        "| --- | ---: |",
        r"| augment=a\|b_c | 92.2 +- 1.1 |",
        r"| 50% | \\x |",
    ]
    lines = tables.latex(headers, cells).splitlines()
    assert lines[0] == r"\begin{tabular}{lr}" and lines[-1] == r"\end{tabular}"
    assert lines[4] == r"augment=a|b\_c & 92.2 $\pm$ 1.1 \\" and lines[5] == r"50\% & \textbackslash{}x \\"
