"""The measurement of listing makes the tree that it says, measures it and leaves nothing behind."""

import os
import re

import numpy as np
import pytest
from PIL import Image

from scripts import benchmark_listing
from utils.config.settings import UserError


@pytest.fixture
def source(tmp_path):
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for number in range(3):
                Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "data" / split / name / f"{number}.png")
    return tmp_path / "data"


def test_the_users_tree_is_measured_and_left_as_it_is(source, capsys):
    before = sorted(source.rglob("*"))
    assert benchmark_listing.main(["--dataname", "folder", "--datapath", str(source)]) == 0
    out = capsys.readouterr().out
    assert "6 training and 6 validation images, 2 classes" in out
    assert len(re.findall(r"^\S.*  \d+\.\d\d  +-?[\d,]+\.\d$", out, re.MULTILINE)) == 8
    assert sorted(source.rglob("*")) == before


def test_a_tree_of_links_has_the_wanted_files_and_is_removed(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark_listing, "CLASSES", 3)
    monkeypatch.setattr(benchmark_listing.time, "sleep", lambda seconds: None)
    line = ["--dataname", "folder", "--datapath", str(source), "--files", "270", "--output", str(tmp_path / "many")]
    assert benchmark_listing.main(line) == 0
    assert "260 training and 10 validation images, 3 classes" in capsys.readouterr().out
    assert not (tmp_path / "many").exists()
    assert all(os.stat(path).st_nlink == 1 for path in source.rglob("*.png")), "no link is left"


@pytest.mark.parametrize(
    "more", [["--files", "100"], ["--files", "54000", "--output", "."], ["--datapath", "/nowhere"]]
)
def test_what_cannot_be_measured_is_a_clear_error(source, more):
    with pytest.raises(UserError, match="--files needs|--datapath"):
        benchmark_listing.main(["--dataname", "folder", "--datapath", str(source), *more])
