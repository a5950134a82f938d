"""Running the commands of a piece, each within the time that is left, and what the machine is."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SAVING_SECONDS = 20  # for a training to save and end after SIGTERM
STATE = "clocks.sm,temperature.gpu,power.draw,utilization.gpu,memory.used"


class PieceFailure(RuntimeError):
    """A piece gave no figures; the message is one line."""


class OutOfTime(RuntimeError):
    """The limit came within a piece."""


@dataclass
class Job:
    """What the pieces share: the flags, the folder of the results, and the time when all must have ended.

    ``deadline`` is one of ``time.monotonic``. ``name`` is the piece's.
    """

    own: argparse.Namespace
    folder: Path
    deadline: float | None = None
    name: str = ""
    scratch: Path = field(init=False)

    def __enter__(self) -> Job:
        # Below the system's folder: names of sockets, which data workers make there, must be short.
        self.scratch = Path(tempfile.mkdtemp(prefix="gpu-"))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)

    @property
    def device(self) -> str:
        return "cpu" if self.own.tiny else "cuda"

    @property
    def log(self) -> Path:
        """What the commands of the piece print."""
        return self.folder / "logs" / f"{self.name}.txt"

    def left(self) -> float | None:
        """Seconds until the deadline, less those that saving takes; None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - SAVING_SECONDS - time.monotonic())

    def run(self, *words: object, codes: Sequence[int] = (0,), cwd: Path = ROOT) -> int:
        """Run a Python program of this repository, or another, to its end; gives its exit code.

        Raises ``PieceFailure`` with the last line that it printed if the code is none of ``codes``, and ``OutOfTime``
        at the deadline, after a SIGTERM that lets a training save.
        """
        line = [sys.executable, *map(str, words)]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "a", encoding="utf-8") as log:
            print(f"$ {shlex.join(line)}", file=log, flush=True)
            code = self._wait(line, log, cwd)
        if code not in codes:
            lines = [text for text in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if text]
            raise PieceFailure(f"{Path(line[1]).name} ended with exit code {code}: {lines[-1][:200]} (see {self.log})")
        return code

    def _wait(self, line: Sequence[str], log: Any, cwd: Path) -> int:
        environ = {**os.environ, "TMPDIR": str(self.scratch), "PYTHONUNBUFFERED": "1"}
        if self.own.tiny:
            environ |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(
            line,
            cwd=cwd,
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that all that it starts can be ended with it
        )
        try:
            return process.wait(self.left())
        except subprocess.TimeoutExpired as error:
            raise OutOfTime from error
        finally:
            end(process)


def end(process: subprocess.Popen) -> None:
    """End ``process`` and what it has started, if it has not ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SAVING_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---------------------------------------------------------------------------------------- the machine


def machine() -> dict[str, str]:
    """GPU, driver, processor, versions and commit."""
    import timm
    import torch
    import torchvision

    from utils.data.images.decoding import decoder
    from utils.record.provenance import commit, cores, processor

    gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if gpu else "none",
        "memory": f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB" if gpu else "",
        "driver": nvidia_smi("driver_version"),
        "processor": f"{processor()}, {cores()} core(s)",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cudnn": str(torch.backends.cudnn.version() or ""),
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "decoder": decoder(),
        "commit": commit(),
    }


def nvidia_smi(query: str = STATE) -> str:
    """What nvidia-smi answers for the first GPU, in a line; '' without it."""
    line = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(line, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
