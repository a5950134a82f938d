"""Reading data sets: torchvision's own files or class folders, whichever lies at ``--datapath``."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from utils.settings import UserError

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
VALIDATION_FOLDERS = ("val", "test")
IDX_FOLDERS = {"mnist": "MNIST", "fashionmnist": "FashionMNIST"}  # torchvision's names for them


@dataclass(frozen=True)
class MemoryImages:
    """Images of one size in memory: ``pixels`` uint8 (m, c, h, w) and ``labels`` int64 (n,).

    Sample i shows ``pixels[i % m]``; m is n except for synthetic data, which shows few images often. ``unreadable``:
    the paths of images whose files cannot be read, by their numbers; their pixels mean nothing.
    """

    pixels: torch.Tensor
    labels: torch.Tensor
    unreadable: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageFiles:
    """Images of any size in files: ``paths`` and ``labels`` int64 (n,), read in mode ``colour`` ('L' or 'RGB')."""

    paths: Sequence[str]
    labels: torch.Tensor
    colour: str

    def __len__(self) -> int:
        return len(self.paths)


Images = MemoryImages | ImageFiles
Splits = tuple[Images, Images, tuple[str, ...]]  # training, validation, class names


def read_digits() -> Splits:
    """scikit-learn's 1,797 handwritten 8x8 digits: 1,437 to train on and 360 to validate, per class alike."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    train, validation = train_test_split(np.arange(len(pixels)), test_size=360, stratify=digits.target, random_state=0)
    return _in_memory(pixels, digits.target, train), _in_memory(pixels, digits.target, validation), _numbers(10)


def _in_memory(pixels: np.ndarray, labels: np.ndarray, chosen: np.ndarray | slice = slice(None)) -> MemoryImages:
    return MemoryImages(
        torch.from_numpy(np.ascontiguousarray(pixels[chosen])), torch.from_numpy(labels[chosen].astype(np.int64))
    )


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(count))


# ------------------------------------------------------------------------ torchvision's own files


def find_idx(root: Path, folder: str) -> Path | None:
    """The folder below ``root`` that holds MNIST's idx files, torchvision's layout or bare."""
    for place in (root, root / folder / "raw", root / "raw"):
        if all(_idx_file(place, name) for name in _IDX_NAMES):
            return place
    return None


_IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def _idx_file(place: Path, name: str) -> Path | None:
    return next((path for path in (place / name, place / f"{name}.gz") if path.is_file()), None)


def remove_damaged_idx(place: Path) -> None:
    """Remove from ``place`` the unpacked idx files that are not whole."""
    for path in (place / name for name in _IDX_NAMES):
        if path.is_file():
            try:
                _read_idx_file(path)
            except UserError:
                path.unlink()


def read_idx(place: Path, classes: tuple[str, ...] | None = None) -> Splits:
    """MNIST or FashionMNIST from idx files (LeCun's format: magic, sizes big-endian, then bytes)."""
    train_images, train_labels, test_images, test_labels = (_read_idx_file(_idx_file(place, n)) for n in _IDX_NAMES)
    for images, labels in ((train_images, train_labels), (test_images, test_labels)):
        if images.ndim != 3 or labels.shape != images.shape[:1] or labels.max(initial=0) > 9:
            raise UserError(f"--datapath {place}: images and labels do not belong together; fetch them again")
    return (
        _in_memory(train_images[:, None], train_labels),
        _in_memory(test_images[:, None], test_labels),
        classes or _numbers(10),
    )


def _read_idx_file(path: Path) -> np.ndarray:
    try:
        data = bytearray(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: is not a whole idx file ({error}); fetch it again") from error
    dimensions = data[3] if len(data) > 3 else 0
    start = 4 + 4 * dimensions
    shape = np.frombuffer(data[4:start], dtype=">i4")
    if data[:3] != b"\0\0\x08" or len(data) != start + int(np.prod(shape, dtype=np.int64)):
        raise UserError(f"{path}: is not a whole idx file; fetch it again")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def read_cifar(root: Path, name: str) -> Splits | None:
    """CIFAR-10 or -100 from torchvision's files (checked against their MD5 sums), None when they are not there."""
    from torchvision import datasets

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    if not (root / kind.base_folder).is_dir():
        return None
    try:
        train, test = kind(str(root), train=True), kind(str(root), train=False)
    except RuntimeError as error:
        raise UserError(f"--datapath {root}: {kind.base_folder} is damaged or not whole; fetch it again") from error
    images = [_in_memory(part.data.transpose(0, 3, 1, 2), np.asarray(part.targets)) for part in (train, test)]
    return images[0], images[1], tuple(train.classes)


# ---------------------------------------------------------------------------------- class folders


def find_splits(root: Path) -> tuple[Path, Path] | None:
    """The training and the validation folder below ``root``, None when one is missing."""
    validation = next((root / name for name in VALIDATION_FOLDERS if (root / name).is_dir()), None)
    return (root / "train", validation) if (root / "train").is_dir() and validation else None


def read_class_folders(train: Path, validation: Path, colour: str) -> Splits:
    """Two trees with a folder a class; the classes are the training tree's, in alphabetical order."""
    classes = class_names(train)
    unknown = sorted(set(class_names(validation)) - set(classes))
    if unknown:
        raise UserError(f"--datapath: {validation} has classes that {train} lacks: {', '.join(unknown[:5])}")
    return image_files(train, classes, colour), image_files(validation, classes, colour, may_lack=True), classes


def split_class_folders(root: Path, share: float, colour: str) -> Splits:
    """One tree, of each class the same share to validate on, chosen once and for all."""
    classes = class_names(root)
    everything = image_files(root, classes, colour)
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
    parts = [
        ImageFiles([everything.paths[i] for i in np.flatnonzero(mask)], torch.from_numpy(labels[mask]), colour)
        for mask in (~chosen, chosen)
    ]
    return parts[0], parts[1], classes


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


def _images_below(folder: str) -> Iterator[str]:
    """The images in ``folder`` and below. Links to folders are not followed, for they may loop.

    What is no file, a pipe for example, is passed over: reading it could take forever. A link to nowhere is not, so
    that it is told of. A folder that is not there has none.
    """
    if not os.path.isdir(folder):
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _images_below(entry.path)
                continue
            named_so = entry.name.lower().endswith(IMAGE_ENDINGS) and not entry.name.startswith(".")
            if named_so and (entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))):
                yield entry.path


def image_files(root: Path, classes: Sequence[str], colour: str, may_lack: bool = False) -> ImageFiles:
    """All images below the folders ``classes`` of ``root``, by class and name. Raises ``UserError`` for an empty one.

    ``may_lack``: only for a tree without any image.
    """
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = list(_images_below(os.path.join(root, name)))
        if not found and not may_lack:
            raise UserError(f"--datapath: {root / name} holds no images ({', '.join(IMAGE_ENDINGS)})")
        paths += sorted(found)
        labels += [label] * len(found)
    if not paths:
        raise UserError(f"--datapath: {root} holds no images ({', '.join(IMAGE_ENDINGS)})")
    return ImageFiles(paths, torch.tensor(labels), colour)
