"""docs/python.md and the Python of README.md run as they stand, and the page names what the modules make public."""

import ast
import importlib
import inspect
import re

import numpy as np
import pytest
from PIL import Image

from tests.helpers import trained
from tests.test_documentation import PAGES
from tests.test_documentation import blocks as blocks_of
from tests.test_structure import ROOT, trees
from training import Training

NOTEBOOK = (ROOT / "examples/finetune_in_a_notebook.py").read_text()  # which tests/test_examples.py runs


def python_blocks(page):
    found = [block for block in blocks_of(PAGES[page]) if "import " in block or "load_model" in block]
    return [block for block in found if block != NOTEBOOK]


def test_the_page_shows_the_example_as_it_stands():
    assert blocks_of(PAGES["docs/python.md"])[0] == NOTEBOOK


@pytest.mark.parametrize("page", ["docs/python.md", "README.md"])
def test_the_blocks_run_one_after_the_other(page, workplace, capsys):
    trained(workplace / "made", "--arch", "fc", "--epochs", 1).rename(workplace / "RUN")
    for name in ("cat.png", "dog.png"):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(name)
    found = python_blocks(page)
    assert found and (page == "README.md" or len(found) + 1 == PAGES[page].count("```python"))
    names = {}
    for block in found:
        exec(compile(block, page, "exec"), names)


def test_the_page_lists_what_the_modules_declare_public_and_each_says_what_it_is():
    section = PAGES["docs/python.md"].partition("## Public names\n")[2]
    rows = [re.findall(r"`(\S+?)`", line) for line in section.splitlines() if line.startswith("| `")]
    listed = {module: names for module, *names in rows}
    declaring = [
        module
        for module, tree in trees().items()
        if any("__all__" in ast.unparse(node).partition("=")[0] for node in tree.body if isinstance(node, ast.Assign))
    ]
    assert listed == {module: sorted(importlib.import_module(module).__all__) for module in declaring}
    for module, names in listed.items():
        for name in names:
            made = getattr(importlib.import_module(module), name)
            verbs = inspect.getmembers(made, inspect.isfunction) if inspect.isclass(made) else []
            public = [made, *(verb for verb_name, verb in verbs if not verb_name.startswith("_"))]
            assert [each.__qualname__ for each in public if not inspect.getdoc(each)] == [], name


def test_what_the_page_says_of_a_run_is_there():
    names = set(re.findall(r"`run\.(\w+)", PAGES["docs/python.md"]))
    assert {"parts", "epochs"} < names <= {*dir(Training), *Training.__dataclass_fields__}
