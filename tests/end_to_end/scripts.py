"""Starting the shell scripts as a user does."""

import os
import stat
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.processes import ROOT

SCRIPTS = ROOT / "scripts"
SBATCH = "slurm.sbatch"
SYNTHETIC = ["--dataname", "synthetic", "--image-size", "32", "--device", "cpu"]


def variables(python=Path(sys.executable).parent):
    """Variables under which the scripts find the python in the folder ``python``, and start one process."""
    path = f"{python}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "NNODES", "USAGE")}
    return {**kept, "PATH": path, "NPROC": "1", "OMP_NUM_THREADS": "1"}


def executable(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run(*command, env, cwd, code=0):
    """The outcome of a command, whose exit code must be ``code``."""
    done = subprocess.run(
        [*map(str, command)], env=env, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done
