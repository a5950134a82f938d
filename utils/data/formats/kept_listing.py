"""The list of a tree's image files, kept in a file: millions of files are listed once, not at every start.

The file names each folder with its time of modification and of change. Adding, removing or renaming a file changes
both, so at a start it is enough to look at the folders. The time of change cannot be set back, as unpacking and copying
do with the time of modification. What is kept is not trusted if any folder differs, nor is it kept if a folder was
changed so shortly before it was listed that a later change might leave the times as they are. A SHA-256 shows damage.
The file may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import numpy as np

from utils.data.formats.file_paths import FilePaths
from utils.data.formats.listing import IMAGE_ENDINGS, THREADS, UNREAD_ENDINGS, FolderTimes, Listing, Scan
from utils.data.kept import claim, held, remove_abandoned
from utils.data.progress_log import Log, ProgressLog

VERSION = 2  # raise it whenever the same folders give another list than before
MAGIC = b"LIST OF IMAGE FILES\n"
DIGEST_BYTES = 32
ALIGNMENT = 8  # bytes, of the numbers in the file
WORTH_KEEPING_SECONDS = 1.0  # of listing; a quicker one is simply done again, and leaves nothing behind
SETTLED_NS = 2 * 10**9  # since a folder's last change: the coarsest clock of a common file system (FAT)
STATS_TOGETHER = 64  # folders that a thread looks at


def _to_nobody(line: str) -> None:
    pass


@dataclass(frozen=True)
class Lister:
    """Lists class folders, from what is kept in ``folder`` if it still holds. None: nothing is kept.

    Without ``keeps`` it writes nothing. All processes of a host that want a list call it: the first one lists and logs
    to ``progress``, the others wait; lines that would be the same from all are logged by ``is_main`` alone.
    """

    folder: Path | None = None
    keeps: bool = False
    progress: ProgressLog = field(default_factory=lambda: ProgressLog(_to_nobody))
    is_main: bool = True

    def list(self, tree: Path, classes: Sequence[str]) -> Listing:
        """The image files below the class folders ``classes``, all that ``tree`` has. Raises ``UserError``."""
        scan = Scan(os.fspath(tree), classes)
        if self.folder is None:
            return self._whole(scan, tree)
        path = self._path(tree)
        log_once = self.progress.log if self.is_main else _to_nobody
        while True:
            kept = self._kept(path, tree, classes, log_once)
            if kept is not None:
                return kept
            if WORTH_KEEPING_SECONDS and scan.run(seconds=WORTH_KEEPING_SECONDS):
                return scan.listing()
            if not self.keeps:
                return self._whole(scan, tree)
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                file = claim(path, f"Waiting until the files below {tree} are listed", log_once, raise_mistakes=True)
            except OSError as error:
                log_once(_cannot_keep(path, error))
                return self._whole(scan, tree)
            if file is not None:
                return self._make(file, path, tree, scan)

    def _path(self, tree: Path) -> Path:
        """A tree that is moved together with its list keeps its name."""
        place = os.path.relpath(tree, self.folder)
        return self.folder / f"files.{hashlib.sha256(os.fsencode(place)).hexdigest()[:16]}.list"

    def _kept(self, path: Path, tree: Path, classes: Sequence[str], log: Log) -> Listing | None:
        """What ``path`` holds; None if it is missing, damaged or no longer true."""
        began = time.monotonic()
        try:
            listing = _read(path, tree)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log(f"{path}: is no whole list of files ({' '.join(str(error).split())[:100]}); listing {tree} again")
            return None
        change = _change(listing, tree, classes)
        if change:
            log(f"{path}: {change} since the files were listed; listing {tree} again")
            return None
        log(f"List of files: {path} ({len(listing.paths):,} files, read in {time.monotonic() - began:.1f} s)")
        return listing

    def _make(self, file: FileIO, path: Path, tree: Path, scan: Scan) -> Listing:
        """List and write. ``file`` is the claimed temporary file."""
        began = time.monotonic()
        log = self.progress.log
        try:
            with held(file):
                remove_abandoned(path.parent, Path(file.name))
                listing = self._whole(scan, tree)
                seconds = time.monotonic() - began
                unsettled = _unsettled(listing.folders, scan.began_ns)
                if unsettled is not None:
                    log(f"The list of files below {tree} is not kept: {unsettled}")
                    os.unlink(file.name)
                else:
                    megabytes = _save(file, path, listing) / 1e6
                    log(f"List of files: {path} ({len(listing.paths):,} files in {seconds:.1f} s, {megabytes:,.0f} MB)")
                return listing
        except OSError as error:
            log(_cannot_keep(path, error))
        return self._whole(scan, tree)

    def _whole(self, scan: Scan, tree: Path) -> Listing:
        with self.progress.counting(f"Listing {tree}", None, "files") as advance:
            scan.run(advance)
        return scan.listing()


def _cannot_keep(path: Path, error: OSError) -> str:
    return (
        f"warning: the list of files cannot be kept in {path.parent} ({error.strerror or error}), so each start lists "
        "them anew; --cache-dir names another folder"
    )


# --------------------------------------------------------------------------------- is it still true


def _change(listing: Listing, tree: Path, classes: Sequence[str]) -> str:
    """What has changed since ``listing`` was made; empty if nothing has."""
    if listing.classes != tuple(classes):
        return "class folders have come or gone"
    parts = [
        listing.folders[first : first + STATS_TOGETHER] for first in range(0, len(listing.folders), STATS_TOGETHER)
    ]
    with ThreadPoolExecutor(THREADS) as pool:
        changed = next(filter(None, pool.map(lambda part: _first_changed(tree, part), parts)), None)
    return "" if changed is None else f"{tree / changed} has changed"


def _first_changed(tree: Path, folders: Sequence[FolderTimes]) -> str | None:
    for folder, modified, changed in folders:
        try:
            status = os.stat(os.path.join(tree, folder))
        except OSError:
            return folder
        if (status.st_mtime_ns, status.st_ctime_ns) != (modified, changed):
            return folder
    return None


def _unsettled(folders: Sequence[FolderTimes], began_ns: int) -> str | None:
    """Why the times of a folder cannot be relied on, None if all can."""
    for folder, modified, changed in folders:
        if modified <= 0:  # as on a mounted object store
            return f"{folder} has no time of modification"
        if max(modified, changed) > began_ns - SETTLED_NS:
            return f"{folder} was changed just before"
    return None


# ------------------------------------------------------------------------------------------ the file


def _save(file: FileIO, path: Path, listing: Listing) -> int:
    """Write ``listing`` and give the file its name; returns its size in bytes."""
    header = json.dumps(
        {
            "version": VERSION,
            "endings": [IMAGE_ENDINGS, UNREAD_ENDINGS],
            "classes": listing.classes,
            "counts": listing.counts.tolist(),
            "unread": listing.unread,
            "folders": listing.folders,
        }
    ).encode()
    header = len(header).to_bytes(8, "little") + header
    header += bytes(-(len(MAGIC) + DIGEST_BYTES + len(header)) % ALIGNMENT)
    parts = [header, listing.paths.ends.astype("<i8").tobytes(), listing.paths.names.tobytes()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    file.truncate(0)
    for part in (MAGIC, digest.digest(), *parts):
        rest = memoryview(part)
        while rest:  # a single write takes at most 2 GB
            rest = rest[file.write(rest) :]
    os.fsync(file.fileno())
    os.replace(file.name, path)
    return file.tell()


def _read(path: Path, tree: Path) -> Listing:
    """The listing in ``path``. Raises ``ValueError`` or another error if it is damaged.

    It is copied into memory: of a mapped file on a network drive that is deleted, a page could be missing later.
    """
    content = np.fromfile(path, dtype=np.uint8)
    start = len(MAGIC) + DIGEST_BYTES
    if content[: len(MAGIC)].tobytes() != MAGIC:
        raise ValueError("another kind of file")
    if hashlib.sha256(content[start:]).digest() != content[len(MAGIC) : start].tobytes():
        raise ValueError("not its SHA-256")
    length = int.from_bytes(content[start : start + 8].tobytes(), "little")
    header = json.loads(content[start + 8 : start + 8 + length].tobytes())
    if header["version"] != VERSION or header["endings"] != [[*IMAGE_ENDINGS], [*UNREAD_ENDINGS]]:
        raise ValueError("of another version")
    counts = np.array(header["counts"], dtype=np.int64)
    begin = start + 8 + length
    begin += -begin % ALIGNMENT
    middle = begin + 8 * int(counts.sum())
    paths = FilePaths(tree, content[middle:], content[begin:middle].view("<i8"))
    folders = tuple((name, modified, changed) for name, modified, changed in header["folders"])
    return Listing(tuple(header["classes"]), counts, paths, tuple(header["unread"]), folders)
