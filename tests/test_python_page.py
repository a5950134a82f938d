"""docs/python.md and the Python of README.md run as they stand, in a folder with a run and an image."""

import numpy as np
import pytest
from PIL import Image

import main
from tests.test_documentation import PAGES
from tests.test_documentation import blocks as blocks_of


def python_blocks(page):
    return [block for block in blocks_of(PAGES[page]) if "import " in block or "load_model" in block]


@pytest.mark.parametrize("page", ["docs/python.md", "README.md"])
def test_the_blocks_run_one_after_the_other(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--arch", "fc", "--epochs", "1", "--device", "cpu", "--no-progress", "--output", "made"]
    assert main.main(flags) == 0
    next(tmp_path.glob("made/digits/fc/*")).rename(tmp_path / "RUN")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("cat.png")
    found = python_blocks(page)
    assert found and (page == "README.md" or len(found) == PAGES[page].count("```python"))
    names = {}
    for block in found:
        exec(compile(block, page, "exec"), names)
