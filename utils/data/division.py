"""How images are divided into those to train on and those to validate on, and what is doubtful about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from utils.config.groups.data import DataSettings
from utils.config.settings import UserError, as_flag
from utils.config.spelling import counted, some
from utils.data import first_look
from utils.data.formats.readers import ImageFiles, Images, class_counts

DIVISION = ("val_split", "val_split_by", "folds", "fold", "fold_seed")  # settings that hold out training images


def division_flags(division: Mapping[str, Any]) -> str:
    """The flags that hold out validation images by the settings ``division``, without those at their defaults."""
    given = {name: division[name] for name in DIVISION if division[name] != getattr(DataSettings, name)}
    return " ".join(as_flag(name, value) for name, value in given.items())


def lacking(
    settings: DataSettings, train: Images | None, validation: Images, classes: tuple[str, ...]
) -> Iterator[str]:
    """Warnings about classes without a validation or a training image."""
    where = division_flags(dataclasses.asdict(settings)) if settings.folds else place_of(settings)

    def line(concerned: np.ndarray, words: str, advice: str = "") -> Iterator[str]:
        if concerned.any():
            said = words.format(f"{concerned.sum()} of {len(classes)} classes")
            yield f"{where}: {said}: {some(classes[label] for label in np.flatnonzero(concerned))}{advice}"

    validated = class_counts(validation.labels, len(classes))
    in_groups = settings.val_split is not None and isinstance(train, ImageFiles) and train.groups is not None
    spread = "; --folds spreads each class's groups as evenly as it can, if there are enough" if in_groups else ""
    yield from line(validated == 0, "{} have no validation image, and the results say nothing about them", spread)
    if train is None:
        return
    trained = class_counts(train.labels, len(classes))
    held_out = (trained == 0) & (validated > 0) & settings.divides_training
    yield from line(held_out, "all images of {} are held out, so that none is trained on and each counts as a mistake")
    yield from line((trained == 0) & ~held_out, "{} have no training image and cannot be learned")


def on_both_sides(train: Images | None, held_out: Images, kind: str = "validation") -> Iterator[str]:
    """Yield a warning if some groups have images in training and among those ``held_out``, of this ``kind``."""
    if train is None or train.groups is None or held_out.groups is None:
        return
    trained = set(train.groups)
    shared = [group for group in held_out.groups if group in trained]
    if shared:
        yield (
            f"--group-column: {counted(len(set(shared)), 'group')} with images in training and in {kind}, "
            f"{100 * len(shared) / len(held_out):.1f} % of the {kind} images, so that the results flatter: "
            f"{some(sorted(set(shared)))}; --folds and --val-split keep each group on one side"
        )


def groups_alike(*splits: Images | None) -> Iterator[str]:
    """Yield a warning if the names of some groups seem to be one name that is written in several ways."""
    names = {group for images in splits if images is not None and images.groups is not None for group in images.groups}
    if several := first_look.alike(sorted(names)):
        yield (
            f"--group-column: {counted(sum(map(len, several)), 'group')} with names that differ only by "
            f"{first_look.WHAT_MAY_DIFFER}: "
            f"{some([' and '.join(map(repr, same)) for same in several], 3)}; write one name, or one of them may be "
            "trained on while the other is validated"
        )


def refuse_without_labels(settings: DataSettings, *splits: Images | None) -> None:
    """Raise ``UserError`` if no image of a split has a label: there would be nothing to learn or to score."""
    for images, words in zip(splits, ("to train on", "to validate on"), strict=True):
        if images is not None and not (images.labels == 1).any():
            raise UserError(f"--datapath {settings.datapath}: no image {words} has a label")


def place_of(settings: DataSettings) -> str:
    """The flag that says where the images lie, for messages."""
    return f"--datapath {settings.datapath}" if settings.datapath else f"--dataname {settings.dataname}"
