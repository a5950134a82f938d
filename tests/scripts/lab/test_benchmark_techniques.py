"""The cost of each technique is that of the flags beside it, measured against the same training without them."""

import contextlib

import pytest

from scripts.common.timing import Spread
from scripts.lab import benchmark_techniques
from scripts.lab.benchmarks import techniques
from scripts.lab.benchmarks.catalogue import LOADING, STEP, TECHNIQUES, VALIDATION, Technique
from utils.config import arguments

TINY = ("--image-size", "8", "--arch", "fc", "--batch-size", "8", "--rounds", "1", "--steps", "1", "--device", "cpu")


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_the_flags_of_each_technique_are_a_setting_that_shapes_the_result_or_its_speed(technique):
    shared = ["--dataname", "cifar10", "--datapath", ".", *technique.base.split()]
    without, with_it = (arguments.parse([*shared, *flags]).values() for flags in ((), technique.flags.split()))
    assert without != with_it
    assert technique.measured and set(technique.measured) <= {STEP, LOADING, VALIDATION}


def test_the_two_sides_are_measured_alternately_and_compared_within_a_round(monkeypatch):
    order = []
    seconds = iter([1.0, 3.0, 4.0, 2.0, 6.0, 6.0])

    @contextlib.contextmanager
    def side(flags, what, units):
        yield lambda: (order.append(" ".join(flags)), next(seconds))[1]

    monkeypatch.setattr(techniques, "side", side)
    cost = techniques.cost(["base"], Technique("some", "flag", "both"), STEP, rounds=3, units=1)
    assert order == ["base both flag", "base both", "base both", "base both flag", "base both flag", "base both"]
    # ratios 1/3, 1/2 and 1; the quartiles of three lie halfway between them
    assert cost == pytest.approx(Spread(1 / 2, (1 / 3 + 1 / 2) / 2, (1 / 2 + 1) / 2))


def test_one_row_for_each_technique_that_was_asked_for(capsys):
    assert benchmark_techniques.main([*TINY, "--workers", "0", "--only", "mixup", "ema"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fc at 8 pixels, batch 8; 1 rounds of 1 steps"
    rows = [line.split()[0] for line in lines[4:]]
    assert rows == ["mixup", "ema"]
    assert lines[4].count("%") == 2 and lines[5].count("%") == 1, "loading is measured of what touches the images"


def test_a_cost_is_shown_as_what_it_adds():
    assert benchmark_techniques.shown(Spread(1.1, 0.99, 1.204)) == "+10 % (-1 to +20)"
    assert benchmark_techniques.shown(None) == "-"
