"""Plan of a packing, which can be interrupted: which image goes into which shard, and which shards are finished."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import threading
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.packing.encoding import Encoding
from utils.checkpoint.fingerprint import listing_of
from utils.config.settings import UserError
from utils.data.data_set import Data
from utils.data.formats.readers import ImageFiles, Images
from utils.data.formats.shards.index import BLOCK, PARTS, Shard, Split, record_type
from utils.data.images.decoding import UnreadableImage
from utils.data.images.levels import range_of
from utils.data.images.stored import version_of
from utils.data.kept import whole_file, write_whole
from utils.data.sample_plan import permutation

LONGEST_NAME = 16  # characters of a member's name: nine digits, a point and an ending
ESTIMATED_FROM = 48  # images
# np.load parses headers with Python's own parser, which can fail in threads on Python 3.11 (CPython issue 106905).
ONE_AT_A_TIME = threading.Lock()


class Part(NamedTuple):
    """A finished shard: its images' ``numbers``, int64 (n,), their ``records``, and images ``left_out``, with reasons.

    ``sources``: the ``Plan.sources`` from which the shard was made.
    """

    shard: Shard
    numbers: np.ndarray
    records: np.ndarray
    left_out: list[str]
    sources: str


@dataclass(frozen=True)
class Plan:
    """Images to pack into ``folder``. ``splits``, ``encodings``: by split, the images and how they are packed."""

    folder: Path
    splits: dict[str, Images]
    classes: tuple[str, ...]
    encodings: dict[str, Encoding]
    shard_samples: int
    skip_bad: bool
    about: dict[str, Any]

    @classmethod
    def of(cls, folder: Path, data: Data, encodings: dict[str, Encoding], shard_samples: int, skip_bad: bool) -> Plan:
        """The plan for all of ``data``."""
        about = {
            **{split: dataclasses.asdict(encoding) for split, encoding in encodings.items()},
            "shard_samples": shard_samples,
            "skip_bad_images": skip_bad,
            "source": listing_of(data.fingerprint),
        }
        ranges = {range_of(encoding.colour) for encoding in encodings.values() if encoding.format != "keep"} - {None}
        if ranges:  # the packed images have 8 bits, so only this tells how they were made
            about["pixel_range"] = list(*ranges)
        splits = {"train": data.train, "val": data.validation}
        return cls(folder, splits, data.classes, encodings, shard_samples, skip_bad, about)

    @property
    def images(self) -> int:
        return sum(map(len, self.splits.values()))

    @property
    def records(self) -> np.dtype:
        """Type of an image's record."""
        labels = self.splits["val"].labels
        return record_type(LONGEST_NAME, labels.shape[1] if labels.ndim > 1 else 0)

    def shards(self) -> list[tuple[str, int]]:
        """Split and number of each shard."""
        return [(split, number) for split in self.splits for number in range(self._count(split))]

    def _count(self, split: str) -> int:
        return max(1, -(-len(self.splits[split]) // self.shard_samples))

    def numbers(self, split: str, shard: int) -> np.ndarray:
        """Indices of a shard's images, int64, in the shard's order.

        Training images are shuffled, so that shards are alike. Images keep their indices in the data set, so a training
        order by index is the same before and after packing.
        """
        count = len(self.splits[split])
        order = permutation(count, 0, 0) if split == "train" else np.arange(count)
        return np.array_split(order, self._count(split))[shard]

    def sources(self, split: str, shard: int) -> str:
        """Digest of the versions of a shard's files, which changes if a file is repaired in place (``version_of``)."""
        images = self.splits[split]
        if not isinstance(images, ImageFiles):
            return ""  # ``about`` has a fingerprint of the pixels
        facts = [version_of(images.paths[number]) for number in self.numbers(split, shard).tolist()]
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()

    # ------------------------------------------------------------------------------------ what is done

    def begin(self) -> None:
        """Begin the packing. Raises ``UserError`` if the folder holds another packing, or foreign tar files."""
        path = self.folder / PARTS / "plan.json"
        text = json.dumps(self.about, indent=1, sort_keys=True)
        try:
            begun = path.read_text()
        except FileNotFoundError:
            if tar := next(self.folder.glob("*.tar"), None):  # shards have such names, and would replace it
                raise UserError(
                    f"--output {self.folder}: holds {tar.name}, which this packing did not make; choose another folder"
                ) from None
            path.parent.mkdir(exist_ok=True)
            write_whole(path, text.encode())
            return
        if begun != text:
            raise UserError(
                f"--output {self.folder}: holds part of another packing (other images or other flags); give the flags "
                "of before, another folder, or remove this one"
            )

    def done(self, split: str, number: int) -> Part | None:
        """The finished shard; None if it must be made, since it is missing, damaged or made of other files."""
        try:
            with ONE_AT_A_TIME, np.load(self._part(split, number), allow_pickle=False) as arrays:
                about = json.loads(str(arrays["about"]))
                shard = Shard(**about["shard"])
                part = Part(shard, arrays["numbers"], arrays["records"], about["left_out"], about["sources"])
            size = (self.folder / shard.file).stat().st_size
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
            return None
        return part if (size, part.sources) == (shard.bytes, self.sources(split, number)) else None

    def keep(self, split: str, number: int, part: Part) -> None:
        """Record a shard as finished."""
        about = {"shard": dataclasses.asdict(part.shard), "left_out": part.left_out, "sources": part.sources}
        with whole_file(self._part(split, number)) as file:
            np.savez(file, numbers=part.numbers, records=part.records, about=json.dumps(about))

    def forget(self, split: str, number: int) -> None:
        """Make sure that the shard is made anew next time."""
        self._part(split, number).unlink(missing_ok=True)

    def _part(self, split: str, number: int) -> Path:
        return self.folder / PARTS / f"{split}-{number:06}.npz"

    # ------------------------------------------------------------------------------------ disk space

    def needed_bytes(self) -> int:
        """Estimate of the shards' size in bytes, from some of the images."""
        total = 0.0
        for split, images in self.splits.items():
            sizes = []
            for number in permutation(len(images), 0, 1)[:ESTIMATED_FROM]:
                try:
                    sizes.append(len(self.encodings[split].encode(images, int(number))[1]))
                except UnreadableImage:
                    if not self.skip_bad:
                        raise
            total += len(images) * (np.mean(sizes or [0]) + 5.5 * BLOCK)  # two short members, three headers, padding
        return int(total * 1.05)

    def refuse_full_disk(self, finished_bytes: int) -> None:
        """Raise ``UserError`` if the shards, ``finished_bytes`` of which are done, will not fit on the disk."""
        needed = self.needed_bytes() - finished_bytes
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise UserError(
                f"--output {self.folder}: the shards need about {needed / 1e9:,.2f} GB more, {free / 1e9:,.2f} GB are "
                "free there; make room, choose another folder, or a smaller --resize"
            )


def merged(parts: list[Part]) -> Split:
    """Merge ``parts`` into one split, with all images' records in image-number order."""
    records = np.empty(sum(len(part.records) for part in parts), dtype=parts[0].records.dtype)
    numbers = np.concatenate([part.numbers for part in parts])
    records[:] = np.concatenate([part.records for part in parts])
    return Split(tuple(part.shard for part in parts), records[np.argsort(numbers, kind="stable")], checked=True)
