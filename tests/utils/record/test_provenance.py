"""Where a run's code comes from."""

from unittest.mock import Mock

import pytest
import torch

from utils.record import provenance


def test_the_vector_instructions_of_a_cpu_are_told_which_its_name_may_not_tell(monkeypatch):
    monkeypatch.setattr(provenance, "processor", lambda: "AMD EPYC")
    monkeypatch.setattr(provenance, "cores", lambda: 2)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    distributed = Mock(world_size=1, device=torch.device("cpu"))
    distributed.describe_device.return_value = "cpu, 1 thread(s) each"
    for ignored in ("", "nonsense"):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", ignored)
        assert provenance.machine(distributed) == "1 process(es) on cpu, 1 thread(s) each (AMD EPYC, AVX2, 2 core(s))"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert provenance.machine(distributed).endswith("(AMD EPYC, AVX2 by ATEN_CPU_CAPABILITY, 2 core(s))")


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
