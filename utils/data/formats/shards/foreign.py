"""Tar files written by WebDataset or any other program: indexed at first use, then read like our own shards.

A sample is all members whose names agree up to the first dot (KEY): an image, and its label in KEY.cls, a number or a
class name, or in KEY.json, as "label" or "cls". The index is written beside the tar files, and is made again when one
of them was added or removed or has changed its size or time, or when different classes are listed.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from utils.config.settings import UserError, as_user_error
from utils.data.formats.class_folders import TRAINING_FOLDERS, VALIDATION_FOLDERS, visible
from utils.data.formats.listing import IMAGE_ENDINGS
from utils.data.formats.shards.index import (
    BLOCK,
    CONTENTS,
    KIND,
    PARTS,
    Shard,
    Split,
    read_contents,
    record_type,
    write_contents,
)
from utils.data.kept import claimed
from utils.data.progress_log import Log, ProgressLog

FOREIGN = "indexed"  # the mark in shards.json of an index of foreign tar files
CLASS_FILES = ("classes.txt", "classnames.txt")  # one name per line, in the order of the labels
COMPRESSED = "is compressed, and images are read by position; unpack it, for example with gunzip"
MOST_PROBLEMS = 1000  # that the index keeps
PART_BYTES = 1 << 20  # that are read at a time
_KEY = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # WebDataset's own rule


def foreign_shards(root: Path) -> dict[str, list[Path]]:
    """The tar files in ``root`` and its folders, by the split ('train', 'val') that file or folder names give.

    As with class folders, a split uses one name: if there is a val, test is left out. Raises ``UserError`` if the
    folder of a split cannot be read.
    """
    named: dict[str, list[Path]] = {name: [] for name in (*VALIDATION_FOLDERS, *TRAINING_FOLDERS)}
    for path in _tar_files(root):
        name = _split_named_by(path.relative_to(root))
        if name is not None:
            named[name].append(path)
    return {
        split: next((named[name] for name in names if named[name]), [])
        for split, names in (("train", TRAINING_FOLDERS), ("val", VALIDATION_FOLDERS))
    }


def _tar_files(root: Path) -> list[Path]:
    """Tar files in ``root`` and its folders, sorted; no hidden ones, such as ._train.tar, which macOS leaves behind."""
    found = []
    for folder in (root, *(path for path in visible(root) if path.is_dir())) if root.is_dir() else ():
        try:
            with os.scandir(folder) as entries:
                found += [Path(entry) for entry in entries if entry.name.endswith(".tar") and entry.name[0] != "."]
        except OSError as error:
            if folder == root or _split_named_by(folder.relative_to(root)) is not None:  # not for lost+found
                raise UserError(f"--datapath: {folder} cannot be read ({error.strerror})") from error
    return sorted(found)


def _split_named_by(path: Path) -> str | None:
    """The name of a split, such as 'valid', that is a word in ``path``, which is relative to the root; None if none."""
    words = {word for part in path.parts for word in re.split("[^a-z]+", part.lower())}
    return next((name for name in (*VALIDATION_FOLDERS, *TRAINING_FOLDERS) if name in words), None)


def ensure_index(root: Path, log: Log) -> None:
    """Index the tar files in ``root``, unless there is an index that still fits them. Raises ``UserError``."""
    if (root / PARTS).exists() and not (root / CONTENTS).exists():
        raise UserError(f"--datapath {root}: its packing was cut or goes on; repeat the command of scripts/pack.py")
    shards = foreign_shards(root)
    if not any(shards.values()) or not _is_ours_to_make(root / CONTENTS):
        return
    if wrong := compressed_shard(root, of_a_split=True):
        raise UserError(f"--datapath {root}: {wrong}")
    if _fits(root, shards):
        return
    said = f"--datapath {root}: the index of its tar files cannot be written there"
    waiting = f"Waiting for another process that indexes {root}"
    with (
        as_user_error(said, advice="; make a folder with links to them (ln -s) and give that"),
        claimed(root / ".shards", waiting, log),
    ):
        if not _fits(root, shards):
            why = " again: they or their classes have changed" if (root / CONTENTS).exists() else ""
            log(f"Indexing the tar files in {root}{why}")
            _index(root, shards, ProgressLog(log))


def _is_ours_to_make(path: Path) -> bool:
    """True if ``path`` has no index, or one of foreign tar files; an index of our packed shards is never replaced."""
    try:
        contents = json.loads(path.read_bytes())
        return contents["kind"] == KIND and bool(contents["made"].get(FOREIGN))
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _fits(root: Path, shards: dict[str, list[Path]]) -> bool:
    """True if the index in ``root`` agrees with the tar files ``shards`` as they are now, and with any class file."""
    try:
        contents = read_contents(root)
    except UserError:  # it is damaged, or one of its tar files has changed
        return False
    if contents is None or contents.made.get("listed") != _listed_classes(root):
        return False
    indexed = {name: {shard.file for shard in split.shards} for name, split in contents.splits.items()}
    return indexed == {name: {path.relative_to(root).as_posix() for path in paths} for name, paths in shards.items()}


def compressed_shard(root: Path, of_a_split: bool = False) -> str | None:
    """What is wrong with the first compressed tar file in ``root``, of all or ``of_a_split``; None if there is none."""
    named = (path for path in sorted(visible(root)) if re.search("[.](tar[.]|tgz$)", path.name))
    named = (path for path in named if not of_a_split or _split_named_by(Path(path.name)))
    return next((f"{path.name} {COMPRESSED}" for path in named if _is_compressed(path)), None)


def _is_compressed(path: Path) -> bool:
    """Whether ``path`` begins as files of gzip, bzip2, xz or Zstandard do."""
    try:
        with open(path, "rb") as file:
            return file.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"))
    except OSError:
        return False


# ------------------------------------------------------------------------------------------- indexing


@dataclass
class _Sample:
    """The sample of one key: the image's record, its label as written, and what is wrong with the sample.

    ``advice`` belongs to what it may lack.
    """

    row: tuple[int, int, int, bytes] | None = None  # offset, size, CRC-32 of the header, name
    label: str | None = None
    fault: str | None = None
    advice: str = ""

    def problem(self, shard_bytes: int) -> str | None:
        """What keeps the sample out of the index, if its tar file has ``shard_bytes``; None if nothing does."""
        if self.fault is not None:
            return self.fault
        if self.row is None:
            return f"has no image{self.advice}"
        if self.label is None:
            return f"has no label (.cls, or .json with label){self.advice}"
        if re.fullmatch("-[0-9]+", self.label):
            return f"has the label {self.label}, which is no class (-1 often stands for unknown)"
        offset, size, *_ = self.row
        return "is cut off" if offset + size > shard_bytes else None


@dataclass
class _Found:
    """The complete samples of a split, and what is wrong with the others.

    ``rows``: records of the index (see ``record_type``), but with labels as written.
    """

    shards: list[Shard] = field(default_factory=list)
    rows: list[tuple[int, int, int, str, int, int, bytes]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _index(root: Path, shards: dict[str, list[Path]], progress: ProgressLog) -> None:
    for name, other in (("train", "val"), ("val", "train")):
        if not shards[name]:
            raise UserError(
                f"--datapath {root}: holds tar files for {other} and none for {name}, whose names (or their folder's) "
                f"hold {' or '.join(TRAINING_FOLDERS if name == 'train' else VALIDATION_FOLDERS)}"
            )
    found = {name: _Found() for name in shards}
    with progress.counting("Indexing", sum(map(len, shards.values())), "tar files") as advance:
        for name, paths in shards.items():
            for path in paths:
                _add(root, path, found[name])
                advance(1)
    listed = _listed_classes(root)
    labels = {label for split in found.values() for _, _, _, label, *_ in split.rows}
    classes, numbers = _classes(root, listed, labels)
    splits = {}
    for name, split in found.items():
        if not split.rows:
            more = f": {split.problems[0]}" if split.problems else ""
            raise UserError(f"--datapath {root}: its tar files for {name} hold no image with a label{more}")
        longest = max(len(member) for *_, member in split.rows)
        rows = [(offset, size, shard, numbers[label], *rest) for offset, size, shard, label, *rest in split.rows]
        splits[name] = Split(tuple(split.shards), np.array(rows, dtype=record_type(longest)), checked=False)
    problems = [line for split in found.values() for line in split.problems]
    made = {FOREIGN: True, "listed": listed, "problems": problems[:MOST_PROBLEMS], "left_out": len(problems)}
    write_contents(root, classes, splits, made)


def _add(root: Path, path: Path, found: _Found) -> None:
    """Add the samples of the tar file ``path`` to ``found``."""
    with as_user_error(f"{path}: cannot be read"):
        status = os.stat(path)
    samples: dict[str, _Sample] = {}
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for info in tar:
                is_link = info.issym() or info.islnk()
                if (info.isreg() or is_link) and (match := _KEY.match(info.name)):
                    sample = samples.setdefault(match[1], _Sample())
                    if info.isreg():
                        _take(sample, match[2].lower(), info, tar, file.fileno())
                    else:
                        sample.advice = "; it holds links, which are not read: pack it with tar -h --hard-dereference"
            end = os.pread(file.fileno(), BLOCK, tar.offset)
            more = _holds_more(file, tar.offset)
        if end.strip(b"\0") or len(end) < BLOCK:
            found.problems.append(f"{path}: is cut off or damaged at byte {tar.offset:,}; what lies before it is read")
        elif more:
            found.problems.append(
                f"{path}: goes on after its end at byte {tar.offset:,}, as tar files do that were joined by cat; what "
                "lies before it is read"
            )
    except (tarfile.TarError, OSError, EOFError) as error:
        reason = " ".join(str(error).split())
        cut = f"is cut off or damaged ({reason}); the whole samples before that are read"
        found.problems.append(f"{path}: {COMPRESSED if _is_compressed(path) else cut}")
    before = len(found.rows)
    for key, sample in samples.items():
        if problem := sample.problem(status.st_size):
            found.problems.append(f"{path}/{key}: {problem}")
            continue
        assert sample.row is not None and sample.label is not None  # nothing is wrong with it
        offset, length, head, name = sample.row
        found.rows.append((offset, length, len(found.shards), sample.label, head, 0, name))
    kept = len(found.rows) - before
    found.shards.append(Shard(path.relative_to(root).as_posix(), status.st_size, kept, changed=status.st_mtime_ns))


def _holds_more(file: BinaryIO, end: int) -> bool:
    """True if anything but zeros follows in a tar file from byte ``end`` on."""
    file.seek(end)
    while part := file.read(PART_BYTES):
        if part.strip(b"\0"):
            return True
    return False


def _take(sample: _Sample, ending: str, info: tarfile.TarInfo, tar: tarfile.TarFile, file: int) -> None:
    """Add a tar member to ``sample``, as image or label; ``ending``: what follows the key in the member's name."""
    if f".{ending}" in IMAGE_ENDINGS:
        if sample.row is not None:
            sample.fault = "has more than one image: a repeated key, or two formats of one image"
        if info.issparse():  # only the parts of it that are not empty are stored
            sample.fault = "is stored as a sparse file (tar -S), which is not read; pack it without"
        head = zlib.crc32(os.pread(file, BLOCK, info.offset_data - BLOCK))
        name = info.name.encode("utf-8", "surrogateescape")
        sample.row = (info.offset_data, info.size, head, name)
    elif ending in ("cls", "json"):
        content = tar.extractfile(info)
        assert content is not None  # the member is a file
        label = _label(ending, content.read())
        if label is None:
            return
        if sample.label not in (None, label):
            sample.fault = f"has two labels, {sample.label} and {label}"
        sample.label = label


def _label(ending: str, content: bytes) -> str | None:
    """The label in a member's content, a number or a name, as text; None if there is none."""
    try:
        if ending == "cls":
            return content.decode().strip() or None
        about = json.loads(content)
        value = about.get("label", about.get("cls")) if isinstance(about, dict) else None
        return str(value).strip() or None if isinstance(value, int | str) and not isinstance(value, bool) else None
    except (ValueError, RecursionError):
        return None


def _classes(root: Path, listed: list[str] | None, labels: set[str]) -> tuple[Sequence[str], dict[str, int]]:
    """The classes (``listed``, or else numbers from 0 or the names in ``labels``), and the number of each label.

    Raises ``UserError`` if ``labels`` do not fit the classes ``listed`` in classes.txt.
    """
    if all(re.fullmatch("[0-9]{1,6}", label) for label in labels):
        numbers = {label: int(label) for label in labels}
        count = max(numbers.values(), default=-1) + 1
        if listed is None:
            return tuple(map(str, range(count))), numbers
        if count > len(listed):
            raise UserError(
                f"--datapath {root}: label {count - 1} is beyond the {len(listed)} names in its classes.txt"
            )
        return listed, numbers
    if listed is not None and (unknown := labels - set(listed)):
        raise UserError(f"--datapath {root}: label {min(unknown)!r} is not in its classes.txt")
    twice = [name for name, count in Counter(listed).items() if count > 1 and name in labels]
    if twice:
        raise UserError(f"--datapath {root}: label {twice[0]!r} stands more than once in its classes.txt")
    classes = listed or tuple(sorted(labels))
    return classes, {name: number for number, name in enumerate(classes)}


def _listed_classes(root: Path) -> list[str] | None:
    """The classes that a file in ``root`` lists; None without such a file. Raises ``UserError``."""
    return next((lines for name in CLASS_FILES if (lines := _lines_of(root / name))), None)


def _lines_of(path: Path) -> list[str]:
    """The names in a file of classes; [] if there is no file. Raises ``UserError`` if it is unreadable or has gaps."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UserError(f"{path}: cannot be read ({reason})") from error
    lines = [line.strip() for line in text.rstrip().splitlines()]
    if "" in lines:  # a class's number is that of its line
        raise UserError(f"{path}: line {lines.index('') + 1} is empty; give each class a line with its name")
    return lines
