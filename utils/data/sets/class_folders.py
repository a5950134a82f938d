"""Data sets as class folders: finding the splits, listing their images, and telling what is left out."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from utils.config.settings import UserError
from utils.data.sets.readers import ImageFiles, Splits

TRAINING_FOLDERS = ("train", "training")
VALIDATION_FOLDERS = ("val", "valid", "validation", "test")
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
UNREAD_ENDINGS = (
    ".gif", ".heic", ".heif", ".avif", ".jfif", ".jpe", ".jp2", ".jxl", ".svg", ".psd", ".tga", ".ico", ".dng", ".raw",
    ".cr2", ".nef", ".arw", ".dcm", ".nii", ".exr",
)  # fmt: skip  # of images, too, but left out
SHOWN = 10  # names in a line
LOOKED_AT = 1000  # entries of a folder whose kind is in question


def training_folder(root: Path) -> Path | None:
    """The folder of the training images below ``root``, whatever the case of its name."""
    return _folder(root, TRAINING_FOLDERS)


def validation_folder(root: Path) -> Path | None:
    """The folder of the validation images below ``root``; that of test images does instead."""
    return _folder(root, VALIDATION_FOLDERS)


def _folder(root: Path, names: Sequence[str]) -> Path | None:
    there = sorted(path for path in visible(root) if path.name.lower() in names and path.is_dir())
    return min(there, key=lambda path: names.index(path.name.lower()), default=None)


def find_splits(root: Path) -> tuple[Path, Path] | None:
    """The training and the validation folder below ``root``, None when one is missing."""
    training, validation = training_folder(root), validation_folder(root)
    return (training, validation) if training and validation else None


def visible(root: Path) -> Iterator[Path]:
    """What lies in ``root``, hidden names left out; nothing where it cannot be read."""
    with suppress(OSError), os.scandir(root) as entries:
        yield from (Path(entry) for entry in entries if not entry.name.startswith("."))


# --------------------------------------------------------------------------------------------- splits


def read_class_folders(train: Path, validation: Path, colour: str) -> Splits:
    """Two trees with a folder a class; the classes are the training tree's, in alphabetical order."""
    classes = class_names(train)
    unknown = sorted(set(class_names(validation)) - set(classes))
    if unknown:
        raise UserError(f"--datapath: {validation} has classes that {train} lacks: {some(unknown)}")
    left_out: Counter[str] = Counter()
    images = (
        image_files(train, classes, colour, left_out),
        image_files(validation, classes, colour, left_out, may_lack=True),
    )
    return Splits(*images, classes, (*_deeper(train, images[0], classes), *_left_out(left_out, train, validation)))


def read_test_folder(folder: Path, classes: Sequence[str], colour: str, whose: str) -> Splits:
    """One tree to evaluate, whose folders are among ``classes``; some may be missing. ``whose`` classes they are."""
    there = set(class_names(folder))
    unknown = sorted(there - set(classes))
    if unknown:
        raise UserError(
            f"--datapath: {folder} has folders that are no classes of {whose}: {some(unknown)}; those are "
            f"{some(classes)}"
        )
    labels = [label for label, name in enumerate(classes) if name in there]
    left_out: Counter[str] = Counter()
    images = image_files(folder, [classes[label] for label in labels], colour, left_out, may_lack=True)
    images = dataclasses.replace(images, labels=torch.tensor(labels)[images.labels])
    return Splits(None, images, tuple(classes), _left_out(left_out, folder))


def split_class_folders(root: Path, share: float, colour: str) -> Splits:
    """One tree, of each class the same share to validate on, chosen once and for all."""
    classes = class_names(root)
    left_out: Counter[str] = Counter()
    everything = image_files(root, classes, colour, left_out)
    labels = everything.labels.numpy()
    chosen = np.zeros(len(labels), dtype=bool)
    generator = np.random.Generator(np.random.Philox(key=[0, 0]))
    for label, name in enumerate(classes):
        members = np.flatnonzero(labels == label)
        count = round(share * len(members))
        if not 0 < count < len(members):
            raise UserError(
                f"--val-split {share:g}: leaves class {name} ({len(members)} images) without training or validation "
                "images"
            )
        chosen[generator.permutation(members)[:count]] = True
    parts = (
        ImageFiles([everything.paths[i] for i in np.flatnonzero(mask)], torch.from_numpy(labels[mask]), colour)
        for mask in (~chosen, chosen)
    )
    return Splits(*parts, classes, (*_deeper(root, everything, classes), *_left_out(left_out, root)))


# ---------------------------------------------------------------------------------- what lies in a tree


def class_names(root: Path) -> tuple[str, ...]:
    """The folders below ``root``, hidden ones left out, in alphabetical order."""
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"--datapath {root}: cannot be read ({error.strerror})") from error
    if not names:
        raise UserError(f"--datapath {root}: holds no class folders; put each class's images in a folder of its name")
    return tuple(names)


def image_files(
    root: Path, classes: Sequence[str], colour: str, left_out: Counter[str] | None = None, may_lack: bool = False
) -> ImageFiles:
    """All images below the folders ``classes`` of ``root``, by class and name. Raises ``UserError`` for an empty one.

    ``left_out`` counts the endings of images that are not read. ``may_lack``: only a tree without any image is empty.
    """
    left_out = Counter() if left_out is None else left_out
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = list(_images_below(os.path.join(root, name), left_out))
        if not found and not may_lack:
            raise UserError(f"--datapath: {root / name} holds no images ({', '.join(IMAGE_ENDINGS)})")
        paths += sorted(found)
        labels += [label] * len(found)
    if not paths:
        raise UserError(f"--datapath: {root} holds no images ({', '.join(IMAGE_ENDINGS)})")
    return ImageFiles(paths, torch.tensor(labels), colour)


def _images_below(folder: str, left_out: Counter[str]) -> Iterator[str]:
    """The images in ``folder`` and below. Links to folders are not followed, for they may loop.

    What is no file, a pipe for example, is passed over: reading it could take forever. A link to nowhere is not, so
    that it is told of. A folder that is not there has none.
    """
    if not os.path.isdir(folder):
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _images_below(entry.path, left_out)
                continue
            if entry.name.startswith("."):
                continue
            if not is_image(entry.name):
                left_out.update(unread_ending(entry.name))
            elif entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path)):
                yield entry.path


def holds_images(folder: Path) -> bool:
    """Whether there are images among the first entries of ``folder``."""
    return any(is_image(path.name) for path in islice(visible(folder), LOOKED_AT))


def is_image(name: str) -> bool:
    """Whether a file of this name is read."""
    return name.lower().endswith(IMAGE_ENDINGS)


def unread_ending(name: str) -> list[str]:
    """The ending of a file that is an image, too, but is not read; else nothing."""
    return [ending for ending in UNREAD_ENDINGS if name.lower().endswith(ending)]


def _deeper(tree: Path, images: ImageFiles, classes: Sequence[str]) -> list[str]:
    """A line when the folders in ``tree`` hold folders only, which may be the classes that were meant."""
    if any(os.path.dirname(os.path.dirname(path)) == str(tree) for path in images.paths):
        return []
    return [
        f"--datapath: no class folder in {tree} holds images itself, only its folders do ({images.paths[0]} ...); the "
        f"classes are {some(classes)}"
    ]


def _left_out(endings: Counter[str], *trees: Path) -> tuple[str, ...]:
    """The images of ``trees`` that are not read, in a line of each kind."""
    lines = []
    if endings:
        counts = ", ".join(f"{count:,} {ending}" for ending, count in sorted(endings.items()))
        where = " and ".join(map(str, trees))
        lines.append(f"--datapath: images below {where} are left out: {counts}; convert them to JPEG or PNG")
    for tree in trees:
        loose = sum(is_image(path.name) and path.is_file() for path in visible(tree))
        if loose:
            lines.append(
                f"--datapath: {tree} holds {loose:,} images beside its class folders, which are left out; move each "
                "into the folder of its class"
            )
    return tuple(lines)


def some(names: Sequence[str]) -> str:
    """The first of ``names``, in characters that a terminal shows, and how many more there are."""
    shown = ", ".join(map(printable, names[:SHOWN]))
    return shown + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")


def printable(text: str) -> str:
    """A file's or class's name in characters that a terminal shows."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
