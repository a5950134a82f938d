"""Finding a data set's images below ``--datapath`` and reading them, in whatever form they lie there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from utils.checkpoint.resume import ResumePoint
from utils.config import plugins
from utils.config.datasets import SPECS
from utils.config.groups.data import DataSettings
from utils.config.settings import UserError
from utils.data.decoded import folder_for
from utils.data.formats import archives, class_folders
from utils.data.formats.class_folders import find_splits, hint, training_folder, validation_folder
from utils.data.formats.class_map import in_order_of
from utils.data.formats.hugging_face import SAVED, read_tables
from utils.data.formats.listing import Lister
from utils.data.formats.own import read_own
from utils.data.formats.readers import IN_MEMORY, OWN_FILES, Splits
from utils.data.formats.shards.foreign import compressed_shard, ensure_index
from utils.data.formats.shards.members import holds_shards, read_shards
from utils.data.formats.table import class_names, read_labels
from utils.data.progress_log import Log, silent


def prepare(settings: DataSettings, log: Log, evaluate: bool = False) -> None:
    """Download (``--download``), unpack or index the data set on one rank. ``evaluate``: only what evaluation needs."""
    elsewhere = settings.dataname in ("hf", *plugins.added("dataset"))
    if settings.datapath is None or elsewhere or settings.is_table:
        return
    root = Path(settings.datapath)
    if _holds_shards(settings, root, log):
        return
    if validation_folder(root) if evaluate else find_splits(root):
        return
    if settings.download:
        archives.fetch(settings.dataname, root, log)
    if settings.dataname == "imagenet" and root.is_dir():
        archives.unpack_imagenet(root, ("val",) if evaluate else ("train", "val"), log)


def in_class_folders(settings: DataSettings) -> bool:
    """True if images lie in class folders below ``--datapath``, or in a set's own files there, and in no table."""
    if settings.datapath is None or settings.is_table:
        return False
    read_otherwise = settings.dataname in (*IN_MEMORY, "hf", *plugins.added("dataset"))
    return not read_otherwise and not holds_shards(Path(settings.datapath))


def read_splits(
    settings: DataSettings,
    device: torch.device,
    lister: Lister,
    trained: ResumePoint | None,
    *,
    evaluate: bool = False,
    of_test: bool = False,
    leave_out_unknown: bool = False,
) -> Splits:
    """Read the images that the settings name for ``get_data`` or, with ``evaluate``, for ``get_test_data``."""
    name = settings.dataname
    if name in IN_MEMORY:
        return IN_MEMORY[name](settings, device)
    if name in plugins.added("dataset"):
        return read_own(plugins.added("dataset")[name], settings)
    root = Path(settings.datapath or ".")
    if not root.is_dir():
        what = f"the paths in {settings.labels} are below it" if settings.labels else f"{name}: {SPECS[name].source}"
        if trained is not None and trained.settings.get("datapath") == settings.datapath:
            what = f"the images of {trained.path} were there; if they have moved, give --datapath and their new folder"
        raise UserError(f"--datapath {root}: no such folder; {what}")
    lister = dataclasses.replace(lister, folder=folder_for(settings))
    if name == "hf":
        return read_tables(settings, lister, evaluate)
    splits: Splits | None
    known = trained if evaluate else None
    classes = listed = known.classes if known else None
    if classes and settings.class_map is not None:  # list and leave out images as in training, which numbers them later
        listed = class_names(classes)
        leave_out_unknown = True
    if settings.is_table:
        splits = read_labels(
            settings,
            classes=listed,
            whose=str(known.path) if known else "",
            evaluate=evaluate,
            of_test=of_test,
            leave_out_unknown=leave_out_unknown,
        )
    elif evaluate and not _holds_shards(settings, root) and (folder := _test_folder(settings, root, known)):
        splits = _read_test_folder(settings, folder, known, lister, leave_out_unknown)
    else:
        splits = _read_files(settings, root, lister)
        if splits is None:
            raise UserError(f"--datapath {root}: {_what_is_missing(root, name, evaluate)}")
    return splits if settings.class_map is None else in_order_of(Path(settings.class_map), splits, classes)


def _holds_shards(settings: DataSettings, root: Path, log: Log = silent) -> bool:
    """True if ``root`` holds shards, whose index is first brought up to date: not every tool calls ``prepare``."""
    if settings.dataname == "shards" or holds_shards(root):
        ensure_index(root, log)
    return holds_shards(root)


def _what_is_missing(root: Path, name: str, evaluate: bool) -> str:
    if name == "shards":
        return compressed_shard(root) or (
            "holds neither shards.json nor .tar files whose names hold train and val; scripts/pack.py makes shards of "
            "a data set"
        )
    if training := training_folder(root):
        holds_folders = any(path.is_dir() for path in class_folders.visible(training))
        if class_folders.holds_images(training) and not holds_folders:
            return (
                f"holds {training.name}/ with images, where the class folders of the training images belong; if "
                f"{training.name} is a class, rename it"
            )
        split = " or give --val-split 0.2" if name == "folder" else ""
        return f"holds no val/ or test/ beside {training.name}/; add one{split}"
    advice = hint(root, name, evaluate) or f"{name}: {SPECS[name].source}"
    if name == "imagenet" and archives.has_imagenet(root):
        advice = "a run without --dry-run makes them from the archives that lie there"
    files = {"folder": "", "imagenet": "imagenet, neither its archives nor "}
    own = files.get(name, f"{name}, neither torchvision's files nor ")
    return f"holds no {own}class folders below train/ and val/ or test/; {advice}"


def _refuse_two_sets(root: Path) -> None:
    """Raise ``UserError`` if class folders lie beside the shards."""
    for split in filter(None, (training_folder(root), validation_folder(root))):
        if any(path.is_dir() for path in class_folders.visible(split)):
            raise UserError(
                f"--datapath {root}: holds shards and class folders below {split.name}/; use --dataname shards for the "
                "shards, or move them to a folder of their own"
            )


def _test_folder(settings: DataSettings, root: Path, trained: ResumePoint | None) -> Path | None:
    """The folder of class folders in ``root`` to evaluate; None if ``_read_files`` finds what to read."""
    classes = trained.classes if trained is not None and trained.classes is not None else ()
    if class_folders.is_tree_of(root, classes):
        return root
    if folder := validation_folder(root):
        return folder
    if training_folder(root) or _own_files(settings, root):
        return None
    folders = (path for path in class_folders.visible(root) if path.is_dir())
    return root if any(path.name in classes or class_folders.holds_images(path) for path in folders) else None


def _read_test_folder(
    settings: DataSettings, folder: Path, trained: ResumePoint | None, lister: Lister, leave_out_unknown: bool
) -> Splits:
    if settings.dataname == "imagenet":
        archives.refuse_half_unpacked(folder)
    if trained is not None and trained.classes is not None:
        classes = trained.classes if settings.class_map is None else sorted(trained.classes)
        whose = trained.path
    else:
        whose = training_folder(folder.parent) or folder
        classes = class_folders.class_names(whose)
    return class_folders.read_test_folder(
        folder, classes, str(whose), leave_out_unknown=leave_out_unknown, lister=lister
    )


def _read_files(settings: DataSettings, root: Path, lister: Lister) -> Splits | None:
    """Read the shards, class folders or own files of a data set in ``root``; None if they are missing."""
    name = settings.dataname
    if _holds_shards(settings, root):
        if name != "shards":
            _refuse_two_sets(root)
        if settings.val_split is not None:
            raise UserError(f"--val-split: the shards in {root} already have validation images; remove the flag")
        return read_shards(root, settings.pixel_range, settings.skip_bad_images)
    if name == "shards":
        return None
    splits = find_splits(root)
    if splits and settings.val_split is not None:
        apart = f", or give --datapath {splits[0]}" if splits[1].name.lower() == "test" else ""
        raise UserError(f"--val-split: {root} already has {splits[1].name}/; remove the flag{apart}")
    if splits and (splits[0] / SAVED).is_file():
        raise UserError(f"--datapath {root}: holds tables of Hugging Face's library datasets; use --dataname hf")
    if splits and name == "imagenet":
        for folder in splits:
            archives.refuse_half_unpacked(folder)
    if splits and settings.folds is None:
        return class_folders.read_class_folders(*splits, lister, tells_of_test=name == "folder")
    if splits or (name == "folder" and settings.divides_training):
        tree = training_folder(root) or root
        holds_folders = any(path.is_dir() for path in class_folders.visible(tree))
        return class_folders.read_tree(tree, lister, is_split=tree != root) if holds_folders else None
    place = _own_files(settings, root)
    return None if place is None else OWN_FILES[name].read(place)


def _own_files(settings: DataSettings, root: Path) -> Path | None:
    """The place of the data set's own files in ``root``; None if they are missing."""
    own = OWN_FILES.get(settings.dataname)
    return own.find(root) if own else None
