"""Labels in a table: the images behave as those of class folders, and a mistake names its row and column."""

import csv
import random
import shutil

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from tests.helpers import image_tree
from utils.config import arguments
from utils.config.settings import UserError
from utils.data.datasets import get_data, get_test_data

CPU = torch.device("cpu")
COUNTS = {"train": 6, "val": 3}
HEADER = ("path", "label", "split")


@pytest.fixture
def tree(tmp_path):
    return image_tree(tmp_path / "tree", COUNTS, "abc")


@pytest.fixture
def flat(tree, tmp_path):
    """The images of ``tree`` in one folder, and their rows in another order than that of classes and names."""
    folder = tmp_path / "flat"
    folder.mkdir()
    rows = []
    for file in sorted(tree.rglob("*.png")):
        split, label, name = file.relative_to(tree).parts
        shutil.copy(file, folder / f"{split}{name}{label}.png")
        rows.append((f"{split}{name}{label}.png", label, split))
    random.Random(0).shuffle(rows)
    return folder, rows


def write(path, rows, header=HEADER, separator=",", encoding="utf-8"):
    with open(path, "w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=separator).writerows([header, *rows])
    return path


def settings(folder, labels, *flags):
    return arguments.parse(["--dataname", "folder", "--datapath", str(folder), "--labels", str(labels), *flags]).data


def read(folder, labels, *flags):
    return get_data(settings(folder, labels, *flags), CPU)


def contents(images):
    return [(open(path, "rb").read(), label) for path, label in zip(images.paths, images.labels.tolist(), strict=True)]


def test_images_and_labels_are_those_of_class_folders_in_their_order(tree, flat, tmp_path):
    folders = get_data(arguments.parse(["--dataname", "folder", "--datapath", str(tree)]).data, CPU)
    data = read(flat[0], write(tmp_path / "labels.csv", flat[1]))
    assert data.classes == folders.classes == ("a", "b", "c")
    for split in ("train", "validation"):
        assert contents(getattr(data, split)) == contents(getattr(folders, split))
    assert data.train.groups is data.train.weights is None


@pytest.mark.parametrize("form", ["parquet", "bom", "semicolons", "tabs", "quoted", "categories"])
def test_each_form_of_a_table_says_the_same(flat, tmp_path, form):
    folder, rows = flat
    expected = read(folder, write(tmp_path / "plain.csv", rows))
    if form in ("parquet", "categories"):
        columns = dict(zip(HEADER, map(list, zip(*rows, strict=True)), strict=True))
        if form == "categories":
            columns["label"] = pyarrow.array(columns["label"]).dictionary_encode()
        parquet.write_table(pyarrow.table(columns), tmp_path / "labels")
    elif form == "quoted":
        lines = [",".join(f'"{cell}"' for cell in row) for row in (HEADER, *rows)]
        (tmp_path / "labels").write_text("\r\n".join([*lines, "", ""]))
    else:
        separator = {"semicolons": ";", "tabs": "\t"}.get(form, ",")
        write(tmp_path / "labels", rows, separator=separator, encoding="utf-8-sig" if form == "bom" else "utf-8")
    data = read(folder, tmp_path / "labels")
    assert data.fingerprint == expected.fingerprint
    assert contents(data.train) == contents(expected.train)


def test_the_order_of_the_rows_says_nothing_and_each_label_does(flat, tmp_path):
    folder, rows = flat
    data = read(folder, write(tmp_path / "a.csv", rows))
    assert read(folder, write(tmp_path / "b.csv", rows[::-1])).fingerprint == data.fingerprint
    changed = [(path, "b" if number == 0 else label, split) for number, (path, label, split) in enumerate(rows)]
    assert (rows[0][1] == "b") or read(folder, write(tmp_path / "c.csv", changed)).fingerprint != data.fingerprint
    weighed = [(*row, number) for number, row in enumerate(rows)]
    heavy = read(folder, write(tmp_path / "d.csv", weighed, (*HEADER, "weight")))
    assert heavy.fingerprint != data.fingerprint
    assert heavy.train.weights.tolist() == [
        float(number)
        for _, _, number in sorted(
            (label, path, number) for number, (path, label, split) in enumerate(rows) if split == "train"
        )
    ]


def test_files_of_one_name_in_several_folders_are_told_apart(tmp_path):
    """Swapped labels of two patients' images would leave names, order and labels as they were."""
    image_tree(tmp_path / "data", {"one": 2, "two": 2}, "x")
    rows = [
        (f"{patient}/x/{n}.png", label, split)
        for patient, label in (("one", "a"), ("two", "b"))
        for n, split in ((0, "train"), (1, "val"))
    ]
    other = [(path, "ba"["ab".index(label)], split) for path, label, split in rows]
    prints = [read(tmp_path / "data", write(tmp_path / "labels.csv", table)).fingerprint for table in (rows, other)]
    assert prints[0].split("+")[0] != prints[1].split("+")[0]


def test_groups_stay_on_one_side_of_val_split(flat, tmp_path):
    folder, rows = flat
    grouped = [(path, label, f"patient {number % 9}") for number, (path, label, _) in enumerate(rows)]
    labels = write(tmp_path / "labels.csv", grouped, ("path", "label", "patient_id"))
    data = read(folder, labels, "--val-split", "0.3")
    train, validation = (set(images.groups) for images in (data.train, data.validation))
    assert train and validation and not train & validation
    assert len(data.train) + len(data.validation) == len(rows)
    of_file = {path: group for path, _, group in grouped}
    assert [of_file[path.rsplit("/", 1)[1]] for path in data.train.paths] == data.train.groups.tolist()
    alone = read(folder, labels, "--val-split", "0.3", "--group-column", "off")
    assert set(alone.train.paths) != set(data.train.paths)


def test_a_table_to_evaluate_needs_neither_splits_nor_training_rows(flat, tmp_path):
    folder, rows = flat
    bare = write(tmp_path / "bare.csv", [row[:2] for row in rows], HEADER[:2])
    with pytest.raises(UserError, match=r"no column says which rows are to validate on.*--val-split 0\.1"):
        read(folder, bare)
    data = get_test_data(settings(folder, bare), CPU, None)
    assert data.train is None and len(data.validation) == len(rows)
    tests = write(tmp_path / "test.csv", [(*row[:2], "test") for row in rows])
    assert len(get_test_data(settings(folder, tests), CPU, None).validation) == len(rows)


def test_numbers_as_labels_keep_their_order(flat, tmp_path):
    folder, rows = flat
    numbers = {"a": "10", "b": "9", "c": "100"}
    data = read(folder, write(tmp_path / "labels.csv", [(path, numbers[label], split) for path, label, split in rows]))
    assert data.classes == ("9", "10", "100")
    assert np.bincount(data.train.labels).tolist() == [COUNTS["train"]] * 3
