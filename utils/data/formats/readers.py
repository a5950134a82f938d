"""Data sets as read, and the registry of those that do not come as class folders (see ``class_folders.py``)."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from utils.config.datasets import SPECS
from utils.config.groups.data import DataSettings
from utils.config.image_size import sides
from utils.config.settings import UserError, as_user_error
from utils.data.images.decoding import dtype_of
from utils.data.images.levels import channels_of
from utils.data.images.stored import ImagePaths

# Rows of the digits to train on, then those to validate on: from train_test_split, stratified, with test_size=360 and
# random_state=0; kept in a file so that results do not depend on scikit-learn's version.
DIGITS_SPLIT = Path(__file__).with_name("digits_split.txt")
DIGITS_TRAINING = 1437
SYNTHETIC_TRAINING = 12_800
SYNTHETIC_VALIDATION = 1_280
SYNTHETIC_DIFFERENT = 256


@dataclass(frozen=True)
class MemoryImages:
    """Images of one size in memory: ``pixels`` (m, c, h, w), and ``labels`` as in ``ImageFiles``.

    Pixels are uint8, or float32 from 0 to 255 if all levels are kept. Sample i shows ``pixels[i % m]``; m equals n, the
    number of labels, except in synthetic data, which repeats a few images. ``unreadable``: the paths of unreadable
    images, by number; their pixels are meaningless. ``groups``, ``weights``: as in ``ImageFiles``.
    """

    pixels: torch.Tensor
    labels: torch.Tensor
    unreadable: dict[int, str] = field(default_factory=dict)
    groups: np.ndarray | None = None
    weights: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def dtype(self) -> torch.dtype:
        return self.pixels.dtype

    def take(self, places: np.ndarray) -> MemoryImages:
        """The images at ``places``, int64 (m,), in that order."""
        return replace(self, pixels=self.pixels[places], labels=self.labels[places])


@dataclass(frozen=True)
class ImageFiles:
    """Images of any size in files: ``paths`` and ``labels``, read in ``colour`` (see ``levels.Colour``).

    ``Data`` sets the colour, that of its preprocessing, whatever a reader gives.
    ``labels``: int64 (n,), or of multi-label images int8 (n, classes): 1 shown, 0 not shown, -1 missing. ``groups``:
    str (n,), the group of each image, such as a patient, which is never divided between training and validation.
    ``weights``: float64 (n,), how much each image counts in the training loss. Both are None if the data set has none.
    """

    paths: Sequence[str]
    labels: torch.Tensor
    colour: str = "RGB"
    groups: np.ndarray | None = None
    weights: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def channels(self) -> int:
        return channels_of(self.colour)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the pixels as they are read."""
        return dtype_of(self.colour)

    def take(self, places: np.ndarray) -> ImageFiles:
        """The images at ``places``, int64 (m,), in that order."""
        assert isinstance(self.paths, ImagePaths)
        return replace(
            self,
            paths=self.paths.take(places),
            labels=self.labels[places],
            groups=None if self.groups is None else self.groups[places],
            weights=None if self.weights is None else self.weights[places],
        )


Images = MemoryImages | ImageFiles


def class_counts(labels: torch.Tensor, classes: int) -> np.ndarray:
    """The number of images of each class, int64 (classes,)."""
    numbers = labels.cpu().numpy()
    return (numbers == 1).sum(0) if numbers.ndim > 1 else np.bincount(numbers, minlength=classes)


def class_numbers(names: Iterable[str], classes: Sequence[str]) -> np.ndarray:
    """The index of each of ``names`` in ``classes``, int64; -1 if it is not there."""
    number = {name: label for label, name in enumerate(classes)}
    return np.array([number.get(name, -1) for name in names], dtype=np.int64)


class Splits(NamedTuple):
    """A data set's images. ``train`` may be None in evaluation.

    ``validation`` is None if it is yet to be taken from ``train``. ``warnings``: lines, such as on images left out.
    ``origin``: a description of the table that the labels come from, if any.
    """

    train: Images | None
    validation: Images | None
    classes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    origin: str = ""


# ---------------------------------------------------------------------------- made without files


def read_digits(*_: Any) -> Splits:
    """Read scikit-learn's 1,797 handwritten 8x8 digits: 1,437 for training, 360 for validation, stratified by class."""
    table = _digits_table()
    pixels = np.round(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    order = np.array(DIGITS_SPLIT.read_text(encoding="utf-8").split(), dtype=np.int64)
    train, validation = (_in_memory(pixels, table[:, -1], indices) for indices in np.split(order, [DIGITS_TRAINING]))
    return Splits(train, validation, _numbers(10))


@cache  # parsing takes longer than a validation of them, and tools open the digits several times
def _digits_table() -> np.ndarray:
    """A row for each image: its 64 pixels, from 0 to 16, and its class; float64 (1797, 65), not to be changed.

    Read from a file of scikit-learn's, since importing the package takes as long as importing torch.
    """
    package = find_spec("sklearn")
    file = Path(package.origin).parent / "datasets/data/digits.csv.gz" if package and package.origin else None
    if file is not None and file.exists():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])


def _in_memory(pixels: np.ndarray, labels: np.ndarray, chosen: np.ndarray | slice = slice(None)) -> MemoryImages:
    return MemoryImages(
        torch.from_numpy(np.ascontiguousarray(pixels[chosen])), torch.from_numpy(labels[chosen].astype(np.int64))
    )


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(count))


def make_synthetic(settings: DataSettings, device: torch.device) -> Splits:
    """Make random images and labels on ``device``, for benchmarks that must not wait for data."""
    spec = SPECS["synthetic"]
    size = settings.image_size or spec.image_size
    classes = spec.classes
    assert classes is not None
    generator = torch.Generator(device).manual_seed(0)

    def random_images(count: int) -> MemoryImages:
        shape = (SYNTHETIC_DIFFERENT, settings.in_channels or spec.channels, *sides(size))
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
        return MemoryImages(pixels, torch.randint(0, classes, (count,), device=device, generator=generator))

    return Splits(random_images(SYNTHETIC_TRAINING), random_images(SYNTHETIC_VALIDATION), _numbers(classes))


# ------------------------------------------------------------------------ torchvision's own files


def find_idx(root: Path, folder: str) -> Path | None:
    """The folder with MNIST's idx files: ``root``, or one below it in torchvision's layout; None if there is none."""
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
    """Remove unpacked idx files that are damaged or incomplete from ``place``."""
    for path in (place / name for name in _IDX_NAMES):
        if path.is_file():
            try:
                _read_idx_file(path)
            except UserError:
                path.unlink()


def read_idx(place: Path, kind: str) -> Splits:
    """Read ``kind``, MNIST or FashionMNIST, from idx files (LeCun's format: magic, big-endian sizes, then bytes)."""
    train_images, train_labels, test_images, test_labels = (
        _read_idx_file(path) for name in _IDX_NAMES if (path := _idx_file(place, name))
    )
    for images, labels in ((train_images, train_labels), (test_images, test_labels)):
        if images.ndim != 3 or labels.shape != images.shape[:1] or labels.max(initial=0) > 9:
            raise UserError(f"--datapath {place}: images and labels do not belong together; fetch them again")
    classes = _numbers(10)
    if kind == "FashionMNIST":
        from torchvision import datasets

        classes = tuple(datasets.FashionMNIST.classes)
    return Splits(
        _in_memory(train_images[:, None], train_labels), _in_memory(test_images[:, None], test_labels), classes
    )


def _read_idx_file(path: Path) -> np.ndarray:
    with as_user_error(f"{path}: is not a whole idx file", (OSError, EOFError, zlib.error), advice="; fetch it again"):
        data = bytearray(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    dimensions = data[3] if len(data) > 3 else 0
    start = 4 + 4 * dimensions
    shape = [int.from_bytes(data[place : place + 4], "big") for place in range(4, start, 4)]
    if data[:3] != b"\0\0\x08" or len(data) != start + math.prod(shape):
        raise UserError(f"{path}: is not a whole idx file; fetch it again")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def read_cifar(root: Path, kind: str) -> Splits:
    """Read CIFAR-10 or -100 from torchvision's files, checked by MD5 sum; ``kind``: the name of torchvision's class."""
    from torchvision import datasets

    reader = getattr(datasets, kind)
    try:
        train = reader(str(root), train=True)
        test = reader(str(root), train=False)
    except RuntimeError as error:
        raise UserError(f"--datapath {root}: {reader.base_folder} is damaged or not whole; fetch it again") from error
    images = [_in_memory(split.data.transpose(0, 3, 1, 2), np.asarray(split.targets)) for split in (train, test)]
    return Splits(images[0], images[1], tuple(train.classes))


def download(root: Path, kind: str) -> None:
    """Download both splits of the data set that torchvision's class ``kind`` reads, into ``root``."""
    from torchvision import datasets

    for train in (True, False):
        getattr(datasets, kind)(str(root), train=train, download=True)


# ------------------------------------------------------------------------------------ the registry


class OwnFiles(NamedTuple):
    """Functions that find, read and download a data set's own files in ``--datapath``, as opposed to class folders.

    ``folder``: the usual name of the folder with the files. ``find`` returns the path to give to ``read``, or None if
    the files are not there. ``download`` fetches the files into a folder; None if ``--download`` cannot.
    """

    folder: str
    find: Callable[[Path], Path | None]
    read: Callable[[Path], Splits]
    download: Callable[[Path], None] | None = None


def _idx(kind: str) -> OwnFiles:
    def fetch(root: Path) -> None:
        remove_damaged_idx(root / kind / "raw")  # torchvision takes any unpacked file to be complete
        download(root, kind)

    return OwnFiles(kind, partial(find_idx, folder=kind), partial(read_idx, kind=kind), fetch)


def _cifar(kind: str, folder: str) -> OwnFiles:
    return OwnFiles(
        folder,
        lambda root: root if (root / folder).is_dir() else None,
        partial(read_cifar, kind=kind),
        partial(download, kind=kind),
    )


# A data set of utils/config/datasets.py has an entry in one of these, unless it comes as class folders only.
IN_MEMORY: dict[str, Callable[[DataSettings, torch.device], Splits]] = {
    "digits": read_digits,
    "synthetic": make_synthetic,
}
OWN_FILES = {
    "mnist": _idx("MNIST"),
    "fashionmnist": _idx("FashionMNIST"),
    "cifar10": _cifar("CIFAR10", "cifar-10-batches-py"),
    "cifar100": _cifar("CIFAR100", "cifar-100-python"),
}
