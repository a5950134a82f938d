"""The SLURM script with stand-ins for SLURM's commands: it saves when its time is up, requeues itself and goes on."""

import os
import shutil
import signal
import subprocess
import time

import pytest

from tests.end_to_end.forked import python_that_forks
from tests.end_to_end.processes import FINAL_LINE, ROOT, load
from tests.end_to_end.scripts import SBATCH, SCRIPTS, SYNTHETIC, executable, variables
from tests.helpers import wait_for

# srun starts a task a node, here all on this machine, hands SIGUSR1 on to them and ends with their highest exit code.
FAKE_SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
pids=() heard=
trap 'heard=1; kill -USR1 "${pids[@]}"' USR1
for ((node = 0; node < SLURM_NNODES; node++)); do
  "$@" & pids+=($!)
done
[[ ! $heard ]] || kill -USR1 "${pids[@]}" # it came before all process ids were noted
highest=0
for pid in "${pids[@]}"; do
  code=
  while [[ -z $code || $heard ]]; do
    heard= code=0
    wait "$pid" || code=$?
  done
  ((code <= highest)) || highest=$code
done
exit "$highest"
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
[[ $* == "show hostnames node[1-2]" ]] && echo localhost && echo elsewhere
[[ $1 != requeue ]] || echo "$*" >> "$REQUEUED"
"""


class Job:
    """A SLURM job of the script: ``start`` runs it as SLURM does, from a copy."""

    def __init__(self, folder, python):
        (folder / "bin").mkdir()
        executable(folder / "bin" / "srun", FAKE_SRUN)
        executable(folder / "bin" / "scontrol", FAKE_SCONTROL)
        self.script = folder / "slurm_script"
        self.requeued = folder / "requeued"
        self.id = str(os.getpid())
        shutil.copy(SCRIPTS / SBATCH, self.script)
        base = variables(python)
        self.env = {
            **base,
            "PATH": f"{folder / 'bin'}{os.pathsep}{base['PATH']}",
            "REQUEUED": str(self.requeued),
            "SLURM_JOB_ID": self.id,
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NNODES": "2",
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_SUBMIT_DIR": str(ROOT),
        }
        self.folder = folder

    def start(self, *flags, **more):
        line = ["bash", self.script, "imagenet/resnet50", "DATA", *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*map(str, line)], env=self.env | more, cwd=self.folder, **pipes)

    def requeues(self):
        return self.requeued.read_text().splitlines() if self.requeued.exists() else []


@pytest.fixture
def job(tmp_path):
    with python_that_forks() as python:
        yield Job(tmp_path, python)


def test_a_slurm_job_whose_time_is_up_saves_requeues_itself_and_goes_on_to_the_end(job, tmp_path):
    flags = "--arch fc --model-kwargs none --weight-decay-except none --epochs 100 --warmup-epochs 0 --lr 0.01 "
    flags += "--train-samples 2048 --global-batch-size 256 --no-progress --picture-epochs off"
    flags = [*SYNTHETIC, *flags.split(), "--output", tmp_path / "runs"]
    first = job.start(*flags)
    wait_for(lambda: list(tmp_path.glob("runs/**/last.pt")) or first.poll() is not None, 120)
    assert first.poll() is None, first.communicate()
    first.send_signal(signal.SIGUSR1)
    out, err = first.communicate(timeout=120)
    assert first.returncode == 75, err
    assert out.count(" stopped by ") == 1
    assert job.requeues() == [f"requeue {job.id}"]
    (run_folder,) = tmp_path.glob("runs/synthetic/fc/*")
    step = load(run_folder, "last.pt")["progress"]["step"]
    assert f"after step {step} " in out

    # The second time one node has to do.
    process = job.start(*flags, "--max-steps", step + 2, SLURM_NNODES="1", SLURM_RESTART_COUNT="1")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert FINAL_LINE.fullmatch(out.splitlines()[-1])["run"] == str(run_folder)
    assert load(run_folder, "final.pt")["progress"]["step"] == step + 2
    assert "Continuing" in (run_folder / "log.txt").read_text()
    assert len(job.requeues()) == 1


# A launcher that ends with $CODE, when it is told so or at once.
FAKE_LAUNCHER = """#!/usr/bin/env bash
[[ ! $AT_ONCE ]] || exit "$CODE"
trap 'sleep 0.2; exit $CODE' USR1
touch started
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("signals", "code", "before", "requeued"),
    [
        ("USR1", 75, 0, True),
        ("USR1 USR1", 75, 99, True),
        ("USR1", 75, 100, False),  # enough
        ("USR1", 75, None, False),  # never, by MAX_REQUEUES
        ("USR1", 1, 0, False),  # it failed
        ("USR1", 0, 0, False),  # it had just finished
        ("TERM", 75, 0, False),  # cancelled
        ("USR1 TERM", 75, 0, False),
        ("", 75, 0, False),  # stopped by somebody else
        ("", 1, 0, False),
    ],
)
def test_a_slurm_job_is_requeued_only_when_its_time_is_up_and_its_state_saved(signals, code, before, requeued, job):
    (job.folder / "scripts").mkdir()
    (job.folder / "scripts" / "launch.sh").write_text(FAKE_LAUNCHER)
    count = {"MAX_REQUEUES": "0"} if before is None else {"SLURM_RESTART_COUNT": str(before)}
    process = job.start(
        **count,
        CODE=str(code),
        AT_ONCE="" if signals else "1",
        SLURM_SUBMIT_DIR=str(job.folder),
        SLURM_NNODES="1",
    )
    wait_for(lambda: not signals or (job.folder / "started").exists())
    for name in signals.split():
        process.send_signal(getattr(signal, f"SIG{name}"))
        time.sleep(0.05)  # two at once would be handled in the order of their numbers
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, out + err
    assert job.requeues() == [f"requeue {job.id}"] * requeued
    assert ("submit the job again" in err) == (before in (None, 100))
