"""A folder of shards as a data set; each image is read by its number, with one positioned read."""

from __future__ import annotations

import hashlib
import os
import zlib
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from utils.config.settings import UserError
from utils.config.spelling import some
from utils.data.formats.readers import ImageFiles, Images, Splits
from utils.data.formats.shards.foreign import FOREIGN
from utils.data.formats.shards.index import ANEW, BLOCK, CONTENTS, Contents, Split, read_contents
from utils.data.images.stored import NumberedImages

COPY = ".shard"  # the ending of a shard's copy in a local folder
MOST_OPEN = 256  # files that a process keeps open; systems allow 1024


def holds_shards(root: Path) -> bool:
    """True if ``root`` holds an index of shards."""
    return (root / CONTENTS).is_file()


def read_shards(root: Path, pixel_range: tuple[float, ...] | None, skip_bad: bool) -> Splits:
    """Read the images of the shards in ``root``, which has an index. Raises ``UserError`` if the index does not fit.

    With ``skip_bad``, samples of foreign tar files that lack an image or a label are left out, with a warning.
    """
    contents = read_contents(root)
    if contents is None:
        raise UserError(f"{root / CONTENTS}: is no index of shards; {ANEW}")
    for name in ("train", "val"):
        if name not in contents.splits or not len(contents.splits[name].records):
            raise UserError(f"--datapath {root}: has no {name} images; {ANEW}")
    packed = contents.made.get("pixel_range")
    if packed is not None and tuple(packed) != pixel_range:
        words = "{:g} {:g}".format(*packed)
        raise UserError(f"--pixel-range: the shards in {root} were packed with {words}; give --pixel-range {words}")
    problems = contents.made.get("problems", ())
    warnings: tuple[str, ...] = ()
    if problems:
        count = contents.made["left_out"]
        told = problems[0] + (f" (and {count - 1:,} more)" if count > 1 else "")
        if not skip_bad:
            raise UserError(f"{told}; repair the tar file, or leave out what is damaged with --skip-bad-images")
        warnings = (f"--datapath {root}: left out: {told}",)
    if contents.made.get(FOREIGN) and not contents.made.get("listed"):
        _refuse_classes_of_validation_alone(contents)
    train, validation = (images_of(contents, name) for name in ("train", "val"))
    return Splits(train, validation, contents.classes, warnings)


def _refuse_classes_of_validation_alone(contents: Contents) -> None:
    """Raise ``UserError`` for classes that only validation has, such as misspelt ones: nothing trains their outputs."""
    trained, validated = (np.unique(contents.splits[name].records["label"]) for name in ("train", "val"))
    unknown = [contents.classes[label] for label in np.setdiff1d(validated, trained)]
    if unknown:
        raise UserError(
            f"--datapath {contents.folder}: its tar files for val have classes that those for train lack: "
            f"{some(unknown)}; correct the labels, or list all classes in classes.txt"
        )


def images_of(contents: Contents, name: str) -> ImageFiles:
    """The images of split ``name``."""
    split = contents.splits[name]
    numbers = split.records["label"]
    labels = torch.from_numpy(numbers.astype(np.int8 if numbers.ndim > 1 else np.int64))
    return ImageFiles(Members(contents.folder, name, split), labels)


class Members(NumberedImages):
    """The images of a split in shards, each named SHARD/MEMBER; their records stay in the mapped index file.

    ``copies``: a folder that may hold copies of the shards, which are then read instead.
    """

    copies: str | None = None

    def __init__(self, folder: Path, name: str, split: Split) -> None:
        super().__init__(name, len(split.records))
        self.split = split
        self.files = [str((folder / shard.file).absolute()) for shard in split.shards]
        self._identity = split.identity

    def name_of(self, number: int) -> str:
        record = self.split.records[number]
        return f"{self.files[record['shard']]}/{record['name'].decode('utf-8', 'surrogateescape')}"

    def version_of(self, number: int) -> str:
        """Text that changes with the image: its size, CRC-32 of its tar header, and CRC-32 of its bytes.

        If the index lacks the last, the image's place in the shard and the shard's time replace it.
        """
        record = self.split.records[number]
        if self.split.checked:
            return f"{record['size']}\0{record['head']}\0{record['crc']}"
        changed = self.split.shards[record["shard"]].changed
        return f"{record['size']}\0{record['head']}\0{record['offset']}\0{changed}"

    def read(self, number: int) -> bytes:
        """The bytes of an image file, read with the tar header before them, which must be the one in the index.

        Raises ``UserError`` if it is a different header: the index is stale, and any image might be the wrong one.
        Raises ``OSError`` if the bytes are damaged or cannot be read.
        """
        record = self.split.records[number]
        shard = self.files[record["shard"]]
        place = int(record["offset"]) - BLOCK, BLOCK + int(record["size"])
        if self.copies is not None:
            # No copy, or a wrong one, is only slower. A copy that stayed open would keep its disk space when removed.
            with suppress(OSError, UserError), open(copy_of(shard, self.copies), "rb", buffering=0) as copy:
                return self._checked(number, _read(copy, *place))
        return self._checked(number, _read(open_shard(shard), *place))

    def _checked(self, number: int, data: bytes) -> bytes:
        record = self.split.records[number]
        size = BLOCK + int(record["size"])
        if len(data) >= BLOCK and zlib.crc32(data[:BLOCK]) != record["head"]:
            name = self.name_of(number)
            raise UserError(f"{name}: does not lie where the index says, so the shard was replaced or damaged; {ANEW}")
        if len(data) != size:
            raise OSError(f"the shard ends {size - len(data):,} bytes too early")
        content = data[BLOCK:]
        if self.split.checked and zlib.crc32(content) != record["crc"]:
            raise OSError("its bytes are not those that were packed: their CRC-32 differs")
        return content

    @property
    def shards(self) -> np.ndarray:
        """The number of each image's shard: uint32 (n,)."""
        return self.split.records["shard"][self.places]

    @property
    def names(self) -> np.ndarray:
        """The name of each image in its shard: bytes (n,)."""
        return self.split.records["name"][self.places]

    @property
    def identity(self) -> bytes:
        return self._identity.encode()

    def take(self, places: np.ndarray) -> Members:
        taken = super().take(places)
        taken._identity = hashlib.sha256(self._identity.encode() + places.astype("<i8").tobytes()).hexdigest()
        return taken


def members_of(images: Images, flag: str) -> Members:
    """The training ``images``, which ``flag`` wants in shards. Raises ``UserError`` if they do not lie there."""
    if not (isinstance(images, ImageFiles) and isinstance(images.paths, Members)):
        raise UserError(f"{flag}: the training images do not lie in shards; remove it")
    return images.paths


# ------------------------------------------------------------------------------------ open files and copies


@lru_cache(maxsize=MOST_OPEN)
def open_shard(path: str) -> BinaryIO:
    """The shard at ``path``, kept open; reads are positioned, so that forked processes may share it."""
    return open(path, "rb", buffering=0)


def _read(file: BinaryIO, offset: int, count: int) -> bytes:
    """Read ``count`` bytes from ``offset`` on, fewer at the file's end. Raises ``OSError``."""
    parts = []
    while count and (part := os.pread(file.fileno(), count, offset)):
        parts.append(part)
        count -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


@lru_cache(maxsize=4096)
def copy_of(path: str, folder: str) -> str:
    """Path in ``folder`` of the copy of the shard at ``path``; its name depends on the shard's path, size and time."""
    status = os.stat(path)
    text = f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode("utf-8", "surrogateescape")
    return os.path.join(folder, hashlib.sha256(text).hexdigest()[:32] + COPY)
