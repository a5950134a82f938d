"""Data sets of Hugging Face's library ``datasets`` on disk, read by row number; nothing is downloaded."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from utils.config.datasets import SPECS
from utils.config.groups.data import DataSettings
from utils.config.settings import UserError, as_user_error
from utils.config.spelling import reason_of, some
from utils.data.formats.class_folders import TRAINING_FOLDERS, VALIDATION_FOLDERS
from utils.data.formats.listing import Lister
from utils.data.formats.readers import ImageFiles, Splits, class_numbers
from utils.data.formats.several_labels import LabelLists, is_text, of_column
from utils.data.images.stored import NumberedImages, version_of
from utils.data.progress_log import Log, silent

SAVED = "state.json"  # the file by which a folder that ``save_to_disk`` wrote is recognised
ENDING = ".parquet"
CONVERTED = "arrow"  # folder of converted files, inside the one for all that is kept of a data set
IMAGE_NAMES = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")
LABEL_NAMES = ("label", "labels", "class", "cls", "target", "fine_label", "category", "y")
MOST_CLASSES = 1_000_000  # of a data set whose labels are bare numbers
_PART = re.compile(r"(.+)-\d+-of-(\d+)")  # how the Hub names the parts of a split


def read_tables(settings: DataSettings, lister: Lister, evaluate: bool) -> Splits:
    """Read the training and validation images at ``--datapath``; with ``evaluate``, training images may be missing.

    ``lister`` has the folder for converted files and the log. Raises ``UserError``.
    """
    library()
    assert settings.datapath is not None
    root = Path(settings.datapath)
    train, validation = _chosen_splits(root, settings, evaluate)
    found = [split for split in (train, validation) if split is not None]
    features = read_features(found[0])
    where = f"{root}, {found[0].name}"
    image = chosen_column(features, settings.image_column, "--image-column", where)
    if settings.label_columns is not None:
        classes = settings.label_columns
        flags = {image: "--image-column"} | dict.fromkeys(classes, "--label-columns")
        tables = [_read(root, split, flags, lister) for split in found]
        labels = [_of_columns(table, classes) for table in tables]
    else:
        label = chosen_column(features, settings.label_column, "--label-column", where)
        flags = {image: "--image-column", label: "--label-column"}
        tables = [_read(root, split, flags, lister) for split in found]
        labels, classes = _of_one_column(root, tables, label, settings.label_separator)
    images = [
        ImageFiles(Rows(dataset, image, f"{root}/{name}", str(root)), torch.from_numpy(own))
        for (name, dataset), own in zip(tables, labels, strict=True)
    ]
    warnings = dict.fromkeys(line for split in found for line in split.warnings)
    return Splits(images[0] if train else None, images[-1] if validation else None, classes, tuple(warnings))


class _Table(NamedTuple):
    """The columns in use of a split called ``name``: a ``datasets.Dataset``."""

    name: str
    dataset: Any


def _read(root: Path, found: Found, flags: dict[str, str], lister: Lister) -> _Table:
    """Read the columns in ``flags``, each of which is named by a flag. Raises ``UserError`` if one is not there."""
    features = read_features(found)
    for column, flag in flags.items():
        if column not in features:
            raise UserError(f"{flag} {column}: {root}, {found.name} has the columns {', '.join(features)}")
    assert lister.folder is not None
    log = lister.progress.log if lister.is_main else silent
    return _Table(found.name, read_split(found, [*flags], lister.folder, log))


def _of_columns(table: _Table, classes: Sequence[str]) -> np.ndarray:
    """The labels in a column for each class (--label-columns): int8 (n, classes). Raises ``UserError``."""
    cells = table.dataset.select_columns([*classes]).with_format("arrow")[:]
    labels = []
    for name in classes:
        values = cells.column(name).to_pylist()
        own, wrong = of_column(values)
        if len(wrong):
            raise UserError(
                f"--label-columns {name}: row {wrong[0]:,} of {table.name} holds {str(values[wrong[0]])[:40]}, "
                "which is none of 1, 0 and nothing"
            )
        labels.append(own)
    return np.stack(labels, axis=1)


def _of_one_column(
    root: Path, tables: Sequence[_Table], column: str, separator: str | None
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Labels of each table, int64 (n,) or int8 (n, classes), and the classes, by the first table. Raises ``UserError``.

    ``separator``: splits each text into the names of several classes.
    """
    read = [labels_of(table.dataset, column, table.name, separator) for table in tables]
    values = [each.values if isinstance(each, LabelLists) else each for each in read]
    kinds = [_item_of(table.dataset.features[column]) for table in tables]
    classes = classes_of(kinds[0], values[0], column)
    labels = []
    for (where, _), kind, each, own in zip(tables, kinds, read, values, strict=True):
        names = getattr(kind, "names", None)  # a ClassLabel's numbers mean nothing without its names
        if names and tuple(names) != classes:
            raise UserError(
                f"--datapath {root}: {where} has other classes than {tables[0].name}: {some([*names])} instead of "
                f"{some(classes)}"
            )
        if not names and values[0].dtype == object and own.dtype != object:
            raise UserError(
                f"--label-column {column}: holds text in {tables[0].name} and numbers in {where}, which do not "
                "say which classes they mean"
            )
        lists = each if isinstance(each, LabelLists) else None
        numbers = numbered(own, classes, column, where, None if lists is None else lists.rows)
        labels.append(numbers if lists is None else lists.matrix(numbers, len(classes)))
    return labels, classes


# -------------------------------------------------------------------------------------------- files


class Found(NamedTuple):
    """The files of one split: a folder that ``save_to_disk`` wrote, or parquet files.

    ``warnings``: about parquet files beside them that are not read, or are not there.
    """

    name: str
    saved: Path | None
    parquet: tuple[Path, ...] = ()
    warnings: tuple[str, ...] = ()


def library() -> ModuleType:
    """Import the library ``datasets``. Raises ``UserError`` with the command that installs it."""
    install = ": python -m pip install -r requirements-tools.txt"
    with as_user_error("--dataname hf needs the library datasets", ImportError, advice=install):
        import datasets
    datasets.disable_progress_bars()  # each process would show its own
    return datasets


def _chosen_splits(root: Path, settings: DataSettings, evaluate: bool) -> tuple[Found | None, Found | None]:
    """The splits to train on and to validate on; the second is None with ``--val-split`` or ``--folds``.

    With ``evaluate``, the first may be None. Raises ``UserError``.
    """
    splits = find(root)
    train, validation = (
        next((splits[name] for name in names if name in splits), None)
        for names in (TRAINING_FOLDERS, VALIDATION_FOLDERS)
    )
    there = f" (it holds {some(sorted(splits))})" if splits else ""
    if train is None and not (evaluate and validation and settings.folds is None):
        raise UserError(
            f"--datapath {root}: holds no training images that save_to_disk wrote, nor in parquet files{there}; "
            f"hf: {SPECS['hf'].source}"
        )
    if settings.folds is not None:
        return train, None
    if validation is not None and settings.val_split is not None:
        raise UserError(f"--val-split: {root} already has {validation.name}; remove the flag")
    if validation is None and settings.val_split is None:
        raise UserError(f"--datapath {root}: holds no validation or test split{there}; give --val-split 0.2")
    return train, validation


def find(root: Path) -> dict[str, Found]:
    """The splits in ``root``, by name in lower case; empty if there are none. Raises ``UserError``.

    As on the Hub, a parquet file belongs to the split that its name, or its folder's name, begins with. If no file
    names a split, all are for training.
    """
    if (root / SAVED).is_file():
        return {"train": Found("train", root)}
    with os.scandir(root) as entries:
        folders = sorted(Path(entry) for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    # Unlike Path.is_file, os.path.isfile passes over folders that cannot be read, such as a disk's lost+found.
    saved = {path.name.lower(): Found(path.name, path) for path in folders if os.path.isfile(path / SAVED)}
    return saved or _parquet(root)


def _parquet(root: Path) -> dict[str, Found]:
    files: dict[str, list[Path]] = {}
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(ENDING) and not name.startswith("."):
                files.setdefault(_split_of(Path(folder, name).relative_to(root)), []).append(Path(folder, name))
    if set(files) == {""}:
        files = {"train": files[""]}
    unnamed = [str(path.relative_to(root)) for path in files.pop("", ())]
    said = (
        [f"--datapath {root}: parquet files whose names say no split are left out: {some(unnamed)}"] if unnamed else []
    )
    for split, paths in files.items():
        wholes = [int(found[2]) for path in paths if (found := _PART.match(path.stem))]
        if wholes and len(wholes) < max(wholes):
            said.append(f"--datapath {root}: holds {len(wholes)} of the {max(wholes)} parquet files of {split}")
        folders = sorted({path.parent for path in paths})
        if len(folders) > 1:
            raise UserError(
                f"--datapath {root}: parquet files of {split} lie in {folders[0]} and in {folders[1]}: several data "
                "sets, or versions of one; give the folder of one"
            )
    return {split: Found(split, None, tuple(paths), tuple(said)) for split, paths in files.items()}


def _split_of(path: Path) -> str:
    """The split named by a parquet file or, failing that, by the nearest folder above it that names one; '' if none.

    The Hub's names give it in full: train_extra-00000-of-00001.parquet is a part of train_extra, not of train.
    """
    for part in (path.stem, *(parent.name for parent in path.parents)):
        first = re.split(r"[^a-z]", part.lower())[0]
        if first in (*TRAINING_FOLDERS, *VALIDATION_FOLDERS):
            whole = _PART.match(part.lower())
            return whole[1] if whole else first
    return ""


def read_features(found: Found) -> Any:
    """The columns of a split and their types, a ``datasets.Features``; no row is read. Raises ``UserError``."""
    datasets = library()
    with _told(found):
        if found.saved is not None:
            return datasets.load_from_disk(str(found.saved)).features
        import pyarrow.parquet

        first, *others = (
            datasets.Features.from_arrow_schema(pyarrow.parquet.read_schema(path)) for path in found.parquet
        )
    for path, features in zip(found.parquet[1:], others, strict=True):
        for column in features.keys() & first.keys():
            own, names = (getattr(_item_of(each[column]), "names", None) for each in (first, features))
            if own and names and own != names:  # the library would take the numbers of one for those of the other
                raise UserError(
                    f"{path}: the classes of column {column} are other ones, or in another order, than in "
                    f"{found.parquet[0].name}; give the files of one data set"
                )
    return first


def read_split(found: Found, columns: list[str], folder: Path, log: Log) -> Any:
    """The named ``columns`` of a split: a ``datasets.Dataset`` that maps its files into memory. Raises ``UserError``.

    Parquet files do not allow reading single rows, so one of the processes that need them converts them to Arrow files
    in ``folder``, once.
    """
    datasets = library()
    with _told(found):
        if found.saved is not None:
            return datasets.load_from_disk(str(found.saved), keep_in_memory=False).select_columns(columns)
        size = sum(path.stat().st_size for path in found.parquet)
        # The library recognises files that it has converted by their times of modification alone.
        seen = hashlib.sha256(" ".join(version_of(str(path)) for path in found.parquet).encode()).hexdigest()
        place = folder / CONVERTED / seen[:16]
        log(f"{found.name}: {len(found.parquet)} parquet file(s) ({size / 1e6:,.0f} MB) as Arrow files in {place}")
        return datasets.Dataset.from_parquet([*map(str, found.parquet)], cache_dir=str(place), columns=columns)


@contextmanager
def _told(found: Found) -> Iterator[None]:
    """Context that turns any exception of the library into a ``UserError``."""
    try:
        yield
    except Exception as error:  # pyarrow's and the library's errors have no common base
        where = found.saved or found.parquet[0]
        reason = reason_of(error.__cause__ or error, with_file=True)
        raise UserError(
            f"--datapath: {where} cannot be read by the library datasets ({reason}); make it again, or see that there "
            "is room for its Arrow files (--cache-dir)"
        ) from error


# ------------------------------------------------------------------------------------------ columns


def chosen_column(features: Any, given: str | None, flag: str, where: str) -> str:
    """Name of the column for ``flag``, '--image-column' or '--label-column': the ``given`` one, or a guess.

    A guess is the only column of the right type; if there are several or none, the first usual name that a column has.
    Raises ``UserError``. ``where``: the split, for messages.
    """
    datasets = library()
    named = f"{where} has the columns {', '.join(features)}"
    if flag == "--image-column":
        certain = [name for name in features if isinstance(features[name], datasets.Image)]
        possible = [name for name in features if _holds_files(features[name])]
        names = IMAGE_NAMES
    else:
        certain = [name for name in features if isinstance(_item_of(features[name]), datasets.ClassLabel)]
        possible = [name for name in features if isinstance(_item_of(features[name]), datasets.Value)]
        names = LABEL_NAMES
    if given is not None:
        if given not in features:
            raise UserError(f"{flag} {given}: {named}")
        if flag == "--image-column" and given not in (*certain, *possible):
            raise UserError(f"{flag} {given}: holds no images but {features[given]}; {named}")
        return given
    for candidates in (certain, [name for name in possible if name in names]):
        usual = [name for name in names if name in candidates]
        if len(candidates) == 1 or usual:
            return (usual or candidates)[0]
    raise UserError(f"{flag} COLUMN is needed: {named}")


def _holds_files(kind: Any) -> bool:
    """True if a column of type ``kind`` holds the bytes of files."""
    return "bytes" in kind if isinstance(kind, dict) else getattr(kind, "dtype", "").endswith("binary")


def _item_of(kind: Any) -> Any:
    """The type of the items if ``kind`` is the type of a column of lists, otherwise ``kind`` itself."""
    return getattr(kind, "feature", kind)


def labels_of(dataset: Any, column: str, where: str, separator: str | None) -> np.ndarray | LabelLists:
    """The labels in a column: numbers, int64 (n,), texts, object (n,), or lists of either. Raises ``UserError``.

    With a ``separator``, lists of the names in each text.
    """
    import pyarrow
    import pyarrow.compute

    flag = f"--label-column {column}:"
    values = dataset.select_columns([column]).with_format("arrow")[:].column(column)
    kind = values.type
    if separator is not None and not is_text(kind):
        raise UserError(f"--label-separator: column {column} of {where} holds no text; remove it")
    if separator is not None:
        lists = LabelLists.split(values.to_pylist(), separator)
    elif pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        item = kind.value_type
        if not (pyarrow.types.is_integer(item) or is_text(item)):
            raise UserError(f"{flag} holds lists of {item} in {where}; lists of classes are needed")
        if missing := _missing(pyarrow.compute.list_flatten(values)):
            words = "are missing; leave them out of the lists"
            raise UserError(f"{flag} {missing:,} labels in the lists of {where} {words}")
        lists = LabelLists.of_arrow(values)
    else:
        if missing := _missing(values):
            raise UserError(f"{flag} {missing:,} rows of {where} have no label")
        if pyarrow.types.is_boolean(kind) or pyarrow.types.is_integer(kind):
            return values.to_numpy().astype(np.int64)
        if is_text(kind):
            return np.array(values.to_pylist(), dtype=object)
        raise UserError(f"{flag} holds {kind} in {where}; one class, or a list of them, is needed")
    lists.refuse_truth_values(f"{flag} every list of {where}")
    return lists


def _missing(values: Any) -> int:
    """How many cells of a ``pyarrow.ChunkedArray`` are missing or, in text, blank."""
    if is_text(values.type):
        return sum(not (text or "").strip() for text in values.to_pylist())
    return values.null_count


def classes_of(kind: Any, values: np.ndarray, column: str) -> tuple[str, ...]:
    """The classes in the order of their labels: the names of a ClassLabel, texts sorted, or numbers from 0 to the
    largest. Raises ``UserError`` for numbers too large to be classes.
    """
    if names := getattr(kind, "names", None):
        return tuple(map(str, names))
    if values.dtype == object:
        return tuple(sorted(set(values)))
    if getattr(kind, "dtype", "") == "bool":
        return "false", "true"
    count = int(values.max(initial=-1)) + 1
    if count > MOST_CLASSES:
        raise UserError(f"--label-column {column}: holds numbers up to {count - 1:,}; classes are numbers from 0 on")
    return tuple(map(str, range(count)))


def numbered(
    values: np.ndarray, classes: tuple[str, ...], column: str, where: str, rows: np.ndarray | None
) -> np.ndarray:
    """The class number of each value, int64 (n,). Raises ``UserError`` for a value that is not among ``classes``.

    ``rows``: int64 (n,), the row of each value, if a row may have several.
    """
    labels = class_numbers(values, classes) if values.dtype == object else values
    strange = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if len(strange):
        theirs = strange if rows is None else rows[strange]
        raise UserError(
            f"--label-column {column}: {len(np.unique(theirs)):,} rows of {where} have a label that is no class, the "
            f"first {values[strange[0]]!s:.40} in row {theirs[0]:,} (-1 often stands for unknown)"
        )
    return labels


# --------------------------------------------------------------------------------------------- rows


class Rows(NumberedImages):
    """The images in the rows of a split.

    ``dataset``: a ``datasets.Dataset`` that maps its files, so that memory use does not grow with the number of rows.
    """

    def __init__(self, dataset: Any, column: str, where: str, root: str) -> None:
        feature = dataset.features[column]
        dataset = dataset.select_columns([column]).with_format(None)  # save_to_disk may have kept another format
        if isinstance(feature, library().Image):
            dataset = dataset.cast_column(column, library().Image(decode=False))
        super().__init__(where, len(dataset))
        self._dataset = dataset
        self._column = column
        self._root = root

    def read(self, number: int) -> bytes:
        """The bytes of the image file in row ``number``. Raises ``OSError``."""
        try:
            value = self._dataset[number][self._column]
        except Exception as error:  # pyarrow's errors have no common base
            raise OSError(f"the row cannot be read: {error}") from error
        if isinstance(value, dict):
            path = value.get("path")
            value = value.get("bytes")
            if value is None and path:
                if "://" in path:
                    raise OSError(f"it lies at {path}, and nothing is fetched")
                value = Path(self._beside(path)).read_bytes()
        if not isinstance(value, bytes):
            raise OSError("the row holds no image")
        return value

    def _beside(self, path: str) -> str:
        return os.path.join(self._root, path)

    def version_of(self, number: int) -> str:
        """Text that changes with the table's files, the column, or the image's own file if it is outside the table."""
        path = self._elsewhere.get(number)
        elsewhere = "" if path is None else f"\0{path}\0{version_of(self._beside(path))}"
        return f"{self._files}\0{number}{elsewhere}"

    @cached_property
    def _files(self) -> str:
        return " ".join([self._column, *(version_of(file["filename"]) for file in self._dataset.cache_files)])

    @cached_property
    def _elsewhere(self) -> dict[int, str]:
        """Paths of the images that are stored outside the table, by row number."""
        import pyarrow
        import pyarrow.compute

        cells = self._cells()
        if not pyarrow.types.is_struct(cells.type) or cells.type.get_field_index("path") < 0:
            return {}
        content, paths = (pyarrow.compute.struct_field(cells, name) for name in ("bytes", "path"))
        outside = pyarrow.compute.and_(pyarrow.compute.is_null(content), pyarrow.compute.is_valid(paths))
        numbers = np.flatnonzero(outside.to_numpy()).tolist()
        return dict(zip(numbers, paths.filter(outside).to_pylist(), strict=True))

    def _cells(self) -> Any:
        """The image column: a ``pyarrow.ChunkedArray`` that maps the table's files."""
        return self._dataset.with_format("arrow")[:].column(self._column)

    @property
    def identity(self) -> bytes:
        """A digest that depends only on the images' sizes in bytes and their order, not on where they are stored."""
        return hashlib.sha256(self._lengths[self.places].tobytes()).hexdigest().encode()

    @cached_property
    def _lengths(self) -> np.ndarray:
        """Size in bytes of each row's image, int64 (rows,), from the table's offsets or the image's own file."""
        import pyarrow
        import pyarrow.compute

        cells = self._cells()
        if pyarrow.types.is_struct(cells.type):
            cells = pyarrow.compute.struct_field(cells, "bytes")
        lengths = pyarrow.compute.fill_null(pyarrow.compute.binary_length(cells), 0).to_numpy().astype("<i8")
        for number, path in self._elsewhere.items():
            with suppress(OSError):  # reading the file will report the error
                lengths[number] = os.path.getsize(self._beside(path))
        return lengths
