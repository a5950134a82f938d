"""A data set as read: its splits, classes and preprocessing, its row in the plan, and its fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, repeat
from typing import Any
from zlib import crc32

import numpy as np
import torch

from utils.checkpoint.fingerprint import joined, same_images, short
from utils.checkpoint.resume import ResumePoint
from utils.config.datasets import SPECS, DatasetSpec
from utils.config.groups.data import VIEWS, DataSettings
from utils.config.image_size import Size, sides
from utils.config.settings import UserError
from utils.data.formats.file_paths import FilePaths
from utils.data.formats.held_out import Folds
from utils.data.formats.own import LOOKED_AT, Items
from utils.data.formats.readers import ImageFiles, Images, class_counts
from utils.data.formats.shards.members import Members
from utils.data.images.arrays import Header
from utils.data.images.levels import grey_of
from utils.data.images.stored import ImagePaths, Stored
from utils.data.preprocessing import KnownPreprocessing, Preprocessing, resolve
from utils.data.sample_plan import evenly_spaced
from utils.runtime.distributed import Distributed

SHOWN_CLASSES = 5  # in a plan

FIRST_BYTES = 1 << 16  # of a file whose content is part of the fingerprint


@dataclass(frozen=True)
class Data:
    """A data set as read: both splits, the class names in label order, and what was resolved.

    ``train`` is None for a set to evaluate. ``preprocessing_line`` describes how images are shown, with the origin of
    each value. ``warnings``: what else a user should know about the set, one line each. ``seen``: a further warning,
    about validation images on which the checkpoint in use was trained; '' if there are none. ``begun_max_shift``: what
    ``spec.max_shift`` was when the run to resume began, if it is None now. ``origin``: the table that the
    labels come from, as text; '' without one. ``folds``: the folds of all training images, one of which is validated.
    ``found``: header of the first file, if images are read as arrays.
    """

    spec: DatasetSpec
    preprocessing: Preprocessing
    preprocessing_line: str
    classes: tuple[str, ...]
    train: Images | None
    validation: Images
    warnings: tuple[str, ...] = ()
    seen: str = ""
    begun_max_shift: int | None = None
    origin: str = ""
    folds: Folds | None = None
    found: Header | None = None

    @property
    def max_shift(self) -> int | None:
        """Default reach of a shift, in pixels; None for an eighth of the image."""
        return self.begun_max_shift or self.spec.max_shift

    @property
    def multilabel(self) -> bool:
        """True if images have several labels."""
        return self.validation.labels.ndim > 1

    @property
    def image_size(self) -> Size:
        """The size of a training image."""
        return self.preprocessing.image_size

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of an image that the network sees: (channels, height, width)."""
        return self.preprocessing.channels, *sides(self.image_size)

    def describe(self, settings: DataSettings, validated: int) -> dict[str, str]:
        """The rows of a run's plan about the images; ``validated``: how many images are validated."""
        training = f"{len(self.train):,} training, " if self.train is not None else ""
        cut = f", cut to {validated:,} (--max-val-batches)" if validated < len(self.validation) else ""
        images = f"{training}{len(self.validation):,} validation images{cut}{self._split_words(settings)}"
        more = ", ..." if len(self.classes) > SHOWN_CLASSES else ""
        rows = {
            "Data": f"{settings.dataname}: {images}",
            **({"Labels": self.origin} if self.origin else {}),
            "Classes": f"{len(self.classes)}: {', '.join(self.classes[:SHOWN_CLASSES])}{more}",
            "Images": " x ".join(map(str, self.image_shape)),
            "Preprocessing": self.preprocessing_line,
        }
        if settings.tta != "none":
            views = VIEWS[settings.tta]
            rows["Validation"] = f"Test-time augmentation {settings.tta}: validation by the mean logits of {views}"
        return rows

    def _split_words(self, settings: DataSettings) -> str:
        """How the validation images were split off and what shares resulted, as text; '' if there was no split."""
        if not settings.divides_training or self.train is None:
            return ""
        count, others = len(self.validation), len(self.train)
        size = len(self.classes)
        kept, trained = (class_counts(images.labels, size) for images in (self.validation, self.train))
        there = kept + trained > 0  # a class map may name others
        shares = 100 * kept[there] / (kept + trained)[there]
        if settings.folds is not None:
            how = f"fold {settings.fold} of --folds {settings.folds}"
        else:
            by = {"name": "by their names", "draw": "by one draw over all"}[settings.val_split_by]
            how = f"--val-split {settings.val_split:g}, {by}"
        grouped = " in whole groups" if self.train.groups is not None else ""
        return (
            f" ({how}: {100 * count / (count + others):.1f} % of all{grouped}, {shares.min():.1f} to "
            f"{shares.max():.1f} % of a class)"
        )

    def shown_to(self, known: KnownPreprocessing | None, settings: DataSettings) -> Data:
        """A copy whose images are shown as the weights of ``known`` expect, unless ``settings`` say otherwise."""
        preprocessing, line = resolve(settings, known, self.found)
        begun = known.max_shift if known is not None and self.spec.max_shift is None else None
        return dataclasses.replace(
            self,
            preprocessing=preprocessing,
            preprocessing_line=line,
            begun_max_shift=begun,
            train=None if self.train is None else in_colour_of(preprocessing, self.train),
            validation=in_colour_of(preprocessing, self.validation),
        )

    def refuse_differences(self, distributed: Distributed) -> None:
        """Raise ``UserError`` if the processes have read different images, as from disks of several machines.

        Each process takes its part of one sample plan, which presumes equal data. All processes must call this.
        """
        if distributed.world_size == 1 or self.spec == SPECS["synthetic"]:
            return
        read = distributed.gather(self.fingerprint)
        for rank, digest in enumerate(read):
            if not same_images(digest, read[0]):
                raise UserError(
                    f"--datapath: process {rank} reads other images or labels ({short(digest)}) than process 0 "
                    f"({short(read[0])}); give every machine the same data",
                    on_all_ranks=True,
                )

    def _rows(self) -> Iterator[tuple[bytes, str, Any]]:
        """Yield path (below ``--datapath``), split and label of each image of a table."""
        for split, images in (("train", self.train), ("val", self.validation)):
            if images is not None:
                assert isinstance(images, ImageFiles) and isinstance(images.paths, FilePaths)  # of a table
                yield from zip(images.paths.below(), repeat(split), images.labels.numpy(), strict=False)

    @cached_property
    def rows(self) -> torch.Tensor | None:
        """CRC-32 of each image's path, and CRC-32 of its split and label: int32 (n, 2); None without a table.

        A resumed run compares them with its checkpoint's to tell which images have changed.
        """
        if not self.origin:
            return None
        rows = [(crc32(path), crc32(split.encode() + label.tobytes())) for path, split, label in self._rows()]
        return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))

    def changed_since(self, trained: ResumePoint) -> str:
        """Text on a table's images that are new, gone, relabelled or in another split since ``trained`` was saved.

        '' if there are none, or without a table."""
        rows = self.rows
        known = None if rows is None else trained.read().get("rows")
        if rows is None or known is None:
            return ""
        then = dict(known.tolist())
        now = rows.tolist()
        changed = [place for place, (path, label) in enumerate(now) if then.get(path, label) != label]
        added = [place for place, (path, _) in enumerate(now) if path not in then]
        lost = len(then.keys() - {path for path, _ in now})
        gone = f"{lost:,} image(s) are gone" if lost else ""
        named = changed or added
        if not named:
            return gone
        path, split, label = next(islice(self._rows(), named[0], None))
        name = f" as {self.classes[label]}" if label.ndim == 0 else ""
        more = f" and {len(named) - 1:,} more" if len(named) > 1 else ""
        what = "had another label or split" if changed else "was not there"
        return f"{os.fsdecode(path)}, now in {split}{name},{more} {what}" + (f"; {gone}" if gone else "")

    @cached_property
    def fingerprint(self) -> str:
        """Digest of classes, labels and images (see ``utils.checkpoint.fingerprint``).

        It covers the pixels of images in memory, the content of shards, or the names of files and the content of some.
        """
        digest = hashlib.sha256("\0".join(self.classes).encode(errors="surrogatepass"))  # folders' names
        contents: list[bytes] | None = None
        splits: tuple[Images | None, ...] = (self.train, self.validation)
        for images in [images for images in splits if images]:
            digest.update(images.labels.cpu().numpy().tobytes())
            if images.weights is not None:
                digest.update(images.weights.numpy().tobytes())
            if isinstance(images, ImageFiles):
                assert isinstance(images.paths, ImagePaths)
                digest.update(images.paths.identity)
                if (found := some_contents(images.paths)) is not None:
                    contents = (contents or []) + found
            else:
                digest.update(images.pixels.cpu().numpy().tobytes())
        return joined(digest.hexdigest(), contents)


def in_colour_of(preprocessing: Preprocessing, images: Images) -> Images:
    """``images``, if files, to be read in the colour of ``preprocessing``; if in memory, converted to its channels.

    Raises ``UserError`` if images in memory would need any conversion except between grey and RGB.
    """
    if isinstance(images, ImageFiles):
        return dataclasses.replace(images, colour=preprocessing.colour)
    if images.pixels.shape[1] == preprocessing.channels:
        return images
    held = images.pixels.shape[1]
    if {held, preprocessing.channels} != {1, 3}:
        raise UserError(
            f"--in-channels {preprocessing.channels}: the images have {held}; grey becomes RGB and back only"
        )
    pixels = images.pixels.expand(-1, 3, -1, -1) if held == 1 else grey_of(images.pixels)
    return dataclasses.replace(images, pixels=pixels.contiguous())


def some_contents(paths: Sequence[str], numbers: np.ndarray | None = None) -> list[bytes] | None:
    """Size and first bytes of some of the files ``numbers``, or of all, evenly spaced from the first to the last.

    None for images whose identity covers their content, as of shards, or that no file holds.
    """
    if isinstance(paths, Members | Items):
        return None
    numbers = np.arange(len(paths)) if numbers is None else numbers
    parts = []
    for number in numbers[evenly_spaced(len(numbers), LOOKED_AT)].tolist():
        path = paths[number]
        try:
            if isinstance(path, Stored):
                content = path.content()
                parts.append(b"%d %b" % (len(content), content[:FIRST_BYTES]))
                continue
            with open(path, "rb", opener=_without_waiting) as file:
                parts.append(b"%d %b" % (os.fstat(file.fileno()).st_size, file.read(FIRST_BYTES)))
        except OSError:  # decoding the file reports the error
            parts.append(b"unreadable")
    return parts


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe in place of an image would wait for its writer
