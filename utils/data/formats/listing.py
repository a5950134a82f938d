"""Lists the image files of class folders with threads: on a network file system a folder is mostly a wait."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from utils.config.settings import UserError
from utils.data.formats.file_paths import NUL, FilePaths

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
UNREAD_ENDINGS = (
    ".gif", ".heic", ".heif", ".avif", ".jfif", ".jpe", ".jp2", ".jxl", ".svg", ".psd", ".tga", ".ico", ".dng", ".raw",
    ".cr2", ".nef", ".arw", ".dcm", ".nii", ".exr",
)  # fmt: skip  # image formats that are left out
LINKED = "links to folders"  # counted beside these endings
THREADS = 16  # that wait for folders at the same time
POLL_SECONDS = 0.2
TELL = 1000  # files, after which a thread says how far it is

FolderTimes = tuple[str, int, int]  # path below the tree, st_mtime_ns, st_ctime_ns


def is_image(name: str) -> bool:
    """Whether a file of this name is read as an image."""
    return name.lower().endswith(IMAGE_ENDINGS)


def unread_ending(name: str) -> list[str]:
    """The ending of an image file in a format that is not read; otherwise nothing."""
    return [ending for ending in UNREAD_ENDINGS if name.lower().endswith(ending)]


@dataclass(frozen=True)
class Listing:
    """The image files below the class folders of a tree.

    ``classes``: the folders, in order; ``counts``: int64 (classes,), the files of each; ``paths``: those of the first
    class, sorted, then of the second and so on. ``unread``: for each class how many images of each ending are not read,
    and how many ``LINKED``.
    ``folders``: all folders that were listed, with their times just before.
    """

    classes: tuple[str, ...]
    counts: np.ndarray
    paths: FilePaths
    unread: tuple[dict[str, int], ...]
    folders: tuple[FolderTimes, ...]

    def of(self, classes: Sequence[str]) -> tuple[FilePaths, np.ndarray, Counter[str]]:
        """Of these ``classes`` alone: paths in their order, label of each, int64 (n,), and what is not read.

        A class that has no folder has no files.
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
    """What one class folder holds; ``names``: the images' paths below the tree, sorted, joined by zero bytes."""

    names: bytes
    count: int
    unread: dict[str, int]
    folders: list[FolderTimes]


class Scan:
    """Lists the class folders ``classes`` of ``tree``; can be left and continued. ``began_ns``: before the first."""

    def __init__(self, tree: str, classes: Sequence[str]) -> None:
        self._tree = tree
        self._classes = classes
        self.began_ns = time.time_ns()
        self._listed: dict[str, _ClassFolder] = {}

    def run(self, advance: Callable[[int], None] | None = None, seconds: float | None = None) -> bool:
        """Go on until all folders are listed, or ``seconds`` have passed; gives whether all are.

        ``advance`` is told how many more files were seen. Raises ``UserError`` for a folder that cannot be read.
        """
        end = None if seconds is None else time.monotonic() + seconds
        seen: SimpleQueue[int] = SimpleQueue()
        seen.put(sum(folder.count for folder in self._listed.values()))
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="listing")
        left = [name for name in self._classes if name not in self._listed]
        futures = {pool.submit(_list_class_folder, self._tree, name, seen.put): name for name in left}
        try:
            waiting = futures.keys()
            while waiting and (end is None or time.monotonic() < end):
                waiting = wait(waiting, POLL_SECONDS).not_done
                if advance is not None:
                    advance(sum(seen.get() for _ in range(seen.qsize())))
        finally:
            pool.shutdown(cancel_futures=True)
        self._take(futures)
        return len(self._listed) == len(self._classes)

    def _take(self, futures: dict[Future[_ClassFolder], str]) -> None:
        for future, name in futures.items():
            if not future.cancelled():
                self._listed[name] = future.result()

    def listing(self) -> Listing:
        """All that was found."""
        found = [self._listed[name] for name in self._classes]
        return Listing(
            classes=tuple(self._classes),
            counts=np.array([folder.count for folder in found], dtype=np.int64),
            paths=FilePaths.joined(self._tree, NUL.join([folder.names for folder in found if folder.count])),
            unread=tuple(folder.unread for folder in found),
            folders=tuple(times for folder in found for times in folder.folders),
        )


def _list_class_folder(tree: str, name: str, tell: Callable[[int], None]) -> _ClassFolder:
    """All images in a class folder and below. Hidden files are left out.

    Links to folders are counted and not followed, as they may loop; only the class folder may be one.
    """
    images: list[str] = []
    unread: Counter[str] = Counter()
    folders: list[FolderTimes] = []
    waiting = [name]
    untold = 0
    while waiting:
        folder = waiting.pop()
        try:
            status = os.stat(os.path.join(tree, folder))  # before its content: a change from here on will show
            folders.append((folder, status.st_mtime_ns, status.st_ctime_ns))
            with os.scandir(os.path.join(tree, folder)) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(f"{folder}/{entry.name}")
                    elif entry.name.startswith("."):
                        continue
                    elif entry.is_symlink() and entry.is_dir():
                        unread[LINKED] += 1
                    elif not is_image(entry.name):
                        unread.update(unread_ending(entry.name))
                    elif entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path)):
                        # Not a pipe, say, which could block forever; a dead link fails later.
                        images.append(f"{folder}/{entry.name}")
                        untold += 1
                        if untold == TELL:
                            tell(TELL)
                            untold = 0
        except OSError as error:
            path = os.path.join(tree, folder)
            raise UserError(f"--datapath: {path} cannot be read ({error.strerror or error})") from error
    tell(untold)
    return _ClassFolder(os.fsencode("\0".join(sorted(images))), len(images), dict(unread), folders)
