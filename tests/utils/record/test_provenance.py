"""Where a run's code comes from."""

from unittest.mock import Mock

import pytest

from utils.record import provenance


@pytest.mark.parametrize(("variable", "expected"), [("0123456789", "0123456789"), ("", "unknown"), (None, "unknown")])
def test_a_copy_without_history_has_the_commit_that_the_variable_names(variable, expected, monkeypatch):
    monkeypatch.setattr(provenance, "_git", Mock(side_effect=OSError("not a repository")))
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    if variable is not None:
        monkeypatch.setenv("GIT_COMMIT", variable)
    assert provenance.commit() == expected


@pytest.mark.parametrize(("status", "expected"), [("", "abcdef0123"), (" M main.py", "abcdef0123, changed")])
def test_history_says_more_than_the_variable_and_a_tree_that_was_changed_is_told(status, expected, monkeypatch):
    monkeypatch.setenv("GIT_COMMIT", "0123456789")
    monkeypatch.setattr(provenance, "_git", lambda *words: "abcdef0123" if words[0] == "rev-parse" else status)
    assert provenance.commit() == expected
