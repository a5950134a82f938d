"""Row 20: one process works longer than --timeout before training: the others wait, and still notice when it is lost.

What is cut half-way is taken up again and never taken for whole: see the tests of unpacking and fetching below.
"""

import os
import re
import signal
import time

import numpy as np
import pytest
from PIL import Image

from tests.end_to_end.forked import ROOT, Forked
from tests.end_to_end.processes import FINAL_LINE
from utils.stopping import TRY_AGAIN

TIMEOUT_SECONDS = 3
SECONDS = 2 * TIMEOUT_SECONDS  # of the long work
FLAGS = ("--arch", "fc", "--max-steps", 2, "--no-progress", "--timeout", TIMEOUT_SECONDS)
LOST = r"main\.py: rank \d has lost the other processes \(.+\); .*--resume auto continues"
PROGRAM = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import main
from utils import long_work
from utils.data import cache, datasets

def work(real):
    def called(*arguments, **options):
        if not os.path.exists("at_work"):  # of the training or the validation images one is enough
            with open("at_work", "w") as file:
                print(os.getpid(), file=file)
            time.sleep(float(os.environ["WORK_SECONDS"]))
        return real(*arguments, **options)
    return called

long_work.TELL_SECONDS = 1
long_work.LONGEST_SECONDS = float(os.environ.get("LONGEST_SECONDS", "600"))
if os.environ["WORK"] == "prepare":
    datasets.prepare = work(datasets.prepare)
else:
    cache.decode = work(cache.decode)
main.end_process(main.main(sys.argv[1:], ends_process=True))
"""


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Starts a run whose data takes long: gives it and the process that is at work on it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(*flags, processes=2, work="prepare", seconds=600, **environment):
        environment |= {"WORK": work, "WORK_SECONDS": str(seconds)}
        run = Forked(*FLAGS, *flags, processes=processes, program=tmp_path / "program.py", **environment)
        deadline = time.monotonic() + 60
        while not (tmp_path / "at_work").exists() or not (tmp_path / "at_work").read_text().endswith("\n"):
            assert time.monotonic() < deadline and run.poll() is None, run.communicate(1)
            time.sleep(0.05)
        return run, int((tmp_path / "at_work").read_text().split()[0])

    return start


def ended(run, started):
    """Exit codes by rank, stdout, the lines on stderr, and how long it took since ``started``."""
    out, err = run.communicate(120)
    return [rank.exitcode for rank in run.ranks], out, err.splitlines(), time.monotonic() - started


@pytest.fixture
def tree(tmp_path):
    """Class folders of small images."""
    for split in ("train", "val"):
        for name in ("a", "b"):
            folder = tmp_path / "tree" / split / name
            folder.mkdir(parents=True)
            for number in range(4):
                pixels = np.full((8, 8, 3), 20 * number, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return "--dataname", "folder", "--datapath", tmp_path / "tree", "--image-size", 8, "--loader", "resident"


def test_the_others_wait_longer_than_the_timeout_and_it_is_said_for_whom(begin):
    run, _ = begin(processes=3, seconds=SECONDS)
    codes, out, err, _ = ended(run, time.monotonic())
    assert codes == [0, 0, 0], err
    assert FINAL_LINE.fullmatch(out.splitlines()[-1])
    assert err and set(err) == {"Preparing the data: 0 min so far, waiting for rank 0"}


def test_the_others_wait_for_the_process_that_decodes_into_the_cache(begin, tree):
    run, _ = begin(*tree, work="decode", seconds=SECONDS)
    codes, out, err, _ = ended(run, time.monotonic())
    assert codes == [0, 0], err
    assert FINAL_LINE.fullmatch(out.splitlines()[-1])
    assert "waiting for rank 0, 1" in err[-1]  # the other one waits for the file


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("work", ["prepare", "decode"])
def test_a_process_that_is_lost_at_its_work_is_noticed_within_the_timeout(begin, tree, work, fault):
    run, worker = begin(*tree, work=work)
    time.sleep(1)  # for the other one to wait
    started = time.monotonic()
    os.kill(worker, fault)
    (other,) = (rank for rank in run.ranks if rank.pid != worker)
    other.join(60)
    seconds = time.monotonic() - started
    run.kill()
    _, _, err, _ = ended(run, started)
    assert other.exitcode == 1
    assert seconds < (TIMEOUT_SECONDS if fault == signal.SIGSTOP else 0) + 10
    assert [line for line in err if re.fullmatch(LOST, line)] == [line for line in err if line.startswith("main.py: ")]
    assert sum(line.startswith("main.py: ") for line in err) == 1
    assert not any("Traceback" in line for line in err)


@pytest.mark.parametrize("work", ["prepare", "decode"])
def test_a_stop_signal_ends_who_works_and_who_waits_at_once(begin, tree, work):
    run, _ = begin(*tree, work=work)
    time.sleep(1)
    started = time.monotonic()
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    codes, _, err, seconds = ended(run, started)
    assert codes == [TRY_AGAIN, TRY_AGAIN]
    assert seconds < 10
    assert [line for line in err if line.startswith("main.py: ")] == [
        "main.py: stopped by SIGTERM before or after training; --resume auto continues"
    ]


def test_work_without_an_end_is_one_line_on_all(begin):
    run, _ = begin(LONGEST_SECONDS="5")
    codes, _, err, _ = ended(run, time.monotonic())
    assert codes == [2, 2]
    (line,) = (line for line in err if line.startswith("main.py: "))
    assert re.search(r"Preparing the data: rank 0 is not done after .* hours; see what it waits for", line)
