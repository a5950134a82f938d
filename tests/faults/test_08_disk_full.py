"""Row 8: a disk that runs full ends the run with one clear line, on all ranks, and the checkpoint before is whole."""

import contextlib
import re
import resource
import subprocess
from pathlib import Path

import pytest

from main import main
from tests.end_to_end.forked import Forked
from tests.end_to_end.processes import ROOT, differences, start, train
from tests.helpers import run_in, trained
from utils.checkpoint import checkpoint
from utils.checkpoint.checkpoint import Checkpointer

FLAGS = "--deterministic --arch fc --epochs 4 --global-batch-size 64 --train-samples 320".split()
FLAGS += "--no-progress --picture-epochs off".split()


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk in memory of some size; mounting again changes its size."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = False

    def mount(kilobytes):
        nonlocal mounted
        options = f"{'remount,' if mounted else ''}size={kilobytes}k"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        mounted = True
        return place

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: mounted and subprocess.run(["umount", place], check=True))
        yield mount


def only_line(err):
    """The program's one line, without a traceback from its files; torchrun writes a report of its own."""
    assert f'File "{ROOT / "main.py"}' not in err and f'File "{ROOT / "utils"}' not in err
    (line,) = [line for line in err.splitlines() if line.startswith("main.py: ") and "has lost the other" not in line]
    return line


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_full_disk_is_one_line_and_with_more_space_the_run_goes_on_from_the_checkpoint_before(
    processes, small_disk, tmp_path
):
    # The first checkpoint takes 0.2 MB, all others 0.4: the third of them finds no place beside two.
    disk = small_disk(1200)
    process = (start if processes > 1 else Forked)(*FLAGS, "--output", disk, processes=processes)
    out, err = process.communicate(timeout=120)
    assert process.returncode == (2 if processes == 1 else 1), out + err
    line = only_line(err)
    assert "cannot write" in line and "No space left on device" in line and "free some space" in line
    run = run_in(disk)
    path, found = checkpoint.newest(run / "checkpoints", pytest.fail)  # whole: there is nothing to warn of
    assert found["progress"]["epoch"] >= 1

    small_disk(50_000)
    resumed = train(*FLAGS, "--output", disk, "--resume", "auto", processes=processes)["run"]
    assert Path(resumed) == run
    whole = train(*FLAGS, "--output", tmp_path / "whole", processes=processes)["run"]
    assert differences(whole, resumed) == []


def test_a_disk_on_which_the_checkpoints_will_not_fit_is_told_after_the_first(small_disk, capsys):
    run = trained(small_disk(3_000), *FLAGS, "--max-steps", 2)
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert re.search(r"MB left on its disk, and checkpoints may take 3\.\d MB", warning)
    assert warning in (run / "log.txt").read_text()


def test_a_disk_without_space_for_the_first_checkpoint_is_told_before_the_first_step(small_disk, capsys):
    disk = small_disk(150)
    assert main(["--device", "cpu", *FLAGS, "--output", str(disk)]) == 2
    output = capsys.readouterr()
    assert "No space left on device" in only_line(output.err) and "epoch 1/" not in output.out


def test_a_disk_that_takes_no_log_line_any_more_ends_the_run_with_a_line(small_disk, tmp_path, capsys, monkeypatch):
    """The log, TensorBoard's events and the metrics files meet the full disk before a checkpoint does."""
    disk = small_disk(20_000)
    original = Checkpointer.save

    def fill(checkpointer, state, *names):
        original(checkpointer, state, *names)
        checkpointer.wait()  # the checkpoint itself is written
        with contextlib.suppress(OSError), open(disk / "filler", "ab") as filler:
            while True:
                filler.write(bytes(1 << 12))
                filler.flush()

    monkeypatch.setattr(Checkpointer, "save", fill)
    assert main(["--device", "cpu", *FLAGS, "--output", str(disk)]) == 2
    assert "No space left on device" in only_line(capsys.readouterr().err)
    monkeypatch.undo()
    (disk / "filler").unlink()
    resumed = trained(disk, *FLAGS, "--resume", "auto")
    assert differences(trained(tmp_path / "whole", *FLAGS), resumed) == []


def test_without_a_disk_of_its_own_a_limit_on_file_sizes_shows_the_same(tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        code = main(["--device", "cpu", *FLAGS, "--output", str(tmp_path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2 and "File too large" in only_line(capsys.readouterr().err)
    checkpoints = run_in(tmp_path) / "checkpoints"
    assert [path.name for path in checkpoints.glob("*.pt")] == ["initial.pt"]
    assert not list(checkpoints.glob(".*"))  # no half of a file stays
