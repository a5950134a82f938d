"""The one harness for timing: order of rounds, failures, ratios."""

import time
from functools import partial

import pytest
import torch

from scripts.common.timing import Spread, covered, interleaved, ratios, timed

CPU = torch.device("cpu")


def test_rounds_alternate_their_order_and_sides_stay_apart():
    order = []
    sides = {name: partial(order.append, name) for name in "abc"}
    values, failures = interleaved(sides, 3, order.append)
    assert "".join(map(str, order)) == "abc1cba2abc3"
    assert [len(values[name]) for name in "abc"] == [3, 3, 3] and not failures


def test_a_side_that_fails_is_left_out_from_there_and_another_error_is_raised():
    calls = []

    def fails():
        calls.append(1)
        raise ValueError("why")

    sides = {"broken": fails, "whole": lambda: 7}
    values, failures = interleaved(sides, 3, failure_of=lambda side, error: f"{side}: {error}")
    assert (values, failures) == ({"broken": [], "whole": [7, 7, 7]}, {"broken": "broken: why"}) and calls == [1]
    with pytest.raises(ValueError, match="why"):
        interleaved(sides, 1)


def test_timed_gives_what_the_work_gives_and_its_seconds():
    seconds, result = timed(lambda: time.sleep(0.02) or "done", CPU)
    assert result == "done" and 0.02 <= seconds < 5


def test_ratios_are_the_rounds_own():
    assert ratios([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == Spread(3.0, 2.0, 4.0)  # medians 4 and 1 would give 4


def test_overlapping_kernels_count_once():
    assert covered([(0, 2), (1, 3), (1.5, 2), (5, 6)]) == 4
    assert covered([]) == 0
