"""Data sets from users' plugin files: anything with ``len`` and items (image, label), such as a torch ``Dataset``."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from utils.config import plugins
from utils.config.datasets import SPECS, DatasetSpec
from utils.config.groups.data import DataSettings
from utils.config.plugins import Entry
from utils.config.settings import UserError
from utils.config.spelling import or_nearest
from utils.data.formats.readers import ImageFiles, Images, MemoryImages, Splits
from utils.data.images.decoding import UnreadableImage, read_pixels, why_unreadable
from utils.data.images.levels import SIXTEEN_BITS_AS_I
from utils.data.images.stored import NumberedImages
from utils.data.sample_plan import evenly_spaced

LOOKED_AT = 32  # images of a split whose content is part of the fingerprint
WITHOUT_PNG = ("CMYK", "HSV", "LAB", "YCbCr")  # Pillow's modes of 8-bit colours that PNG does not know


class Items(NumberedImages):
    """The images of one split of a data set from a user's plugin file."""

    def __init__(self, dataset: Any, name: str, file: Path) -> None:
        super().__init__(name, len(dataset))
        self._dataset = dataset
        self._file = file

    @property
    def identity(self) -> bytes:
        """The split's name, a digest of the images' numbers, and digests of the content of some images, as bytes."""
        places = evenly_spaced(len(self), LOOKED_AT)
        contents = map(self._digest, self.places[places].tolist())
        return "\0".join((self.name, hashlib.sha256(self.places.tobytes()).hexdigest(), *contents)).encode()

    def _digest(self, number: int) -> str:
        try:
            with _same_random_numbers():
                return hashlib.sha256(self.read(number)).hexdigest()
        except OSError:  # a damaged image, which decoding will report
            return "unreadable"

    def read(self, number: int) -> bytes:
        """The bytes of the image file of item ``number``; an image that is not a file is encoded as PNG, without loss.

        An ``OSError`` means a damaged image; any other exception is reported as a mistake in the user's file.
        """
        with plugins.mistakes_of(self._file, f"{self.name}[{number}]", but=OSError):
            image = self._dataset[number][0]
        if isinstance(image, bytes | bytearray | memoryview):
            return bytes(image)
        return _encoded(
            image if isinstance(image, Image.Image) else Image.fromarray(_pixels(image, self.name_of(number)))
        )

    def version_of(self, number: int) -> str:
        """Text that changes with the image: its name and a digest of its content."""
        return f"{self.name}[{number}]\0{self._digest(number)}"


def _encoded(image: Image.Image) -> bytes:
    """Encode ``image`` as a file that reads as its own does: PNG, or TIFF for numbers of 32 bits.

    Raises ``OSError`` if the image was opened but not loaded, and is damaged.
    """
    file = io.BytesIO()
    try:
        _load(image)
        upright = ImageOps.exif_transpose(image)  # a PNG file made here keeps no rotation
        if upright.mode in WITHOUT_PNG:
            upright = upright.convert("RGB")
        if upright.mode == "I" and image.format in SIXTEEN_BITS_AS_I:
            upright = Image.fromarray(np.asarray(upright).astype(np.uint16))
        if upright.mode in ("I", "F"):
            upright.save(file, "tiff")
        else:
            upright.save(file, "png", compress_level=1)
    except OSError:
        raise
    except Exception as error:  # each of Pillow's readers fails in its own ways on a damaged file
        raise OSError(why_unreadable(error)) from error
    return file.getvalue()


def _load(image: Image.Image) -> None:
    """Decode an image that was only opened; close it if that fails, or Pillow's next try would take it for whole."""
    try:
        image.load()
    except Exception:
        image.close()
        raise


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Context in which Python, NumPy and torch draw the same numbers each time; afterwards they go on as before.

    The items of a data set may be augmented, and it is to be recognised all the same.
    """
    states = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _pixels(image: Any, where: str) -> np.ndarray:
    """Convert an array or tensor to uint8 (height, width) or (height, width, 3). Raises ``UserError``."""
    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3):
        pixels = np.moveaxis(pixels, 0, 2)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    if pixels.dtype != np.uint8 or (pixels.ndim != 2 and (pixels.ndim != 3 or pixels.shape[2] != 3)):
        raise UserError(
            f"--plugin: image {where} is {pixels.dtype} of the shape {pixels.shape}; give uint8 (height, width), "
            "(height, width, 3) or (3, height, width), a Pillow image or the bytes of an image file"
        )
    return np.ascontiguousarray(pixels)


def read_own(entry: Entry, settings: DataSettings) -> Splits:
    """Read the splits that the user's function ``entry`` returns for ``--datapath``. Raises ``UserError``."""
    try:
        given = entry(settings.datapath)
    except UserError as error:
        if settings.datapath is not None:
            raise
        raise UserError(f"{error}; --datapath was not given") from error
    where = f"--plugin {entry.file}: data set {entry.name}"
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise UserError(f"{where} must return (training, validation, classes)")
    *datasets, classes = given
    try:
        classes = tuple(map(str, classes))
    except TypeError as error:
        raise UserError(f"{where} must return the names of the classes last, not {classes!r}") from error
    spec = SPECS[entry.name]
    known = plugins.choices("augment")
    for name in spec.augment:
        if name not in known:
            hint = or_nearest(name, known, f"there are {', '.join(known)}")
            raise UserError(f"{where}: there is no augmentation {name}; {hint}")
    splits: list[Images] = []
    for name, dataset in zip(("train", "val"), datasets, strict=True):
        labels = _labels(dataset, len(classes), f"{where}, {name}")
        images = Items(dataset, f"{entry.name}/{name}", entry.file)
        splits.append(_in_memory(images, labels, spec) if spec.fixed_size else ImageFiles(images, labels))
    return Splits(splits[0], splits[1], classes)


def _in_memory(images: Items, labels: torch.Tensor, spec: DatasetSpec) -> MemoryImages:
    pixels = torch.empty(len(images), spec.channels, spec.image_size, spec.image_size, dtype=torch.uint8)
    for number in range(len(images)):
        image = images[number]
        try:
            read = read_pixels(image, spec.colour)
        except UnreadableImage as error:  # whose advice does not hold: images in memory are not skipped
            raise UserError(
                f"--plugin: {image}: cannot be read as an image ({error.reason}); leave it out of the data set, since "
                "one of a fixed_size is read whole at the start, and --skip-bad-images skips none of it"
            ) from error
        if read.shape[1:] != pixels.shape[2:]:
            raise UserError(
                f"--plugin: image {image} has {read.shape[1]} x {read.shape[2]} pixels, and a data set of a fixed_size "
                f"has {spec.image_size} x {spec.image_size}"
            )
        pixels[number] = read
    return MemoryImages(pixels, labels)


def _labels(dataset: Any, classes: int, where: str) -> torch.Tensor:
    """Labels, int64 (n,): ``dataset.targets`` if present, as in torchvision's data sets, or else each item's label.

    A ``target_transform``, as torchvision's data sets have it, changes the items' labels and not the targets.
    """
    try:
        count = len(dataset)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where}: must have a length ({type(error).__name__}: {error})") from error
    changed = getattr(dataset, "target_transform", None) is not None
    targets = None if changed else getattr(dataset, "targets", None)
    try:
        values = [dataset[number][1] for number in range(count)] if targets is None else list(targets)
        labels = torch.tensor([_whole(value) for value in values], dtype=torch.int64)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where}: items must be (image, label) ({type(error).__name__}: {error})") from error
    if len(labels) != count:
        raise UserError(f"{where}: {count} items have {len(labels)} targets")
    wrong = ((labels < 0) | (labels >= classes)).nonzero().flatten().tolist()
    if not len(labels) or wrong:
        which = f"item {wrong[0]} has label {labels[wrong[0]]} of {classes} classes" if wrong else "there are no items"
        raise UserError(f"{where}: {which}")
    return labels


def _whole(value: Any) -> int:
    """The number that a label is. Raises ``ValueError`` for a fraction, which ``int`` would cut off."""
    number = int(value)
    if number != float(value):
        raise ValueError(f"the label {float(value):g} is no whole number")
    return number
