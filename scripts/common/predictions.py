"""Predictions of a trained network for every image of a data set, made by the same exact validation as in main.py."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d

from models.load import Loaded
from models.prepare import to_memory_format
from scripts.common.answers import Answers
from scripts.common.command_line import say, warn
from scripts.common.label_answers import LabelAnswers
from utils.checkpoint.fingerprint import joined, same_images
from utils.checkpoint.resume import ResumePoint, is_at
from utils.config import arguments, plugins
from utils.config.datasets import SPECS
from utils.config.groups.data import DataSettings
from utils.config.settings import Settings, UserError
from utils.config.spelling import counted, printable, some
from utils.data.data_set import Data, in_colour_of, some_contents
from utils.data.datasets import get_data, get_test_data
from utils.data.division import groups_alike, on_both_sides
from utils.data.first_look import COMPARED_FILES, copies_in, lost_levels
from utils.data.formats.class_folders import find_splits, test_folder, training_folder, validation_folder
from utils.data.formats.hugging_face import find
from utils.data.formats.readers import IN_MEMORY, ImageFiles, Images, class_numbers
from utils.data.formats.table import NO_COLUMN, column_names
from utils.data.images.decoding import for_people, open_image
from utils.data.loaders import Batch, ProgressLog, ValidationLoader, loaders, tried_out
from utils.data.sampling import first_samples
from utils.data.splits import in_class_folders
from utils.loop.bad_images import BadImages
from utils.loop.test_time_augmentation import in_views
from utils.loop.validation import validate
from utils.optim.head import SeenFeatures
from utils.precision.amp import autocast, keep_in_fp32
from utils.record.metrics import Report
from utils.record.reading import OneLabel
from utils.record.writer import Writer
from utils.runtime.distributed import Distributed, RankInfo
from utils.runtime.memory import lacks_memory

SHOWN = 5  # paths shown in a message
THUMBNAIL = 16  # pixels per side
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


class FromDataSet:
    """Images with the indices ``numbers``, int64 (n,), in the data set ``images``."""

    images: Images
    numbers: np.ndarray

    @property
    def groups(self) -> np.ndarray | None:
        """Group of each image, str (n,); None if the data set has no groups."""
        return None if self.images.groups is None else self.images.groups[self.numbers]

    def picture(self, place: int) -> Image.Image:
        """Whole image at ``place`` among the n, upright, in mode 'L' or 'RGB'."""
        return picture(self.images, int(self.numbers[place]))


@dataclass(frozen=True)
class PredictedImages(FromDataSet):
    """The n images of the predictions, in the data set's order, the same on every rank.

    ``ids``: paths, or numbers in the split such as 'val[17]'. ``report``: the metrics, as ``main.py --evaluate``
    computes them. ``notes``: lines about what the metrics leave out. On request: ``features``, float32 (n, d), and
    ``thumbnails``, float32 (n, 256), the images as the network saw them, in grey and 16 x 16 pixels.
    """

    classes: tuple[str, ...]
    ids: list[str]
    report: Report
    notes: tuple[str, ...]
    images: Images
    numbers: np.ndarray
    features: torch.Tensor | None = None
    thumbnails: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def digest(self) -> str:
        """Fingerprint (``same_images``) of the images' classes and names, without the folders above the class folders.

        It also covers the content of some files, for images of several splits may have the same names.
        """
        labels = self.labels.tolist()
        rows = (f"{'/'.join(Path(one).parts[-2:])}\0{label}" for one, label in zip(self.ids, labels, strict=True))
        listing = hashlib.sha256("\n".join([*self.classes, *rows]).encode("utf-8", "surrogateescape")).hexdigest()
        images = self.images
        return joined(listing, some_contents(images.paths, self.numbers) if isinstance(images, ImageFiles) else None)


@dataclass(frozen=True)
class Predictions(PredictedImages, Answers):
    """Predictions of a network with one label per image."""

    reading: ClassVar[OneLabel] = OneLabel()


@dataclass(frozen=True)
class LabelPredictions(PredictedImages, LabelAnswers):
    """Predictions of a multi-label network."""


AnyPredictions = Predictions | LabelPredictions


def predict_split(
    loaded: Loaded,
    chosen: Chosen,
    distributed: Distributed | None = None,
    *,
    features: bool = False,
    first: PredictedImages | None = None,
) -> AnyPredictions:
    """Predict the ``chosen`` images with ``loaded``'s network, on all ranks of ``distributed`` or in this process.

    ``features``: also return the output layer's inputs. ``first``: another network's predictions of the same images.
    Moves the network to the device; writes nothing to the disk. Raises ``UserError``.
    """
    args = settings_of(loaded, chosen)
    one = Distributed(RankInfo(), args.run, args.precision.tf32) if distributed is None else nullcontext(distributed)
    with one as processes:
        with processes.raise_on_all_ranks(), processes.without_timeout("Reading the data"):
            images, notes = read_images(loaded, args, chosen, processes.device, first)
            loaded.network.to(processes.device)
            keep_in_fp32(loaded.network, args.precision.fp32_layers or (), processes.device)
            loader = _loader(loaded, args, images, processes)
            samples, left_out = _samples(len(images), args, chosen)
            loader = loader.part(samples) if len(samples) < len(images) else loader
            notes = (*notes, *left_out, *_doubts(images, loaded, args, chosen, first))
        for note in notes:
            warn(note)
        warn_of_other_views(loaded, args.data.tta)
        with enough_memory(args.data.val_batch_size or args.data.batch_size):
            seen = SeenFeatures(loaded.network) if features else None
            report, batches, unreadable = _validated(loaded, args, loader, processes, chosen.progress, seen)
    if not batches:
        raise UserError(f"--split {chosen.split}: no image can be read", on_all_ranks=True)
    if unreadable:
        shown = ", ".join(sorted(unreadable)[:SHOWN])
        notes = (*notes, f"{len(unreadable):,} image(s) that cannot be read are left out: {shown}")
        warn(notes[-1])
    numbers, logits, labels, found, small = (list(parts) for parts in zip(*batches, strict=True))
    if features and any(part is None for part in found):
        raise UserError(f"{loaded.arch}: its output layer takes no features of each image alone", on_all_ranks=True)
    numbers = np.concatenate(numbers)
    if lost := sorted(classes_of(images.labels) - classes_of(torch.cat(labels)) if unreadable else ()):
        names = some([loaded.classes[label] for label in lost])
        notes = (*notes, f"no image can be read of these classes, of which the figures say nothing: {names}")
        warn(notes[-1])
    order = np.argsort(numbers)
    kind = partial(LabelPredictions, reading=loaded.reading) if loaded.reading.several else Predictions
    return kind(
        logits=torch.cat(logits)[order],
        labels=torch.cat(labels)[order],
        classes=loaded.classes,
        ids=ids_of(images, chosen.split, numbers[order]),
        report=report,
        notes=notes,
        images=images,
        numbers=numbers[order],
        features=torch.cat(found)[order] if features else None,
        thumbnails=torch.cat(small)[order] if features else None,
    )


def _doubts(
    images: Images, loaded: Loaded, args: Settings, chosen: Chosen, first: PredictedImages | None
) -> Iterator[str]:
    """Yield warnings about images that may be new to the run. ``first``: as in ``predict_split``."""
    table = _other_table(loaded, chosen)
    for role, name in _lacked(loaded.settings, table).items() if first is None else ():
        if role in WITHOUT_COLUMN:
            yield f"{table}: has no column {name}, the run's --{role}-column, so {WITHOUT_COLUMN[role]}"
    if isinstance(images, ImageFiles) and chosen.may_be_new:
        yield from lost_levels(images, loaded.classes, args.data.datapath)
        if first is None:  # otherwise ``loaded`` has the other run's data
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


def _samples(count: int, args: Settings, chosen: Chosen) -> tuple[np.ndarray, list[str]]:
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


def classes_of(labels: torch.Tensor) -> set[int]:
    """Classes that occur in ``labels`` (n,) or targets (n, classes)."""
    return set((labels if labels.ndim == 1 else (labels == 1).any(0).nonzero()[:, 0]).tolist())


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


def warn_of_other_views(loaded: Loaded, tta: str) -> None:
    """Warn if the checkpoint's temperature and distances were fitted with other views than ``tta``."""
    if loaded.confidence is not None and loaded.confidence.tta != tta:
        warn(f"{loaded.path}: its temperature and distances were fitted with --tta {loaded.confidence.tta}, not {tta}")


def point_of(loaded: Loaded) -> ResumePoint:
    """A ``ResumePoint`` with the checkpoint's settings, classes, data and progress."""
    state = {"settings": loaded.settings, "classes": [*loaded.classes], "fingerprint": loaded.fingerprint}
    return ResumePoint(loaded.path, {**state, "seen": loaded.seen, "progress": loaded.progress or {}}, digest="")


def ids_of(images: Images, split: str, numbers: np.ndarray) -> list[str]:
    """Paths of the images with these ``numbers`` in a split, or for images in memory names such as 'val[17]'."""
    files = images.paths if isinstance(images, ImageFiles) else None
    return [files[number] if files else f"{split}[{number}]" for number in numbers.tolist()]


def picture(images: Images, number: int) -> Image.Image:
    """Whole image ``number`` of a data set, upright, in mode 'L' or 'RGB'. Raises ``UnreadableImage``."""
    if isinstance(images, ImageFiles):
        return open_image(images.paths[number], images.colour)
    return for_people(images.pixels[number % len(images.pixels)].permute(1, 2, 0).cpu().numpy())


def read_images(
    loaded: Loaded, args: Settings, chosen: Chosen, device: torch.device, first: PredictedImages | None = None
) -> tuple[Images, tuple[str, ...]]:
    """Chosen images, labelled by the network's classes, and notes about what is missing or left out.

    ``first``: as in ``predict_split``.
    """
    if first is not None and isinstance(first.images, ImageFiles):
        return files_of(first, loaded)
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


def _holds_class_folders(root: Path, classes: Sequence[str]) -> bool:
    """True if a folder named after one of ``classes`` lies in ``root``, or in its folder of a split."""
    trees = filter(None, (root, training_folder(root), validation_folder(root), test_folder(root)))
    return any((tree / name).is_dir() for tree in trees for name in classes)


def files_of(first: PredictedImages, loaded: Loaded) -> tuple[ImageFiles, tuple[str, ...]]:
    """Image files of ``first`` with the labels that ``loaded``'s network has for them, and a note on those left out.

    Classes are matched by name. Images of classes that the network does not know are left out.
    """
    images = first.images
    assert isinstance(images, ImageFiles)
    images = dataclasses.replace(images, colour=loaded.preprocessing.colour)
    if images.labels.ndim > 1:
        if {*first.classes} != {*loaded.classes}:
            raise UserError(f"{loaded.path}: its classes are not those of the other network")
        places = [first.classes.index(name) for name in loaded.classes]
        return dataclasses.replace(images, labels=images.labels[:, places]), ()
    labels = torch.from_numpy(class_numbers(first.classes, loaded.classes))[images.labels]
    images = dataclasses.replace(images, labels=labels)
    known = np.flatnonzero((labels >= 0).numpy())
    if len(known) == len(images):
        return images, ()
    if not len(known):
        raise UserError(f"{loaded.path}: knows none of the images' classes")
    left_out = len(images) - len(known)
    return images.take(known), (f"{left_out:,} images of classes that {loaded.path} does not know are left out",)


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


def _loader(loaded: Loaded, args: Settings, images: Images, distributed: Distributed) -> ValidationLoader:
    """main.py's validation loader for ``images``; image files are streamed, and nothing is cached on the disk."""
    files = isinstance(images, ImageFiles)
    loader = "stream" if files else args.data.loader
    data = Data(SPECS[args.data.dataname], loaded.preprocessing, "", loaded.classes, train=None, validation=images)
    _, loader, _ = loaders(
        data,
        args.with_values(loader=loader, datapath=None, cache_dir=None),
        distributed,
        channels_last=to_memory_format(args, loaded.network, distributed.device),
        progress=ProgressLog(say, args.logging.progress),
    )
    return loader


# indices, logits, labels, features, thumbnails
Recorded = tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class _Recorder(nn.Module):
    """Wrapper of ``network`` for ``validate`` that keeps logits, unreadable paths and, given ``seen``, the features."""

    def __init__(self, network: nn.Module, advance: Callable[[int], None], seen: SeenFeatures | None) -> None:
        super().__init__()
        self.network = network
        self.advance = advance
        self.seen = seen
        self.kept: list[Recorded] = []
        self.unreadable: list[str] = []

    def before_batch(self, batch: Batch) -> None:
        """Remember ``batch``, whose logits come next."""
        self.batch = batch
        self.unreadable += batch.unreadable
        self.advance(1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.seen is not None:
            self.seen.forget()
        logits = self.network(images)
        features = None if self.seen is None else self.seen.of(len(images))
        small = None if self.seen is None else adaptive_avg_pool2d(images.float().mean(1), THUMBNAIL).flatten(1)
        answer = (logits.float(), self.batch.targets, features, small)
        self.kept.append((self.batch.indices, *(part if part is None else part.cpu() for part in answer)))
        return logits


def _validated(
    loaded: Loaded,
    args: Settings,
    loader: ValidationLoader,
    distributed: Distributed,
    progress: bool,
    seen: SeenFeatures | None,
) -> tuple[Report, list[Recorded], list[str]]:
    """Validate; return the report and, from all ranks, what was recorded of each batch and the unreadable paths."""
    log = ProgressLog(say if distributed.is_main else lambda line: None, bar=progress and distributed.is_main)
    with log.counting("Validation", len(loader), "batches") as advance:
        recorder = _Recorder(in_views(loaded.network, args.data.tta), advance, seen)
        report = validate(
            recorder,
            loader,
            distributed,
            autocast(args.precision, distributed.device),
            Writer(silent=True),
            BadImages(False, distributed, Writer(silent=True)),
            lambda: None,
            recorder.before_batch,
        )
    loaded.network.eval()
    if seen is not None:
        seen.close()
    kept, paths = zip(*distributed.gather((recorder.kept, recorder.unreadable)), strict=True)
    return report, [*chain.from_iterable(kept)], [*chain.from_iterable(paths)]


@contextmanager
def enough_memory(batch_size: int) -> Iterator[None]:
    """Context for forward passes that turns lack of memory into a ``UserError``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        raise UserError(
            f"--batch-size {batch_size}: there is not enough memory for so many images; lower it"
        ) from error


class Predictor:
    """The network of ``loaded``, run as by ``main.py --evaluate``: same precision, views and memory format.

    ``own``: a tool's command line, whose --amp, --tta, --batch-size and --workers replace the run's. ``batch_size``,
    ``workers`` (a number or 'auto') and ``tta``: the resulting settings. ``device``: where the network is.
    """

    def __init__(self, loaded: Loaded, own: argparse.Namespace) -> None:
        args = settings_of(loaded, Chosen.of(own))
        with Distributed(RankInfo(), args.run, args.precision.tf32) as here:  # sets threads, TF32 and memory up
            self.loaded = loaded
            self.device = here.device
        self.batch_size = args.data.val_batch_size or args.data.batch_size
        self.workers = args.data.workers
        self.tta = args.data.tta
        self.channels_last = to_memory_format(args, loaded.network, self.device)
        self._autocast = autocast(args.precision, self.device)
        self._network = in_views(loaded.network, self.tta)
        self.distance = None if loaded.confidence is None else loaded.confidence.distance
        self._seen = None if self.distance is None else SeenFeatures(loaded.network)
        warn_of_other_views(loaded, self.tta)

    @torch.inference_mode()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Logits, float32 (n, classes) on the CPU, of preprocessed images (n, channels, h, w)."""
        if self._seen is not None:
            self._seen.forget()
        with self._autocast:
            return self._network(images.to(self.device)).float().cpu()

    def distances(self, images: int) -> list[float] | None:
        """Distance of each of the last ``images`` images given to ``logits``; None if the checkpoint keeps none."""
        return None if self.distance is None else self.distance(self._seen.of(images).cpu()).tolist()

    @property
    def temperature(self) -> str:
        """The checkpoint's temperature as text to append to a list, such as ', temperature 1.5'; '' if it has none."""
        kept = self.loaded.confidence
        return f", temperature {kept.temperature:.4g}" if kept is not None and kept.temperature is not None else ""
