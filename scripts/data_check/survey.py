"""Contents of a data set, image by image: each file is read once, decoded as in training, and hashed.

``take_survey`` lists what training would read, even if training would refuse to start, and the test images that it
would leave alone; ``inspect`` examines every image; ``findings.py`` judges the result.
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image
from torch.utils.data import ConcatDataset, Dataset

from scripts.common.image_stream import reason
from utils.config.datasets import SPECS, DatasetSpec
from utils.config.groups.data import DataSettings
from utils.config.image_size import Size
from utils.config.settings import UserError
from utils.config.spelling import printable, reason_of
from utils.data.data_set import Data, in_colour_of
from utils.data.datasets import get_data, preprocessing_of
from utils.data.division import groups_alike
from utils.data.first_look import Seen
from utils.data.formats import class_folders
from utils.data.formats.class_folders import LISTER, find_splits, test_folder, training_folder
from utils.data.formats.listing import Lister
from utils.data.formats.readers import ImageFiles, Images
from utils.data.formats.table import rows_of_test
from utils.data.images.arrays import array_header
from utils.data.images.decoding import open_image, read_pixels
from utils.data.images.levels import is_array
from utils.data.images.look import Look, look
from utils.data.images.stored import NamedBytes, content_of
from utils.data.progress_log import ProgressLog
from utils.data.splits import in_class_folders
from utils.data.worker_pool import START, in_chunks

CHUNK = 64  # images that a worker takes at a time
SPOKEN_OF = 20_000  # most images chosen for a comparison of kinds, sizes and levels, besides remarkable ones
HASH_BYTES = 16  # of the SHA-256 over an image's pixels

# One image. A hash that cannot be computed is empty. NumPy drops zero bytes at a hash's end, see ``hexadecimal``.
RECORD = np.dtype(
    [
        ("sha256", "S32"),
        ("pixel_hash", f"S{HASH_BYTES}"),
        ("width", "i4"),
        ("height", "i4"),
        ("mode", "S8"),
        ("format", "S8"),
        ("rotated", "?"),
    ]
)
UNREAD = (b"", b"", 0, 0, b"", b"", False)
SEPARATOR = "; "  # between an image's labels in text
WORDS = {"train": "training", "val": "validation", "test": "test"}  # for each split, in the order of a survey


@dataclass(frozen=True)
class Survey:
    """Images of the splits in the order of ``WORDS``: those that training would read, and those to test on, if any.

    ``classes``: the classes of all splits. ``labels``: int64 (n,), indices into ``classes``, or for multi-label data
    int8 (n, classes): 1, 0, or -1 if missing. ``images``: of each split, in memory or in files. ``trees``: by split the
    folders that hold class folders; only 'train' if one folder is for training and validation. ``refusal``: why
    training would not start, if so. ``warnings``: training's, except for plain class folders, which findings.py judges.
    ``origin``: the table that the labels come from, in words, and its rows that training does not read. ``of_test``:
    lines about a table's rows to test on. ``is_divided``: whether a share of the training images is validated.
    """

    spec: DatasetSpec
    image_size: Size
    root: Path | None
    trees: Mapping[str, Path]
    classes: tuple[str, ...]
    labels: np.ndarray
    images: tuple[Images, ...]
    refusal: str | None = None
    warnings: tuple[str, ...] = ()
    origin: str = ""
    of_test: tuple[str, ...] = ()
    is_divided: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def colour(self) -> str:
        """Mode and range in which files are read, as text."""
        return next((split.colour for split in self.images if isinstance(split, ImageFiles)), self.spec.colour)

    @cached_property
    def paths(self) -> Sequence[str] | None:
        """Files of the images; None for a data set in memory."""
        files = [split.paths for split in self.images if isinstance(split, ImageFiles)]
        return ConcatDataset(files) if files else None  # names in shards are made on request

    @property
    def several(self) -> bool:
        """True if the data is multi-label."""
        return self.labels.ndim > 1

    @cached_property
    def ranges(self) -> dict[str, range]:
        """The indices of each split's images."""
        ends = np.cumsum([0, *map(len, self.images)]).tolist()
        return {split: range(begin, end) for split, (begin, end) in zip(WORDS, pairwise(ends), strict=False)}

    def label_of(self, index: int) -> str:
        """Class of an image, or its labels."""
        if not self.several:
            return self.classes[self.labels[index]]
        return SEPARATOR.join(self.classes[place] for place in np.flatnonzero(self.labels[index] == 1))

    def agree(self, index: int, others: np.ndarray) -> np.ndarray:
        """Whether each of ``others`` has the image's label, bool (m,); multi-label: whether no known labels differ."""
        own, theirs = self.labels[index], self.labels[others]
        if not self.several:
            return theirs == own
        return ~((theirs >= 0) & (own >= 0) & (theirs != own)).any(1)

    def split_of(self, index: int) -> str:
        return next(split for split, indices in self.ranges.items() if index < indices.stop)

    def name(self, index: int) -> str:
        """Image's name in a report: its path below ``--datapath``, or its number in a split."""
        if self.paths is None:
            split = self.split_of(index)
            return f"{split}[{index - self.ranges[split].start}]"
        return self.below(self.paths[index])

    def below(self, path: str | Path) -> str:
        """Path relative to ``--datapath``, or another name as it is, in printable characters."""
        is_path = self.root is not None and Path(path).is_relative_to(self.root)
        return printable(os.path.relpath(path, self.root) if is_path else str(path))


# -------------------------------------------------------------------------------------- what there is


def take_survey(settings: DataSettings, lister: Lister = LISTER) -> Survey:
    """List the images that training would read with ``settings``, and the test images that it would leave alone.

    Class folders that training refuses are listed too, with all classes of all splits. Raises ``UserError`` if there
    is nothing to list.
    """
    spec = SPECS[settings.dataname]
    name = settings.dataname
    if name == "synthetic":
        raise UserError("--dataname synthetic: random images, new in each run; there is nothing to check")
    root = Path(settings.datapath) if settings.datapath is not None and name != "digits" else None
    trees = _trees(settings, root)
    images: tuple[Images, ...]
    try:
        data = get_data(settings, torch.device("cpu"), lister)
        classes = data.classes
        trees = trees if isinstance(data.train, ImageFiles) else {}
        test, of_test = _to_test_on(settings, trees, data)
        images = (data.train, data.validation) if test is None else (data.train, data.validation, test)
        told = data.warnings if not trees or settings.class_map is not None else ()
        facts: dict[str, Any] = {"warnings": told, "origin": data.origin, "of_test": of_test}
    except UserError as error:
        classes, images = _listed(trees, spec.colour)
        if not any(map(len, images)):
            raise
        preprocessing = preprocessing_of(next(filter(len, images)), settings)
        images = tuple(in_colour_of(preprocessing, split) for split in images)
        facts = {"refusal": str(error)}
    labels = np.concatenate([split.labels.numpy() for split in images])
    size = settings.image_size or spec.image_size
    divided = settings.divides_training
    return Survey(spec, size, root, trees, classes, labels, images, is_divided=divided, **facts)


def _to_test_on(settings: DataSettings, trees: Mapping[str, Path], data: Data) -> tuple[Images | None, tuple[str, ...]]:
    """Images that training leaves for a test, None if there are none, and lines about such rows of a table."""
    if "test" in trees:
        return _images_of(trees["test"], data.classes, data.train.colour), ()
    if not settings.is_table:
        return None, ()
    test, lines = rows_of_test(settings, data.classes)
    if test is None:
        return None, lines
    more_alike = {*groups_alike(data.train, data.validation, test)} - {*groups_alike(data.train, data.validation)}
    return replace(test, colour=data.train.colour), (*lines, *more_alike)


def _trees(settings: DataSettings, root: Path | None) -> dict[str, Path]:
    """Folders with class folders by split: those that ``get_data`` would read, and one to test on beside them."""
    if root is None or settings.dataname == "shards" or not in_class_folders(settings):
        return {}
    splits = find_splits(root)
    if not settings.divides_training:
        trees = dict(zip(WORDS, splits or (), strict=False))
    else:
        trees = {} if splits and settings.folds is None else {"train": training_folder(root) or root}
    test = test_folder(root)
    beside = trees.get("train", root) != root and test not in (None, *trees.values())
    return {**trees, "test": test} if beside and test is not None and class_names(test) else trees


def _listed(trees: Mapping[str, Path], colour: str) -> tuple[tuple[str, ...], tuple[ImageFiles, ...]]:
    """Classes and images of all splits as found; all images of a single tree count as training images."""
    classes = tuple(sorted(set(chain.from_iterable(map(class_names, trees.values())))))
    none = ImageFiles([], torch.empty(0, dtype=torch.int64), colour)
    splits = [split for split in WORDS if split != "test" or split in trees]
    return classes, tuple(_images_of(trees[split], classes, colour) if split in trees else none for split in splits)


def class_names(tree: Path) -> tuple[str, ...]:
    """Class folders of ``tree``; none if training would refuse it for having none."""
    try:
        return class_folders.class_names(tree)
    except UserError:
        return ()


def _images_of(tree: Path, classes: Sequence[str], colour: str) -> ImageFiles:
    """Images of ``tree`` as found; findings.py reports classes without images."""
    try:
        return replace(class_folders.image_files(tree, classes, LISTER, may_lack=True)[0], colour=colour)
    except UserError:
        return ImageFiles([], torch.empty(0, dtype=torch.int64), colour)


# ------------------------------------------------------------------------------------------ each image


class Inspected(NamedTuple):
    """All images of a survey as ``RECORD`` (n,), and by index the reason why an image is damaged.

    ``looks``: facts about all readable files with something remarkable, and about a sample of the others.
    """

    records: np.ndarray
    damage: dict[int, str]
    looks: list[Seen]

    @property
    def readable(self) -> np.ndarray:
        """Records of the images that can be decoded."""
        return self.records[self.records["pixel_hash"] != b""]


def inspect(survey: Survey, *, workers: int, progress: ProgressLog) -> Inspected:
    """Examine every image. Memory grows by about 80 bytes per image.

    Raises ``UserError`` if a process is killed from outside.
    """
    if survey.paths is None:
        return Inspected(np.concatenate([_of_pixels(images.pixels.numpy()) for images in survey.images]), {}, [])
    found = Inspected(np.empty(len(survey), dtype=RECORD), {}, [])
    stop = multiprocessing.get_context(START).Event()
    inspector = _ChunkInspector(survey.paths, survey.colour, stop)
    try:
        for chunk, (rows, damage, looks) in in_chunks(
            inspector, len(survey), CHUNK, "Checking", workers=workers, progress=progress
        ):
            found.records[chunk.start : chunk.stop] = rows
            found.damage.update(damage)
            for index, facts in looks.items():
                found.looks.append(Seen(survey.label_of(index), survey.split_of(index), survey.name(index), facts))
    finally:
        stop.set()
    return found


class _ChunkInspector(Dataset):
    """A worker's task: records of a range of files, why some are damaged, and facts about some of the others."""

    def __init__(self, paths: Sequence[str], colour: str, stop: Any) -> None:
        self.paths = paths
        self.colour = colour
        self.stop = stop
        self.compared = np.zeros(len(paths), dtype=bool)
        self.compared[np.linspace(0, len(paths) - 1, min(len(paths), SPOKEN_OF)).astype(int)] = True

    def __getitem__(self, chunk: range) -> tuple[np.ndarray, dict[int, str], dict[int, Look]]:
        rows = []
        damage = {}
        looks = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about metadata and large images: no damage to the pixels
            for index in chunk:
                if self.stop.is_set():  # the main process was interrupted and waits for this one to end
                    break
                row, found = inspect_file(self.paths[index], self.colour)
                rows.append(row)
                if isinstance(found, str):
                    damage[index] = found
                elif self.compared[index] or is_remarkable(found):
                    looks[index] = found
        return np.array(rows, dtype=RECORD), damage, looks


def is_remarkable(found: Look) -> bool:
    """True if a network may not see all of a file, or if the file shows a single level."""
    is_plain = found.seen is not None and found.seen[0] == found.seen[2]
    return found.bits > 8 or found.further > 0 or found.frames > 1 or found.alpha is not None or is_plain


def inspect_file(path: str, colour: str) -> tuple[tuple[Any, ...], Look | str]:
    """Inspect an image file: return its ``RECORD``, with the size in training, and facts, or why it is damaged.

    The file is read once, so the hashed bytes are those decoded.
    """
    try:
        data = content_of(path)
    except (OSError, UserError) as error:
        return UNREAD, f"cannot be opened ({reason_of(error)})"
    sha256 = hashlib.sha256(data).digest()
    if not data:
        return (sha256, *UNREAD[1:]), "is empty (0 bytes)"
    kinds = UNREAD[4:]
    size = (0, 0)
    try:
        if is_array(colour) or array_header(NamedBytes(path, data)) is not None:
            return _inspect_array(NamedBytes(path, data), colour, sha256)
        with Image.open(io.BytesIO(data)) as header:  # reads no pixels; open_image returns only pixels
            kinds = (header.mode.encode(), (header.format or "").encode(), _is_rotated(header))
            size = header.size
        image = open_image(io.BytesIO(data), colour)
        found = look(io.BytesIO(data), colour, image)
        content = pixel_hash(colour, image.size, image.tobytes() + found.lost)
        return (sha256, content, *image.size, *kinds), found._replace(size=image.size)
    except Exception as error:  # training would stop at this file, whatever the error
        return (sha256, b"", *size, *kinds), reason(error)


def _inspect_array(file: NamedBytes, colour: str, sha256: bytes) -> tuple[tuple[Any, ...], Look]:
    """Result of ``inspect_file`` for a file that is read as an array, or holds one."""
    pixels = read_pixels(file, colour)
    found = look(file, colour)
    height, width = pixels.shape[1:]
    content = pixel_hash(colour, (width, height), pixels.permute(1, 2, 0).numpy().tobytes() + found.lost)
    row = (sha256, content, width, height, _mode_of(file, found.bits).encode(), found.file_format.encode(), False)
    return row, found._replace(size=(width, height))


def _mode_of(file: NamedBytes, bits: int) -> str:
    """Pillow's mode of an image with this many ``bits``; 'CHANNELSxBITS' if Pillow has none for it."""
    if (array := array_header(file)) is not None:
        channels = array.channels
    else:
        with Image.open(file) as image:
            if bits == 8:
                return image.mode
            channels = len(image.getbands())
    return {(1, 8): "L", (3, 8): "RGB"}.get((channels, bits), f"{channels}x{bits}")


def _is_rotated(image: Image.Image) -> bool:
    """True if EXIF says that the pixels are not stored upright."""
    if image.format == "PNG" and not {"exif", "Raw profile type exif", "XML:com.adobe.xmp"} & image.info.keys():
        return False  # to look for more, Pillow would decode all pixels
    return image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)


def pixel_hash(colour: str, size: tuple[int, int], pixels: bytes) -> bytes:
    """First bytes of the SHA-256 over an image's mode, size and pixels."""
    digest = hashlib.sha256(f"{colour} {size[0]} {size[1]} ".encode())
    digest.update(pixels)
    return digest.digest()[:HASH_BYTES]


def _of_pixels(pixels: np.ndarray) -> np.ndarray:
    """Records of images in memory, uint8 (n, c, h, w), as ``RECORD`` (n,)."""
    _, channels, height, width = pixels.shape
    mode = {1: "L", 3: "RGB"}.get(channels, f"{channels}x8")
    rows = [
        (b"", pixel_hash(mode, (width, height), image.tobytes()), width, height, mode, b"", False) for image in pixels
    ]
    return np.array(rows, dtype=RECORD)


def hexadecimal(digest: bytes, count: int) -> str:
    """A ``RECORD``'s hash in hexadecimal, with all its ``count`` bytes; '' if there is none."""
    return bytes(digest).ljust(count, b"\0").hex() if digest else ""
