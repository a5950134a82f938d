"""Matches, which compare main.py with rivals: what is measured, in which order, and how it is judged.

A measurement gives one figure, images per second or seconds. The sides of a match are measured alternately, round by
round, and compared within each round, so that what slows the machine for a while cancels out.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from scripts.common.timing import Spread, interleaved, ratios, synchronise

ROOT = Path(__file__).resolve().parents[3]
MAIN = ROOT / "main.py"
PEERS = ROOT / "scripts" / "lab" / "benchmarks" / "peers.py"
RATE = "images/s"
SECONDS = "s"
COMMAND_SECONDS = 1800  # no command here takes nearly as long
BARE = "bare loop"
TIMM = "timm's train.py"
WITHOUT_TIMM = "timm's train.py is left out: give --timm-train PATH, the file of a checkout of timm"
HEADERS = ("what", "against", "ours", "the other", "result", "min - max", "target", "")

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


def play(part: str, match: Match, rounds: int) -> list[dict[str, Any]]:
    """Measure ``match`` and return a CSV row for each rival: unrounded figures, None where one is missing.

    A rival that fails is not measured again, but the others are. If ours fails, so do all rows.
    """
    sides = {OURS: match.ours} | {n: rival.measure for n, rival in enumerate(match.rivals) if rival.measure}

    def failure_of(side: int, error: Exception) -> str:
        return str(error) if isinstance(error, CommandFailure) and side != OURS else ""

    try:
        figures, failures = interleaved(sides, rounds, failure_of=failure_of)
    except CommandFailure as error:
        figures, failures = {}, dict.fromkeys(range(len(match.rivals)), str(error))
    rows = []
    for number, rival in enumerate(match.rivals):
        ours, other, result = [], None, (None, None, None)
        if number not in failures:
            ours, other = figures[OURS], figures.get(number)
            result = compare(ours, other, match.unit)
        rows.append(
            {
                "part": part,
                "what": match.what,
                "unit": match.unit,
                "against": rival.name,
                "ours": statistics.median(ours) if ours else None,
                "other": statistics.median(other) if other else None,
                **dict(zip(("result", "result_min", "result_max"), result, strict=True)),
                "target": rival.target,
                "failure": failures.get(number, ""),
            }
        )
    return rows


def compare(ours: Sequence[float], other: Sequence[float] | None, unit: str) -> Spread:
    """Summarise the rounds' ratios (images per second) or differences of ours and ``other``, if given, or else ours."""
    if other is None:
        return Spread.of(ours)
    if unit == RATE:
        return ratios(ours, other)
    return Spread.of([a - b for a, b in zip(ours, other, strict=True)])


def cells(row: Mapping[str, Any]) -> list[str]:
    """Text cells of a row, in the order of ``HEADERS``; the last says that the target is missed, or why it failed."""
    what = [f"{row['what']} ({row['unit']})", row["against"]]
    is_rate = row["unit"] == RATE
    target = "" if row["target"] is None else f"{'at least' if is_rate else 'at most'} {row['target']:g}"
    if row["failure"]:
        return [*what, "", "", "", "", target, f"failed: {row['failure']}"]
    form = "{:.2f}x" if is_rate else "{:.2f}" if row["other"] is None else "{:+.2f}"
    result, low, high = (form.format(row[name]) for name in ("result", "result_min", "result_max"))
    ours, other = (number(row[name]) for name in ("ours", "other"))
    return [*what, ours, other, result, f"{low} - {high}", target, "MISSED" * misses(row)]


def number(value: float | None) -> str:
    """``value`` as text with at least three digits; '' for None."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def misses(row: Mapping[str, Any]) -> bool:
    """True if the median lies on the wrong side of the target."""
    if row["target"] is None:
        return False
    return row["result"] < row["target"] if row["unit"] == RATE else row["result"] > row["target"]


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
    with open(path, newline="", encoding="utf-8") as file:
        rates = [float(row["images_per_second"]) for row in csv.DictReader(file)]
    return statistics.harmonic_mean(rates[1:])
