"""Row 9: a process of a run dies or freezes, or their launcher dies: all of them end, and the run can go on.

How long it takes. When a process dies, the others notice at their next exchange, and torchrun within 0.1 s. When one
freezes, the others give up after ``--timeout`` seconds (600 by default, with which no other run here would end in time);
torchrun then kills what does not obey SIGTERM after 30 s, which is its own figure, and here 3. When torchrun dies, the
system tells its processes, which save and end.
"""

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from main import main
from scripts.verification.processes import descendants, processes
from tests.end_to_end.forked import Launched
from tests.end_to_end.processes import ROOT, command, load
from tests.helpers import QUIETLY, wait_for
from utils.loop.stop_signals import TRY_AGAIN

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes through /proc")

BATCH = 60
IMAGES = 1437
FLAGS = ("--arch", "fc", "--global-batch-size", BATCH, "--save-every-steps", 10, "--epochs", 100000, *QUIETLY)
TIMEOUT_SECONDS = 5
TORCHRUN = ROOT / "scripts/torchrun.py"
# A torchrun that waits for less than those 30 s, which no flag or variable of its own shortens.
IMPATIENT = f"""
import runpy
from torch.distributed.elastic.multiprocessing.api import PContext
PContext.close.__defaults__ = (None, 3)
runpy.run_path({str(TORCHRUN)!r}, run_name="__main__")
"""
LOST = r"main\.py: rank \d has lost the other processes \(.+\); .*--resume auto continues"
# torchrun was quicker
STOPPED = r"main\.py: stopped by SIGTERM (as the others were ending|before or after training); --resume auto continues"


class Outcome(NamedTuple):
    """How a run has ended after its fault."""

    code: int
    out: str
    err: str
    left: set[int]  # processes that had not ended
    output: Path
    processes: list[int]  # of training, before the fault


class Run:
    """A run on its way; ``launcher`` is torchrun or what stands in for it."""

    def __init__(self, output, ranks, launcher=("-m", "torch.distributed.run"), timeout=600):
        line = command(*FLAGS, "--timeout", timeout, "--output", output, processes=ranks)
        line[1:3] = launcher
        self.output = output
        with open(f"{output}.out", "w") as out, open(f"{output}.err", "w") as err:
            self.process = Launched(line, out, err)

    def ranks(self):
        """The training processes, once they have saved something."""
        saved = "digits/fc/*/checkpoints/last.pt"
        wait_for(lambda: list(self.output.glob(saved)) or self.process.poll() is not None, 120)
        assert list(self.output.glob(saved)), Path(f"{self.output}.err").read_text()
        return sorted(descendants(self.process.pid))

    def ended(self, ranks):
        """What the run left, when its ``ranks`` have ended or a minute after the launcher."""
        code = self.process.wait(120)
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not processes().keys() & ranks)
        left = processes().keys() & ranks
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        out, err = (Path(f"{self.output}.{name}").read_text() for name in ("out", "err"))
        return Outcome(code, out, err, left, self.output, ranks)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Each fault's outcome. They happen side by side."""
    folder = tmp_path_factory.mktemp("runs")
    impatient = folder / "impatient.py"
    impatient.write_text(IMPATIENT)
    frozen = Run(folder / "frozen", 2, (impatient,), TIMEOUT_SECONDS)
    frozen_ranks = frozen.ranks()
    os.kill(frozen_ranks[1], signal.SIGSTOP)
    killed = Run(folder / "killed", 3)
    orphans = Run(folder / "orphans", 2)
    stopped = Run(folder / "stopped", 2, (TORCHRUN,))
    killed_ranks = killed.ranks()
    os.kill(killed_ranks[-1], signal.SIGKILL)
    orphan_ranks = orphans.ranks()
    os.kill(orphans.process.pid, signal.SIGKILL)
    stopped_ranks = stopped.ranks()
    os.kill(stopped.process.pid, signal.SIGTERM)
    return {
        "killed": killed.ended(killed_ranks),
        "orphans": orphans.ended(orphan_ranks),
        "stopped": stopped.ended(stopped_ranks),
        "frozen": frozen.ended(frozen_ranks),
    }


def goes_on(outcome):
    """The same command with --resume auto continues the run, with the samples that its steps have seen counted right."""
    (run,) = outcome.output.glob("digits/fc/*")
    before = load(run, "last.pt")["progress"]["step"]
    last = before + 5
    flags = [*FLAGS, "--output", outcome.output, "--resume", "auto", "--max-steps", last]
    assert main([*map(str, flags)]) == 0
    progress = load(run, "final.pt")["progress"]
    an_epoch = -(-IMAGES // BATCH)
    assert progress["step"] == last
    assert progress["samples_seen"] == last // an_epoch * IMAGES + last % an_epoch * BATCH
    return before


def test_a_killed_rank_ends_the_others_and_the_run_goes_on(outcomes):
    outcome = outcomes["killed"]
    assert len(outcome.processes) == 3
    assert outcome.code == 1
    assert not outcome.left
    tells_its_loss_in_a_line(outcome)
    goes_on(outcome)


def test_a_frozen_rank_ends_the_others_within_the_timeout_and_the_run_goes_on(outcomes):
    outcome = outcomes["frozen"]
    assert outcome.code == 1
    assert not outcome.left
    assert tells_its_loss_in_a_line(outcome) == 1
    assert outcome.err.splitlines()[-1] == "torchrun.py: failed; process 0: exit code 1, process 1: SIGKILL"
    goes_on(outcome)


@pytest.mark.parametrize(("fault", "code"), [("stopped", TRY_AGAIN), ("orphans", -signal.SIGKILL)])
def test_ranks_save_and_end_when_their_launcher_gets_sigterm_or_dies_and_the_run_goes_on(outcomes, fault, code):
    outcome = outcomes[fault]
    assert outcome.code == code, outcome.err
    assert not outcome.left
    assert "Traceback" not in outcome.err
    told = re.search(r"stopped by SIGTERM after step (\d+)", outcome.out)
    assert goes_on(outcome) == int(told[1])


def tells_its_loss_in_a_line(outcome):
    """How many survivors have told in one line each what happened, without a traceback; torchrun may print its own."""
    assert str(ROOT / "main.py") + '"' not in outcome.err
    ours = [line for line in outcome.err.splitlines() if line.startswith("main.py: ")]
    assert ours and all(re.fullmatch(f"{LOST}|{STOPPED}", line) for line in ours), outcome.err
    assert len(ours) < len(outcome.processes)
    return len(ours)
