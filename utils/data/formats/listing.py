"""The image files of class folders, listed by threads; the list is kept, as listing millions of files takes minutes.

On a network file system, listing a folder is mostly waiting. A kept list names each folder with its modification time
and its change time (ctime). Adding, removing or renaming a file changes both, so a later start needs to check only the
folders' times. Unpacking and copying can set the modification time back, but not the change time. A list is not used if
any folder's times differ, and is not kept if a folder was changed so shortly before it was listed that a further change
might leave its times as they are. A SHA-256 reveals damage. The file of a list may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from utils.config.settings import as_user_error
from utils.config.spelling import reason_of
from utils.data.formats.file_paths import NUL, FilePaths
from utils.data.kept import claimed, remove_abandoned, write_whole
from utils.data.progress_log import ProgressLog, silent

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".npy")
# Endings of image formats that are not read.
UNREAD_ENDINGS = (
    ".gif .heic .heif .avif .jfif .jpe .jp2 .jxl .svg .psd .tga .ico .dng .raw .cr2 .cr3 .nef .arw .raf .orf .rw2 .dcm "
    ".nii .exr .pbm .pnm .pfm .npz .pcx .mpo"
)
# Counted together with these endings: links, and files whose name has none.
LINKED = "links to folders"
NAMELESS = "without an ending"
THREADS = 16  # that wait for folders at the same time
POLL_SECONDS = 0.2
TELL = 1000  # files after which a thread reports its progress
MAGIC = b"LIST OF IMAGE FILES, VERSION 5\n"  # a new version is due whenever the same folders give a different list
DIGEST_BYTES = 32
WORTH_KEEPING_SECONDS = 1.0  # of listing; if it is quicker, no list is kept and each start lists the files again
SETTLED_NS = 2 * 10**9  # since a folder's last change: the coarsest clock of a common file system (FAT)
STATS_TOGETHER = 64  # folders that a thread checks at a time

FolderTimes = tuple[str, int, int]  # path below the tree, st_mtime_ns, st_ctime_ns


def is_image(name: str) -> bool:
    """True if a file of this name is read as an image."""
    return name.lower().endswith(IMAGE_ENDINGS)


def unread_ending(name: str) -> list[str]:
    """A list with the file's ending, if it belongs to an image format that is not read; otherwise an empty list."""
    ending = os.path.splitext(name.lower())[1]
    return [ending] if ending in UNREAD_ENDINGS.split() else []


def left_out(name: str) -> list[str]:
    """What warnings call a file that is not read: its ending, if images have it, or ``NAMELESS``; [] if they do not."""
    return unread_ending(name) if "." in name else [NAMELESS]


def no_images(unread: Iterable[str]) -> str:
    """The end of a message about a folder without images, with files that ``left_out`` calls ``unread``."""
    others = sorted({*unread} - {NAMELESS, LINKED})
    advice = f"; convert {', '.join(others)} files to JPEG or PNG" if others else ""
    return f"holds no images ({', '.join(IMAGE_ENDINGS)}){advice}"


@dataclass(frozen=True)
class Listing:
    """The image files below the class folders of a tree.

    ``classes``: the folders, in order; ``counts``: int64 (classes,), the number of files in each; ``paths``: those of
    the first class, sorted, then of the second and so on. ``unread``: for each class, how many images are skipped, by
    ending or ``NAMELESS``, and how many links to folders (``LINKED``). ``folders``: all folders listed, with times from
    before listing.
    """

    classes: tuple[str, ...]
    counts: np.ndarray
    paths: FilePaths
    unread: tuple[dict[str, int], ...]
    folders: tuple[FolderTimes, ...]

    def of(self, classes: Sequence[str]) -> tuple[FilePaths, np.ndarray, Counter[str]]:
        """The images of ``classes`` only: paths, class by class; labels, int64 (n,); counts of unread images by ending.

        A class without a folder has no images.
        """
        number = {name: place for place, name in enumerate(self.classes)}
        chosen = [number[name] for name in classes if name in number]
        counts = np.array([self.counts[number[name]] if name in number else 0 for name in classes], dtype=np.int64)
        labels = np.repeat(np.arange(len(classes)), counts)
        unread: Counter[str] = Counter()
        for place in chosen:
            unread.update(self.unread[place])
        if chosen == list(range(len(self.classes))):
            return self.paths, labels, unread
        begins = np.cumsum(self.counts) - self.counts
        places = [np.arange(begins[place], begins[place] + self.counts[place]) for place in chosen]
        return self.paths.take(np.concatenate([np.empty(0, dtype=np.int64), *places])), labels, unread


@dataclass(frozen=True)
class _ClassFolder:
    """Content of one class folder; ``names``: the images' paths below the tree, sorted, joined by zero bytes."""

    names: bytes
    count: int
    unread: dict[str, int]
    folders: list[FolderTimes]


def list_folders(
    tree: str, classes: Sequence[str], advance: Callable[[int], None] | None = None, seconds: float = math.inf
) -> Listing | None:
    """List the image files below ``classes``, all class folders of ``tree``; None if that takes over ``seconds``.

    ``advance`` is called with the number of files found since its last call. Raises ``UserError`` for a folder that
    cannot be read.
    """
    end = time.monotonic() + seconds
    seen: SimpleQueue[int] = SimpleQueue()
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="listing")
    futures = [pool.submit(_list_class_folder, tree, name, seen.put) for name in classes]
    try:
        waiting = set(futures)
        while waiting and time.monotonic() < end:
            waiting = wait(waiting, POLL_SECONDS).not_done
            if advance is not None:
                advance(sum(seen.get() for _ in range(seen.qsize())))
    finally:
        pool.shutdown(cancel_futures=True)
    if time.monotonic() >= end:
        return None
    found = [future.result() for future in futures]
    return Listing(
        classes=tuple(classes),
        counts=np.array([folder.count for folder in found], dtype=np.int64),
        paths=FilePaths.joined(tree, NUL.join([folder.names for folder in found if folder.count])),
        unread=tuple(folder.unread for folder in found),
        folders=tuple(times for folder in found for times in folder.folders),
    )


def _list_class_folder(tree: str, name: str, tell: Callable[[int], None]) -> _ClassFolder:
    """List the images in a class folder and below it, without hidden files and folders. Raises ``UserError``.

    Links to folders are counted but not followed, as they may loop; only the class folder itself may be a link.
    """
    images: list[str] = []
    unread: Counter[str] = Counter()
    folders: list[FolderTimes] = []
    waiting = [name]
    untold = 0
    while waiting:
        folder = waiting.pop()
        path = os.path.join(tree, folder)
        with as_user_error(f"--datapath: {path} cannot be read"):
            status = os.stat(path)  # before reading its content, so that a later change shows
            folders.append((folder, status.st_mtime_ns, status.st_ctime_ns))
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.name.startswith("."):  # such as Jupyter's .ipynb_checkpoints, which holds copies
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(f"{folder}/{entry.name}")
                    elif entry.is_symlink() and entry.is_dir():
                        unread[LINKED] += 1
                    elif not is_image(entry.name):
                        unread.update(left_out(entry.name))
                    elif entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path)):
                        # Not a pipe, for example, which could block forever; a dead link fails when it is read.
                        images.append(f"{folder}/{entry.name}")
                        untold += 1
                        if untold == TELL:
                            tell(TELL)
                            untold = 0
    tell(untold)
    return _ClassFolder(os.fsencode("\0".join(sorted(images))), len(images), dict(unread), folders)


# ------------------------------------------------------------------------------------------ kept


@dataclass(frozen=True)
class Lister:
    """Lists class folders, or reads a valid list kept in ``folder``; if ``folder`` is None, no list is kept.

    Without ``keeps``, nothing is written. All processes of a host that need a list call ``list``: the first one lists
    the folders and logs to ``progress``, the others wait. Only the process with ``is_main`` logs what all would log.
    """

    folder: Path | None = None
    keeps: bool = False
    progress: ProgressLog = field(default_factory=lambda: ProgressLog(silent))
    is_main: bool = True

    def list(self, tree: Path, classes: Sequence[str]) -> Listing:
        """List the image files below ``classes``, all class folders of ``tree``. Raises ``UserError``."""
        if self.folder is None:
            return self._whole(tree, classes)
        began = time.monotonic()
        path = self.folder / _file_of(tree, self.folder)
        log_once = self.progress.log if self.is_main else silent
        kept, why_not = _kept(path, tree, classes)
        if kept is not None:
            log_once(f"List of files: {path} ({len(kept.paths):,} files, read in {time.monotonic() - began:.1f} s)")
            return kept
        if why_not:
            log_once(f"{path}: {why_not}; listing {tree} again")
        if (quick := list_folders(os.fspath(tree), classes, seconds=WORTH_KEEPING_SECONDS)) is not None:
            return quick
        if self.keeps:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                remove_abandoned(self.folder)
                with claimed(path, f"Waiting until the files below {tree} are listed", log_once):
                    return _kept(path, tree, classes)[0] or self._make(path, tree, classes)
            except OSError as error:
                log_once(
                    f"warning: the list of files cannot be kept in {self.folder} ({reason_of(error)}), so each "
                    "start lists them anew; --cache-dir names another folder"
                )
        return self._whole(tree, classes)

    def _make(self, path: Path, tree: Path, classes: Sequence[str]) -> Listing:
        """List the files, and keep the list if the folders' times can be relied on. Raises ``OSError``."""
        began_ns = time.time_ns()
        began = time.monotonic()
        listing = self._whole(tree, classes)
        seconds = time.monotonic() - began
        if unsettled := _unsettled(listing.folders, began_ns):
            self.progress.log(f"The list of files below {tree} is not kept: {unsettled}")
        else:
            content = _packed(listing)
            write_whole(path, content)
            self.progress.log(
                f"List of files: {path} ({len(listing.paths):,} files in {seconds:.1f} s, {len(content) / 1e6:,.0f} MB)"
            )
        return listing

    def _whole(self, tree: Path, classes: Sequence[str]) -> Listing:
        with self.progress.counting(f"Listing {tree}", None, "files") as advance:
            listing = list_folders(os.fspath(tree), classes, advance)
        assert listing is not None  # there is no time limit
        return listing


def _file_of(tree: Path, folder: Path) -> str:
    """Name of a list's file, which stays the same when ``tree`` is moved together with ``folder``."""
    place = os.path.relpath(tree, folder)
    return f"files.{hashlib.sha256(os.fsencode(place)).hexdigest()[:16]}.list"


def _kept(path: Path, tree: Path, classes: Sequence[str]) -> tuple[Listing | None, str]:
    """The list in ``path`` and ''; or None and the reason not to use it, '' if there is no file."""
    try:
        listing = _unpacked(path.read_bytes(), tree)
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except Exception as error:  # numpy's and zipfile's readers fail in many ways on a damaged file
        return None, f"is no whole list of files ({' '.join(str(error).split())[:100]})"
    change = _change(listing, tree, classes)
    return (None, f"{change} since the files were listed") if change else (listing, "")


def _change(listing: Listing, tree: Path, classes: Sequence[str]) -> str:
    """The first change found since ``listing`` was made, as text; '' if there is none."""
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
    """The reason why a folder's times cannot be relied on; None if all folders' times can be."""
    for folder, modified, changed in folders:
        if modified <= 0:  # as on a mounted object store
            return f"{folder} has no time of modification"
        if max(modified, changed) > began_ns - SETTLED_NS:
            return f"{folder} was changed just before"
    return None


def _packed(listing: Listing) -> bytes:
    about = {
        "endings": [IMAGE_ENDINGS, UNREAD_ENDINGS],
        "classes": listing.classes,
        "unread": listing.unread,
        "folders": listing.folders,
    }
    file = io.BytesIO()
    paths = listing.paths
    np.savez(file, about=json.dumps(about), counts=listing.counts, ends=paths.ends, names=paths.names)
    content = file.getvalue()
    return MAGIC + hashlib.sha256(content).digest() + content


def _unpacked(content: bytes, tree: Path) -> Listing:
    """The listing that ``_packed`` turned into ``content``. Raises ``ValueError`` or another error if it is damaged.

    ``content`` is read into memory, not mapped: a mapped file may lose pages if it is deleted on a network drive.
    """
    start = len(MAGIC) + DIGEST_BYTES
    if not content.startswith(MAGIC):
        raise ValueError("another kind of file, or of another version")
    if hashlib.sha256(content[start:]).digest() != content[len(MAGIC) : start]:
        raise ValueError("not its SHA-256")
    arrays = np.load(io.BytesIO(content[start:]), allow_pickle=False)
    about = json.loads(str(arrays["about"]))
    if about["endings"] != [[*IMAGE_ENDINGS], UNREAD_ENDINGS]:
        raise ValueError("of another version")
    paths = FilePaths(tree, arrays["names"], arrays["ends"])
    folders = tuple((name, modified, changed) for name, modified, changed in about["folders"])
    return Listing(tuple(about["classes"]), arrays["counts"], paths, tuple(about["unread"]), folders)
