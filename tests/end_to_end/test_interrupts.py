"""Ctrl-C ends the program in one line, also while it imports: no traceback, and no import that fails in its stead."""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import main
import training
from tests.end_to_end.processes import ROOT
from utils.loop.stop_signals import TRY_AGAIN
from utils.runtime.console import INTERRUPTED

# In sitecustomize.py, which Python imports at its start: a signal comes when WHERE is about to be imported, and the
# import of a module in C answers a handler's exception as the interpreter does, with one of its own.
SIGNAL_AT_IMPORT = """
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name == os.environ["WHERE"]:
            try:
                os.kill(os.getpid(), int(os.environ["NUMBER"]))
                for _ in range(1000):
                    pass
            except BaseException:
                if name.startswith("torch."):
                    raise ImportError("initialization failed") from None
                raise
sys.meta_path.insert(0, Finder())
"""

MOMENTS = ("utils.runtime.console", "dataclasses", "utils.loop.stop_signals", "torch.nn")


@pytest.fixture
def folder(tmp_path):
    """A folder with the ``sitecustomize.py`` that all processes of a test import, written before any of them starts."""
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_AT_IMPORT)
    return tmp_path


def start(folder, program, where, number=signal.SIGINT):
    environment = os.environ | {"PYTHONPATH": str(folder), "WHERE": where, "NUMBER": str(int(number))}
    line = [sys.executable, ROOT / program, "--output", folder / "runs", "--device", "cpu", "--max-steps", "1"]
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("places", [MOMENTS, pytest.param(("torch._dynamo",), marks=pytest.mark.thorough)])
def test_a_stop_signal_while_the_program_imports_is_one_line_at_most_and_its_exit_code(folder, places):
    interrupted = INTERRUPTED, "main.py: interrupted"
    stopped = TRY_AGAIN, "main.py: stopped by SIGTERM before or after training; --resume auto continues"
    moments = {(where, signal.SIGINT): interrupted for where in places} | {("torch.nn", signal.SIGTERM): stopped}
    started = [start(folder, "main.py", *moment) for moment in moments]  # side by side, because some import for seconds
    for (moment, (code, line)), process in zip(moments.items(), started, strict=True):
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out) == (code, ""), (moment, err)
        assert err == "" if moment[0] == "utils.runtime.console" else err.startswith(line), moment
        assert err.count("\n") <= 1, (moment, err)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("where", ["utils.runtime.console", "torch.distributed"])
def test_ctrl_c_while_the_launcher_imports_leaves_no_traceback(folder, where):
    process = start(folder, "scripts/torchrun.py", where)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (INTERRUPTED, "") and err in ("", "torchrun.py: interrupted\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TRY_AGAIN), (0, 1)])
def test_a_rank_that_loses_the_others_ends_as_it_was_told_if_it_was(number, code, monkeypatch, capsys):
    """The others may be told where they can end at once, while this one waits for them in an exchange."""

    def run(_, signals, hooks):
        with signals.held():
            if number:
                os.kill(os.getpid(), number)
            raise RuntimeError("[../gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:20356")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(training, "find_run", lambda command_line, args, distributed: SimpleNamespace(args=args))
    monkeypatch.setattr(main, "train", run)
    monkeypatch.setattr("utils.runtime.distributed.Distributed", lambda *_: nullcontext())
    assert main.main([]) == code
    (line,) = capsys.readouterr().err.splitlines()
    name = number and signal.Signals(number).name
    assert (f"stopped by {name} as the others were ending" if number else "rank 1 has lost the other processes") in line
