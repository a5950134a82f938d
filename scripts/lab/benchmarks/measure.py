"""Matches, which compare main.py with rivals: what is measured, in which order, and how it is judged.

A measurement gives one figure, such as images per second or seconds. The sides of a match are measured alternately,
round by round, and compared within each round, so that what slows the machine for a while cancels out.
"""

from __future__ import annotations

import csv
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from scripts.common.timing import Spread, interleaved, ratios, synchronise
from utils.runtime.cpu import SPINS

ROOT = Path(__file__).resolve().parents[3]
MAIN = ROOT / "main.py"
PEERS = ROOT / "scripts" / "lab" / "benchmarks" / "peers.py"
RATE = "images/s"
SECONDS = "s"
PERCENT = "%"
COMMAND_SECONDS = 1800  # no command here takes nearly as long
BARE = "bare loop"
TIMM = "timm's train.py"
WITHOUT_TIMM = "timm's train.py is left out: give --timm-train PATH, the file of a checkout of timm"

Measure = Callable[[], float]
OURS = -1  # key of our side; a rival's key is its index


class CommandFailure(RuntimeError):
    """A measured command ended with the wrong exit code or output; the message is one line."""


@dataclass(frozen=True)
class Setup:
    """Facts that all parts share. ``environ``: the environment of every measured command.

    ``tiny``: do so little work that the figures mean nothing, only to see that everything runs, even without a GPU.
    """

    seconds: float
    threads: int
    device: torch.device
    scratch: Path
    environ: Mapping[str, str]
    on_cpu: bool = True
    mnist: str | None = None
    cifar10: str | None = None
    images: str | None = None
    timm_train: str | None = None
    tiny: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


class Rival(NamedTuple):
    """A side that main.py ("ours") is compared with; without ``measure``, our figure itself is judged.

    ``target``: the smallest acceptable ratio ours / other of images per second; for other units, the largest acceptable
    difference ours - other or, without ``measure``, the largest acceptable figure of ours. None: only reported.
    """

    name: str = ""
    measure: Measure | None = None
    target: float | None = None


class Match(NamedTuple):
    """A measurement of main.py, ``ours``, to be compared with its ``rivals``."""

    what: str
    unit: str
    ours: Measure
    rivals: Sequence[Rival]


@dataclass(frozen=True)
class Row:
    """Result of main.py ("ours") against one rival.

    ``result``: the rounds' ratios, differences or figures (see ``Rival``). ``failure``: why there are none, in one
    line; '' if there are.
    """

    part: str
    what: str
    unit: str
    against: str
    target: float | None
    ours: Spread | None = None
    other: Spread | None = None
    result: Spread | None = None
    failure: str = ""

    @property
    def is_ratio(self) -> bool:
        return self.unit == RATE

    @property
    def missed(self) -> bool:
        """True if the median lies on the wrong side of the target."""
        if self.target is None or self.result is None:
            return False
        return self.result.median < self.target if self.is_ratio else self.result.median > self.target


def play(part: str, match: Match, rounds: int, measured: Callable[[], None] = lambda: None) -> list[Row]:
    """Measure ``match`` and return a row for each rival. ``measured`` is called after each measurement.

    A rival that fails is not measured again, but the others are. If ours fails, so do all rows.
    """
    sides = {OURS: match.ours} | {n: rival.measure for n, rival in enumerate(match.rivals) if rival.measure}

    def failure_of(side: int, error: Exception) -> str:
        return str(error) if isinstance(error, CommandFailure) and side != OURS else ""

    try:
        figures, failures = interleaved(sides, rounds, lambda *_: measured(), failure_of)
    except CommandFailure as error:
        figures, failures = {}, dict.fromkeys(range(len(match.rivals)), str(error))
    rows = []
    for number, rival in enumerate(match.rivals):
        about = (part, match.what, match.unit, rival.name, rival.target)
        if number in failures:
            rows.append(Row(*about, failure=failures[number]))
            continue
        ours, other = figures[OURS], figures.get(number)
        spreads = (Spread.of(ours), other and Spread.of(other), compare(ours, other, match.unit))
        rows.append(Row(*about, *spreads))
    return rows


def compare(ours: Sequence[float], other: Sequence[float] | None, unit: str) -> Spread:
    """Summarise the rounds' ratios (images per second) or differences of ours and ``other``, if given, or else ours."""
    if other is None:
        return Spread.of(ours)
    if unit == RATE:
        return ratios(ours, other)
    return Spread.of([a - b for a, b in zip(ours, other, strict=True)])


# ---------------------------------------------------------------------------------- in this process


def throughput(
    batches: Iterator[int],
    seconds: float,
    device: torch.device,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Images per second of ``batches``, an iterator that makes batches when read and yields their sizes.

    Times batches until ``seconds`` have passed, after ``warm_up`` untimed ones. The device is synchronised only before
    and after the timed batches.
    """
    for _ in range(warm_up):
        next(batches)
    synchronise(device)
    images = 0
    began = clock()
    while True:
        images += next(batches)
        if clock() - began >= seconds:
            break
    synchronise(device)
    return images / (clock() - began)


# ------------------------------------------------------------------------------------------ commands


def run_command(command: Sequence[str | os.PathLike], environ: Mapping[str, str], code: int = 0) -> str:
    """Stdout of ``command``, run to its end. Raises ``CommandFailure`` unless the exit code is ``code``.

    Stderr is kept apart, since some libraries print warnings on it if there is a GPU.
    """
    done = subprocess.run(
        list(map(str, command)), env=dict(environ), capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS
    )
    if done.returncode != code:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing on stderr"]
        raise CommandFailure(f"{Path(command[1]).name} ended with exit code {done.returncode}: {lines[-1].strip()}")
    return done.stdout


def peer(setup: Setup, name: str, *flags: object, briefly: bool = False) -> Measure:
    """Measurement by a program of ``peers.py``: the images per second on its last line.

    ``briefly``: threads that wait for each other spin as briefly as main.py's, not as long as torch's default.
    """
    environ = environment(setup) | ({"GOMP_SPINCOUNT": SPINS} if briefly else {})

    def measure() -> float:
        command = [sys.executable, PEERS, name, *flags, "--seconds", setup.seconds]
        return float(run_command(command, environ).split()[-1])

    return measure


def environment(setup: Setup) -> dict[str, str]:
    """Environment of a measured command."""
    return {**setup.environ, "OMP_NUM_THREADS": str(setup.threads)}


def main_run(setup: Setup, *flags: object, read: Callable[[Path], float] | None = None) -> Measure:
    """Measurement by a whole run of main.py: what ``read`` finds in its folder, by default images per second."""

    def measure() -> float:
        with TemporaryDirectory(dir=setup.scratch) as output:
            command = [sys.executable, MAIN, *flags, "--no-progress", "--output", output]
            run_command(command, environment(setup))
            [folder] = [path.parent for path in Path(output).rglob("metrics.csv")]
            return (read or warm_images_per_second)(folder)

    return measure


def warm_images_per_second(folder: Path) -> float:
    """Images per second over the training parts of all epochs after the first."""
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        rates = [float(row["images_per_second"]) for row in csv.DictReader(file)]
    return statistics.harmonic_mean(rates[1:])


def warm_data_wait(folder: Path) -> float:
    """Percentage of training time spent waiting for data: median over the log's lines after the first epoch."""
    lines = (folder / "log.txt").read_text(encoding="utf-8").splitlines()
    found = [re.search(r"epoch (\d+)/.* data wait (\d+) %", line) for line in lines]
    return statistics.median([float(match[2]) for match in found if match and match[1] != "1"] or [math.nan])
