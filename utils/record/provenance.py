"""Origin of a run's figures: the machine and the commit of this repository."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from utils.runtime.cpu import cores, facts

if TYPE_CHECKING:
    from utils.runtime.distributed import Distributed

ROOT = Path(__file__).resolve().parents[2]
# how these facts' lines in config.yaml begin
MACHINE = "machine: "
COMMIT = "commit: "
PLAN = "plan: "  # a row of the plan, title and text
UNKNOWN = "unknown"
GIT_SECONDS = 10


def machine(distributed: Distributed) -> str:
    """The processes and their device: '1 process(es) on cpu, 2 thread(s) each (AMD EPYC 7763, AVX2, 2 core(s))'.

    Of a CPU also the vector instructions that torch uses, on which the last bits depend.
    """
    import torch

    where = f"{distributed.world_size} process(es) on {distributed.describe_device()}"
    if distributed.device.type != "cpu":
        return where
    capability = torch.backends.cpu.get_cpu_capability()
    kept_to = " by ATEN_CPU_CAPABILITY" if os.environ.get("ATEN_CPU_CAPABILITY") == capability.lower() else ""
    return f"{where} ({processor()}, {capability}{kept_to}, {cores()} core(s))"


def processor() -> str:
    """The processor's name; its architecture if the system does not tell the name."""
    names = [line.partition(":")[2].strip() for line in facts() if line.startswith("model name")]
    return next(filter(None, names), "") or platform.processor() or platform.machine()


def commit() -> str:
    """Short hash of this repository's commit, followed by ', changed' if files differ.

    Without git, the content of the variable GIT_COMMIT, for a copy without its history; otherwise 'unknown'.
    """
    try:
        name = _git("rev-parse", "--short=10", "HEAD")
        return f"{name}, changed" if _git("status", "--porcelain", "--untracked-files=no") else name
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("GIT_COMMIT") or UNKNOWN


def _git(*words: str) -> str:
    line = ["git", "-C", str(ROOT), "--no-optional-locks", *words]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=GIT_SECONDS).stdout.strip()
