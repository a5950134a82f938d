"""How long a training would take: its arithmetic against sums by hand."""

from __future__ import annotations

import pytest

from scripts.common.recipes import recipes
from scripts.lab import collect_results
from scripts.lab.collect_results import KEPT, finished_runs, read_machines, result_rows
from scripts.lab.results import estimates


def test_the_arithmetic_of_a_training_is_that_of_its_layers():
    fc = 28 * 28 * 300 + 300 * 100 + 100 * 10
    assert estimates.training_multiply_adds("mnist/fc") == 3 * fc * 60_000 * 10  # epochs
    conv2 = 28 * 28 * 9 * 64 * (1 + 64) + 14 * 14 * 64 * 256 + 256 * 256 + 256 * 10
    assert estimates.training_multiply_adds("mnist/conv2") == 3 * conv2 * 60_000 * 5


def test_the_rates_are_those_of_the_runs_that_they_name():
    rows, _ = result_rows(
        [recipe for recipe in recipes() if recipe.name == "imagenette/resnet10t"], finished_runs([KEPT])
    )
    (row,) = rows
    (run,) = row.runs
    known = read_machines().known
    measured = estimates.training_multiply_adds("imagenette/resnet10t") / run.seconds
    assert float(known["A"]["multiply_adds_per_second"]) == pytest.approx(measured, rel=0.01)
    page = (collect_results.ROOT / "docs" / "benchmarks" / "h100.md").read_text(encoding="utf-8")
    assert "3,306 images/s" in page
    resnet50 = estimates.training_multiply_adds("imagenet/resnet50") / (1_281_167 * 90)
    assert float(known["D"]["multiply_adds_per_second"]) == pytest.approx(3306 * resnet50, rel=0.01)
