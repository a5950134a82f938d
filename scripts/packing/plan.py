"""Plan of a packing: which image goes into which shard, and what is done, so that one that was cut goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.packing.encoding import Encoding
from utils.checkpoint.fingerprint import listing_of
from utils.config.settings import UserError
from utils.data.datasets import Data
from utils.data.formats.readers import ImageFiles, Images
from utils.data.formats.shards.index import BLOCK, PARTS, Shard, Split, record_type
from utils.data.images.decoding import UnreadableImage
from utils.data.images.levels import range_of
from utils.data.images.stored import version_of
from utils.data.kept import whole_file, write_whole
from utils.data.sample_plan import permutation

LONGEST_NAME = 16  # of a member: nine digits, a point and an ending
ESTIMATED_FROM = 48  # images


class Part(NamedTuple):
    """A finished shard: its images' ``numbers`` int64 (n,) and their ``records``, and those ``left_out``, with why.

    ``sources``: the ``Plan.sources`` that it was made of.
    """

    shard: Shard
    numbers: np.ndarray
    records: np.ndarray
    left_out: list[str]
    sources: str


@dataclass(frozen=True)
class Plan:
    """Images to pack into ``folder``. ``splits``, ``encodings``: the images and how they are packed, by split."""

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
        if ranges:  # the packed images have 8 bits, so nothing but this says how they came about
            about["pixel_range"] = list(*ranges)
        splits = {"train": data.train, "val": data.validation}
        return cls(folder, splits, data.classes, encodings, shard_samples, skip_bad, about)

    @property
    def images(self) -> int:
        return sum(map(len, self.splits.values()))

    @property
    def records(self) -> np.dtype:
        """The kind of an image's record."""
        labels = self.splits["val"].labels
        return record_type(LONGEST_NAME, labels.shape[1] if labels.ndim > 1 else 0)

    def shards(self) -> list[tuple[str, int]]:
        """Split and number of each shard."""
        return [(split, number) for split in self.splits for number in range(self._count(split))]

    def _count(self, split: str) -> int:
        return max(1, -(-len(self.splits[split]) // self.shard_samples))

    def numbers(self, split: str, shard: int) -> np.ndarray:
        """The images of a shard in their order there, int64. Those of training are mixed, so each shard has all kinds.

        They keep their numbers in the data set, so an order of training by number is the same before and after.
        """
        count = len(self.splits[split])
        order = permutation(count, 0, 0) if split == "train" else np.arange(count)
        return np.array_split(order, self._count(split))[shard]

    def sources(self, split: str, shard: int) -> str:
        """A digest of each file of a shard: a file that was repaired under its name has another (``version_of``)."""
        images = self.splits[split]
        if not isinstance(images, ImageFiles):
            return ""  # ``about`` has a fingerprint of the pixels
        facts = [version_of(images.paths[number]) for number in self.numbers(split, shard).tolist()]
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()

    # ------------------------------------------------------------------------------------ what is done

    def begin(self) -> None:
        """Refuse a folder in which another packing was begun, or with tar files that no packing has begun."""
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
        """A shard that is finished; None if it must be made. What is damaged or made of other files is made again."""
        try:
            with np.load(self._part(split, number), allow_pickle=False) as arrays:
                about = json.loads(str(arrays["about"]))
                shard = Shard(**about["shard"])
                part = Part(shard, arrays["numbers"], arrays["records"], about["left_out"], about["sources"])
            size = (self.folder / shard.file).stat().st_size
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
            return None
        return part if (size, part.sources) == (shard.bytes, self.sources(split, number)) else None

    def keep(self, split: str, number: int, part: Part) -> None:
        """Note a shard as finished."""
        about = {"shard": dataclasses.asdict(part.shard), "left_out": part.left_out, "sources": part.sources}
        with whole_file(self._part(split, number)) as file:
            np.savez(file, numbers=part.numbers, records=part.records, about=json.dumps(about))

    def forget(self, split: str, number: int) -> None:
        """Make a shard anew next time."""
        self._part(split, number).unlink(missing_ok=True)

    def _part(self, split: str, number: int) -> Path:
        return self.folder / PARTS / f"{split}-{number:06}.npz"

    # ------------------------------------------------------------------------------------ disk space

    def needed_bytes(self) -> int:
        """About how much room the shards take, from some of the images."""
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
        """Raise ``UserError`` if the shards will not fit."""
        needed = self.needed_bytes() - finished_bytes
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise UserError(
                f"--output {self.folder}: the shards need about {needed / 1e9:,.2f} GB more, {free / 1e9:,.2f} GB are "
                "free there; make room, choose another folder, or a smaller --resize"
            )


def merged(parts: list[Part]) -> Split:
    """A split of these shards, the records of all its images in the order of their numbers."""
    records = np.empty(sum(len(part.records) for part in parts), dtype=parts[0].records.dtype)
    numbers = np.concatenate([part.numbers for part in parts])
    records[:] = np.concatenate([part.records for part in parts])
    return Split(tuple(part.shard for part in parts), records[np.argsort(numbers, kind="stable")], checked=True)
