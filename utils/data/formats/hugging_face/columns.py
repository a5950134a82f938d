"""The columns of a table that hold image and label, and the classes."""

from __future__ import annotations

from typing import Any

import numpy as np

from utils.config.settings import UserError
from utils.data.formats.hugging_face.files import library

IMAGE_NAMES = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")
MOST_CLASSES = 1_000_000  # that are bare numbers
LABEL_NAMES = ("label", "labels", "class", "cls", "target", "fine_label", "category", "y")


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
