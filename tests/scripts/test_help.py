"""--help of each command answers at once: it imports nothing that takes long."""

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


@pytest.mark.parametrize("command", [ROOT / "main.py", *COMMANDS], ids=lambda path: path.name)
def test_help_imports_nothing_slow(command):
    line = [sys.executable, "-X", "importtime", command, "--help"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=120)
    assert command.name in done.stdout
    imported = set(re.findall(r"\| +(\w+)$", done.stderr, re.MULTILINE))
    assert "argparse" in imported or "re" in imported, "the list of imports was read"
    assert imported & set(SLOW) == set()


def test_the_programs_help_is_not_the_launchers():
    assert asks_for_help(["--help"]) and asks_for_help(["--nproc-per-node", "2", "-h", "main.py"])
    assert not asks_for_help(["main.py", "--help"]) and not asks_for_help(["--standalone"])
