"""metrics.npz: every step once, in whatever way a run ends and goes on."""

import numpy as np
import pytest

from utils.record.curves import CURVES, WHOLE, Curves, read


def steps(*numbers):
    """A row for each step, whose other numbers tell it from the others."""
    return [[number, *(number + place / 10 for place in range(1, len(CURVES)))] for number in numbers]


def test_what_is_written_is_found_again_and_added_to(tmp_path):
    curves = Curves(tmp_path)
    curves.add(steps(1, 2, 3))
    curves.write()
    curves.add(steps(4, 5))
    np.testing.assert_array_equal(read(tmp_path / WHOLE), steps(1, 2, 3))
    curves.write()
    np.testing.assert_array_equal(read(tmp_path / WHOLE), steps(1, 2, 3, 4, 5))


@pytest.mark.parametrize("until", [0, 2, 5])
def test_steps_beyond_a_checkpoint_are_dropped_and_come_again(tmp_path, until):
    curves = Curves(tmp_path)
    curves.add(steps(1, 2, 3, 4, 5))
    curves.write()
    curves = Curves(tmp_path)
    assert curves.restore(read(tmp_path / WHOLE), until) == until == len(read(tmp_path / WHOLE))
    curves.add(steps(*range(until + 1, 9)))
    curves.write()
    np.testing.assert_array_equal(read(tmp_path / WHOLE), steps(*range(1, 9)))


def test_without_a_metrics_npz_a_run_goes_on_with_the_rows_to_come(tmp_path):
    curves = Curves(tmp_path)
    assert curves.restore(None, 5) == 0
    curves.add(steps(6))
    curves.write()
    np.testing.assert_array_equal(read(tmp_path / WHOLE), steps(6))
