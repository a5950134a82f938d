"""A data set of Hugging Face's library ``datasets`` on disk, read by the numbers of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils.config.datasets import SPECS
from utils.config.groups.data import DataSettings
from utils.config.settings import UserError
from utils.data.formats.class_folders import TRAINING_FOLDERS, VALIDATION_FOLDERS, held_out, some
from utils.data.formats.hugging_face.files import Found, find, library, read_features, read_split
from utils.data.formats.hugging_face.rows import Rows
from utils.data.formats.listing import Lister
from utils.data.formats.readers import ImageFiles, Splits
from utils.data.progress_log import silent

IMAGE_NAMES = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")
MOST_CLASSES = 1_000_000  # that are bare numbers
LABEL_NAMES = ("label", "labels", "class", "cls", "target", "fine_label", "category", "y")


def read_tables(settings: DataSettings, lister: Lister, evaluate: bool = False) -> Splits:
    """The training and validation images at ``--datapath``; to ``evaluate``, the first may be missing (None).

    ``lister`` says where converted files are kept, and tells of it. Raises ``UserError``.
    """
    library()
    root = Path(settings.datapath)
    train, validation = _chosen_splits(root, settings.val_split, evaluate)
    reader = _Reader(root, settings, lister, train or validation)
    values = {found.name: reader.values(found) for found in filter(None, (train, validation))}
    first = train or validation
    classes = classes_of(reader.feature(first), values[first.name], reader.label)
    for found in filter(None, (train, validation)):  # a ClassLabel's numbers mean nothing without its names
        names = getattr(reader.feature(found), "names", None)
        if names and tuple(names) != classes:
            raise UserError(
                f"--datapath {root}: {found.name} has other classes than {first.name}: {some([*names])} instead of "
                f"{some(classes)}"
            )
        if not names and values[first.name].dtype == object and values[found.name].dtype != object:
            raise UserError(
                f"--label-column {reader.label}: holds text in {first.name} and numbers in {found.name}, which do not "
                "say which classes they mean"
            )
    images = {name: reader.images(name, numbers, classes) for name, numbers in values.items()}
    if validation is not None:
        return Splits(images[train.name] if train else None, images[validation.name], classes)
    both = images[train.name]
    labels = both.labels.numpy()
    # Rows have no names. Their numbers stay when others are added behind them.
    keys = (f"{classes[label]}/{number}".encode() for number, label in enumerate(labels.tolist()))
    mask, warnings = held_out(keys, labels, classes, settings)
    parts = [
        ImageFiles(both.paths.take(np.flatnonzero(chosen)), both.labels[torch.from_numpy(chosen)], both.colour)
        for chosen in (~mask, mask)
    ]
    return Splits(*parts, classes, warnings)


def _chosen_splits(root: Path, val_split: float | None, evaluate: bool) -> tuple[Found | None, Found | None]:
    """The splits to train and to validate on; the second is None with ``--val-split``."""
    splits = find(root)
    train = next((splits[name] for name in TRAINING_FOLDERS if name in splits), None)
    validation = next((splits[name] for name in VALIDATION_FOLDERS if name in splits), None)
    there = f" (it holds {some(sorted(splits))})" if splits else ""
    if train is None and not (evaluate and validation):
        raise UserError(
            f"--datapath {root}: holds no training images that save_to_disk wrote, nor in parquet files{there}; "
            f"hf: {SPECS['hf'].source}"
        )
    if validation is not None and val_split is not None:
        raise UserError(f"--val-split: {root} already has {validation.name}; remove the flag")
    if validation is None and val_split is None:
        raise UserError(f"--datapath {root}: holds no validation or test split{there}; give --val-split 0.1")
    return train, validation


class _Reader:
    """Reads splits whose columns are those of ``first``."""

    def __init__(self, root: Path, settings: DataSettings, lister: Lister, first: Found) -> None:
        self._root = root
        self._lister = lister
        self._features = {}
        columns = self._features[first.name] = read_features(first)
        self.image = chosen_column(columns, settings.image_column, "--image-column", f"{root}, {first.name}")
        self.label = chosen_column(columns, settings.label_column, "--label-column", f"{root}, {first.name}")
        self._tables: dict[str, Any] = {}

    def feature(self, found: Found) -> Any:
        """The kind of the labels' column."""
        return self._features[found.name][self.label]

    def values(self, found: Found) -> np.ndarray:
        """The labels as they are stored."""
        if found.name not in self._features:
            self._features[found.name] = read_features(found)
        features = self._features[found.name]
        for column, flag in ((self.image, "--image-column"), (self.label, "--label-column")):
            if column not in features:
                raise UserError(f"{flag} {column}: {self._root}, {found.name} has the columns {', '.join(features)}")
        log = self._lister.progress.log if self._lister.is_main else silent
        table = read_split(found, [self.image, self.label], self._lister.folder, log)
        self._tables[found.name] = table
        return labels_of(table, self.label, found.name)

    def images(self, name: str, values: np.ndarray, classes: tuple[str, ...]) -> ImageFiles:
        """A split's images and labels."""
        labels = torch.from_numpy(numbered(values, classes, self.label, name))
        where = f"{self._root}/{name}"
        paths = Rows(self._tables[name], self.image, where, str(self._root))
        return ImageFiles(paths, labels, SPECS["hf"].colour)


# ------------------------------------------------------------------------------------------ columns


def chosen_column(features: Any, given: str | None, flag: str, where: str) -> str:
    """The column for ``flag``, '--image-column' or '--label-column': as ``given``, or guessed.

    A guess is the only column of the fitting kind, or the first of the usual names among those. Raises ``UserError``.
    """
    named = f"{where} has the columns {', '.join(features)}"
    if given is not None:
        if given not in features:
            raise UserError(f"{flag} {given}: {named}")
        if flag == "--image-column" and not (isinstance(features[given], library().Image) or _holds(features[given])):
            raise UserError(f"{flag} {given}: holds no images but {features[given]}; {named}")
        return given
    certain, possible, names = _candidates(features, flag)
    for candidates in (certain, possible):
        usual = [name for name in names if name in candidates]
        if len(candidates) == 1 or usual:
            return (usual or candidates)[0]
    raise UserError(f"{flag} COLUMN is needed: {named}")


def _candidates(features: Any, flag: str) -> tuple[list[str], list[str], tuple[str, ...]]:
    """Columns that are surely what ``flag`` asks for, those that may be, and the usual names."""
    datasets = library()
    if flag == "--image-column":
        certain = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
        return certain, [name for name, kind in features.items() if name in IMAGE_NAMES and _holds(kind)], IMAGE_NAMES
    certain = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    possible = [name for name, kind in features.items() if name in LABEL_NAMES and isinstance(kind, datasets.Value)]
    return certain, possible, LABEL_NAMES


def _holds(kind: Any) -> bool:
    """Whether a column's cells hold the bytes of files."""
    return "bytes" in kind if isinstance(kind, dict) else getattr(kind, "dtype", "").endswith("binary")


def labels_of(dataset: Any, column: str, where: str) -> np.ndarray:
    """A column as numbers, int64 (n,), or as text, object (n,). Raises ``UserError`` if it holds neither."""
    import pyarrow

    values = dataset.select_columns([column]).with_format("arrow")[:].column(column)
    if values.null_count:
        raise UserError(f"--label-column {column}: {values.null_count:,} rows of {where} have no label")
    kind = values.type
    if pyarrow.types.is_boolean(kind) or pyarrow.types.is_integer(kind):
        return values.to_numpy().astype(np.int64)
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        return np.array(values.to_pylist(), dtype=object)
    raise UserError(f"--label-column {column}: holds {kind} in {where}; one class of each image is needed")


def classes_of(feature: Any, values: np.ndarray, column: str) -> tuple[str, ...]:
    """The classes, in the order of their labels: names of a ClassLabel, all texts sorted, or the numbers up to the
    largest. Raises ``UserError`` for numbers that are those of something else.
    """
    names = getattr(feature, "names", None)
    if names:
        return tuple(map(str, names))
    if values.dtype == object:
        return tuple(sorted(set(values)))
    if getattr(feature, "dtype", "") == "bool":
        return "false", "true"
    count = int(values.max(initial=-1)) + 1
    if count > MOST_CLASSES:
        raise UserError(f"--label-column {column}: holds numbers up to {count - 1:,}; classes are numbers from 0 on")
    return tuple(map(str, range(count)))


def numbered(values: np.ndarray, classes: tuple[str, ...], column: str, where: str) -> np.ndarray:
    """The label of each image, int64 (n,). Raises ``UserError`` for one that is not among ``classes``."""
    if values.dtype == object:
        number = {name: label for label, name in enumerate(classes)}
        labels = np.array([number.get(value, -1) for value in values], dtype=np.int64)
    else:
        labels = values
    strange = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if len(strange):
        raise UserError(
            f"--label-column {column}: {len(strange):,} rows of {where} have a label that is no class, the first "
            f"{values[strange[0]]!s:.40} in row {strange[0]:,} (-1 often stands for unknown)"
        )
    return labels
