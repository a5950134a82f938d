"""Compiled networks are kept: a second start compiles nothing, and what is not ours or not whole is not executed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from utils.runtime.compiled import LIST, VARIABLE, KeptCompilation, compile_in_place

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_folder_chosen(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # so that it is what it was after the test
    monkeypatch.delenv(VARIABLE)


def kept(parent, recipe="conv2", machine="a CPU"):
    os.environ.pop(VARIABLE, None)
    lines = []
    return KeptCompilation(parent, recipe, machine, lines.append), lines


def compiled(parent):
    """A folder in which two files were compiled and listed."""
    own, _ = kept(parent)
    (own.folder / "ab").mkdir()
    for name in ("ab/kernel.so", "ab/kernel.py"):
        (own.folder / name).write_text(name)
    own.write_list()
    return own.folder


def test_the_compiler_uses_the_folder_of_this_recipe_on_this_machine(tmp_path):
    folder = compiled(tmp_path)
    again, lines = kept(tmp_path)
    assert os.environ[VARIABLE] == str(folder) == str(again.folder) and lines == []
    assert {kept(tmp_path, *other)[0].folder for other in (("conv4",), ("conv2", "another"))}.isdisjoint({folder})


def test_a_damaged_file_is_removed_with_one_line_and_the_others_stay(tmp_path):
    folder = compiled(tmp_path)
    (folder / "ab/kernel.so").write_bytes(b"ab/kernel.s")
    _, (line,) = kept(tmp_path)
    assert line.endswith("1 kept file(s) are damaged, such as ab/kernel.so: compiled anew")
    assert {path.name for path in (folder / "ab").iterdir()} == {"kernel.py"}
    assert kept(tmp_path)[1] == []


def test_without_a_readable_list_nothing_of_the_folder_is_used(tmp_path):
    folder = compiled(tmp_path)
    (folder / LIST).write_text("{")
    _, (line,) = kept(tmp_path)
    assert "kept file(s) are damaged" in line and [path.name for path in folder.rglob("*") if path.is_file()] == []


def test_a_folder_of_another_user_or_that_others_can_write_to_is_left_alone(tmp_path, monkeypatch):
    folder = compiled(tmp_path)
    folder.chmod(0o777)
    own, (line,) = kept(tmp_path)
    assert line.endswith("is not used for what is compiled: others can write to it")
    assert not own.is_used and VARIABLE not in os.environ
    folder.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    _, (line,) = kept(tmp_path)
    assert line.endswith("belongs to another user")


def test_a_folder_that_the_user_has_chosen_stays(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "/mine")
    own = KeptCompilation(tmp_path, "conv2", "a CPU", print)
    own.write_list()
    assert os.environ[VARIABLE] == "/mine" and not own.folder.exists()


TRAIN = """
import json, sys
from torch._dynamo.utils import counters
from main import main
code = main(sys.argv[1:])
print(json.dumps({"code": code, **counters["inductor"]}))
"""


@pytest.mark.thorough
def test_a_second_start_compiles_nothing(tmp_path):
    def start(seed):
        flags = ["--arch", "fc", "--compile", "--max-steps", "3", "--seed", str(seed), "--output", str(tmp_path)]
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        command = [sys.executable, "-c", TRAIN, *flags, "--device", "cpu"]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        return json.loads(run.stdout.splitlines()[-1])

    first = start(0)
    second = start(1)
    assert first["code"] == second["code"] == 0
    assert first["fxgraph_cache_miss"] > 0 and not second.get("fxgraph_cache_miss")
    assert second["fxgraph_cache_hit"] >= first["fxgraph_cache_miss"]
    libraries = {path.name: path.stat().st_mtime for path in tmp_path.rglob("*.so")}
    assert start(2)["code"] == 0 and {path.name: path.stat().st_mtime for path in tmp_path.rglob("*.so")} == libraries


class OfTheUser(nn.Linear):
    def forward(self, images):
        return super().forward(images)


def traced(inputs, outputs):
    return torch.fx.symbolic_trace(nn.Linear(inputs, outputs))


@pytest.mark.parametrize("kind", [nn.Linear, OfTheUser, traced])
def test_each_size_of_batch_has_its_own_code_also_after_others(kind, monkeypatch):
    """The last batch of an epoch must not leave code for any size, which is slower, to all later ones."""
    compiled_for = []

    def note(graph, inputs):
        compiled_for.append([value for value in inputs if isinstance(value, torch.SymInt)])
        return graph.forward

    own = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, *, mode, **flags: own(call, backend=note, **flags))
    model = kind(3, 2)
    compile_in_place(model, "default")
    sizes = [*range(2, 12), *range(2, 12)]
    assert [len(model(torch.zeros(size, 3))) for size in sizes] == sizes
    assert compiled_for == [[]] * 10
