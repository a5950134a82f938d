"""Matches: what is measured on both sides, in which order, and how it is judged.

A measurement gives one figure, images a second or seconds. The sides of a match are measured alternately, a round at a
time, and compared within the round, so that what slows the machine down for a while falls out of the comparison.
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
OURS = -1  # the key of our side, where a rival has its number


class CommandFailure(RuntimeError):
    """A measured command ended with the wrong exit code or output; the message is one line."""


@dataclass(frozen=True)
class Setup:
    """Facts that all parts share. ``environ`` is that of every measured command.

    ``tiny``: with so little work that the figures mean nothing, to see that everything runs, also without a GPU.
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
    """Side that ours is compared with; without a ``measure`` ours is judged by its own figure.

    ``target``: the least ratio ours / other of images a second; of other units the largest difference ours - other, or
    the largest figure of ours. None: only reported.
    """

    name: str = ""
    measure: Measure | None = None
    target: float | None = None


class Match(NamedTuple):
    """One measurement of ours and its rivals."""

    what: str
    unit: str
    ours: Measure
    rivals: Sequence[Rival]


@dataclass(frozen=True)
class Row:
    """Ours against one rival. ``result``: ratio, difference or figure (see ``Rival``), each round's own.

    ``failure`` says in a line why there are no figures.
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
    """Measure ``match`` and compare: a row for each rival. ``measured`` is called after each measurement.

    A rival that fails is not measured again; the others are. Without ours there is nothing to compare.
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
    """Median and spread of the rounds' own ratios (of images a second) or differences; without ``other`` of ours."""
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
    """Images a second of ``batches``, an iterator that makes them as it is read and yields each one's size.

    The first ``warm_up`` are not timed. The device is waited for at the borders only.
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
    """Stdout of ``command``. Raises ``CommandFailure`` when it does not end with exit code ``code``.

    Warnings of libraries, which some print only on a GPU, go to stderr.
    """
    done = subprocess.run(
        list(map(str, command)), env=dict(environ), capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS
    )
    if done.returncode != code:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing on stderr"]
        raise CommandFailure(f"{Path(command[1]).name} ended with exit code {done.returncode}: {lines[-1].strip()}")
    return done.stdout


def peer(setup: Setup, name: str, *flags: object, briefly: bool = False) -> Measure:
    """Images a second that a program of ``peers.py`` prints on its last line.

    ``briefly``: threads that wait for each other spin briefly, as main.py's do, and not as long as torch's own do.
    """
    environ = environment(setup) | ({"GOMP_SPINCOUNT": SPINS} if briefly else {})

    def measure() -> float:
        command = [sys.executable, PEERS, name, *flags, "--seconds", setup.seconds]
        return float(run_command(command, environ).split()[-1])

    return measure


def environment(setup: Setup) -> dict[str, str]:
    """The environment of a measured command."""
    return {**setup.environ, "OMP_NUM_THREADS": str(setup.threads)}


def main_run(setup: Setup, *flags: object, read: Callable[[Path], float] | None = None) -> Measure:
    """A whole run of main.py, and what ``read`` finds in its folder: by default its images a second."""

    def measure() -> float:
        with TemporaryDirectory(dir=setup.scratch) as output:
            command = [sys.executable, MAIN, *flags, "--no-progress", "--output", output]
            run_command(command, environment(setup))
            [folder] = [path.parent for path in Path(output).rglob("metrics.csv")]
            return (read or warm_images_per_second)(folder)

    return measure


def warm_images_per_second(folder: Path) -> float:
    """Images a second over the training parts of all epochs after the first."""
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        rates = [float(row["images_per_second"]) for row in csv.DictReader(file)]
    return statistics.harmonic_mean(rates[1:])


def warm_data_wait(folder: Path) -> float:
    """Percent of the time that training waited for data: median of the log's lines after the first epoch."""
    lines = (folder / "log.txt").read_text(encoding="utf-8").splitlines()
    found = [re.search(r"epoch (\d+)/.* data wait (\d+) %", line) for line in lines]
    return statistics.median([float(match[2]) for match in found if match and match[1] != "1"] or [math.nan])
