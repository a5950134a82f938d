"""The table of data sets, and ``get_data``, which reads one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from utils.data import archives, readers
from utils.data.claims import Log
from utils.data.readers import ImageFiles, Images, MemoryImages, Splits
from utils.settings import DataSettings, UserError

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
        return "L" if self.channels == 1 else "RGB"


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
    """A data set as read: both splits, the class names in label order, and what was resolved."""

    spec: DatasetSpec
    image_size: int
    augment: tuple[str, ...]
    classes: tuple[str, ...]
    train: Images
    validation: Images

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over what was read: pixels in memory, or the files' names, with labels and classes."""
        digest = hashlib.sha256("\0".join(self.classes).encode())
        for images in (self.train, self.validation):
            digest.update(images.labels.cpu().numpy().tobytes())
            if isinstance(images, ImageFiles):
                digest.update("\0".join("/".join(Path(path).parts[-2:]) for path in images.paths).encode())
            else:
                digest.update(images.pixels.cpu().numpy().tobytes())
        return digest.hexdigest()


def get_data(settings: DataSettings, device: torch.device) -> Data:
    """Read the data set that the settings name; raises ``UserError`` that says how to get missing data.

    Only synthetic data is made on ``device``; a loader brings the rest there.
    """
    spec = SPECS[settings.dataname]
    image_size = settings.image_size or spec.image_size
    if settings.dataname == "synthetic":
        splits = _synthetic(spec, image_size, device)
    elif settings.dataname == "digits":
        splits = readers.read_digits()
    else:
        splits = _read(settings, spec)
    train, validation, classes = splits
    if spec.classes is not None and len(classes) != spec.classes:
        raise UserError(
            f"--datapath {settings.datapath}: {len(classes)} classes where {settings.dataname} has {spec.classes}; "
            "use --dataname folder for another set"
        )
    if len(classes) < 2:
        raise UserError(
            f"--datapath {settings.datapath}: holds one class, {classes[0]}; a classifier needs two or more"
        )
    augment = spec.augment if settings.augment is None else settings.augment
    return Data(spec, image_size, tuple(name for name in augment if name != "none"), classes, train, validation)


def prepare(settings: DataSettings, log: Log) -> None:
    """Fetch (``--download``) or unpack what ``get_data`` will read; ``log`` hears of it. For one process of all."""
    if settings.datapath is None:
        return
    root = Path(settings.datapath)
    if readers.find_splits(root) is not None:
        return
    if settings.download:
        archives.fetch(settings.dataname, root, log)
    if settings.dataname == "imagenet" and root.is_dir():
        archives.unpack_imagenet(root, ("train", "val"), log)


def _read(settings: DataSettings, spec: DatasetSpec) -> Splits:
    root = Path(settings.datapath or ".")
    if not root.is_dir():
        raise UserError(f"--datapath {root}: no such folder; {settings.dataname}: {spec.source}")
    reader = _reader(settings, spec)
    if reader is None:
        raise UserError(
            f"--datapath {root}: holds no val/ or test/ beside train/; add one"
            + (" or give --val-split 0.1" if settings.dataname == "folder" else "")
            if (root / "train").is_dir()
            else f"--datapath {root}: holds no {settings.dataname}, neither torchvision's files nor "
            f"class folders below train/ and val/ or test/; {spec.source}"
        )
    return reader()


def _reader(settings: DataSettings, spec: DatasetSpec) -> Callable[[], Splits] | None:
    """What reads the files that lie at ``--datapath``, None when they are not there."""
    root, name = Path(settings.datapath or "."), settings.dataname
    splits = readers.find_splits(root)
    if splits and settings.val_split is not None:
        raise UserError(f"--val-split: {root} already has {splits[1].name}/; remove the flag")
    if splits:
        if name == "imagenet":
            for folder in splits:
                archives.refuse_half_unpacked(folder)
        return lambda: readers.read_class_folders(*splits, spec.colour)
    if name == "folder" and settings.val_split is not None:
        tree = root / "train" if (root / "train").is_dir() else root
        return lambda: readers.split_class_folders(tree, settings.val_split, spec.colour)
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

    return part(SYNTHETIC_TRAINING), part(SYNTHETIC_VALIDATION), tuple(str(n) for n in range(spec.classes))
