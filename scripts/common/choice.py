"""Choice of the images to run a trained network on, and doubts about what results on them would say."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from models.load import Loaded
from utils.checkpoint.fingerprint import same_images
from utils.checkpoint.resume import ResumePoint, is_at
from utils.config import arguments, plugins
from utils.config.groups.data import DataSettings
from utils.config.settings import Settings, UserError
from utils.config.spelling import counted, printable
from utils.data.data_set import Data, in_colour_of
from utils.data.datasets import get_data, get_test_data
from utils.data.division import groups_alike, on_both_sides
from utils.data.first_look import COMPARED_FILES, copies_in, lost_levels
from utils.data.formats.class_folders import find_splits, test_folder, training_folder, validation_folder
from utils.data.formats.hugging_face import find
from utils.data.formats.readers import IN_MEMORY, ImageFiles, Images
from utils.data.formats.table import NO_COLUMN, column_names
from utils.data.images.decoding import for_people, open_image
from utils.data.loaders import tried_out
from utils.data.sampling import first_samples
from utils.data.splits import in_class_folders

WITHOUT_COLUMN = {  # what follows for an evaluation
    "split": "a column of the usual name says the splits, or else all rows count, also those that the run trained on",
    "group": "each image counts for itself",
}


@dataclass(frozen=True)
class Chosen:
    """Choice of images, and of how a network is run on them; None: as in the network's training run.

    ``split``: 'train', 'test', or 'val', which main.py validates on. ``datapath``: class folders to read instead of the
    run's data, or with ``labels`` the images of that table; ``files``: unlabelled images to read instead, labelled as
    the first class, or with none of several labels. ``most``: number of images to draw at random. ``batch_size``:
    images per forward pass. ``tta``: as main.py's --tta.
    """

    split: str = "val"
    datapath: str | None = None
    labels: str | None = None
    files: tuple[str, ...] | None = None
    most: int | None = None
    device: str = "auto"
    amp: str | None = None
    batch_size: int | None = None
    tta: str | None = None
    workers: str | None = None
    skip_bad_images: bool = False
    progress: bool = True

    @classmethod
    def of(cls, own: argparse.Namespace) -> Chosen:
        """Choice made by a tool's command line."""
        return cls(**{field.name: getattr(own, field.name) for field in fields(cls) if hasattr(own, field.name)})

    @property
    def may_be_new(self) -> bool:
        """True for images that the run has neither trained nor validated on, as far as the choice tells."""
        return self.datapath is not None or self.files is not None or self.split == "test"


def settings_of(loaded: Loaded, chosen: Chosen) -> Settings:
    """The run's settings, replaced by those of ``chosen`` where given. Raises ``UserError``.

    They are for one process, so that any number of ranks computes the same batches; a batch has as many images as a
    forward pass of one process of the run. Files are decoded on the CPU if ``--decode gpu`` cannot work.
    """
    flags = [(name, getattr(chosen, name)) for name in ("datapath", "labels", "device", "amp", "tta", "workers")]
    flags.append(("val-batch-size", chosen.batch_size))
    line = [f"--{name}={value}" for name, value in flags if value is not None]
    line += ["--skip-bad-images"] * chosen.skip_bad_images
    begun = point_of(loaded).settings
    if chosen.labels is not None:  # which say the classes instead
        begun.pop("class_from_name", None)
        line.append("--dataname=folder")
    for role in _lacked(begun, _other_table(loaded, chosen)):  # its splits may have the usual name
        begun[f"{role}_column"] = None if role == "split" else NO_COLUMN
    batch_size = begun.get("val_batch_size") or loaded.settings.get("batch_size")
    if batch_size is not None:  # otherwise one process would get the global batch, which the run's processes shared
        begun["val_batch_size"] = batch_size
    if chosen.skip_bad_images or chosen.device == "cpu" or not torch.cuda.is_available():
        begun.pop("decode", None)
    args = arguments.parse(["--evaluate", f"--resume={loaded.path}", *line], checkpoint=begun)
    if loaded.reading.several:
        args.refuse_for_several_labels("tta")
    return args


def _lacked(settings: Mapping[str, Any], table: str | None) -> dict[str, str]:
    """Columns, by role, that a run's ``settings`` name and ``table`` lacks, but that evaluation can do without."""
    named = {role: settings.get(f"{role}_column") for role in ("split", "group", "weight")}
    named = {role: name for role, name in named.items() if name not in (None, NO_COLUMN)}
    if table is None or not named:
        return {}
    there = column_names(table)
    return {role: name for role, name in named.items() if name not in there}


def _other_table(loaded: Loaded, chosen: Chosen) -> str | None:
    """The table of labels that ``chosen`` means instead of that of ``loaded``'s run.

    If the run's table lay among its images, that of a ``datapath`` lies there, too.
    """
    place = loaded.settings.get("datapath")
    table = loaded.settings.get("labels")
    if chosen.labels is not None or chosen.datapath is None:
        return chosen.labels
    if place is None or table is None or not Path(table).is_relative_to(place):
        return None
    moved = Path(chosen.datapath, Path(table).relative_to(place))
    return str(moved) if moved.is_file() else None


def point_of(loaded: Loaded) -> ResumePoint:
    """A ``ResumePoint`` with the checkpoint's settings, classes, data and progress."""
    state = {"settings": loaded.settings, "classes": [*loaded.classes], "fingerprint": loaded.fingerprint}
    return ResumePoint(loaded.path, {**state, "seen": loaded.seen, "progress": loaded.progress or {}}, digest="")


def read_images(loaded: Loaded, args: Settings, chosen: Chosen, device: torch.device) -> tuple[Images, tuple[str, ...]]:
    """Chosen images, labelled by the network's classes, and notes about what is missing or left out."""
    if chosen.files is not None:
        several = loaded.reading.several
        shape = (len(chosen.files), len(loaded.classes)) if several else (len(chosen.files),)
        no_class = torch.zeros(shape, dtype=torch.int8 if several else torch.int64)
        return ImageFiles(list(chosen.files), no_class, loaded.preprocessing.colour), ()
    settings = args.data
    if chosen.datapath is not None:  # it may be laid out as the run's own images were, or else in class folders
        root = Path(chosen.datapath)
        tables = settings.dataname == "hf"
        takes_no_path = settings.dataname in plugins.added("dataset") and loaded.settings.get("datapath") is None
        if settings.dataname in IN_MEMORY or takes_no_path or (tables and not (root.is_dir() and find(root))):
            settings = dataclasses.replace(settings, dataname="folder")
        if chosen.labels is None:
            settings = dataclasses.replace(settings, labels=_other_table(loaded, chosen))
        if settings.class_from_name is not None and _holds_class_folders(root, loaded.classes):
            settings = dataclasses.replace(settings, class_from_name=None)
        data, changed = _data_of_run(loaded, settings, chosen) if chosen.split == "train" else (None, "")
        if data is not None and data.train is not None and not changed:  # the run's own, in another place
            samples, left_out = _trained_on(len(data.train), args)
            images = in_colour_of(loaded.preprocessing, data.train)
            return images.take(samples) if left_out else images, (*data.warnings, *left_out)
    tree = _tree(settings, chosen)
    if tree is not None:
        settings = dataclasses.replace(settings.undivided, datapath=str(tree))
    if chosen.split == "train" and tree is None:
        data = get_data(settings, device, trained=point_of(loaded))
        images = data.train
        notes = data.warnings
        if not same_images(data.fingerprint, loaded.fingerprint):
            notes = (f"the data set holds other images than {loaded.path} was trained on", *notes)
    else:
        data = get_test_data(
            settings,
            device,
            point_of(loaded),
            division_is_explicit=False,
            leave_out_unknown=True,
            of_test=settings.is_table and chosen.split == "test",
        )
        images = data.validation
        notes = (*_known(data.seen, loaded, args.data, chosen), *data.warnings)
    if data.multilabel != loaded.reading.several:
        words = ("one label each", "several labels each")
        raise UserError(
            f"--datapath {settings.datapath}: its images have {words[data.multilabel]}, and {loaded.path} gives "
            f"{words[loaded.reading.several]}"
        )
    if data.classes != loaded.classes:
        raise UserError(f"{loaded.path}: its classes are not those of {settings.dataname}; give --datapath FOLDER")
    return in_colour_of(loaded.preprocessing, images), notes


def _known(seen: str, loaded: Loaded, settings: DataSettings, chosen: Chosen) -> list[str]:
    """``seen``, unless --split train says it; of training images in their own place, whether something has changed."""
    if chosen.split != "train":
        return [seen] if seen else []
    if not is_at(point_of(loaded).state, settings):
        return []
    data, changed = _data_of_run(loaded, settings, chosen)
    if data is not None and not changed:
        return []
    return [f"the training or validation images have changed since {loaded.path} was trained"]


def _data_of_run(loaded: Loaded, settings: DataSettings, chosen: Chosen) -> tuple[Data | None, str]:
    """The data of ``loaded``'s run, where it was or where ``chosen`` says, and words if it has changed since."""
    for place in dict.fromkeys((settings.datapath, chosen.datapath or settings.datapath)):
        try:
            own = dataclasses.replace(settings, datapath=place)
            data = get_data(own, torch.device("cpu"), trained=point_of(loaded))
        except UserError:
            continue
        is_same = same_images(data.fingerprint, loaded.fingerprint)
        if is_same or place == settings.datapath:
            return data, "" if is_same else " (if it was there then: the data has changed since)"
    return None, ""


def _holds_class_folders(root: Path, classes: Sequence[str]) -> bool:
    """True if a folder named after one of ``classes`` lies in ``root``, or in its folder of a split."""
    trees = filter(None, (root, training_folder(root), validation_folder(root), test_folder(root)))
    return any((tree / name).is_dir() for tree in trees for name in classes)


def _tree(settings: DataSettings, chosen: Chosen) -> Path | None:
    """Class folders of a split; None for validation, or if the data set's own reader finds the images.

    Raises ``UserError`` if there are no such folders.
    """
    if chosen.split == "val" or settings.is_table or (settings.dataname == "hf" and chosen.split == "train"):
        return None
    is_share = settings.divides_training or settings.train_samples is not None
    if chosen.split == "train" and chosen.datapath is None and is_share:
        return None  # a share of the images, which a fingerprint must prove unchanged
    root = Path(settings.datapath or "")
    in_shards = settings.dataname == "shards" and chosen.datapath is None  # perhaps without an index
    has_folders = in_class_folders(settings) and not in_shards
    if has_folders and not root.is_dir():
        raise UserError(f"--split {chosen.split}: {root} is no longer there; --datapath FOLDER names another place")
    tree = (test_folder if chosen.split == "test" else training_folder)(root) if has_folders else None
    if tree is None and chosen.datapath is not None:
        raise UserError(
            f"--split {chosen.split}: {chosen.datapath} holds no {chosen.split}/; without the flag, its own class "
            "folders are read"
        )
    if tree is None and chosen.split == "test":
        if has_folders and (settings.val_split or find_splits(root)):
            raise UserError(
                f"--split test: {settings.datapath} holds no test/; --datapath FOLDER evaluates other class folders"
            )
        raise UserError(f"--split test: {settings.dataname} has no test images besides those of --split val")
    return tree


def samples_of(count: int, args: Settings, chosen: Chosen) -> tuple[np.ndarray, list[str]]:
    """Indices of the images to predict, of ``count`` in the split, and lines about images that are left out.

    Training images that --train-samples kept out of the run are left out.
    """
    samples, notes = np.arange(count), []
    if chosen.split == "train" and chosen.datapath is None:
        samples, notes = _trained_on(count, args)
    if chosen.most is not None:
        samples = samples[tried_out(len(samples), chosen.most)]
    return samples, notes


def _trained_on(count: int, args: Settings) -> tuple[np.ndarray, list[str]]:
    """Indices of the images that the run trained on, of ``count`` training images, and a line about the others."""
    samples = first_samples(count, args)
    if len(samples) == count:
        return samples, []
    left_out = f"{count - len(samples):,} training images, on which the run did not train, are left out"
    return samples, [f"--train-samples {len(samples):,}: {left_out}"]


def ids_of(images: Images, split: str, numbers: np.ndarray) -> list[str]:
    """Paths of the images with these ``numbers`` in a split, or for images in memory names such as 'val[17]'."""
    files = images.paths if isinstance(images, ImageFiles) else None
    return [files[number] if files else f"{split}[{number}]" for number in numbers.tolist()]


def picture(images: Images, number: int) -> Image.Image:
    """Whole image ``number`` of a data set, upright, in mode 'L' or 'RGB'. Raises ``UnreadableImage``."""
    if isinstance(images, ImageFiles):
        return open_image(images.paths[number], images.colour)
    return for_people(images.pixels[number % len(images.pixels)].permute(1, 2, 0).cpu().numpy())


def validated_on(own: argparse.Namespace | Chosen, settings: Mapping[str, Any]) -> bool:
    """True if the images to evaluate are those that the run with these ``settings`` validated on.

    It does not matter which flags choose them. A run with --folds validated on a part of its training images.
    """
    labels = settings.get("labels")
    if own.labels is not None and (labels is None or os.path.realpath(own.labels) != os.path.realpath(labels)):
        return False
    if own.datapath is None and own.split == "val":
        return True
    place = settings.get("datapath")
    if own.split == "train" or not isinstance(place, str):
        return False
    root = Path(own.datapath or place)
    its_root = Path(place)
    if settings.get("folds") is not None:
        return own.split == "val" and os.path.realpath(root) == os.path.realpath(its_root)
    read = test_folder(root) if own.split == "test" else validation_folder(root) or root
    theirs = validation_folder(its_root) or its_root  # test/ if there is no val/
    return read is not None and os.path.realpath(read) == os.path.realpath(theirs)


def doubts(images: Images, loaded: Loaded, args: Settings, chosen: Chosen, read_for_other: bool) -> Iterator[str]:
    """Yield warnings about images that may be new to the run. ``read_for_other``: they are those of another network."""
    table = _other_table(loaded, chosen)
    for role, name in _lacked(loaded.settings, table).items() if not read_for_other else ():
        if role in WITHOUT_COLUMN:
            yield f"{table}: has no column {name}, the run's --{role}-column, so {WITHOUT_COLUMN[role]}"
    if isinstance(images, ImageFiles) and chosen.may_be_new:
        yield from lost_levels(images, loaded.classes, args.data.datapath)
        if not read_for_other:  # otherwise ``loaded`` has the other run's data
            yield from seen_before(images, loaded, chosen)


def seen_before(images: Images, loaded: Loaded, chosen: Chosen) -> Iterator[str]:
    """Yield warnings if ``loaded``'s run trained on some of ``images``, or their groups, or was chosen by some."""
    args = settings_of(loaded, Chosen())
    is_large = len(images) > COMPARED_FILES and images.groups is None
    if chosen.files is not None or chosen.split == "train" or args.data.dataname in (*IN_MEMORY, "hf") or is_large:
        return
    data, changed = _data_of_run(loaded, args.data, chosen)
    if data is None or not isinstance(data.train, ImageFiles) or not isinstance(images, ImageFiles):
        return
    train = data.train.take(first_samples(len(data.train), args))
    for split, verb in ((train, "trained on"), (data.validation, "chosen by its result on")):
        if split is not train and not loaded.is_favoured:
            continue
        assert isinstance(split, ImageFiles)
        copies = copies_in(split, images)
        if split is not train and validated_on(chosen, loaded.settings):  # evaluate.py says so of these images anyway
            copies = [(path, known) for path, known in copies if not os.path.samefile(path, known)]
        if copies:
            pair = " = ".join(os.path.relpath(path, args.data.datapath) for path in copies[0])
            yield (
                f"{loaded.path} was {verb} {counted(len(copies))} of {len(images):,} to test on, which makes results "
                f"too good: {printable(pair)}{changed}; scripts/check_data.py lists all"
            )
    if chosen.datapath is None and chosen.labels is None:  # a name of another table is no name of this one
        yield from on_both_sides(train, images, "test")
        yield from groups_alike(train, images)
