"""A Python that cannot run the programs is told in a line."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from utils.runtime import console

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("line", ["main.py", "scripts/evaluate.py x.pt", "scripts/torchrun.py main.py"])
def test_without_packages_each_program_is_one_line(tmp_path, line):
    program, *flags = line.split()
    (tmp_path / "x.pt").touch()
    bare = [sys.executable, "-S", "-E"]  # without the environment's packages
    line = [*bare, ROOT / program, *flags]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    name = Path(program).name
    assert done.returncode == 2 and done.stdout == ""
    (told,) = done.stderr.splitlines()
    assert told.startswith(f"{name}: the package ") and told.endswith("pip install -r requirements.txt")
    assert " torch " in told or " numpy " in told
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


def test_an_interrupt_during_the_imports_of_a_tool_is_one_line(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "utils.config.arguments":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
"""
    )
    line = [sys.executable, ROOT / "scripts/explain.py", "auto", "x.png"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "explain.py: interrupted\n")


def test_a_name_that_is_no_text_in_any_encoding_is_printed_as_it_is():
    line = [sys.executable, "-c", "from utils.runtime import console; console.outlive_readers(); print('caf\\udce9')"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (b"caf\xe9\n", b"")


def test_a_module_of_ours_that_is_missing_is_no_package_to_install():
    with pytest.raises(ModuleNotFoundError):
        console.lacks_package("main.py", ModuleNotFoundError("no such", name="utils.lost"))


def test_a_package_of_another_version_is_one_line(capsys):
    gone = ImportError("cannot import name 'decode_jpeg' from 'torchvision.io'", name="torchvision.io")
    assert console.lacks_package("main.py", gone) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("main.py: another version of torchvision is needed than the one for ")
    assert "decode_jpeg" in line


def test_an_old_python_is_one_line_and_can_read_as_far(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit) as end:
        console.refuse_old_python("main.py")
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"main.py: needs Python 3.10 or newer, and {sys.executable} is 3.9; ")
    readable = [ROOT / "main.py", Path(console.__file__), *(ROOT / "scripts").glob("*.py")]
    for path in [*readable, ROOT / "scripts/common/__init__.py"]:
        ast.parse(path.read_text(), feature_version=(3, 8))
