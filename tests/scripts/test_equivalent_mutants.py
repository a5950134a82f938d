"""The list of mutants that change nothing: each line as text, of a file that is there, with a reason."""

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_each_reviewed_mutant_is_a_line_of_a_file_that_is_broken_with_a_reason():
    groups = yaml.safe_load((ROOT / "tests/equivalent_mutants.yaml").read_text(encoding="utf-8"))
    for group in groups:
        assert set(group) == {"file", "why", "lines"} and group["why"] and group["lines"]
        assert (ROOT / group["file"]).is_file() and f'"{group["file"]}"' in (ROOT / "pyproject.toml").read_text()
        assert [line for line in group["lines"] if not isinstance(line, str)] == []
