"""--help of each command, and main.py's answer to a mistake, come at once: nothing is imported that takes long."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.torchrun import asks_for_help

ROOT = Path(__file__).resolve().parents[2]
SLOW = ("torch", "torchvision", "timm", "numpy", "sklearn", "matplotlib", "mutmut", "libcst", "scipy", "PIL")
COMMANDS = sorted(
    path for path in [*ROOT.glob("scripts/*.py"), *ROOT.glob("scripts/lab/*.py")] if path.name != "__init__.py"
)


def answer(*line, code):
    """What such a command prints, and the modules that it imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *line], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    imported = set(re.findall(r"\| +(\w+)$", done.stderr, re.MULTILINE))
    assert "argparse" in imported or "re" in imported, "the list of imports was read"
    return done.stdout, imported


@pytest.mark.parametrize("command", [ROOT / "main.py", *COMMANDS], ids=lambda path: path.name)
def test_help_imports_nothing_slow(command):
    text, imported = answer(command, "--help", code=0)
    assert f" {command.relative_to(ROOT)} " in text
    assert imported & set(SLOW) == set(), "functions import these, so that --help does not"


def test_a_tool_needs_no_docstrings():
    """python -OO, or PYTHONOPTIMIZE=2, leaves them out."""
    text, _ = answer("-OO", ROOT / "scripts/list_recipes.py", "--help", code=0)
    assert " scripts/list_recipes.py " in text


def test_a_mistake_imports_nothing_slow():
    text, imported = answer(ROOT / "main.py", "--epochs", "0", code=2)
    assert text == "" and imported & set(SLOW) == set()


def test_the_programs_help_is_not_the_launchers():
    assert asks_for_help(["--help"]) and asks_for_help(["--nproc-per-node", "2", "-h", "main.py"])
    assert not asks_for_help(["main.py", "--help"]) and not asks_for_help(["--standalone"])
