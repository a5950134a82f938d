"""The table of data sets, and reading one: ``get_data`` to train on, ``get_test_data`` to evaluate."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from utils.config.settings import DataSettings, UserError
from utils.data.images.view import View
from utils.data.preprocessing import Known, Preprocessing, resolve
from utils.data.progress_log import Log
from utils.data.sets import archives, class_folders, readers
from utils.data.sets.class_folders import find_splits, some, training_folder, validation_folder
from utils.data.sets.hints import hint
from utils.data.sets.readers import ImageFiles, Images, MemoryImages, Splits

FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
SYNTHETIC_TRAINING, SYNTHETIC_VALIDATION, SYNTHETIC_DIFFERENT = 12_800, 1_280, 256


@dataclass(frozen=True)
class DatasetSpec:
    """What is known of a data set before it is read.

    ``classes`` is None where the data says it. ``image_size`` is the side in pixels that networks
    see by default; with ``fixed_size`` every stored image has it. ``mean`` and ``std`` are of pixel
    values between 0 and 1 over the training images, a number a channel. ``augment`` is the default
    training augmentation, ``max_shift`` the reach of a shift in pixels.
    """

    classes: int | None
    image_size: int
    fixed_size: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: tuple[str, ...]
    max_shift: int
    source: str

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def colour(self) -> str:
        """Pillow's name of the pixel format."""
        return self.preprocessing.colour

    @property
    def preprocessing(self) -> Preprocessing:
        """How networks see the images by default: those of one size whole, of others the middle."""
        return Preprocessing(
            self.image_size, self.image_size, self.mean, self.std, crop_pct=1.0 if self.fixed_size else View.crop_pct,
            crop_mode=View.crop_mode, interpolation=View.interpolation,
            stored_size=self.image_size if self.fixed_size else None,
        )  # fmt: skip


_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# fmt: off
SPECS: dict[str, DatasetSpec] = {
    "digits": DatasetSpec(
        10, 8, True, (0.3055,), (0.3756,), ("shift",), 1, "comes with scikit-learn"),
    "mnist": DatasetSpec(
        10, 28, True, (0.1307,), (0.3081,), ("shift",), 2, "--download fetches it"),
    "fashionmnist": DatasetSpec(
        10, 28, True, (0.2860,), (0.3530,), ("shift",), 2, "--download fetches it"),
    "cifar10": DatasetSpec(
        10, 32, True, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), ("shift", "flip"), 4,
        "--download fetches it"),
    "cifar100": DatasetSpec(
        100, 32, True, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), ("shift", "flip"), 4,
        "--download fetches it"),
    "imagenet": DatasetSpec(
        1000, 224, False, _IMAGENET_MEAN, _IMAGENET_STD, ("resized-crop", "flip"), 28,
        "get ILSVRC2012 from image-net.org and unpack it there"),
    "folder": DatasetSpec(
        None, 224, False, _IMAGENET_MEAN, _IMAGENET_STD, ("resized-crop", "flip"), 28,
        "one folder a class below train/ and val/, or below DIR with --val-split 0.1"),
    "synthetic": DatasetSpec(
        1000, 224, True, (0.5, 0.5, 0.5), (0.289, 0.289, 0.289), ("flip",), 28, "made on the device"),
}
# fmt: on


@dataclass(frozen=True)
class Data:
    """A data set as read: both splits, the class names in label order, and what was resolved.

    ``train`` is None for a set to evaluate. ``preprocessing_line`` says how images are shown, and where each part of
    that comes from. ``warnings``: what else a user should know of the set, a line each.
    """

    spec: DatasetSpec
    preprocessing: Preprocessing
    preprocessing_line: str
    augment: tuple[str, ...]
    classes: tuple[str, ...]
    train: Images | None
    validation: Images
    warnings: tuple[str, ...] = ()

    @property
    def image_size(self) -> int:
        """The side in pixels of a training image."""
        return self.preprocessing.image_size

    def shown_to(self, known: Known | None, settings: DataSettings) -> Data:
        """The same images, shown as weights that are ``known`` expect it where ``settings`` say nothing else."""
        preprocessing, line = resolve(settings, self.spec.preprocessing, known)
        return dataclasses.replace(self, preprocessing=preprocessing, preprocessing_line=line)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over what was read: pixels in memory, or the files' names, with labels and classes."""
        assert self.train is not None
        digest = hashlib.sha256("\0".join(self.classes).encode())
        for images in (self.train, self.validation):
            digest.update(images.labels.cpu().numpy().tobytes())
            if isinstance(images, ImageFiles):
                digest.update("\0".join("/".join(Path(path).parts[-2:]) for path in images.paths).encode())
            else:
                digest.update(images.pixels.cpu().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Trained:
    """What the network to evaluate, from the checkpoint at ``path``, was trained on.

    ``classes`` in label order, ``datapath`` and ``fingerprint`` of its data; None where the checkpoint does not say.
    """

    path: Path
    classes: tuple[str, ...] | None
    datapath: str | None
    fingerprint: str | None


def get_data(settings: DataSettings, device: torch.device) -> Data:
    """Read the data set that the settings name; raises ``UserError`` that says how to get missing data.

    Only synthetic data is made on ``device``; a loader brings the rest there.
    """
    return _data(settings, _splits(settings, device))


def get_test_data(
    settings: DataSettings, device: torch.device, trained: Trained | None, val_split_told: bool = True
) -> Data:
    """Read the validation images that the settings name, and no others; raises ``UserError`` as ``get_data`` does.

    Class folders need no train/: their classes are those of ``trained``, and they may also lie directly below
    ``--datapath``. Without ``val_split_told``, ``--val-split`` is what the checkpoint was trained with.
    """
    notes: tuple[str, ...] = ()
    if settings.val_split is not None and not val_split_told:
        data, notes = _validated_in_training(settings, device, trained)
        if data is not None:
            return dataclasses.replace(data, train=None, warnings=(*notes, *data.warnings))
        settings = dataclasses.replace(settings, val_split=None)
    folder = _test_folder(settings, trained)
    if folder is None:
        splits = _splits(settings, device, evaluate=True)._replace(train=None)
    else:
        splits = _read_test_folder(settings, folder, trained)
    return _data(settings, splits._replace(warnings=(*notes, *splits.warnings)))


def _test_folder(settings: DataSettings, trained: Trained | None) -> Path | None:
    """The class folders to evaluate; None where ``get_data`` knows what to read, or that there is nothing."""
    if settings.datapath is None or settings.dataname in ("digits", "synthetic") or settings.val_split is not None:
        return None
    root = Path(settings.datapath)
    if folder := validation_folder(root):
        return folder
    if training_folder(root) or _reader(settings):
        return None
    classes = trained.classes if trained is not None and trained.classes is not None else ()
    folders = (path for path in class_folders.visible(root) if path.is_dir())
    return root if any(path.name in classes or class_folders.holds_images(path) for path in folders) else None


def _read_test_folder(settings: DataSettings, folder: Path, trained: Trained | None) -> Splits:
    if settings.dataname == "imagenet":
        archives.refuse_half_unpacked(folder)
    if trained is not None and trained.classes is not None:
        classes, whose = trained.classes, trained.path
    else:
        whose = training_folder(folder.parent) or folder
        classes = class_folders.class_names(whose)
    return class_folders.read_test_folder(folder, classes, SPECS[settings.dataname].colour, str(whose))


def _validated_in_training(
    settings: DataSettings, device: torch.device, trained: Trained
) -> tuple[Data | None, tuple[str, ...]]:
    """What training has validated on, a part of one tree, and lines about it; None where another tree is given.

    A tree that was moved since is known by its fingerprint.
    """
    root = Path(settings.datapath)
    if validation_folder(root):
        return None, ()
    same_place = trained.datapath is not None and os.path.realpath(trained.datapath) == os.path.realpath(root)
    try:
        data = get_data(settings, device)
    except UserError:
        if same_place:
            raise
        data = None
    if data is not None and data.fingerprint == trained.fingerprint:
        return data, ()
    share = f"--val-split {settings.val_split:g}"
    if same_place:
        return data, (
            f"--datapath {root}: holds other images than {trained.path} was trained on, so some of those that {share} "
            "chooses now may have been trained on",
        )
    return None, (
        f"--datapath {root}: is not what {trained.path} was trained on, so all of its images are evaluated; {share} "
        "evaluates a share",
    )


def _data(settings: DataSettings, splits: Splits) -> Data:
    spec = SPECS[settings.dataname]
    train, validation, classes, warnings = splits
    if spec.classes is not None and len(classes) != spec.classes:
        raise UserError(
            f"--datapath {settings.datapath}: {len(classes)} classes where {settings.dataname} has {spec.classes}; "
            "use --dataname folder for another set"
        )
    if len(classes) < 2:
        where = hint(Path(settings.datapath), settings.dataname)
        raise UserError(
            f"--datapath {settings.datapath}: holds one class, {classes[0]}; a classifier needs two or more"
            + (where and f"; {where}")
        )
    if settings.dataname != "synthetic":  # whose labels are random
        warnings = (*_unvalidated(settings, validation, classes), *warnings)
    augment = spec.augment if settings.augment is None else settings.augment
    preprocessing, line = resolve(settings, spec.preprocessing, None)
    return Data(
        spec=spec,
        preprocessing=preprocessing,
        preprocessing_line=line,
        augment=tuple(name for name in augment if name != "none"),
        classes=classes,
        train=train,
        validation=validation,
        warnings=warnings,
    )


def _unvalidated(settings: DataSettings, validation: Images, classes: tuple[str, ...]) -> list[str]:
    """A line about the classes without a validation image."""
    counts = torch.bincount(validation.labels, minlength=len(classes))
    names = [name for name, count in zip(classes, counts.tolist(), strict=True) if not count]
    if not names:
        return []
    return [
        f"--datapath {settings.datapath}: {len(names)} of {len(classes)} classes have no validation image, and the "
        f"results say nothing of them: {some(names)}"
    ]


def prepare(settings: DataSettings, log: Log, evaluate: bool = False) -> None:
    """Fetch (``--download``) or unpack what will be read; ``log`` hears of it. For one process of all.

    ``evaluate``: ``get_test_data`` will read it.
    """
    if settings.datapath is None:
        return
    root = Path(settings.datapath)
    if validation_folder(root) if evaluate else find_splits(root):
        return
    if settings.download:
        archives.fetch(settings.dataname, root, log)
    if settings.dataname == "imagenet" and root.is_dir():
        archives.unpack_imagenet(root, ("val",) if evaluate else ("train", "val"), log)


def _splits(settings: DataSettings, device: torch.device, evaluate: bool = False) -> Splits:
    name, spec = settings.dataname, SPECS[settings.dataname]
    if name == "synthetic":
        return _synthetic(spec, settings.image_size or spec.image_size, device)
    if name == "digits":
        return readers.read_digits()
    root = Path(settings.datapath or ".")
    if not root.is_dir():
        raise UserError(f"--datapath {root}: no such folder; {name}: {spec.source}")
    reader = _reader(settings)
    if reader is None:
        raise UserError(f"--datapath {root}: {_what_is_missing(root, name, evaluate)}")
    return reader()


def _what_is_missing(root: Path, name: str, evaluate: bool) -> str:
    if training := training_folder(root):
        split = " or give --val-split 0.1" if name == "folder" else ""
        return f"holds no val/ or test/ beside {training.name}/; add one{split}"
    advice = hint(root, name, evaluate) or f"{name}: {SPECS[name].source}"
    if name == "imagenet" and archives.has_imagenet(root):
        advice = "a run without --dry-run makes them from the archives that lie there"
    files = {"folder": "", "imagenet": "imagenet, neither its archives nor "}
    own = files.get(name, f"{name}, neither torchvision's files nor ")
    return f"holds no {own}class folders below train/ and val/ or test/; {advice}"


def _reader(settings: DataSettings) -> Callable[[], Splits] | None:
    """What reads the files that lie at ``--datapath``, None when they are not there."""
    root, name, colour = Path(settings.datapath or "."), settings.dataname, SPECS[settings.dataname].colour
    splits = find_splits(root)
    if splits and settings.val_split is not None:
        raise UserError(f"--val-split: {root} already has {splits[1].name}/; remove the flag")
    if splits:
        if name == "imagenet":
            for folder in splits:
                archives.refuse_half_unpacked(folder)
        return lambda: class_folders.read_class_folders(*splits, colour)
    if name == "folder" and settings.val_split is not None:
        tree = training_folder(root) or root
        if not any(path.is_dir() for path in class_folders.visible(tree)):
            return None
        return lambda: class_folders.split_class_folders(tree, settings.val_split, colour)
    if name in readers.IDX_FOLDERS:
        place = readers.find_idx(root, readers.IDX_FOLDERS[name])
        return place and (lambda: readers.read_idx(place, FASHION_CLASSES if name == "fashionmnist" else None))
    if name in ("cifar10", "cifar100"):
        found = root / {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
        return (lambda: readers.read_cifar(root, name)) if found.is_dir() else None
    return None


def _synthetic(spec: DatasetSpec, size: int, device: torch.device) -> Splits:
    """Random images and labels made on the device, for benchmarks: no data path to wait for."""
    generator = torch.Generator(device).manual_seed(0)

    def part(count: int) -> MemoryImages:
        shape = (SYNTHETIC_DIFFERENT, spec.channels, size, size)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
        return MemoryImages(pixels, torch.randint(0, spec.classes, (count,), device=device, generator=generator))

    return Splits(part(SYNTHETIC_TRAINING), part(SYNTHETIC_VALIDATION), tuple(str(n) for n in range(spec.classes)))
