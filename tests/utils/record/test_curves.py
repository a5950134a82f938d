"""metrics.npz: every step once, and what is kept between two epochs costs no more in a long run."""

import numpy as np
import pytest

from utils.record.curves import CURVES, REST, WHOLE, Curves, read

ROW = 8 * len(CURVES) + 4  # with its CRC-32


def steps(*numbers):
    """A row for each step, whose other numbers tell it from the others."""
    return [[number, *(number + place / 10 for place in range(1, len(CURVES)))] for number in numbers]


def begun(folder):
    """Curves of which three steps are in metrics.npz and three more have been appended."""
    curves = Curves(folder)
    curves.add(steps(1, 2, 3))
    curves.write()
    curves.add(steps(4, 5))
    curves.append()
    curves.add(steps(6))
    curves.append()
    return curves


def test_what_is_appended_is_written_once_and_found_again(tmp_path):
    curves = begun(tmp_path)
    assert (tmp_path / REST).stat().st_size == 3 * ROW
    np.testing.assert_array_equal(read(tmp_path / WHOLE), steps(1, 2, 3))
    assert Curves(tmp_path).restore(read(tmp_path / WHOLE), 6) == 6
    np.testing.assert_array_equal(read(tmp_path / WHOLE), steps(1, 2, 3, 4, 5, 6))
    assert not (tmp_path / REST).exists()
    curves.add(steps(7))
    curves.write()
    np.testing.assert_array_equal(read(tmp_path / WHOLE), steps(*range(1, 8)))


@pytest.mark.parametrize("until", [0, 2, 3, 5])
def test_steps_beyond_a_checkpoint_are_dropped_and_come_again(tmp_path, until):
    begun(tmp_path)
    curves = Curves(tmp_path)
    assert curves.restore(read(tmp_path / WHOLE), until) == until
    curves.add(steps(*range(until + 1, 9)))
    curves.append()
    assert Curves(tmp_path).restore(read(tmp_path / WHOLE), 8) == 8
    np.testing.assert_array_equal(read(tmp_path / WHOLE), steps(*range(1, 9)))


def test_a_kill_within_an_append_or_between_the_two_files_loses_and_doubles_nothing(tmp_path):
    begun(tmp_path)
    with open(tmp_path / REST, "ab") as file:
        file.write(b"x" * (ROW - 1))  # a row that was cut
    rest = (tmp_path / REST).read_bytes()
    assert Curves(tmp_path).restore(read(tmp_path / WHOLE), 6) == 6
    (tmp_path / REST).write_bytes(rest)  # metrics.npz has been renamed, the rows are still there
    assert Curves(tmp_path).restore(read(tmp_path / WHOLE), 6) == 6
    np.testing.assert_array_equal(read(tmp_path / WHOLE), steps(1, 2, 3, 4, 5, 6))


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (lambda rows: rows[:-1], 5),
        (lambda rows: rows + rows, 6),  # the second time they are no news
        (lambda rows: rows[:ROW] + rows[:ROW] + rows[ROW:], 6),
        (lambda rows: rows[ROW : 2 * ROW] + rows[:ROW] + rows[2 * ROW :], 4),  # what follows on a gap is not known
        (lambda rows: b"0" * len(rows), 3),
        (lambda rows: b"x" + rows, 3),
        (lambda rows: rows[: ROW + 20] + b"x" + rows[ROW + 21 :], 4),
        (lambda rows: b"", 3),
    ],
)
def test_damaged_rows_are_left_out(tmp_path, damage, left):
    begun(tmp_path)
    (tmp_path / REST).write_bytes(damage((tmp_path / REST).read_bytes()))
    assert Curves(tmp_path).restore(read(tmp_path / WHOLE), 6) == left
    np.testing.assert_array_equal(read(tmp_path / WHOLE), steps(*range(1, left + 1)))


def test_before_there_is_a_metrics_npz_the_rows_stand_alone(tmp_path):
    begun(tmp_path)
    (tmp_path / WHOLE).unlink()
    assert Curves(tmp_path).restore(None, 5) == 0  # what came before them is lost
    curves = Curves(tmp_path)
    curves.add(steps(1, 2))
    curves.append()
    assert Curves(tmp_path).restore(None, 2) == 2
