"""Tables that are cut off in the middle of a row: no reader takes the digits that are left for a number."""

import csv

import pytest

from utils.record.run_folder import read_table
from utils.record.writer import Writer

ROWS = [{"epoch": str(n), "val_top1": f"{50 + n}.6667", "val_ece": f"1{n}.25"} for n in (1, 2, 3)]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "metrics.csv"
    with open(path, "w", newline="") as file:
        out = csv.DictWriter(file, fieldnames=list(ROWS[0]))
        out.writeheader()
        out.writerows(ROWS)
    return path


def test_wherever_its_end_is_cut_off_all_whole_rows_are_read_and_no_other(table):
    content = table.read_bytes()
    for kept in range(len(content)):
        table.write_bytes(content[:kept])
        rows, cut = read_table(table)
        ends = content[:kept].count(b"\n")
        assert rows == ROWS[: max(0, ends - 1)]
        assert cut or ends == len(rows) + 1 or kept <= content.index(b"\n")


def test_a_row_that_was_cut_off_before_others_were_added_is_left_out(table):
    lines = table.read_text().splitlines()
    table.write_text("\n".join([lines[0], lines[1], "2,5", lines[3], ""]))
    assert read_table(table) == ([ROWS[0], ROWS[2]], True)


def test_a_continued_run_leaves_the_cut_row_out_and_says_so(table, capsys):
    table.write_text(table.read_text()[:-8])
    writer = Writer(table.parent, progress=False, resumed=(3, 0))
    writer.epoch({"epoch": 4, "val_top1": 54.0, "val_ece": 1.0})
    writer.close()
    assert [row["epoch"] for row in read_table(table)[0]] == ["1", "2", "4"]
    assert "metrics.csv or metrics.npz lacks what was recorded before; it stays lost" in capsys.readouterr().out
