"""Data sets in class folders: finds the splits, lists their images, and warns about images that are left out."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from utils.config.settings import UserError, as_user_error
from utils.config.spelling import folded, printable, some
from utils.data.formats.file_paths import FilePaths
from utils.data.formats.listing import LINKED, Lister, is_image, no_images
from utils.data.formats.readers import OWN_FILES, ImageFiles, Splits

TRAINING_FOLDERS = ("train", "training")
VALIDATION_FOLDERS = ("val", "valid", "validation", "test")
TEST_FOLDERS = ("test",)
HINTED = 3  # names in a hint, at most
LOOKED_AT = 1000  # entries of a folder, at most, that are checked to see what it holds
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".7z", ".rar")
SETS_BY_FOLDER = {own.folder: name for name, own in OWN_FILES.items()}
LISTER = Lister()  # keeps no list and logs nothing


def folder_of(names: Sequence[str], root: Path) -> Path | None:
    """The folder in ``root`` that has the earliest of ``names``, in upper or lower case; None if there is none."""
    there = sorted(path for path in visible(root) if path.name.lower() in names and path.is_dir())
    return min(there, key=lambda path: names.index(path.name.lower()), default=None)


training_folder = partial(folder_of, TRAINING_FOLDERS)
validation_folder = partial(folder_of, VALIDATION_FOLDERS)  # or the test folder if there is no other
test_folder = partial(folder_of, TEST_FOLDERS)


def find_splits(root: Path) -> tuple[Path, Path] | None:
    """The training folder and the validation folder in ``root``; None if either is missing."""
    training = training_folder(root)
    validation = validation_folder(root)
    return (training, validation) if training and validation else None


def is_tree_of(root: Path, classes: Sequence[str]) -> bool:
    """True if folders in ``root`` named like splits, as CIFAR-100's class 'train', are ``classes`` beside others."""
    there = {path.name for path in visible(root) if path.is_dir()}
    like_splits = {name for name in there if name.lower() in (*TRAINING_FOLDERS, *VALIDATION_FOLDERS)}
    return bool(like_splits) and like_splits <= set(classes) and bool((there - like_splits) & set(classes))


def visible(root: Path) -> Iterator[Path]:
    """The entries of ``root`` that are not hidden; no entries if ``root`` cannot be read."""
    with suppress(OSError), os.scandir(root) as entries:
        yield from (Path(entry) for entry in entries if not entry.name.startswith("."))


# --------------------------------------------------------------------------------------------- splits


def read_class_folders(train: Path, validation: Path, lister: Lister = LISTER, tells_of_test: bool = False) -> Splits:
    """Read two trees with one folder per class; the classes are those of ``train``, in alphabetical order.

    With ``tells_of_test``, warn if the validation folder is named test. Raises ``UserError``.
    """
    classes = class_names(train)
    there = set(class_names(validation))
    if unknown := sorted(there - set(classes)):
        what_to_do = _perhaps(unknown, classes)
        if not what_to_do and len(there) == 1 < len(classes):
            what_to_do = f"; sort its images into folders named like those of {train.name}/"
        raise UserError(f"--datapath: {validation} has classes that {train} lacks: {some(unknown)}{what_to_do}")
    images, unread = image_files(train, classes, lister)
    validation_images, also_unread = image_files(validation, classes, lister, may_lack=True)
    on_test = [
        f"--datapath: there is no val/ beside {train}, so {validation.name}/ chooses best.pt and the end of "
        f"--early-stopping; to keep it for the end: --datapath {train} --val-split 0.2, then scripts/evaluate.py RUN "
        f"--datapath {validation}"
    ]
    warnings = (
        *(on_test if tells_of_test and validation.name.lower() in TEST_FOLDERS else ()),
        *_second_folders(train, TRAINING_FOLDERS, classes),
        *_second_folders(validation, VALIDATION_FOLDERS, classes),
        *deeper(train, images, classes),
        *_left_out(unread + also_unread, train, validation),
    )
    return Splits(images, validation_images, classes, warnings)


def _second_folders(folder: Path, names: Sequence[str], classes: Sequence[str]) -> Iterator[str]:
    """Yield a warning if other folders of the split ``folder``, such as valid/ beside val/, are left out.

    ``names``: those that the split may have. A test/ beside a val/ is left for the end; a folder without ``classes`` or
    images in folders, such as one of logs, is none of a split.
    """
    alike = {*names} - ({*TEST_FOLDERS} if folder.name.lower() not in TEST_FOLDERS else set())
    there = (path for path in visible(folder.parent) if path.name.lower() in alike and path.is_dir())
    others = sorted(path.name for path in there if not path.samefile(folder) and _holds_classes(path, classes))
    if others:
        yield (
            f"--datapath: {folder} is read, and {some(f'{name}/' for name in others)} beside it left out; move the "
            f"images there into {folder.name}/, or elsewhere"
        )


def _holds_classes(folder: Path, classes: Sequence[str]) -> bool:
    """True if one of the first folders in ``folder`` is one of ``classes`` or holds images itself."""
    folders = (path for path in islice(visible(folder), LOOKED_AT) if path.is_dir())
    return any(path.name in classes or holds_images(path) for path in folders)


def _perhaps(unknown: Sequence[str], classes: Sequence[str]) -> str:
    """Words on which classes the ``unknown`` names may mean, as they look alike; '' if none does."""
    known = {folded(name): name for name in classes}
    alike = [(name, known[folded(name)]) for name in unknown if folded(name) in known]
    if not alike:
        return ""
    accents = any(name.casefold() != other.casefold() for name, other in alike)
    cause = ", whose accents are other characters, as macOS writes them: rename one" if accents else ""
    return f"; perhaps {some(f'{name} for {other}' for name, other in alike)}{cause}"


def read_test_folder(
    folder: Path,
    classes: Sequence[str],
    whose: str,
    *,
    leave_out_unknown: bool = False,
    lister: Lister = LISTER,
) -> Splits:
    """Read a tree to evaluate. Its folders must be ``classes``, of which some may be missing. Raises ``UserError``.

    With ``leave_out_unknown``, other folders are left out with a warning, but at least one must be among ``classes``.
    ``whose``: the owner of ``classes``, such as a checkpoint, for messages.
    """
    there = set(class_names(folder))
    unknown = sorted(there - set(classes))
    if unknown and not (leave_out_unknown and there & set(classes)):
        raise UserError(
            f"--datapath: {folder} has folders that are no classes of {whose}: {some(unknown)}; those are "
            f"{some(classes)}{_perhaps(unknown, classes)}"
        )
    images, unread = image_files(folder, classes, lister, may_lack=True)
    perhaps = _perhaps(unknown, classes)
    left_out = [f"--datapath {folder}: folders that are no classes of {whose} are left out: {some(unknown)}{perhaps}"]
    return Splits(None, images, tuple(classes), (*(left_out if unknown else ()), *_left_out(unread, folder)))


def read_tree(root: Path, lister: Lister = LISTER, is_split: bool = False) -> Splits:
    """Read a tree of training images, some of which will later be taken for validation. Raises ``UserError``.

    With ``is_split``, ``root`` was found by its name, and a warning tells of other folders of that split.
    """
    classes = class_names(root)
    _refuse_split_among(root, classes)
    images, unread = image_files(root, classes, lister)
    warnings = (
        *(_second_folders(root, TRAINING_FOLDERS, classes) if is_split else ()),
        *like_splits(root, classes),
        *deeper(root, images, classes),
        *_left_out(unread, root),
    )
    return Splits(images, None, classes, warnings)


def like_splits(root: Path, classes: Sequence[str]) -> Iterator[str]:
    """Yield a warning if classes are named like splits: they may be images without labels."""
    if names := [name for name in classes if name.lower() in VALIDATION_FOLDERS]:
        yield (
            f"--datapath: {some(names)} in {root} is taken for a class and trained on; if it is not one, move it "
            f"out of {root}"
        )


# ---------------------------------------------------------------------------------- what lies in a tree


def _refuse_split_among(root: Path, classes: Sequence[str]) -> None:
    """Raise ``UserError`` for folders such as test/cat/ beside cat/: test would be a class and be trained on."""
    for split in (name for name in classes if name.lower() in VALIDATION_FOLDERS):
        if inside := [name for name in classes if (root / split / name).is_dir()]:
            raise UserError(
                f"--datapath: {root} holds {split}/{inside[0]}/ beside {inside[0]}/, so {split} would be a class; move "
                f"{root / split} out of {root}, and evaluate it with scripts/evaluate.py RUN --datapath FOLDER"
            )


def class_names(root: Path) -> tuple[str, ...]:
    """Names of the visible folders in ``root``, in alphabetical order. Raises ``UserError`` if there are none."""
    with as_user_error(f"--datapath {root}: cannot be read"), os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise UserError(f"--datapath {root}: holds no class folders; put each class's images in a folder of its name")
    return tuple(names)


def image_files(
    root: Path, classes: Sequence[str], lister: Lister, may_lack: bool = False
) -> tuple[ImageFiles, Counter[str]]:
    """List the images below the folders ``classes`` of ``root``, by class and name; count unread images by ending.

    Raises ``UserError`` if a class has no images; with ``may_lack``, only if no class has any.
    """
    there = class_names(root)
    if not set(there) <= set(classes):  # the others may be large and are not listed, so no list is kept
        there = tuple(name for name in there if name in classes)
        lister = dataclasses.replace(lister, folder=None)
    listing = lister.list(root, there)
    paths, labels, unread = listing.of(classes)
    empty = np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0)
    if len(empty) and not may_lack:
        name = classes[empty[0]]
        raise UserError(f"--datapath: {root / name} {no_images(listing.of([name])[2])}")
    if len(empty) and not len(paths):
        raise UserError(f"--datapath: {root} {no_images(unread)}")
    return ImageFiles(paths, torch.from_numpy(labels)), unread


def holds_images(folder: Path) -> bool:
    """True if images are among the first entries of ``folder``."""
    return any(is_image(path.name) for path in islice(visible(folder), LOOKED_AT))


def deeper(tree: Path, images: ImageFiles, classes: Sequence[str]) -> list[str]:
    """A warning if all images in ``tree`` lie deeper than its class folders: inner folders may be meant as classes."""
    assert isinstance(images.paths, FilePaths)
    if images.paths.in_one_level or any(path.count(b"/") == 1 for path in images.paths.below()):
        return []
    return [
        f"--datapath: no class folder in {tree} holds images itself, only its folders do ({images.paths[0]} ...); the "
        f"classes are {some(classes)}"
    ]


def _left_out(endings: Counter[str], *trees: Path) -> Iterator[str]:
    """Yield warnings about images in ``trees`` that are not read; ``endings``: see ``unread_images``."""
    yield from unread_images(endings, " and ".join(map(str, trees)), "inside the classes ")
    for tree in trees:
        if loose := sum(is_image(path.name) and path.is_file() for path in visible(tree)):
            yield (
                f"--datapath: {tree} holds {loose:,} images beside its class folders, which are left out; move each "
                "into the folder of its class"
            )


def unread_images(endings: Counter[str], where: str, inside: str = "") -> Iterator[str]:
    """Yield warnings about files that are not read, by ``endings`` (see ``left_out``, ``LINKED``).

    ``where``: the folders, as text; ``inside``: in which part of them links were looked for.
    """
    if linked := endings[LINKED]:
        yield (
            f"--datapath: {linked:,} link(s) to folders {inside}below {where} are not followed, as they may loop, so "
            "the images there are left out; put folders in their place, or links to files"
        )
    if others := sorted((ending, count) for ending, count in endings.items() if ending != LINKED):
        counts = ", ".join(f"{count:,} {ending}" for ending, count in others)
        yield f"--datapath: files below {where} are left out: {counts}; convert them to .jpg or .png files"


# ------------------------------------------------------------------------- what else lies in a wrong folder


def hint(root: Path, name: str, evaluate: bool = False) -> str:
    """A hint at what ``root`` holds instead of data set ``name``, and what to do; '' if unclear.

    ``evaluate``: True if the data set was to be evaluated, not trained on.
    """
    entries = sorted(islice(visible(root), LOOKED_AT))
    folders = [path for path in entries if path.is_dir()]
    if root.resolve().name.lower() in (*TRAINING_FOLDERS, *VALIDATION_FOLDERS) and find_splits(root.resolve().parent):
        return f"it is one of two splits: use --datapath {root.parent if root.name not in ('', '.', '..') else '..'}"
    if find_splits(root):
        return ""  # both splits are there, but with too few classes
    if validation := validation_folder(root):
        return f"it holds {validation.name}/ and no train/: add it (only --evaluate needs none)"
    if inner := [folder for folder in folders if find_splits(folder)]:
        splits = [path for folder in inner for path in find_splits(folder) or ()]
        return f"it holds {_names(root, splits)}: use --datapath {inner[0]}"
    if named := [path for path in folders if SETS_BY_FOLDER.get(path.name, name) != name]:
        return f"it holds {_names(root, named)}/: use --dataname {SETS_BY_FOLDER[named[0].name]}"
    if classes := [folder for folder in folders if holds_images(folder)]:
        own = "add --val-split 0.2" if name == "folder" else "put such folders into train/ and val/"
        return f"it holds {_names(root, classes, '/')}: {own}"
    for folder in folders:
        if classes := [path for path in sorted(visible(folder)) if path.is_dir() and holds_images(path)]:
            share = "" if evaluate else " --val-split 0.2"
            return f"it holds {_names(root, classes, '/')}: use --datapath {folder}{share}"
    if loose := [path for path in entries if is_image(path.name)]:
        return f"it holds {_names(root, loose)}: put each class's images into a folder of the class's name"
    if packed := [path for path in entries if path.name.lower().endswith(ARCHIVES)]:
        return f"it holds {_names(root, packed)}: unpack it first"
    return ""


def _names(root: Path, paths: Sequence[Path], mark: str = "") -> str:
    more = ", ..." if len(paths) > HINTED else ""
    return ", ".join(printable(os.path.relpath(path, root)) + mark for path in paths[:HINTED]) + more
