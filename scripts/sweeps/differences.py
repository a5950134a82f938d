"""Differences between the points of a sweep (combinations of values) over the same seeds, with corrected tests."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scripts.common.runs import RunResult, deviation, reach, validated_to_trained
from scripts.common.uncertainty import CONFIDENCE
from scripts.sweeps.grid import Trial
from scripts.sweeps.outcomes import points_of

FEW = 6  # fewer pairs never let a sign-flip test reach 0.05
TINY = 1e-9  # percentage points, far less than one image counts
POWER = 0.8  # the share of repetitions in which a difference of ``detectable`` size is significant
HEADERS = ("setting", "against", "n", "difference", f"{100 * CONFIDENCE:.0f} % interval", "p", "p (Holm)")


@dataclass(frozen=True)
class Difference:
    """``one`` minus ``other``, in percentage points: ``values`` of each pair of runs with the same seed and fold.

    ``low``, ``high``: interval of the mean. ``p``: of a two-sided paired t test; NaN if all values are equal but not 0,
    since their spread is then unknown. ``corrected``: ``p`` after Holm's correction for all compared pairs of points.
    ``ratio``: as in ``reach``; 0 unless the runs are on cross-validation folds.
    """

    one: tuple[str, ...]
    other: tuple[str, ...]
    values: tuple[float, ...]
    low: float
    high: float
    p: float
    corrected: float = math.nan
    ratio: float = 0.0

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def turned(self) -> Difference:
        """``other`` minus ``one``."""
        values = tuple(-value for value in self.values)
        return replace(self, one=self.other, other=self.one, values=values, low=-self.high, high=-self.low)


def differences(results: Mapping[Trial, RunResult]) -> list[Difference]:
    """Difference of every two points with at least two seeds (and folds) in common; the better point comes first."""
    points: dict[tuple[str, ...], dict[tuple[int, int | None], RunResult]] = {}
    for trial, result in results.items():
        points.setdefault(trial.point, {})[trial.seed, trial.fold] = result
    has_folds = any(trial.fold is not None for trial in results)  # which share most of their images (``reach``)
    found = []
    for one, other in itertools.combinations(points, 2):
        shared = [key for key in points[one] if key in points[other]]
        values = tuple(points[one][key].final - points[other][key].final for key in shared)
        if len(values) > 1 and all(map(math.isfinite, values)):
            runs = [points[point][key] for point in (one, other) for key in shared]
            found.append(paired(one, other, values, validated_to_trained(runs) if has_folds else 0.0))
    corrected = holm([difference.p for difference in found])
    return [replace(difference, corrected=p) for difference, p in zip(found, corrected, strict=True)]


def paired(one: tuple[str, ...], other: tuple[str, ...], values: Sequence[float], ratio: float = 0.0) -> Difference:
    """Mean of ``values``, its t interval and the p of its paired t test; ``ratio`` as in ``reach``."""
    from scipy.stats import t

    if statistics.fmean(values) < 0:
        one, other, values = other, one, [-value for value in values]
    mean = statistics.fmean(values)
    around = reach(values, ratio)
    error = math.sqrt(1 / len(values) + ratio) * deviation(values)
    p = 1.0 if mean < TINY else math.nan
    if error > TINY:
        p = 2 * float(t.sf(mean / error, len(values) - 1))
    return Difference(one, other, tuple(values), mean - around, mean + around, p, ratio=ratio)


def holm(values: Sequence[float]) -> list[float]:
    """P values corrected for their number (Holm, A simple sequentially rejective multiple test procedure, 1979).

    NaN stays NaN, but counts in that number.
    """
    order = np.argsort(values)  # NaN comes last
    scaled = np.minimum(1.0, np.arange(len(values), 0, -1) * np.asarray(values)[order])
    found = np.empty(len(values))
    found[order] = np.maximum.accumulate(scaled)
    return found.tolist()


def best_first(found: Sequence[Difference], results: Mapping[Trial, RunResult]) -> list[Difference]:
    """Comparisons of the point with the highest mean in ``results`` with the others, by rising difference.

    A difference may be negative where a point lacks some of the seeds. Of equal points the first counts as the best;
    points that could be compared with none are left out.
    """
    compared = {point for each in found for point in (each.one, each.other)}
    finals = {point: [run.final for run in runs] for point, runs in points_of(results).items() if point in compared}
    means = {point: statistics.fmean(values) for point, values in finals.items()}
    best = max(means, key=lambda point: -math.inf if math.isnan(means[point]) else round(means[point], 9), default=None)
    of_best = [each if each.one == best else each.turned for each in found if best in (each.one, each.other)]
    return sorted(of_best, key=lambda each: each.mean)


def rows(found: Sequence[Difference]) -> list[list[str]]:
    """Table rows, with columns as in ``HEADERS``."""
    return [
        [
            " ".join(each.one) or "as the recipe",
            " ".join(each.other) or "as the recipe",
            str(len(each.values)),
            f"{round(each.mean, 2) + 0.0:+.2f}",  # a difference of nothing is no negative one
            f"{each.low:+.2f} to {each.high:+.2f}",
            *("-" if math.isnan(p) else f"{p:.3g}" for p in (each.p, each.corrected)),
        ]
        for each in found
    ]


def csv_rows(found: Sequence[Difference]) -> list[dict[str, Any]]:
    """One CSV row per pair of points; differences in percentage points."""
    return [
        {
            "setting": " ".join(each.one),
            "against": " ".join(each.other),
            "pairs": len(each.values),
            "difference": f"{each.mean:.6g}",
            "low": f"{each.low:.6g}",
            "high": f"{each.high:.6g}",
            "p": f"{each.p:.6g}",
            "p_holm": f"{each.corrected:.6g}",
        }
        for each in found
    ]


def detectable(width: float, pairs: int) -> float:
    """True difference that a two-sided t test of ``pairs`` finds with a chance of ``POWER``, by the noncentral t.

    ``width``: half-width of the interval of the mean, and so the smallest significant difference; a true difference of
    that size is significant in half to two thirds of all repetitions. The spread is taken as known from these pairs.
    """
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    critical = float(t.ppf((1 + CONFIDENCE) / 2, pairs - 1))
    found = brentq(lambda true: nct.sf(critical, pairs - 1, true) - POWER, critical, 2 * critical)  # in standard errors
    return width * found / critical


def remarks(found: Sequence[Difference], shown: int) -> list[str]:
    """Lines about the kind of test, and how little a few seeds can show."""
    if not found:
        return []
    pairs = min(len(each.values) for each in found)
    width = statistics.median((each.high - each.low) / 2 for each in found if len(each.values) == pairs)
    others = f"; {len(found) - shown} more in differences.csv" if len(found) > shown else ""
    folds = any(each.ratio for each in found)
    over = "folds, with Nadeau and Bengio's variance (2003)" if folds else "seeds"
    lines = [
        f"p: paired t test over the same {over}, two-sided; Holm's correction is for all {len(found)} comparison(s), "
        f"intervals are not corrected{others}",
    ]
    if width > TINY:
        lines.append(
            f"with {pairs} pairs, a difference must reach about {width:.2f} points for p < 0.05; a true one of "
            f"{detectable(width, pairs):.2f} is found four times out of five"
        )
    if pairs < FEW:
        lines.append(
            "so few pairs cannot show that differences are normal, which a t test assumes; a test of signs, which does "
            f"not, gives p = {2 / 2**pairs:.3g} at best"
        )
    if any(math.isnan(each.p) for each in found):
        lines.append("-: the same difference in each pair, whose spread is unknown")
    return lines
