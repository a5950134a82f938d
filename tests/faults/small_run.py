"""A small run in this process, to damage."""

import shutil
from pathlib import Path

import torch

import main
from tests.end_to_end.processes import load
from utils.checkpoint.inventory import CONTENTS, inventory

FLAGS = ("--device", "cpu", "--arch", "fc", "--epochs", "3", "--no-progress", "--ema-decay", "0.9")


def begin(output, *more):
    """Train into ``output``; gives the run's folder."""
    assert main.main([*FLAGS, "--output", str(output), *map(str, more)]) == 0
    (folder,) = Path(output).glob("digits/fc/*")
    return folder


def copy_of(run, tmp_path, monkeypatch):
    """A copy of ``run`` below ``runs``, the default output, of a current folder of its own."""
    shutil.copytree(run.parents[2], tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return Path("runs").joinpath(*run.parts[-3:])


def as_older(run, key):
    """older.pt: the last checkpoint of ``run`` as of a version that did not write ``key`` yet."""
    state = {name: value for name, value in load(run, "last.pt").items() if name not in (key, CONTENTS)}
    torch.save(state | {CONTENTS: inventory(state)}, "older.pt")
    return "older.pt"


def told(capsys, line):
    """The exit code of a command line of main.py, and its lines on stderr, none of them a traceback."""
    code = main.main([str(word) for word in line])
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("main.py: ") for line in lines), lines
    return code, lines
