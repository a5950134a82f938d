"""How a process ends: exit functions and profilers have their turn, and nobody hears of objects that were left out."""

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import atexit, sys
sys.path.insert(0, {root!r})
from utils.runtime.process import end_process
from utils.runtime.garbage import garbage_collection

class Node:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("freed")

garbage_collection.put_off()
node = Node()
garbage_collection.freeze_imports()
del node
atexit.register(print, "exit function")
"""


def run(tmp_path, end, *profiler):
    program = tmp_path / "program.py"
    program.write_text(BEGIN.format(root=str(Path(__file__).parents[3])) + end)
    command = [sys.executable, *profiler, program]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("profiler", [(), ("-m", "cProfile")])
def test_exit_functions_and_profilers_have_their_turn_and_no_teardown_follows(profiler, tmp_path):
    ended = run(tmp_path, "end_process(3)", *profiler)
    assert ended.stdout.splitlines()[-1] == "exit function" and "freed" not in ended.stdout
    assert (" function calls " in ended.stdout) == bool(profiler)
    assert ended.returncode == 3 and ended.stderr == ""


def test_after_a_traceback_what_was_left_out_is_freed(tmp_path):
    """Extension modules list as leaked, on stderr, what is not."""
    ended = run(tmp_path, "raise RuntimeError")
    assert ended.stdout.splitlines() == ["exit function", "freed"] and ended.returncode == 1
