"""Images as they were read, and reading torchvision's own files; class folders: see ``class_folders.py``."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from utils.config.settings import UserError

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


class Splits(NamedTuple):
    """A data set's images; ``train`` is None for one to evaluate. ``warnings``: what was left out, a line each."""

    train: Images | None
    validation: Images
    classes: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def read_digits() -> Splits:
    """scikit-learn's 1,797 handwritten 8x8 digits: 1,437 to train on and 360 to validate, per class alike."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    train, validation = train_test_split(np.arange(len(pixels)), test_size=360, stratify=digits.target, random_state=0)
    parts = (_in_memory(pixels, digits.target, part) for part in (train, validation))
    return Splits(*parts, _numbers(10))


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
    return Splits(
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
    return Splits(*images, tuple(train.classes))
