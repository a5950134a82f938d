"""Tables of figures as CSV files."""

from __future__ import annotations

import csv
import io
from pathlib import Path


def read_table(path: Path, errors: str = "strict") -> tuple[list[dict[str, str]], bool]:
    """The whole rows of a CSV file, and whether others are left out because they are cut off.

    The last number of a row that ends early may lack digits. ``errors``: of decoding UTF-8. Raises ``OSError`` and
    ``ValueError``.
    """
    with open(path, newline="", encoding="utf-8", errors=errors) as file:
        text = file.read()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    kept = rows if text.endswith("\n") else rows[:-1]
    whole = [row for row in kept if None not in row.values()]
    return whole, len(whole) < len(rows)
