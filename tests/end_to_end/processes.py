"""Starting the program as a user does, and reading what it leaves."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.forked import ROOT, Forked
from tests.helpers import equal

FINAL_LINE = re.compile(
    r"val_top1=(?P<top1>\d+\.\d{4}) val_top5=(?P<top5>\d+\.\d{4}) val_loss=(?P<loss>\d+\.\d{4}) val_count=(?P<count>\d+)"
    r"(?: max_val_batches=\d+)?"
    r"(?: val_epoch=(?P<epoch>\d+) best_top1=(?P<best_top1>\d+\.\d{4}) best_epoch=(?P<best_epoch>\d+))?"  # of training
    r"(?: run=(?P<run>.+))?"
)


def command(*flags, processes=1):
    """The command line of a run on the CPU: plain python, or torchrun for several processes."""
    launcher = []
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *launcher, str(ROOT / "main.py"), "--device", "cpu", *map(str, flags)]


def start(*flags, processes=1, **options):
    """The running program; its output is text in pipes.

    It has as many threads as a run in this process (see conftest.py), for the bits depend on their number.
    """
    line = command(*flags, processes=processes)
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def train(*flags, processes=1):
    """Run to the end; gives the match of the final line."""
    out = Forked(*flags, processes=processes).output()
    found = FINAL_LINE.fullmatch(out.splitlines()[-1])
    assert found, out
    return found


def flat(value, path=""):
    """A nested checkpoint as {path: leaf}."""
    if isinstance(value, dict):
        return {name: leaf for key, item in value.items() for name, leaf in flat(item, f"{path}/{key}").items()}
    if isinstance(value, list):
        return {name: leaf for n, item in enumerate(value) for name, leaf in flat(item, f"{path}/{n}").items()}
    return {path: value}


def differences(run, other, name="final.pt"):
    """The entries of two runs' checkpoints that are not bit for bit equal: weights, optimizer, progress, all."""
    left, right = (
        flat({key: value for key, value in load(folder, name).items() if key not in ("settings", "contents")})
        for folder in (run, other)
    )
    assert left.keys() == right.keys()
    return [
        key
        for key, value in left.items()
        if key != "/progress/epoch_seconds"  # which a clock decides
        and not equal(value, right[key])
    ]


def load(run, name):
    return torch.load(Path(run) / "checkpoints" / name, weights_only=True)


def rows(run):
    """metrics.csv without what a clock decides."""
    with open(Path(run) / "metrics.csv", newline="") as file:
        return [
            {key: value for key, value in row.items() if key not in ("seconds", "images_per_second")}
            for row in csv.DictReader(file)
        ]


def curves(run):
    """metrics.npz as {name: bytes of the values of all steps}: a NaN too is equal to itself then."""
    with np.load(Path(run) / "metrics.npz") as content:
        return {name: content[name].tobytes() for name in content.files}


def points(run):
    """TensorBoard's scalars as {tag: [(step, the value in text), ...]} without speeds."""
    board = EventAccumulator(str(run), size_guidance={"scalars": 0})
    board.Reload()
    return {
        # Files of one second and one process are not always read in the order in which they were written.
        tag: sorted((event.step, repr(event.value)) for event in board.Scalars(tag))
        for tag in board.Tags()["scalars"]
        if not tag.startswith("Speed/")
    }
