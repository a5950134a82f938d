"""The index of a folder of shards: each image's tar file and its place there, so that it can be read by its number.

``shards.json`` lists the classes and the shards, with their sizes and SHA-256. ``SPLIT.index.npy`` holds a record for
each image, in the order of the images' numbers, which need not be their order in the shards. The records are mapped
into memory, so that workers share them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from utils.config.settings import UserError, as_user_error
from utils.data.kept import write_whole
from utils.runtime.files import sha256

CONTENTS = "shards.json"
PARTS = ".packing"  # in a folder whose packing is not finished
KIND = "image shards"
VERSION = 1
BLOCK = 512  # bytes of a block in a tar file: a header, or a part of the content
ANEW = "pack anew (scripts/pack.py)"


def record_type(longest_name: int, labels: int = 0) -> np.dtype:
    """The dtype of an image's record: number of its ``shard``, ``offset`` and ``size`` of its bytes in it, ``label``.

    ``head`` is the CRC-32 of its tar header, ``crc`` that of its bytes (only if ``Split.checked``), ``name`` its name
    in the tar file, in UTF-8. ``labels``: the number of classes, if ``label`` is int8 (labels,) for multi-label images.
    """
    return np.dtype(
        [
            ("offset", "<i8"),
            ("size", "<u4"),
            ("shard", "<u4"),
            ("label", "i1", (labels,)) if labels else ("label", "<i4"),
            ("head", "<u4"),
            ("crc", "<u4"),
            ("name", f"S{max(1, longest_name)}"),
        ]
    )


@dataclass(frozen=True)
class Shard:
    """A tar file of ``bytes`` bytes with ``samples`` images. ``changed``: its time in ns, if it has no ``sha256``."""

    file: str
    bytes: int
    samples: int
    sha256: str = ""
    changed: int = 0


@dataclass(frozen=True)
class Split:
    """The images of a split: ``records`` (n,), by image number. ``checked``: True if records hold the images' CRC-32.

    ``identity``: the SHA-256 of the file that the records were read from.
    """

    shards: tuple[Shard, ...]
    records: np.ndarray
    checked: bool
    identity: str = ""


@dataclass(frozen=True)
class Contents:
    """The content of a folder of shards. ``made``: how it was made, for people and for ``scripts/pack.py``."""

    folder: Path
    classes: tuple[str, ...]
    splits: dict[str, Split]
    made: dict[str, Any]

    @property
    def multilabel(self) -> bool:
        """True if the images are multi-label."""
        return any(split.records["label"].ndim > 1 for split in self.splits.values())


# ------------------------------------------------------------------------------------------- writing


def write_contents(folder: Path, classes: Sequence[str], splits: dict[str, Split], made: dict[str, Any]) -> None:
    """Write the index of the shards in ``folder``; ``shards.json`` last, so that the index is never incomplete."""
    described = {}
    for name, split in splits.items():
        file = io.BytesIO()
        np.save(file, split.records, allow_pickle=False)
        write_whole(folder / f"{name}.index.npy", file.getvalue())
        described[name] = {
            "samples": len(split.records),
            "checked": split.checked,
            "index_sha256": hashlib.sha256(file.getvalue()).hexdigest(),
            "shards": [asdict(shard) for shard in split.shards],
        }
    contents = {"kind": KIND, "version": VERSION, "classes": list(classes), "made": made, "splits": described}
    write_whole(folder / CONTENTS, json.dumps(contents, indent=1, sort_keys=True).encode())


# ------------------------------------------------------------------------------------------- reading


def read_contents(folder: Path) -> Contents | None:
    """Read the index in ``folder``; None without one. Raises ``UserError`` if it is damaged or the shards differ."""
    try:
        text = (folder / CONTENTS).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{folder / CONTENTS}: cannot be read ({error.strerror})") from error
    try:
        contents = json.loads(text)
        if contents["kind"] != KIND:
            return None
        if contents["version"] != VERSION:
            raise UserError(f"{folder / CONTENTS}: has version {contents['version']}, not {VERSION}; {ANEW}")
        classes = tuple(map(str, contents["classes"]))
        splits = {name: _split(folder, name, split) for name, split in contents["splits"].items()}
        made = dict(contents["made"])
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{folder / CONTENTS}: is damaged or not whole ({error!r}); {ANEW}, or remove it from foreign tar files"
        ) from error
    for name, split in splits.items():
        labels = split.records["label"]
        low, high = (-1, 1) if labels.ndim > 1 else (0, len(classes) - 1)
        fits = labels.ndim == 1 or labels.shape[1] == len(classes)
        if not fits or (len(labels) and not (labels.min() >= low and labels.max() <= high)):
            raise UserError(f"{folder / name}.index.npy: has labels beyond its {len(classes)} classes; {ANEW}")
    return Contents(folder, classes, splits, made)


def _split(folder: Path, name: str, described: dict[str, Any]) -> Split:
    path = folder / f"{name}.index.npy"
    shards = tuple(Shard(**shard) for shard in described["shards"])
    _refuse_other_shards(folder, shards)
    with as_user_error(f"{path}: cannot be read", advice=f"; {ANEW}"):
        if sha256(path) != described["index_sha256"]:
            raise UserError(f"{path}: is not the index that {CONTENTS} was written with; {ANEW}")
        records = np.load(path, mmap_mode="r" if described["samples"] else None, allow_pickle=False)
    return Split(shards, records.view(np.ndarray), bool(described["checked"]), described["index_sha256"])


def _refuse_other_shards(folder: Path, shards: Sequence[Shard]) -> None:
    """Raise ``UserError`` if a shard was truncated, replaced or lost; this takes one ``os.stat`` per shard."""
    if wrong := [problem for shard in shards if (problem := _problem_of(folder / shard.file, shard))]:
        more = f" (and {len(wrong) - 1} more)" if wrong[1:] else ""
        raise UserError(f"{wrong[0]}{more}; copy it again, or {ANEW}")


def _problem_of(path: Path, shard: Shard) -> str | None:
    try:
        status = os.stat(path)
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    if status.st_size != shard.bytes:
        what = "cut off" if status.st_size < shard.bytes else "replaced"
        return f"{path}: was {what}: it has {status.st_size:,} bytes, the index says {shard.bytes:,}"
    if shard.changed and status.st_mtime_ns != shard.changed:
        return f"{path}: has changed since it was indexed"
    return None
