"""Matches, which compare main.py with rivals: what is measured, in which order, and how it is judged.

A measurement gives one figure, images per second or seconds. The sides of a match are measured alternately, round by
round, and compared within each round, so that what slows the machine for a while cancels out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from scripts.common.timing import Spread, interleaved, ratios, synchronise
from scripts.lab.benchmarks.lines import RATE, Line, read_csv

ROOT = Path(__file__).resolve().parents[3]
MAIN = ROOT / "main.py"
PEERS = ROOT / "scripts" / "lab" / "benchmarks" / "peers.py"
COMMAND_SECONDS = 1800  # no command here takes nearly as long
BARE = "bare loop"
TIMM = "timm's train.py"
WITHOUT_TIMM = "timm's train.py is left out: give --timm-train PATH, the file of a checkout of timm"

Measure = Callable[[], float]
OURS = -1  # key of our side; a rival's key is its index


class CommandFailure(RuntimeError):
    """A measured command ended with the wrong exit code or output; the message is one line."""


class Rival(NamedTuple):
    """A side that main.py ("ours") is compared with; without ``measure``, our figure itself is judged.

    ``target``: the smallest acceptable ratio ours / other of images per second, or the largest acceptable difference
    ours - other of seconds (without ``measure``, of our figure). None: only reported.
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


def play(match: Match, rounds: int) -> list[Line]:
    """Measure ``match`` and return a line for each rival.

    A rival that fails is not measured again, but the others are. If ours fails, so do all rows.
    """
    sides = {OURS: match.ours} | {n: rival.measure for n, rival in enumerate(match.rivals) if rival.measure}

    def failure_of(side: int, error: Exception) -> str:
        return str(error) if isinstance(error, CommandFailure) and side != OURS else ""

    try:
        figures, failures = interleaved(sides, rounds, failure_of=failure_of)
    except CommandFailure as error:
        figures, failures = {}, dict.fromkeys(range(len(match.rivals)), str(error))
    lines = []
    for place, rival in enumerate(match.rivals):
        about = (match.what, match.unit, rival.name)
        if place in failures:
            lines.append(Line(*about, aim=rival.target, note=f"failed: {failures[place]}"))
            continue
        ours, other = figures[OURS], figures.get(place)
        middle = (statistics.median(ours), statistics.median(other) if other else None)
        lines.append(Line(*about, *middle, *compare(ours, other, match.unit), rival.target))
    return lines


def compare(ours: Sequence[float], other: Sequence[float] | None, unit: str) -> Spread:
    """Summarise the rounds' ratios (images per second) or differences of ours and ``other``, if given, or else ours."""
    if other is None:
        return Spread.of(ours)
    if unit == RATE:
        return ratios(ours, other)
    return Spread.of([a - b for a, b in zip(ours, other, strict=True)])


# ---------------------------------------------------------------------------------- in this process


def throughput(batches: Iterator[int], seconds: float, device: torch.device, warm_up: int) -> float:
    """Images per second of ``batches``, an iterator that makes batches when read and yields their sizes.

    Times batches until ``seconds`` have passed, after ``warm_up`` untimed ones. The device is synchronised only before
    and after the timed batches.
    """
    for _ in range(warm_up):
        next(batches)
    synchronise(device)
    images = 0
    began = time.perf_counter()
    while True:
        images += next(batches)
        if time.perf_counter() - began >= seconds:
            break
    synchronise(device)
    return images / (time.perf_counter() - began)


# ------------------------------------------------------------------------------------------ commands


def run_command(command: Sequence[object], environ: Mapping[str, str], code: int = 0) -> str:
    """Stdout of ``command``, run to its end. Raises ``CommandFailure`` unless the exit code is ``code``.

    Stderr is kept apart, since some libraries print warnings on it if there is a GPU.
    """
    words = list(map(str, command))
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS)
    if done.returncode != code:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing on stderr"]
        name = os.path.basename(words[1])
        raise CommandFailure(f"{name} ended with exit code {done.returncode}: {lines[-1].strip()}")
    return done.stdout


def peer(own: argparse.Namespace, name: str, *flags: object) -> Measure:
    """Measurement by a program of ``peers.py``: the images per second on its last line."""
    command = [sys.executable, PEERS, name, *flags, "--seconds", own.seconds]
    return lambda: float(run_command(command, own.environ).split()[-1])


def main_run(own: argparse.Namespace, *flags: object) -> Measure:
    """Measurement by a whole run of main.py: its images per second over all epochs after the first."""

    def measure() -> float:
        with TemporaryDirectory(dir=own.scratch) as output:
            run_command([sys.executable, MAIN, *flags, "--no-progress", "--output", output], own.environ)
            [path] = Path(output).rglob("metrics.csv")
            return warm_images_per_second(path)

    return measure


def warm_images_per_second(path: Path) -> float:
    """Images per second in a metrics.csv, over the training parts of all epochs after the first."""
    rates = [float(row["images_per_second"]) for row in read_csv(path)]
    return statistics.harmonic_mean(rates[1:])
