"""Labels in a table: for each image its file, its class, and perhaps its split, group and weight.

Tables are CSV or Parquet files, read by pyarrow. As with class folders, the images are ordered by class and path; the
order of the rows does not matter.
"""

from __future__ import annotations

import csv
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from utils.config.groups.data import BEFORE_THE_NUMBER, TABLE_COLUMNS, DataSettings
from utils.config.settings import UserError, as_user_error
from utils.config.spelling import printable, some
from utils.data.formats.class_folders import TRAINING_FOLDERS, VALIDATION_FOLDERS, unread_images
from utils.data.formats.file_paths import NUL, FilePaths
from utils.data.formats.hugging_face import ENDING, LABEL_NAMES
from utils.data.formats.listing import IMAGE_ENDINGS, LINKED, THREADS, is_image, left_out, no_images
from utils.data.formats.readers import ImageFiles, Images, Splits, class_numbers
from utils.data.formats.several_labels import LabelLists, is_text, of_column

if TYPE_CHECKING:
    import pyarrow

# Names by which a column is found if no flag names it, the likeliest first.
GUESSES = {
    "path": (
        *("path", "image", "filename", "file", "file_name", "image_path", "file_path", "filepath", "img", "img_path"),
        *("image_name", "image_id", "id", "picture", "photo"),
    ),
    "label": (*LABEL_NAMES, "class_name", "label_name", "diagnosis", "species", "breed"),
    "split": ("split", "set", "subset", "partition"),
    "group": ("group", "group_id", "patient", "patient_id", "subject", "subject_id"),
    "weight": ("weight", "sample_weight"),
}
NO_COLUMN = "off"  # a flag's value: no such column, whatever the columns' names
TRAIN, VALIDATION, TEST = range(3)
SPLITS = dict.fromkeys(TRAINING_FOLDERS, TRAIN) | dict.fromkeys(VALIDATION_FOLDERS, VALIDATION) | {"test": TEST}
SEPARATORS = ",;\t|"
TRIED = 20  # folders, after which threads list the others if listing is mostly waiting
FIRST_BYTES = 1 << 16  # that hold the names of the columns


@dataclass(frozen=True)
class Table:
    """The rows of a file of labels, or a row for each image whose name contains its class.

    ``files``: paths of files below ``root``, sorted; ``file``: int64 (n,), the index in ``files`` of each row's file,
    all different. ``label``: int64 (n,), the index in ``texts`` of each row's label, -1 if missing; with a column for
    each class int8 (n, classes). ``split``: int8 (n,), TRAIN, VALIDATION or TEST; ``group``: str (n,); ``weight``:
    float64 (n,); each is None if there is no such column. ``at(row, role)``: the place of the cell in the column for
    ``role``, for messages. ``flag``: the flag that gives the labels; ``words``: a description of the table for a plan.
    ``warnings``: lines about images that are left out.
    """

    root: Path
    files: pyarrow.LargeBinaryArray
    file: np.ndarray
    label: np.ndarray
    texts: list[str]
    flag: str
    words: str
    at: Callable[[int, str], str]
    split: np.ndarray | None = None
    group: np.ndarray | None = None
    weight: np.ndarray | None = None
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.file)


class TablePaths(FilePaths):
    """Paths of a table's files; fingerprints use whole paths, as several folders may hold files of one name."""

    @classmethod
    def of(cls, root: Path, files: pyarrow.LargeBinaryArray) -> TablePaths:
        """Make the sequence from ``files``, at least one path below ``root``."""
        import pyarrow
        import pyarrow.compute as compute

        empty, end = (pyarrow.scalar(text, pyarrow.large_binary()) for text in (b"", NUL))
        _, offsets, names = compute.binary_join_element_wise(files, empty, end).buffers()
        ends = np.frombuffer(offsets, dtype=np.int64)[1 : len(files) + 1] - 1
        return cls(root, np.frombuffer(names, dtype=np.uint8)[: ends[-1]], ends)

    @property
    def identity(self) -> bytes:
        return self.names.tobytes()


# ---------------------------------------------------------------------------------------------- reading


def table_of(settings: DataSettings) -> Table:
    """The table that ``--labels`` names or, without it, that of the file names. Raises ``UserError``."""
    return table_of_names(settings) if settings.labels is None else read_table(settings)


def column_names(file: str) -> tuple[str, ...]:
    """The names of the columns of the table in ``file``. Raises ``UserError``."""
    return _Source.of(Path(file)).names


def read_table(settings: DataSettings) -> Table:
    """Read the table that ``--labels`` names. Raises ``UserError`` with a line for the first mistake of each kind."""
    assert settings.labels is not None and settings.datapath is not None
    path = Path(settings.labels)
    root = Path(settings.datapath)
    source = _Source.of(path)
    given = {role: getattr(settings, f"{role}_column") for role in TABLE_COLUMNS}
    several = settings.label_columns or ()
    if several:
        given["label"] = NO_COLUMN
    columns = source.chosen(given, several)
    own = source.columns_of_classes(several)
    cells = source.read(columns | own)
    mistakes = _Mistakes(source, columns | own)
    if not len(cells["path"]):
        raise UserError(f"--labels {path}: has no rows below the names of its columns")
    files, file = _files(cells["path"], root, mistakes)
    texts: list[str] = []
    if several:
        label = np.stack([_own_labels(cells[role], role, mistakes) for role in own], axis=1)
        columns["label"] = some(several, 3)
    else:
        label, texts = _coded(cells["label"])
        if settings.label_separator is None:
            mistakes.add("label", _blank(label, texts), "is empty")
        of_lines = np.array([*("\n" in text for text in texts), False])[label]
        mistakes.add("label", np.flatnonzero(of_lines), "spans several lines; a quotation mark is too many")
    mistakes.refuse()
    _refuse_repeated(_first_spelling(root, files)[file], label, cells["path"], mistakes)
    split = _splits(cells["split"], mistakes) if "split" in cells else None
    group = _groups(cells["group"], mistakes) if "group" in cells else None
    weight = _weights(cells["weight"], mistakes) if "weight" in cells else None
    mistakes.refuse()
    words = source.described(len(file), columns, given, several)
    return Table(root, files, file, label, texts, f"--labels {path}", words, mistakes.at, split, group, weight)


def table_of_names(settings: DataSettings) -> Table:
    """List the images below ``--datapath``; the pattern ``--class-from-name`` finds the class in each file name.

    If all lie in folders named after splits, the folder decides the split. Links to folders are not followed. Raises
    ``UserError``.
    """
    import pyarrow

    assert settings.datapath is not None and settings.class_from_name is not None
    root = Path(settings.datapath)
    pattern = re.compile(settings.class_from_name)
    paths = []
    unread: Counter[str] = Counter()
    for folder, inner, names in os.walk(root, onerror=_refuse_unreadable):
        inner[:] = [name for name in inner if not name.startswith(".")]
        unread[LINKED] += sum(os.path.islink(os.path.join(folder, name)) for name in inner)
        below = os.path.relpath(folder, root)
        shown = [name for name in names if not name.startswith(".")]
        images = [name for name in shown if is_image(name)]
        unread.update(ending for name in shown if not is_image(name) for ending in left_out(name))
        paths += images if below == "." else [f"{below}/{name}" for name in images]
    paths.sort()
    if not paths:
        raise UserError(f"--datapath {root}: {no_images(unread)}")
    matches = [pattern.match(path.rpartition("/")[2]) for path in paths]
    if wrong := [path for path, found in zip(paths, matches, strict=True) if not (found and found[1])]:
        more = f" ({len(wrong) - 1:,} more files like it)" if len(wrong) > 1 else ""
        raise UserError(
            f"--class-from-name: no class is in the name of {printable(wrong[0])} by {pattern.pattern}{more}; "
            "give another one, such as '([^_]+)_' for what stands before the first _"
        )
    label, texts = _coded(pyarrow.chunked_array([[found[1] for found in matches if found]], pyarrow.string()))
    split = np.array([SPLITS.get(path.partition("/")[0].lower(), -1) for path in paths], dtype=np.int8)
    beside = [path for path, number in zip(paths, split.tolist(), strict=True) if number < 0]
    told = [*unread_images(unread, str(root))]
    if 0 < len(beside) < len(paths):
        told.append(
            f"--class-from-name: {len(paths) - len(beside):,} images below {root} lie in folders with names of splits, "
            f"which count for nothing, as {len(beside):,} lie elsewhere: {some(beside, 2)}; move these into such a "
            "folder, or out of the way"
        )
    how = (
        "before the number at the end" if pattern.pattern == BEFORE_THE_NUMBER else f"by the pattern {pattern.pattern}"
    )
    words = f"in the names of {len(paths):,} files, {how}: {texts[label[0]]} of {printable(paths[0])}"
    return Table(
        root,
        pyarrow.array(map(os.fsencode, paths), pyarrow.large_binary()),
        np.arange(len(paths)),
        label,
        texts,
        "--class-from-name",
        words,
        lambda row, role: f"--class-from-name: {printable(paths[row])}:",
        None if beside else split,
        warnings=tuple(told),
    )


def _refuse_unreadable(error: OSError) -> None:
    """Raise ``UserError`` for a folder that cannot be read, except a disk's lost+found."""
    if os.path.basename(error.filename) != "lost+found":
        raise UserError(f"--datapath: {error.filename} cannot be read ({error.strerror})")


def lacks_rows_of_val(settings: DataSettings) -> bool:
    """True if the table says which images are for what, and none are of val: training validates on those of test."""
    table = table_of(settings)
    return table.split is not None and not (table.split == VALIDATION).any()


def rows_of_test(settings: DataSettings, classes: Sequence[str]) -> tuple[Images | None, tuple[str, ...]]:
    """Images that training leaves for a test in the end, None if there are none; and lines about those left out."""
    table = table_of(settings)
    if table.split is None or not (table.split == TEST).any():
        return None, ()
    if not settings.divides_training and not (table.split == VALIDATION).any():
        return None, ()  # training validates on them
    whose = "the rows to train on"
    try:
        test = read_labels(settings, classes=classes, whose=whose, evaluate=True, of_test=True, leave_out_unknown=True)
    except UserError as error:  # all are of other classes, as labels are that the user does not know
        return None, tuple(error.mistakes)
    return test.validation, tuple(line for line in test.warnings if line not in table.warnings)


def _coded(cells: pyarrow.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """The number of each row's text, int64 (n,), -1 for a missing text; and the list of distinct texts."""
    coded = cells.combine_chunks().dictionary_encode()
    numbers = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers, coded.dictionary.to_pylist()


def _blank(numbers: np.ndarray, texts: list[str]) -> np.ndarray:
    """The rows whose text is missing or blank, int64; ``numbers`` and ``texts`` as ``_coded`` returns them."""
    return np.flatnonzero(np.array([*(not text.strip() for text in texts), True])[numbers])


def _own_labels(cells: pyarrow.ChunkedArray, role: str, mistakes: _Mistakes) -> np.ndarray:
    """The labels in a class's own column, int8 (n,); adds invalid cells to ``mistakes``."""
    numbers, texts = _coded(cells)
    labels, wrong = of_column([*texts, None])
    mistakes.add(
        role, np.flatnonzero(np.isin(numbers, wrong)), "is none of 1, 0 and nothing, for a missing label", cells
    )
    return labels[numbers]


def _splits(cells: pyarrow.ChunkedArray, mistakes: _Mistakes) -> np.ndarray:
    numbers, names = _coded(cells)
    split = np.array([*(SPLITS.get(name.strip().lower(), -1) for name in names), -1], dtype=np.int8)[numbers]
    mistakes.add("split", np.flatnonzero(split < 0), "is none of train, val and test", cells)
    return split


def _groups(cells: pyarrow.ChunkedArray, mistakes: _Mistakes) -> np.ndarray:
    numbers, names = _coded(cells)
    mistakes.add("group", _blank(numbers, names), "is empty")
    return np.array([*map(str.strip, names), None], dtype=object)[numbers]  # a blank must not divide a patient's images


def _weights(cells: pyarrow.ChunkedArray, mistakes: _Mistakes) -> np.ndarray:
    import pyarrow

    try:
        weights = cells.cast(pyarrow.float64()).fill_null(np.nan).to_numpy()  # without a text of each of many weights
    except pyarrow.ArrowInvalid:
        weights = np.array([_number(text) for text in cells.to_pylist()], dtype=np.float64)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    mistakes.add("weight", wrong, "is no number of at least 0", cells)
    return weights


def _number(text: str | None) -> float:
    try:
        return np.nan if text is None else float(text)
    except ValueError:
        return np.nan


# ---------------------------------------------------------------------------------------------- files


def _where(chosen: pyarrow.Array | pyarrow.ChunkedArray) -> np.ndarray:
    """The rows for which ``chosen`` is true, int64; a missing value counts as false."""
    return np.flatnonzero(chosen.fill_null(False).to_numpy(zero_copy_only=False))


def _places(paths: pyarrow.LargeBinaryArray, files: pyarrow.LargeBinaryArray) -> np.ndarray:
    """The first index in ``files`` of each of ``paths``, int64; -1 if it is not among them."""
    import pyarrow.compute as compute

    return compute.index_in(paths, files).fill_null(-1).to_numpy().astype(np.int64)


def _files(cells: pyarrow.ChunkedArray, root: Path, mistakes: _Mistakes) -> tuple[pyarrow.LargeBinaryArray, np.ndarray]:
    """All files in the folders named by ``cells``, sorted; and the index of each row's file among them, int64 (n,).

    A whole path, from / on, means the file below ``root``. A name without an ending means the image that has this name
    and an ending. Raises ``UserError``.
    """
    import pyarrow
    import pyarrow.compute as compute

    below = os.fsencode(os.path.join(os.path.abspath(root), ""))
    paths = cells.cast(pyarrow.large_binary()).combine_chunks()
    paths = compute.replace_substring_regex(paths, b"^" + re.escape(below) + b"/*", b"")
    elsewhere = _where(compute.starts_with(paths, b"/"))
    mistakes.add("path", elsewhere, f"is not below --datapath {root}", cells)
    mistakes.refuse()
    files = _there(root, compute.replace_substring_regex(paths, "[^/]*$", "").unique().drop_null().to_pylist())
    ending = rf"(?i)\.({'|'.join(ending[1:] for ending in IMAGE_ENDINGS)})$"
    images = _where(compute.match_substring_regex(files, ending))
    file = _places(paths, files)
    if len(without := np.flatnonzero(file < 0)):
        bare = paths.take(without)
        names = compute.replace_substring_regex(files.take(images), ending, "")
        place = _places(bare, names)
        again = names.take(np.flatnonzero(_places(names, names) != np.arange(len(names))))
        several = without[_places(bare, again) >= 0]
        mistakes.add("path", several, "has no ending, and several images have this name", cells)
        file[without] = np.append(images, -1)[place]
        _refuse_lost(without[place < 0], cells, root, mistakes)
    odd = np.flatnonzero(~np.isin(file, images))
    mistakes.add("path", odd, f"is no image ({', '.join(IMAGE_ENDINGS)})", cells)
    mistakes.refuse()
    return files, file


def _refuse_lost(rows: np.ndarray, cells: pyarrow.ChunkedArray, root: Path, mistakes: _Mistakes) -> None:
    """Raise ``UserError`` if there are any ``rows``, whose paths in ``cells`` are empty or name no file."""
    paths = cells.take(rows).to_pylist()
    blank = np.array([not (path or "").strip() for path in paths], dtype=bool)
    windows = any("\\" in (path or "") for path in paths)
    advice = "; write folders with / and not \\" if windows else ""
    if any(path and path != path.strip() for path in paths):
        advice += "; blanks before and after a path belong to it"
    mistakes.add("path", rows[blank], "is empty")
    mistakes.add("path", rows[~blank], f"is no file below --datapath {root}{advice}", cells)
    mistakes.refuse()


def _there(root: Path, folders: list[bytes]) -> pyarrow.LargeBinaryArray:
    """The paths below ``root`` of the files in ``folders``, sorted. A folder is 'name/', or '' for ``root`` itself."""
    import pyarrow

    def files(folder: bytes) -> list[bytes]:
        try:
            with os.scandir(os.path.join(os.fsencode(root), folder)) as entries:
                return sorted([folder + entry.name for entry in entries if entry.is_file()])
        except (OSError, ValueError):  # reported for each row that names the folder
            return []

    folders = sorted(folders)
    began = time.perf_counter(), time.thread_time()
    found = [files(folder) for folder in folders[:TRIED]]
    waits = (time.perf_counter() - began[0]) / 2 > time.thread_time() - began[1]
    with ThreadPoolExecutor(THREADS) as pool:  # they cost half as much again if there is no waiting
        found += (pool.map if waits else map)(files, folders[TRIED:])
    return pyarrow.array(sorted(chain.from_iterable(found)), pyarrow.large_binary())  # quick, as parts are sorted


def _first_spelling(root: Path, files: pyarrow.LargeBinaryArray) -> np.ndarray:
    """For each of ``files`` below ``root``, the index (int64) of its first spelling.

    a.png, .//a.png and b/../a.png are one file, and so is that in a link to its folder. Links to files are files.
    """
    import pyarrow
    import pyarrow.compute as compute

    coded = compute.replace_substring_regex(files, "[^/]*$", "").dictionary_encode()
    folders = [os.path.join(os.fsencode(root), folder) for folder in coded.dictionary.to_pylist()]
    known: dict[tuple[int, int], int] = {}
    first = []
    for number, folder in enumerate(folders):
        status = os.stat(folder)
        other = known.setdefault((status.st_dev, status.st_ino), number)
        same = other == number or os.path.realpath(folder) == os.path.realpath(folders[other])
        first.append(other if same else number)
    if first == list(range(len(folders))):
        return np.arange(len(files))
    places = pyarrow.array(np.array(first)[coded.indices.to_numpy()])
    names = compute.replace_substring_regex(files, "(?s)^.*/", "")
    names = compute.binary_join_element_wise(
        coded.dictionary.take(places), names, pyarrow.scalar(b"", pyarrow.large_binary())
    )
    return _places(names, names)


def _refuse_repeated(file: np.ndarray, label: np.ndarray, cells: pyarrow.ChunkedArray, mistakes: _Mistakes) -> None:
    """Raise ``UserError`` if two rows name one file. ``file``: see ``_first_spelling``; ``label``: see ``Table``."""
    order = np.argsort(file, kind="stable")
    begins = np.diff(file[order], prepend=-1) > 0
    if begins.all():
        return
    first = np.empty_like(order)
    first[order] = order[begins][begins.cumsum() - 1]
    again = np.flatnonzero(first != np.arange(len(file)))
    differs = (label[again] != label[first[again]]).reshape(len(again), -1).any(1)
    for rows, words in ((again[differs], "has another label in {}"), (again[~differs], "stands in {}, too; keep one")):
        if len(rows):
            mistakes.add("path", rows, words.format(mistakes.source.place(first[rows[0]])), cells)
    mistakes.refuse()


# ------------------------------------------------------------------------------------ what a file says


class _Mistakes:
    """Messages about wrong rows of a table, gathered until ``refuse`` raises them."""

    def __init__(self, source: _Source, columns: dict[str, str]) -> None:
        self.source = source
        self.columns = columns
        self.lines: list[str] = []

    def add(self, role: str, rows: Sequence[int] | np.ndarray, words: str, cells: Any = None) -> None:
        """Add a message, ``words``, about the first of ``rows``, its cell in ``cells``, and how many more there are."""
        if not len(rows):
            return
        first = int(rows[0])
        cell = "" if cells is None else cells[first]
        text = str(cell.as_py() if hasattr(cell, "as_py") else cell)
        shown = f" {printable(text[:80])}" if text else ""
        more = f" ({len(rows) - 1:,} more rows like it)" if len(rows) > 1 else ""
        self.lines.append(f"{self.at(first, role)}{shown} {words}{more}")

    def at(self, row: int, role: str) -> str:
        """The place of a cell, for messages: file, line or row, and column."""
        return f"--labels {self.source.file}: {self.source.place(row)}, column {self.columns[role]}:"

    def refuse(self) -> None:
        if self.lines:
            raise UserError(*self.lines)


@dataclass(frozen=True)
class _Source:
    """A readable file of labels: the names of its columns and, in a CSV file, their separator."""

    file: Path
    names: tuple[str, ...]
    separator: str = ","
    is_parquet: bool = False

    @classmethod
    def of(cls, file: Path) -> _Source:
        """Read the names of the columns of ``file``. Raises ``UserError`` if it is not a table."""
        with as_user_error(f"--labels {file}: cannot be read"), open(file, "rb") as opened:
            begin = opened.read(FIRST_BYTES)
        if not begin.strip():
            raise UserError(f"--labels {file}: is empty; its first line names the columns: path,label")
        if begin.startswith(b"PAR1") or file.suffix == ENDING:
            import pyarrow
            from pyarrow import parquet

            with as_user_error(f"--labels {file}: cannot be read as Parquet", (pyarrow.ArrowException, OSError)):
                return cls(file, tuple(parquet.read_schema(file).names), is_parquet=True)
        if begin.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise UserError(f"--labels {file}: is written in UTF-16; save it as UTF-8")
        if b"\0" in begin:
            raise UserError(f"--labels {file}: is neither text nor Parquet; export it as CSV in UTF-8")
        first = begin.removeprefix(b"\xef\xbb\xbf").splitlines()[0]
        try:
            line = first.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"--labels {file}: line 1 is not written in UTF-8; save it as UTF-8") from error
        separator = max(SEPARATORS, key=re.sub('"[^"]*"', "", line).count)
        names = tuple(name.strip() for name in next(csv.reader([line], delimiter=separator)))
        if any(is_image(name) for name in names):
            raise UserError(
                f"--labels {file}: line 1 holds {printable(line[:80])} and no names of columns; put a line above it "
                f"that names its columns ({len(names)}), such as path and label, with the same separator"
            )
        twice = [name for name in names if name and names.count(name) > 1]  # spreadsheets write empty columns
        if twice:
            raise UserError(f"--labels {file}: two columns are called {printable(twice[0])}; rename one")
        return cls(file, names, separator)

    def chosen(self, given: dict[str, str | None], of_classes: Sequence[str]) -> dict[str, str]:
        """The column of each role: the name ``given`` for it or, if that is None, the first usual name of the columns.

        Columns ``of_classes`` are never guessed: one of them may be called weight. Roles without a column, and those
        switched off, are left out. Raises ``UserError`` if a given column does not exist, if none is found for paths or
        labels, or if two roles share one.
        """
        small = {name.lower(): name for name in reversed(self.names) if name not in of_classes}
        columns = {}
        mistakes = []
        there = f"{self.file} has the columns {', '.join(map(printable, filter(None, self.names)))}"
        for role, name in given.items():
            guess = next((small[usual] for usual in GUESSES[role] if usual in small), None)
            if name == NO_COLUMN and (role == "path" or (role == "label" and not of_classes)):
                mistakes.append(f"--{role}-column off: only other columns can be left out; {there}")
            elif name is not None and name not in (*self.names, NO_COLUMN):
                off = "" if role in ("path", "label") else "; off instead of a name leaves it out"
                mistakes.append(f"--{role}-column {name}: {there}{off}")
            elif name is None and guess is None and role in ("path", "label"):
                columns_of_classes = ", or --label-columns for a column of each class" if role == "label" else ""
                mistakes.append(f"--{role}-column COLUMN is needed{columns_of_classes}: {there}")
            elif name != NO_COLUMN and (column := name or guess):
                columns[role] = column
        for role, name in columns.items():
            other = next(other for other in columns if columns[other] == name)
            if other != role:
                off = "" if role in ("path", "label") else ", or off"
                mistakes.append(f"--{role}-column: {name} is the column of the {other}s, too; give another one{off}")
        if mistakes:
            raise UserError(*mistakes)
        return columns

    def columns_of_classes(self, names: Sequence[str]) -> dict[str, str]:
        """The columns of the classes ``names``, by role, such as 'label of cat'. Raises ``UserError``."""
        if lacking := [name for name in names if name not in self.names]:
            there = ", ".join(map(printable, filter(None, self.names)))
            raise UserError(f"--label-columns {lacking[0]}: {self.file} has the columns {there}")
        if len(set(names)) < len(names):
            raise UserError("--label-columns: names a column twice")
        return {f"label of {name}": name for name in names}

    def read(self, columns: dict[str, str]) -> dict[str, pyarrow.ChunkedArray]:
        """Read the cells of ``columns`` (name by role) as text, by role. Raises ``UserError``."""
        import pyarrow

        try:
            table = self._parquet(columns) if self.is_parquet else self._csv()
            if not self.is_parquet:
                self._refuse_swallowed(table, self.names.index(columns["path"]))
            return {role: table.column(name) for role, name in columns.items()}
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"--labels {self.file}: {self._why(str(error))}") from error

    def _csv(self) -> pyarrow.Table:
        import pyarrow
        from pyarrow import csv as reader

        return reader.read_csv(
            self.file,
            reader.ReadOptions(column_names=self.names, skip_rows=1),
            reader.ParseOptions(delimiter=self.separator, newlines_in_values=True),
            reader.ConvertOptions(
                column_types=dict.fromkeys(self.names, pyarrow.string()), strings_can_be_null=False, null_values=[]
            ),
        )

    def _refuse_swallowed(self, table: pyarrow.Table, path: int) -> None:
        """Raise ``UserError`` if a cell of several lines holds rows of the ``table``: a quotation mark was not closed.

        Only a line with the name of an image in the column numbered ``path`` is one, as notes may have several lines.
        """
        import pyarrow.compute as compute

        for number, name in enumerate(self.names):
            column = table.column(number)
            for row in np.flatnonzero(compute.match_substring_regex(column, "[\r\n]").to_numpy()):
                first, *others = column[row].as_py().splitlines() or [""]
                rest = [""] * number + first.split(self.separator)  # the cells of the row itself from this one on
                lines = [(line, line.split(self.separator)) for line in others]
                lines += [(first, rest)] if number < path and len(rest) >= len(self.names) else []
                for line, cells in lines:
                    if len(cells) > max(number, path) and is_image(cells[path].strip(' "')):
                        raise UserError(
                            f"--labels {self.file}: {self.place(int(row))}, column {printable(name)}: holds whole "
                            f"rows, such as {printable(line[:80])}; a quotation mark is too many"
                        )

    def _parquet(self, columns: dict[str, str]) -> pyarrow.Table:
        import pyarrow
        from pyarrow import parquet

        table = parquet.read_table(self.file, columns=list(columns.values()))
        for role, name in columns.items():
            kind = table.schema.field(name).type
            if pyarrow.types.is_dictionary(kind):
                kind = kind.value_type
            of_any = role not in TABLE_COLUMNS or role == "weight"
            number = pyarrow.types.is_integer(kind) or (of_any and pyarrow.types.is_floating(kind))
            if not (number or is_text(kind) or pyarrow.types.is_boolean(kind)):
                advice = "; pandas keeps those as Int64, also if some are missing"
                raise UserError(
                    f"--labels {self.file}: column {name} holds {kind}, and each {role} is text or a whole number"
                    f"{advice if pyarrow.types.is_floating(kind) else ''}"
                )
        return table.cast(pyarrow.schema([(name, pyarrow.string()) for name in table.column_names]))

    def described(self, rows: int, columns: dict[str, str], given: dict[str, str | None], own: Sequence[str]) -> str:
        """A description of the file: its rows, the columns read (guessed ones are marked), and those not read."""
        shown = [
            role if name == role else f"{role} {name}{' (guessed)' * (given[role] is None)}"
            for role, name in columns.items()
        ]
        read = {*columns.values(), *own}
        others = [printable(name) or "(no name)" for name in self.names if name not in read]
        unread = f"; not read: {some(others, 5)}" if others else ""
        separator = {",": "", "\t": "; separated by tabs"}.get(self.separator, f"; separated by {self.separator}")
        return f"{self.file}, {rows:,} rows; columns: {', '.join(shown)}{unread}{separator}"

    def place(self, row: int) -> str:
        """The place of a row: its number in a Parquet file, from 1; its line in a CSV file."""
        if self.is_parquet:
            return f"row {row + 1:,}"
        return next((f"line {number:,}" for place, (number, _) in enumerate(self._rows()) if place == row), "a line")

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """The first line and the cells of each row; blank lines are skipped, as in pyarrow, and a row may have several.

        Ends at a cell that is too long for the module csv, such as one whose quotation mark is never closed.
        """
        with suppress(csv.Error), open(self.file, encoding="utf-8-sig", errors="replace", newline="") as lines:
            next(lines)
            rows = csv.reader(lines, delimiter=self.separator)
            first = 2
            for cells in rows:
                if cells:
                    yield first, cells
                first = rows.line_num + 2

    def _why(self, error: str) -> str:
        """The reason why pyarrow cannot read the file: the line at fault if one is found, or else ``error``."""
        count = len(self.names)
        if not self.is_parquet:
            for number, cells in self._rows():
                if any("\ufffd" in cell for cell in cells):
                    return f"line {number:,} is not written in UTF-8; save it as UTF-8"
                if len(cells) != count:
                    return f"line {number:,} has {len(cells)} cell(s), and line 1 names {count} columns"
        return f"cannot be read ({' '.join(error.split())[:200]})"


# --------------------------------------------------------------------------------------------- splits


def read_labels(
    settings: DataSettings,
    *,
    classes: Sequence[str] | None,
    whose: str,
    evaluate: bool,
    of_test: bool,
    leave_out_unknown: bool,
) -> Splits:
    """Read the images of the table that ``--labels`` or ``--class-from-name`` gives. Raises ``UserError``.

    With ``evaluate``, all rows of a table without splits are read; with ``of_test``, only test rows. ``classes``:
    those of a checkpoint, which messages call ``whose``; with ``leave_out_unknown``, images of other classes are left
    out with a warning.
    """
    table = table_of(settings)
    train, validation, unused = _rows_of(table, settings, evaluate, of_test)
    names, labels, unknown = _numbered(table, settings, train if len(train) else validation, classes, whose)
    used = np.concatenate([train, validation])
    warnings = [*table.warnings]
    if not evaluate and table.split is not None and len(validation) and (table.split[validation] == TEST).all():
        warnings.append(
            f"{table.flag}: no row is of val, so those of test choose best.pt and the end of --early-stopping; to keep "
            "them for the end: --val-split 0.2, then scripts/evaluate.py RUN --split test"
        )
    separator = settings.label_separator
    if separator is not None and not any(separator in text for text in table.texts):
        warnings.append(f"--label-separator: {separator!r} occurs in no cell, so each cell names one class")
    if labels.ndim > 1 and (count := int((labels[used] < 0).all(1).sum())):
        end = ""
        if separator is not None and separator.strip():
            end = f"; write {separator} where an image shows none of the classes"
        warnings.append(f"{table.flag}: {count:,} image(s) without any known label, which no figure counts{end}")
    if len(strange := used[unknown[used]]):
        label = printable(table.texts[table.label[strange[0]]][:80])
        more = f" ({len(strange) - 1:,} more rows like it)" if len(strange) > 1 else ""
        line = f"{table.at(strange[0], 'label')} {label} is no class of {whose or 'the rows to train on'}{more}"
        if not leave_out_unknown or len(strange) == len(used):
            raise UserError(f"{line}; those are {some(names)}")
        warnings.append(f"{line}; they are left out")
        train, validation = (rows[~unknown[rows]] for rows in (train, validation))
    origin = table.words
    if len(unused):
        assert table.split is not None
        names_of_splits = ("train", "val", "test")
        of_splits = " and ".join(names_of_splits[number] for number in np.unique(table.split[unused]))
        origin += f"; {len(unused):,} rows of {of_splits} are not for training"
    images = [_images(table, rows, labels) if len(rows) else None for rows in (train, validation)]
    return Splits(images[0], images[1], names, tuple(warnings), origin)


def _numbered(
    table: Table, settings: DataSettings, named_by: np.ndarray, classes: Sequence[str] | None, whose: str
) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Class names; labels, int64 (n,) or int8 (n, classes); and whether each row has an unknown class, bool (n,).

    The class names are ``classes``, from a checkpoint, or those in the rows ``named_by``. Raises ``UserError``.
    """
    if table.label.ndim > 1:
        assert settings.label_columns is not None
        names = tuple(classes or settings.label_columns)
        if set(names) != set(settings.label_columns):
            raise UserError(f"--label-columns: are other classes than those of {whose}: {some(names)}")
        places = [settings.label_columns.index(name) for name in names]
        return names, table.label[:, places], np.zeros(len(table), dtype=bool)
    used = np.unique(table.label[named_by])  # numbers of texts
    if settings.label_separator is None:
        names = tuple(classes or class_names(table.texts[text] for text in used))
        numbers = class_numbers(table.texts, names)[table.label]
        return names, numbers, numbers < 0
    lists = LabelLists.split([*table.texts, None], settings.label_separator)  # the last is for a missing text
    lists.refuse_truth_values(f"{table.flag}: every list in the column of labels")
    names = tuple(classes or class_names(lists.values[np.isin(lists.rows, used)]))
    if not names:
        raise UserError(f"{table.at(int(named_by[0]), 'label')} no row names a class")
    numbers = class_numbers(lists.values, names)
    unknown = np.isin(np.arange(len(lists.known)), lists.rows[numbers < 0])
    return names, lists.matrix(numbers.clip(min=0), len(names))[table.label], unknown[table.label]


def _rows_of(
    table: Table, settings: DataSettings, evaluate: bool, of_test: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows to train on, the rows to validate on, and the unused rows of val and test: int64 each.

    With ``--val-split`` or ``--folds``, there are no rows to validate on yet; they are later chosen from those to train
    on. Raises ``UserError``.
    """
    everything = np.arange(len(table))
    none = everything[:0]
    if table.split is None and of_test:
        raise UserError(f"--split test: {table.flag} has no column that says which images are those of test")
    if table.split is None:
        if not settings.divides_training and not evaluate:
            raise UserError(
                f"{table.flag}: no column or folder says which images are to validate on (split, with train and val); "
                + ("" if settings.class_from_name else "name it with --split-column, or ")
                + "give --val-split 0.2",
                *table.warnings,
            )
        return (everything, none, none) if settings.divides_training else (none, everything, none)
    train, validation, test = (np.flatnonzero(table.split == number) for number in (TRAIN, VALIDATION, TEST))
    if of_test:
        train, validation = none, test
    elif settings.val_split is not None and len(validation):
        raise UserError(
            f"--val-split: {table.flag} says already which images are to validate on; remove the flag, or give "
            "--split-column off"
        )
    elif settings.divides_training and len(train):
        return train, none, np.concatenate([validation, test])
    elif not len(validation):
        validation, test = test, none
    if not len(validation) or not (len(train) or evaluate):
        lacking = "test" if of_test else "train" if len(validation) else "val or test"
        raise UserError(f"{table.flag}: the split of no image is {lacking}")
    return train, validation, none if evaluate else test


def class_names(labels: Iterable[str]) -> tuple[str, ...]:
    """The distinct labels: in numerical order if all are whole numbers, otherwise in alphabetical order."""
    names = set(labels)
    numbers = all(name.isascii() and name.isdigit() and str(int(name)) == name for name in names)
    return tuple(sorted(names, key=int) if numbers else sorted(names))


def _images(table: Table, rows: np.ndarray, labels: np.ndarray) -> ImageFiles:
    """The images of ``rows``, ordered by class and path, as in class folders; multi-label images by path alone."""
    rows = rows[np.argsort(table.file[rows])]
    if labels.ndim == 1:
        rows = rows[np.argsort(labels[rows], kind="stable")]
    return ImageFiles(
        TablePaths.of(table.root, table.files.take(table.file[rows])),
        torch.from_numpy(labels[rows]),
        groups=None if table.group is None else table.group[rows],
        weights=None if table.weight is None else torch.from_numpy(table.weight[rows]),
    )
