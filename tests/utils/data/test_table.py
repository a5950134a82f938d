"""Labels in a table: the images behave as those of class folders, and a mistake names its row and column."""

import csv
import os
import random
import re
import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from main import main
from scripts import check_data, evaluate, pack
from tests.helpers import QUIETLY, image_tree, mistakes_of, trained
from tests.utils.data import loading
from tests.utils.data.loading import evaluated, read_folder, read_tree, save
from utils.checkpoint.resume import ResumePoint
from utils.config.datasets import SPECS
from utils.config.settings import UserError
from utils.data.data_set import Data
from utils.data.formats.class_map import in_order_of
from utils.data.formats.file_paths import FilePaths
from utils.data.formats.readers import ImageFiles, MemoryImages, Splits

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


def read(folder, labels, *flags):
    return read_folder(folder, "--labels", labels, *flags)


def contents(images):
    return [(Path(path).read_bytes(), label) for path, label in zip(images.paths, images.labels.tolist(), strict=True)]


def test_images_and_labels_are_those_of_class_folders_in_their_order(tree, flat, tmp_path):
    folders = read_folder(tree)
    data = read(flat[0], write(tmp_path / "labels.csv", flat[1]))
    assert data.classes == folders.classes == ("a", "b", "c")
    for split in ("train", "validation"):
        assert contents(getattr(data, split)) == contents(getattr(folders, split))
    assert data.train.groups is data.train.weights is None


@pytest.mark.parametrize(
    "form",
    ["parquet", "bom", "semicolons", "tabs", "quoted", "categories", "views", "empty columns", "whole paths"],
)
def test_each_form_of_a_table_says_the_same(flat, tmp_path, form):
    folder, rows = flat
    expected = read(folder, write(tmp_path / "plain.csv", rows))
    if form in ("parquet", "categories", "views"):
        columns = dict(zip(HEADER, map(list, zip(*rows, strict=True)), strict=True))
        if form == "categories":
            columns["label"] = pyarrow.array(columns["label"]).dictionary_encode()
        if form == "views":
            columns = {name: pyarrow.array(cells, pyarrow.string_view()) for name, cells in columns.items()}
        parquet.write_table(pyarrow.table(columns), tmp_path / "labels")
    elif form == "quoted":
        lines = [",".join(f'"{cell}"' for cell in row) for row in (HEADER, *rows)]
        (tmp_path / "labels").write_text("\r\n".join([*lines, "", ""]))
    elif form == "empty columns":  # as spreadsheets write them
        write(tmp_path / "labels", [(*row, "", "") for row in rows], (*HEADER, "", ""))
    elif form == "whole paths":
        folder = Path(shutil.copytree(folder, tmp_path / "flat (1.0) ü[a]"))
        write(tmp_path / "labels", [(str(folder / path), *rest) for path, *rest in rows])
    else:
        separator = {"semicolons": ";", "tabs": "\t"}.get(form, ",")
        write(tmp_path / "labels", rows, separator=separator, encoding="utf-8-sig" if form == "bom" else "utf-8")
    data = read(folder, tmp_path / "labels")
    assert data.fingerprint == expected.fingerprint
    assert contents(data.train) == contents(expected.train)


def test_notes_of_several_lines_fill_a_file_of_any_size(flat, tmp_path):
    """pyarrow reads a large file in blocks, each of which may end within a cell."""
    folder, rows = flat
    noted = [(*row, "seen,\n" + "again\n" * 10_000) for row in rows]
    data = read(folder, write(tmp_path / "noted.csv", noted, (*HEADER, "note")))
    assert data.fingerprint == read(folder, write(tmp_path / "plain.csv", rows)).fingerprint


@pytest.mark.parametrize("end", [None, 9, 7], ids=["never closed", "closed later", "closed in the next row"])
@pytest.mark.parametrize(("column", "separator"), [("note", ","), ("note", "\t"), ("patient", "\t")])
def test_rows_within_a_cell_are_refused_whichever_column_has_a_quotation_mark_too_many(
    flat, tmp_path, column, separator, end
):
    folder, rows = flat
    header = ("patient", *HEADER, "note") if column == "patient" else (*HEADER, "note")
    lines = []
    for number, row in enumerate(rows):
        mark = '"' * (number in (6, end))
        cells = [f"{mark}p{number}", *row, "seen"] if column == "patient" else [*row, f"{mark}seen b.png"]
        lines.append(separator.join(cells))
    (tmp_path / "labels.csv").write_text("\n".join([separator.join(header), *lines, ""]))
    found = f"line 8, column {column}: holds whole rows, such as .*; a quotation mark is too many"
    if column == "patient" and end is None:
        found = "line 8 has 1 cell"
    with pytest.raises(UserError, match=found):
        read(folder, tmp_path / "labels.csv")


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


def test_groups_whose_names_may_be_one_are_told(flat, tmp_path):
    folder, rows = flat
    header = (*HEADER[:2], "patient_id")
    names = ("Ann", "ann", "M\u00fcller", "Mu\u0308ller", "Bo", "Bob", "7", "07")
    typed = [(path, label, names[number % 8]) for number, (path, label, *_) in enumerate(rows)]

    def told(name, rows):
        warnings = read(folder, write(tmp_path / name, rows, header), "--val-split", "0.3").warnings
        return [line for line in warnings if "--group-column" in line]

    (line,) = told("a.csv", typed)
    assert line.startswith("--group-column: 6 groups with names that differ only by case, blanks")
    assert "'07' and '7'" in line and "'Ann' and 'ann'" in line and "Bob" not in line
    apart = [(*row, name.replace("ann", "Eve").replace("Mu", "Lu").replace("07", "8")) for *row, name in typed]
    assert told("b.csv", apart) == []


def test_groups_stay_on_one_side_of_val_split(flat, tmp_path):
    folder, rows = flat
    grouped = [(path, label, f"patient {number % 9}") for number, (path, label, _) in enumerate(rows)]
    typed = [(*row, group + " " * (number > 13)) for number, (*row, group) in enumerate(grouped)]
    labels = write(tmp_path / "labels.csv", typed, ("path", "label", "patient_id"))
    data = read(folder, labels, "--val-split", "0.3")
    train, validation = (set(images.groups) for images in (data.train, data.validation))
    assert train and validation and not train & validation
    assert len(data.train) + len(data.validation) == len(rows)
    of_file = {path: group for path, _, group in grouped}
    assert [of_file[path.rsplit("/", 1)[1]] for path in data.train.paths] == data.train.groups.tolist()
    alone = read(folder, labels, "--val-split", "0.3", "--group-column", "off")
    assert set(alone.train.paths) != set(data.train.paths)
    assert data.origin == f"{labels}, 27 rows; columns: path, label, group patient_id (guessed)"
    assert alone.origin == f"{labels}, 27 rows; columns: path, label; not read: patient_id", "nor a misspelt one"


def test_a_class_whose_groups_are_all_trained_on_is_told_with_what_spreads_them(flat, tmp_path):
    folder, rows = flat
    grouped = [(path, label, f"{label}{number % 3}") for number, (path, label, _) in enumerate(rows)]
    labels = write(tmp_path / "labels.csv", grouped, ("path", "label", "group"))
    said = read(folder, labels, "--val-split", "0.3").warnings
    (lacking,) = (line for line in said if "no validation image" in line)
    assert lacking.endswith("; --folds spreads each class's groups as evenly as it can, if there are enough")
    folds = [read(folder, labels, "--folds", "3", "--fold", fold).warnings for fold in "012"]
    assert not any("no validation image" in line for said in folds for line in said)


def test_a_table_to_evaluate_needs_neither_splits_nor_training_rows(flat, tmp_path):
    folder, rows = flat
    bare = write(tmp_path / "bare.csv", [row[:2] for row in rows], HEADER[:2])
    with pytest.raises(UserError, match=r"no column or folder says which images are to validate on.*--val-split 0\.2"):
        read(folder, bare)
    data = evaluated(folder, "--labels", bare)
    assert data.train is None and len(data.validation) == len(rows)
    tests = write(tmp_path / "test.csv", [(*row[:2], "test") for row in rows])
    assert len(evaluated(folder, "--labels", tests).validation) == len(rows)


def test_rows_of_test_that_are_validated_on_are_told_with_how_to_keep_them_for_the_end(flat, tmp_path):
    folder, rows = flat
    tests = write(tmp_path / "tests.csv", [(path, label, split.replace("val", "test")) for path, label, split in rows])
    (line,) = read(folder, tests).warnings
    assert "no row is of val, so those of test choose best.pt" in line and "--val-split 0.2" in line
    kept = read(folder, tests, "--val-split", "0.2")
    assert not any("best.pt" in line for line in kept.warnings)
    assert len(kept.train) + len(kept.validation) == sum(split == "train" for *_, split in rows)
    for flags, told in (((), True), (("--val-split", "0.2"), False)):
        run = {"settings": {"datapath": str(folder), "labels": str(tests)}, "classes": ["a", "b", "c"]}
        point = ResumePoint(Path("best.pt"), run, "")
        data = evaluated(folder, "--labels", tests, *flags, trained=point, of_test=True)
        assert any("its run validated on these images" in line for line in data.warnings) is told


def test_numbers_as_labels_keep_their_order(flat, tmp_path):
    folder, rows = flat
    numbers = {"a": "10", "b": "9", "c": "100"}
    data = read(folder, write(tmp_path / "labels.csv", [(path, numbers[label], split) for path, label, split in rows]))
    assert data.classes == ("9", "10", "100")
    assert np.bincount(data.train.labels).tolist() == [COUNTS["train"]] * 3


# ---------------------------------------------------------------------------------------- mistakes

GOOD = "path,label,split\na.png,cat,train\nb.png,dog,train\nc.png,cat,val\nd.png,dog,val\n"


def replaced(old, new):
    return GOOD.replace(old, new, 1)


MISTAKES = {
    "no such file": (None, "", "cannot be read (No such file or directory)"),
    "empty": ("", "", "is empty; its first line names the columns: path,label"),
    "names alone": ("path,label,split\n", "", "has no rows below the names of its columns"),
    "missing file": (replaced("b.png", "x.png"), "", "line 3, column path: x.png is no file below --datapath"),
    "missing files": (GOOD.replace(".png", ".jpg"), "", "a.jpg is no file below --datapath DIR (3 more rows like it)"),
    "duplicate row": (GOOD + "a.png,cat,train\n", "", "line 6, column path: a.png stands in line 2, too"),
    "label twice": (GOOD + "a.png,dog,train\n", "", "line 6, column path: a.png has another label in line 2"),
    "duplicate spelt otherwise": (GOOD + ".//a.png,cat,train\n", "", ".//a.png stands in line 2, too"),
    "duplicate by the folder above": (GOOD + "x/../a.png,cat,train\n", "", "x/../a.png stands in line 2, too"),
    "duplicate in a link to its folder": (GOOD + "link/a.png,dog,val\n", "", "link/a.png has another label in line 2"),
    "column twice": (replaced("split", "label"), "", "two columns are called label; rename one"),
    "blank before a path": (replaced("b.png", " b.png"), "", "blanks before and after a path belong to it"),
    "open quotation mark": (replaced("dog", '"dog'), "", "line 3 has 2 cell(s), and line 1 names 3 columns"),
    "below a row of several lines": (
        'path,label,split,note\na.png,cat,train,"one\ntwo\n\nfour"\n\nb.png,,train,\nc.png,cat,val,\nd.png,dog,val,\n',
        "",
        "line 7, column label: is empty",
    ),
    "no label": (replaced("dog,train", ",train"), "", "line 3, column label: is empty"),
    "blank label": (replaced("dog,train", "  ,train"), "", "line 3, column label: is empty"),
    "no path": (replaced("b.png", ""), "", "line 3, column path: is empty"),
    "no header": ("a.png\tcat\ttrain\nb.png\tdog\tval\n", "", "put a line above it that names its columns (3), such"),
    "cells missing": (replaced("b.png,dog,train", "b.png,dog"), "", "line 3 has 2 cell(s), and line 1 names 3 columns"),
    "Latin-1": (replaced("dog", "hünd").encode("latin-1"), "", "line 3 is not written in UTF-8; save it as UTF-8"),
    "UTF-16": (GOOD.encode("utf-16"), "", "is written in UTF-16; save it as UTF-8"),
    "a picture": (b"\x89PNG\r\n\x1a\n\0\0", "", "is neither text nor Parquet; export it as CSV in UTF-8"),
    "half of a Parquet file": (b"PAR1 cut", "", "cannot be read as Parquet"),
    "unknown split": (replaced("cat,val", "cat,vla"), "", "line 4, column split: vla is none of train, val and test"),
    "no split": (replaced("dog,val", "dog,"), "", "line 5, column split: is none of train, val and test"),
    "nothing to train on": (GOOD.replace("train", "val"), "", "the split of no image is train"),
    "nothing to validate on": (GOOD.replace("val", "train"), "", "the split of no image is val or test"),
    "class of validation": (replaced("cat,val", "cow,val"), "", "line 4, column label: cow is no class of the rows to"),
    "one class": (GOOD.replace("dog", "cat"), "", "holds one class, cat; a classifier needs two or more"),
    "absolute path": (replaced("b.png", "/b.png"), "", "line 3, column path: /b.png is not below --datapath"),
    "Windows path": (replaced("b.png", "x\\b.png"), "", "write folders with / and not \\"),
    "no image": (replaced("b.png", "n.txt"), "", "line 3, column path: n.txt is no image (.jpg"),
    "two images of a name": (replaced("b.png", "t"), "", "line 3, column path: t has no ending, and several images"),
    "wrong weight": (
        GOOD.replace("split", "weight").replace("train", "1").replace("val", "-1"),
        "--val-split 0.5",
        "line 4, column weight: -1 is no number of at least 0 (1 more rows like it)",
    ),
    "empty group": (
        replaced("split", "group").replace("val", "").replace("train", "p"),
        "--val-split 0.5",
        "line 4, column group: is empty",
    ),
    "columns without a name": ("path,,,x\na.png,,,cat\n", "", "column of each class: FILE has the columns path, x"),
    "unknown column": (GOOD, "--label-column kind", "--label-column kind: FILE has the columns path, label, split"),
    "unknown group column": (GOOD, "--group-column patient", "label, split; off instead of a name leaves it out"),
    "no usual name": (
        replaced("label", "x"),
        "",
        "--label-column COLUMN is needed, or --label-columns for a column of",
    ),
    "no labels": (GOOD, "--label-column off", "--label-column off: only other columns can be left out; FILE has"),
    "no paths": (GOOD, "--path-column off", "--path-column off: only other columns can be left out; FILE has"),
    "one column for two": (GOOD, "--label-column split", "split is the column of the labels, too"),
    "no split column": (replaced("split", "x"), "", "which images are to validate on (split, with train and val)"),
    "splits and a share": (GOOD, "--val-split 0.5", "says already which images are to validate on; remove the flag"),
}


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number, name in enumerate(("a.png", "b.png", "c.png", "d.png", "t.png", "t.jpg")):
        save(folder / name, 40 * number)
    (folder / "n.txt").write_text("")
    (folder / "x").mkdir()
    (folder / "link").symlink_to(".")
    return folder


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_one_line_with_its_place_and_ends_with_exit_code_2(six, tmp_path, capfd, mistake):
    content, flags, line = MISTAKES[mistake]
    file = tmp_path / "{labels}.csv"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    place = ["--dataname", "folder", "--datapath", str(six), "--labels", str(file)]
    assert main([*place, *flags.split(), "--device", "cpu", "--output", str(tmp_path / "runs")]) == 2
    told = capfd.readouterr().err.replace(str(file), "FILE").replace(str(six), "DIR")
    assert line in told, told
    assert told.count("\n") == 1 and not (tmp_path / "runs").exists()


# ------------------------------------------------------------------- class maps, and classes in names


@pytest.mark.parametrize("text", ["c\na\nb\nd\n", "\ufeffname,index\nb,2\na,1\nd,3\nc,0\n", "a,1\nc,0\nb,2\nd,3"])
def test_a_class_map_orders_the_classes_of_folders_and_tables(tree, flat, tmp_path, text):
    (tmp_path / "map.txt").write_text(text, encoding="utf-8")
    flags = ["--class-map", str(tmp_path / "map.txt")]
    plain = read_folder(tree)
    folders = read_folder(tree, *flags)
    table = read(flat[0], write(tmp_path / "labels.csv", flat[1]), *flags)
    assert folders.classes == table.classes == ("c", "a", "b", "d")
    assert contents(folders.train) == contents(table.train)
    assert list(folders.train.paths) == list(plain.train.paths)
    assert folders.train.labels.tolist() == [(1, 2, 0)[label] for label in plain.train.labels.tolist()]
    alone = evaluated(tree, *flags)
    assert alone.classes == folders.classes
    assert alone.validation.labels.tolist() == folders.validation.labels.tolist()


def test_classes_that_a_map_does_not_name_are_left_out_with_a_warning(tree, tmp_path):
    (tmp_path / "map.txt").write_text("c\na\n")
    data = read_folder(tree, "--class-map", tmp_path / "map.txt")
    assert np.bincount(data.train.labels).tolist() == [COUNTS["train"]] * 2
    assert data.warnings == (
        f"--class-map {tmp_path}/map.txt: does not name b, so {sum(COUNTS.values())} images are left out",
    )


def test_a_class_of_a_map_that_no_image_shows_is_told(tree, tmp_path):
    (tmp_path / "map.txt").write_text("a\nb\nc\nbs\n")
    unseen, untrained = read_folder(tree, "--class-map", tmp_path / "map.txt").warnings
    assert "1 of 4 classes have no validation image" in unseen
    assert untrained == f"--datapath {tree}: 1 of 4 classes have no training image and cannot be learned: bs"


def test_a_run_with_a_class_map_is_evaluated_on_the_images_that_it_validated_on(tree, flat, tmp_path):
    (tmp_path / "map.txt").write_text("c\na\n")
    labels = write(tmp_path / "labels.csv", flat[1])
    for folder, more in ((tree, ()), (flat[0], ("--labels", str(labels)))):
        flags = ["--class-map", str(tmp_path / "map.txt"), *more]
        data, point = read_tree(folder, *flags)
        shown = evaluated(folder, *flags, trained=point)
        assert set(contents(shown.validation)) == set(contents(data.validation))
        assert any("left out" in line for line in shown.warnings)
        assert shown.seen == "", "none of these images has changed since the training"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("", "names 0 class(es); give a name on each line"),
        ("a\nb\na\n", "names a twice"),
        ("a,0\nb,2\n", "numbers its classes not from 0 to 1, each once: see 1"),
        ("a,0\nb,0\n", "numbers its classes not from 0 to 1, each once: see 1"),
        ("x\ny\n", "names none of the data's classes, which are a, b, c; its own are x, y"),
    ],
)
def test_a_wrong_class_map_is_one_line(tree, tmp_path, text, line):
    if text is not None:
        (tmp_path / "map.txt").write_text(text)
    (mistake,) = mistakes_of(read_folder, tree, "--class-map", tmp_path / "map.txt")
    assert line in mistake


@pytest.mark.parametrize(
    ("names", "pattern", "classes", "split"),
    [
        (("cat.0", "cat.12", "dog.3", "dog.40"), [], ("cat", "dog"), False),
        (("great_dane_1", "great_dane_2", "pug_1", "pug_22"), [], ("great_dane", "pug"), True),
        (("n01_10", "n01_2", "n02_3", "n02_44"), [], ("n01", "n02"), False),
        (("n01_tench", "n01_carp", "n02_dog", "n02_pug"), ["([^_]+)_"], ("n01", "n02"), True),
    ],
)
def test_the_classes_of_images_are_in_their_names(tmp_path, names, pattern, classes, split):
    folder = tmp_path / "data"
    for number, name in enumerate(names):
        place = folder / ("train", "val")[number % 2] if split else folder
        save(place / f"{name}.png", 40 * number)
    share = () if split else ("--val-split", "0.5")
    data = read_folder(folder, "--class-from-name", *pattern, *share)
    assert data.classes == classes
    files = [
        (path.rsplit("/", 1)[1], data.classes[label])
        for path, label in zip(data.train.paths, data.train.labels, strict=True)
    ]
    assert len(files) == 2 and all(name.startswith(label) for name, label in files)
    assert f"{classes[0]} of " in data.origin


def test_a_name_without_a_class_is_refused_and_told(tmp_path):
    for name in ("cat.1", "cat.2", "17"):
        save(tmp_path / f"{name}.png")
    with pytest.raises(UserError, match=r"--class-from-name: no class is in the name of 17\.png by "):
        read_folder(tmp_path, "--class-from-name", "--val-split", "0.5")


def test_images_beside_the_folders_of_splits_of_which_each_names_its_class_are_told(tmp_path):
    """Otherwise one image too many has those of test trained on."""
    for name in ("train/cat.1", "train/dog.1", "test/cat.2", "test/dog.2", "cat.3"):
        save(tmp_path / f"{name}.png")
    told = r"--class-from-name: 4 images below .* count for nothing, as 1 lie elsewhere: cat\.3\.png; move these"
    needs_a_share, line = mistakes_of(read_folder, tmp_path, "--class-from-name")
    assert "give --val-split" in needs_a_share and re.match(told, line)
    assert re.match(told, read_folder(tmp_path, "--class-from-name", "--val-split", "0.5").warnings[-1])


def test_images_that_lie_where_names_are_not_read_are_told(tmp_path, monkeypatch):
    data = tmp_path / "data"
    for name in ("a/cat.1.png", "a/cat.2.png", "dog.1.png", "dog.2.png", "elsewhere/dog.3.png"):
        save((tmp_path if "elsewhere" in name else data) / name)
    (data / "a" / "cat.3.heic").touch()
    (data / "link").symlink_to(tmp_path / "elsewhere")
    (data / "lost+found").mkdir()
    scandir = os.scandir
    unreadable = data / "lost+found"

    def scan(folder):
        if str(folder) == str(unreadable):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    linked, heic = read_folder(data, "--class-from-name", "--val-split", "0.5").warnings[-2:]
    assert linked.startswith(f"--datapath: 1 link(s) to folders below {data} are not followed")
    assert heic.startswith(f"--datapath: files below {data} are left out: 1 .heic")
    unreadable = data / "a"
    with pytest.raises(UserError, match=f"--datapath: {unreadable} cannot be read \\(Permission denied\\)"):
        read_folder(data, "--class-from-name", "--val-split", "0.5")


def test_a_class_map_is_for_one_label_an_image(tmp_path):
    (tmp_path / "map.txt").write_text("b\na\n")
    images = MemoryImages(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([[1, 0], [1, 1]], dtype=torch.int8))
    with pytest.raises(UserError, match="map.txt: orders the classes of images that have one each, and these have"):
        in_order_of(tmp_path / "map.txt", Splits(images, images, ("a", "b")))


# --------------------------------------------------------------------------------------------- a run


def test_a_resume_names_the_label_that_has_changed(flat, tmp_path, capfd):
    folder, rows = flat
    labels = write(tmp_path / "labels.csv", rows)
    flags = "--arch fc --image-size 8 --workers 0 --batch-size 6 --lr 0.01 --epochs 2"
    start = ["--dataname", "folder", "--datapath", str(folder), "--labels", str(labels), *flags.split(), *QUIETLY]
    run = trained(tmp_path / "runs", *start, "--max-steps", 2)
    place = next(number for number, row in enumerate(rows) if row[1:] == ("a", "train"))
    other = [*rows[:place], (rows[place][0], "c", "train"), *rows[place + 1 :]]
    capfd.readouterr()
    write(labels, other)
    assert main([*start, "--resume", str(run)]) == 2
    assert f"{rows[place][0]}, now in train as c, had another label or split" in capfd.readouterr().err
    write(labels, rows[:place] + rows[place + 1 :])
    assert main([*start, "--resume", str(run)]) == 2
    assert "1 image(s) are gone" in capfd.readouterr().err
    write(labels, rows[::-1])
    assert main([*start, "--resume", str(run)]) == 0


def test_many_new_rows_at_the_end_are_told_at_once(tmp_path):
    """The first one's place was once searched for among all of them, again for each row before it."""
    count = 60_000
    paths = FilePaths.joined(tmp_path, b"\0".join(b"%05d.png" % number for number in range(count)))
    images = ImageFiles(paths, torch.zeros(count, dtype=torch.int64))
    data = Data(SPECS["folder"], None, "", ("a",), images, images.take(np.arange(0)), origin="a table")
    trained = Mock(**{"read.return_value": {"rows": data.rows[: count // 2]}})
    began = time.perf_counter()
    assert data.changed_since(trained) == "30000.png, now in train as a, and 29,999 more was not there"
    assert time.perf_counter() - began < 5


def test_tools_read_the_rows_of_each_split_and_other_tables(flat, tmp_path, capsys):
    folder, rows = flat
    three = [(path, label, "test" if path < "val1" and split == "val" else split) for path, label, split in rows]
    labels = write(tmp_path / "labels.csv", three)
    flags = "--arch fc --image-size 8 --workers 0 --batch-size 6 --lr 0.01 --epochs 1"
    place = ("--dataname", "folder", "--datapath", folder, "--labels", labels)
    run = str(trained(tmp_path / "runs", *place, *flags.split()))
    counts = {name: sum(split == name for *_, split in three) for name in ("train", "val", "test")}
    assert counts == {"train": 18, "val": 6, "test": 3}
    for split, count in counts.items():
        assert evaluate.main([run, "--device", "cpu", "--workers", "0", "--split", split]) == 0
        assert f"{split}_count={count}" in capsys.readouterr().out.splitlines()[-1]
    whole = write(tmp_path / "whole.csv", [row[:2] for row in rows], HEADER[:2])
    assert evaluate.main([run, "--device", "cpu", "--workers", "0", "--labels", str(whole)]) == 0
    assert f"val_count={len(rows)}" in capsys.readouterr().out.splitlines()[-1]


def test_a_table_beside_class_folders_is_checked_alone(tree, tmp_path, capsys):
    """Its images are those of its rows, not of the folders that they happen to lie in."""
    rows = [(str(path.relative_to(tree)), path.parts[-2], path.parts[-3]) for path in sorted(tree.rglob("*.png"))]
    labels = write(tmp_path / "labels.csv", rows[:-2])
    place = ["--dataname", "folder", "--datapath", str(tree), "--labels", str(labels), "--workers", "0"]
    assert check_data.main([*place, "--output", str(tmp_path / "check")]) == 0
    told = capsys.readouterr().out
    assert f"verdict: no faults in {len(rows) - 2} images" in told
    assert "outside class folders" not in told


def test_shards_of_a_table_hold_its_images_and_labels_and_say_what_they_do_not(flat, tmp_path, capsys):
    folder, rows = flat
    labels = write(tmp_path / "labels.csv", [(*row, 1.5) for row in rows], (*HEADER, "weight"))
    place = ["--dataname", "folder", "--datapath", str(folder), "--labels", str(labels), "--workers", "0"]
    assert pack.main([*place, "--output", str(tmp_path / "shards")]) == 0
    assert "shards do not keep the images' weights" in capsys.readouterr().err
    data = read(folder, labels)
    shards = loading.read("--dataname", "shards", "--datapath", tmp_path / "shards")
    assert shards.classes == data.classes
    for packed, images in ((shards.train, data.train), (shards.validation, data.validation)):
        assert packed.labels.tolist() == images.labels.tolist()
        assert [path.content() for path in packed.paths] == [Path(path).read_bytes() for path in images.paths]
