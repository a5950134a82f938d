"""A small run in this process, to damage."""

import shutil
from pathlib import Path

import torch

import main
from tests.end_to_end.processes import load
from tests.helpers import QUIETLY, trained
from utils.checkpoint.inventory import CONTENTS, inventory
from utils.runtime import console

FLAGS = (*QUIETLY, *"--arch fc --epochs 3 --ema-decay 0.9".split())


def begin(output, *more):
    """Train into ``output``; gives the run's folder."""
    return trained(output, *FLAGS, *more)


def copy_of(run, tmp_path, monkeypatch):
    """A copy of ``run`` below ``runs``, the default output, of a current folder of its own."""
    shutil.copytree(run.parents[2] / "digits", tmp_path / "runs" / "digits")
    monkeypatch.chdir(tmp_path)
    return Path("runs").joinpath(*run.parts[-3:])


class Attack:
    """Unpickled, it makes a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


def save_as(path, state):
    """Put ``state`` in place of the checkpoint at ``path``, which no manifest then vouches for."""
    path.unlink(missing_ok=True)  # not in place: the files of a run share bytes
    torch.save(state, path)
    (path.parent / "manifest.json").unlink(missing_ok=True)


def with_contents(state):
    """``state`` with the inventory that fits it."""
    state = {name: value for name, value in state.items() if name != CONTENTS}
    return state | {CONTENTS: inventory(state)}


def as_older(run, key):
    """older.pt: the last checkpoint of ``run`` as of a version that did not write ``key`` yet."""
    state = load(run, "last.pt")
    del state[key]
    torch.save(with_contents(state), "older.pt")
    return "older.pt"


def told(capsys, line):
    """The exit code of a command line of main.py, and its lines on stderr, none of them a traceback."""
    console.note_line()  # or the silence before this test counts, and slow work gets a line of its own after 5 s
    code = main.main([str(word) for word in line])
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("main.py: ") for line in lines), lines
    return code, lines
