"""The programs in examples/ run as they stand."""

import runpy
import sqlite3
import sys
from pathlib import Path

import pytest

from main import main
from tests.end_to_end.processes import differences
from tests.helpers import image_tree

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FLAGS = ("--device", "cpu", "--no-progress")


def ran(monkeypatch, name, *words):
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert end.value.code == 0


def test_an_own_data_set_network_and_loss_train_and_go_on_to_the_same_bits(tmp_path, monkeypatch):
    for folder, *stops in (("whole",), ("cut", 7)):
        for flags in (*(("--max-steps", stop) for stop in stops), ()):
            ran(monkeypatch, "own_loop.py", *FLAGS, "--epochs", 1, "--output", tmp_path / folder, *flags)
    runs = [next(tmp_path.glob(f"{folder}/stripes/small/*")) for folder in ("whole", "cut")]
    assert differences(*runs) == []
    assert len((EXAMPLES / "own_loop.py").read_text().splitlines()) < 40


def test_a_notebook_goes_from_images_to_a_network_and_its_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image_tree(tmp_path / "photographs", {"train": 8, "val": 4}, size=16)
    tiny = (
        "--arch",
        "timm/test_vit",
        "--no-pretrained",
        "--no-new-head",
        "--image-size",
        32,
        "--epochs",
        2,
        "--warmup-epochs",
        1,
    )
    monkeypatch.setattr(sys, "argv", ["", "photographs", *map(str, tiny), *FLAGS])
    made = runpy.run_path(str(EXAMPLES / "finetune_in_a_notebook.py"))
    assert made["classes"] == ("a", "b") and (made["run"] / "report.html").stat().st_size > 10_000
    assert len((EXAMPLES / "finetune_in_a_notebook.py").read_text().splitlines()) <= 15


def test_a_database_is_a_data_set(tmp_path):
    image_tree(tmp_path, {"images": 6}, size=16)
    database = sqlite3.connect(tmp_path / "images.db")
    database.execute("CREATE TABLE classes (label INTEGER, name TEXT)")
    database.execute("CREATE TABLE images (split TEXT, image BLOB, label INTEGER)")
    for label, name in enumerate("ab"):
        database.execute("INSERT INTO classes VALUES (?, ?)", (label, name))
        for number, path in enumerate(sorted((tmp_path / "images" / name).iterdir())):
            row = ("train" if number % 3 else "val", path.read_bytes(), label)
            database.execute("INSERT INTO images VALUES (?, ?, ?)", row)
    database.commit()
    flags = [
        "--plugin",
        EXAMPLES / "plugin.py",
        "--dataname",
        "sqlite",
        "--datapath",
        tmp_path / "images.db",
        "--arch",
        "fc",
    ]
    more = ["--epochs", 1, "--batch-size", 4, "--workers", 1, "--output", tmp_path / "runs", *FLAGS]
    assert main([*map(str, [*flags, *more])]) == 0
    (log,) = tmp_path.glob("runs/sqlite/fc/*/log.txt")
    assert "sqlite: 8 training, 4 validation images" in log.read_text()
