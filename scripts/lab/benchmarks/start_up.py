"""Comparisons of the time a user waits: for --help, for the report of a mistake, for the first training step."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from scripts.lab.benchmarks.measure import (
    MAIN,
    SECONDS,
    CommandFailure,
    Match,
    Measure,
    Rival,
    Setup,
    environment,
    run_command,
)

# What a training run on the digits imports; torch's optimizers import torch._dynamo.
IMPORTS = """
import torch, torch._dynamo, numpy, PIL.Image
from torch.utils.tensorboard import SummaryWriter
print("imported", flush=True)
"""


def start_up(setup: Setup) -> Iterator[Match | str]:
    """Compare seconds since the start of the process. Yields ``Match``es."""
    environ = environment(setup)
    yield Match("main.py --help", SECONDS, whole(environ, "--help"), [Rival(target=0.3)])
    mistake = whole(environ, "--epochs", "many", code=2)
    yield Match("main.py --epochs many: the mistake is reported", SECONDS, mistake, [Rival(target=0.3)])

    def first_step() -> float:
        output = setup.scratch / f"start-{time.monotonic_ns()}"
        flags = ("--max-steps", "1", "--print-freq", "1", "--no-progress", "--device", "cpu", "--output", str(output))
        return seconds_to_line([sys.executable, str(MAIN), *flags], "epoch 1/", environ)

    def imports() -> float:
        return seconds_to_line([sys.executable, "-c", IMPORTS], "imported", environ)

    rivals = [Rival("import the same libraries", imports, 1.0)]
    yield Match("main.py: start to first step on the digits", SECONDS, first_step, rivals)


def whole(environ: Mapping[str, str], *flags: str, code: int = 0) -> Measure:
    """Measurement of main.py with ``flags`` until it ends, in seconds; the expected exit code is ``code``."""

    def measure() -> float:
        began = time.perf_counter()
        run_command([sys.executable, MAIN, *flags], environ, code)
        return time.perf_counter() - began

    return measure


def seconds_to_line(command: Sequence[str], begin: str, environ: Mapping[str, str]) -> float:
    """Seconds until ``command`` prints a line that begins with ``begin``; lets it end. Raises ``CommandFailure``."""
    began = time.perf_counter()
    seconds = None
    with subprocess.Popen(
        command, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        for line in process.stdout:
            if seconds is None and line.startswith(begin):
                seconds = time.perf_counter() - began
    if process.returncode or seconds is None:
        raise CommandFailure(
            f"{' '.join(command[1:2])} ended with exit code {process.returncode} and no '{begin}' line"
        )
    return seconds
