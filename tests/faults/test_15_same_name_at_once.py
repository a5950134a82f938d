"""Runs that would share a folder: each gets its own, and a run is written by one process at a time."""

import shutil

from tests.end_to_end.forked import Forked
from tests.end_to_end.processes import FINAL_LINE, load, rows
from tests.faults.small_run import FLAGS, begin
from tests.helpers import wait_for

SECONDS = 120


def test_runs_of_one_name_started_at_once_get_a_folder_each(tmp_path):
    flags = (*FLAGS, "--epochs", 1, "--name", "same", "--output", tmp_path)
    processes = [Forked(*flags) for _ in range(3)]
    folders = [FINAL_LINE.fullmatch(process.output().splitlines()[-1])["run"] for process in processes]
    assert len(set(folders)) == 3
    for folder in folders:
        assert load(folder, "final.pt")["progress"]["epoch"] == 1
        assert [row["epoch"] for row in rows(folder)] == ["1"]


def test_of_two_processes_that_continue_one_run_at_once_the_second_is_refused(tmp_path):
    flags = (*FLAGS, "--epochs", 10_000, "--output", tmp_path, "--resume", "auto")
    run = begin(tmp_path, "--epochs", 10_000, "--max-steps", 5)
    processes = [Forked(*flags) for _ in range(2)]
    try:
        wait_for(lambda: any(process.poll() is not None for process in processes), SECONDS)
        ended = [process for process in processes if process.poll() is not None]
        assert [process.returncode for process in ended] == [2]
        out, err = ended[0].communicate()
        assert err.splitlines() == [f"main.py: {run}: another process is writing this run; wait for it or stop it"]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert list(run.parent.iterdir()) == [run]


def test_a_copy_of_a_run_is_a_run_of_its_own(tmp_path):
    run = begin(tmp_path, "--max-steps", 2)
    copied = run.with_name(f"{run.name}_copy")
    shutil.copytree(run, copied)
    first, second = (Forked("--no-progress", "--resume", folder) for folder in (run, copied))
    for process in (first, second):
        _, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, err) == (0, "")
    assert rows(run) == rows(copied)
