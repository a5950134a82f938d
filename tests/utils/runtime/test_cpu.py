"""How a process uses the CPU."""

import os
import resource
import sys

import pytest
import torch

from tests.end_to_end.forked import answer_of
from utils.runtime import cpu


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_threads_spin_briefly_unless_a_person_has_said_how_they_wait(monkeypatch):
    cpu.let_threads_wait_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "5000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    cpu.let_threads_wait_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    cpu.let_threads_wait_briefly()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize(
    ("wished", "processes", "threads"),
    [
        (None, 1, 8),
        (None, 3, 2),
        (None, 100, 1),  # an equal part of the cores
        ("1", 1, 1),
        ("1", 2, 4),  # torchrun's own setting for several processes is 1
        ("3", 2, 3),
        ("0", 2, 4),
        ("many", 1, 8),
    ],
)
def test_cores_are_shared_out_and_a_persons_wish_wins(wished, processes, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    if wished is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", wished)
    assert cpu.threads_per_process(processes) == threads


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_vnni\n", False),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("model name : with amx_bf16 in its name\n", False),
        (None, False),
    ],
)
def test_units_for_bf16_are_read_from_the_systems_file(text, expected, monkeypatch, tmp_path):
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(cpu, "CPU_FACTS", tmp_path / "cpuinfo")
    assert cpu.has_bf16_units.__wrapped__() is expected


def count_pages_mapped_again(keeps, answer):
    if keeps:
        cpu.keep_freed_memory()
    for _ in range(30):  # the heap grows until blocks of this size lie in it side by side
        torch.ones(9 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(9 << 20)
    answer.put(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc is told so")
def test_freed_memory_is_used_again_without_new_pages():
    faults = {keeps: answer_of(count_pages_mapped_again, keeps) for keeps in (True, False)}
    if faults[False] < 100:
        pytest.skip("this C library keeps freed memory by itself, or pages are huge")
    assert faults[True] < faults[False] / 100


@pytest.mark.parametrize(("text", "limit"), [("150000 100000\n", 2), ("max 100000\n", 64), ("", 64), (None, 64)])
def test_a_containers_share_of_the_processor_limits_its_cores(text, limit, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert cpu.cores() == limit
