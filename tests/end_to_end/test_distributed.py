"""Several processes: the same answers, exact validation, and no process left behind."""

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from main import main
from tests.end_to_end.processes import FINAL_LINE, load, start, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same two epochs on 1, 2 and 3 processes, with the same global batch."""
    output = tmp_path_factory.mktemp("runs")
    flags = ("--arch", "conv2", "--epochs", 2, "--global-batch-size", 60, "--no-progress", "--deterministic")
    return {n: Path(train(*flags, "--output", output / str(n), processes=n)["run"]) for n in (1, 2, 3)}


def test_learning_rates_are_equal_and_losses_close_on_one_two_and_three_processes(runs):
    curves = {n: np.load(run / "metrics.npz") for n, run in runs.items()}
    for n in (2, 3):
        np.testing.assert_array_equal(curves[1]["lr"], curves[n]["lr"])
        np.testing.assert_array_equal(curves[1]["step"], curves[n]["step"])
        np.testing.assert_allclose(curves[1]["loss"][:10], curves[n]["loss"][:10], rtol=1e-4)
        np.testing.assert_allclose(curves[1]["gradient_norm"][:10], curves[n]["gradient_norm"][:10], rtol=1e-3)
    for n, run in runs.items():
        assert load(run, "final.pt")["progress"]["samples_seen"] == 2 * 1437, n


def test_weights_after_two_epochs_are_close_on_one_two_and_three_processes(runs):
    weights = {n: load(run, "final.pt")["model"] for n, run in runs.items()}
    for n in (2, 3):
        for name, value in weights[1].items():
            error = (value - weights[n][name]).norm() / value.norm()
            assert error < 0.05, (n, name)


@pytest.mark.parametrize("batch_size", [7])
def test_one_checkpoint_evaluates_to_the_same_line_on_one_two_and_three_processes(runs, batch_size):
    flags = ("--evaluate", "--resume", runs[3] / "checkpoints/last.pt", "--val-batch-size", batch_size)
    lines = {n: train(*flags, processes=n).group() for n in (1, 2, 3)}
    assert len(set(lines.values())) == 1, lines
    assert "val_count=360" in lines[1]


def test_a_mistake_is_told_once_by_several_processes_with_no_traceback_of_ours(tmp_path):
    process = start("--arch", "resnt18", "--output", tmp_path / "runs", processes=2)
    out, err = process.communicate(timeout=120)
    assert process.returncode != 0
    ours = [line for line in err.splitlines() if line.startswith("main.py: ")]
    assert len(ours) == 1 and "did you mean resnet18" in ours[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes through /proc")
def test_a_killed_rank_ends_the_others(tmp_path):
    process = start("--epochs", 1000, "--output", tmp_path, "--no-progress", "--arch", "fc", processes=2)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("digits/fc/*/checkpoints/last.pt")) and time.monotonic() < deadline:
        time.sleep(0.2)
    workers = children(process.pid)
    assert len(workers) == 2
    os.kill(workers[-1], signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def children(parent):
    """The processes whose parent is ``parent``."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            pid, rest = stat.parent.name, stat.read_text().rpartition(")")[2].split()
            if int(rest[1]) == parent:
                found.append(int(pid))
    return sorted(found)


def test_the_process_group_is_gone_after_a_run_and_after_a_mistake(tmp_path, capsys):
    assert main(["--device", "cpu", "--arch", "fc", "--epochs", "1", "--output", str(tmp_path)]) == 0
    assert FINAL_LINE.fullmatch(capsys.readouterr().out.splitlines()[-1])
    assert main(["--device", "cpu", "--arch", "none-such", "--output", str(tmp_path)]) == 2
    assert not torch.distributed.is_initialized()
