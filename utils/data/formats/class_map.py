"""The order of the classes as given by a file: timm's class maps."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from utils.config.settings import UserError, as_user_error
from utils.config.spelling import some
from utils.data.formats.readers import Images, Splits, class_numbers


def read_class_map(file: Path) -> tuple[str, ...]:
    """Read the classes in the order of their numbers: a name on each line, or a CSV file of ``name,number``.

    Raises ``UserError``.
    """
    where = f"--class-map {file}"
    with as_user_error(f"{where}: cannot be read", (OSError, UnicodeDecodeError)):
        lines = [line for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines)]
    if rows and len(rows[0]) == 2 and not rows[0][1].isdigit():
        rows = rows[1:]  # the names of the columns
    if rows and all(len(row) == 2 and row[1].isdigit() for row in rows):
        numbers = [int(number) for _, number in rows]
        if sorted(numbers) != list(range(len(rows))):
            wrong = next(n for n, number in enumerate(sorted(numbers)) if n != number)
            raise UserError(f"{where}: numbers its classes not from 0 to {len(rows) - 1}, each once: see {wrong}")
        names = [name for _, name in sorted((int(number), name) for name, number in rows)]
    else:
        names = [line.strip() for line in lines]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{where}: names {some(twice)} twice")
    if len(names) < 2:
        raise UserError(f"{where}: names {len(names)} class(es); give a name on each line, or lines name,number")
    return tuple(names)


def in_order_of(file: Path, splits: Splits, classes: Sequence[str] | None = None) -> Splits:
    """Relabel the images by the class map in ``file``; leave out those of other classes, as timm does, and warn.

    ``classes``: those of a checkpoint, whose numbers count in place of the file's.
    """
    both = splits.train, splits.validation
    if any(images is not None and images.labels.ndim > 1 for images in both):
        raise UserError(f"--class-map {file}: orders the classes of images that have one each, and these have several")
    classes = tuple(classes or read_class_map(file))
    labels = torch.from_numpy(class_numbers(splits.classes, classes))
    if (labels < 0).all():
        raise UserError(
            f"--class-map {file}: names none of the data's classes, which are {some(splits.classes)}; its own are "
            f"{some(classes)}"
        )
    parts = [None if images is None else _relabelled(images, labels) for images in both]
    lost = sum(len(images or ()) for images in both) - sum(len(part or ()) for part in parts)
    warnings = splits.warnings
    if lost:
        others = some(name for name, label in zip(splits.classes, labels.tolist(), strict=True) if label < 0)
        warnings = (f"--class-map {file}: does not name {others}, so {lost:,} images are left out", *warnings)
    return splits._replace(train=parts[0], validation=parts[1], classes=classes, warnings=warnings)


def _relabelled(images: Images, labels: torch.Tensor) -> Images:
    """The images with new labels, without those whose class has none. ``labels``: int64 (old classes,), -1 for none."""
    chosen = images.take(np.flatnonzero((labels[images.labels] >= 0).numpy()))
    return replace(chosen, labels=labels[chosen.labels])
