"""Decoded images in a file that every process of a host maps, so that they are decoded once and held in memory once.

A file of the cache is a plain .npy array, uint8 (n, c, size, size), named after a fingerprint of what it was made from.
With ``--skip-bad-images`` the numbers of unreadable images follow, as JSON; whoever takes the file tries those again.
It is written under another name, flushed and renamed, so what bears its own name is whole; the other name is locked
while it is written, so the first of several processes writes and the rest wait for it, without a collective. A file
system that knows no locks lets each of them write. The cache may be deleted at any time.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from utils.config.settings import DataSettings, UserError
from utils.data.images.decoding import UnreadableImage, decode_crop, decode_whole
from utils.data.images.unreadable import first_readable
from utils.data.images.view import View
from utils.data.progress_log import Log, ProgressLog
from utils.data.sets.claims import claim, leave, remove_abandoned
from utils.data.sets.readers import ImageFiles, MemoryImages
from utils.data.worker_pool.pool import WorkerPool

DECODING_VERSION = 1  # to be raised whenever decode_whole or decode_crop give other pixels than before
FOLDER = ".decoded"  # in --datapath; readers pass over hidden folders
CHUNK_BYTES = 3 << 19  # pixels that a worker hands over at a time; for 32x32 images larger chunks gained nothing
HEADER_BYTES = 128

Shape = tuple[int, ...]
Decoded = tuple[torch.Tensor, list[int]]  # pixels, and the numbers of unreadable images, in order


def folder_for(settings: DataSettings) -> Path | None:
    """Where decoded images are kept: ``--cache-dir``, else a hidden folder in ``--datapath``; None without either."""
    if settings.cache_dir is not None:
        return Path(settings.cache_dir)
    return None if settings.datapath is None else Path(settings.datapath) / FOLDER


def decoded(
    images: ImageFiles, view: View, folder: Path | None, *, workers: int, progress: ProgressLog, is_main: bool = True,
    skip_bad: bool = False,
) -> MemoryImages:  # fmt: skip
    """What ``view`` shows of files, as uint8 pixels (n, c, size, size).

    They are read from ``folder``'s cache and, when they are not there, decoded by ``workers`` processes (0: in place)
    and put there; without a folder, or when it cannot be written, they stay in memory. Changing the pixels changes
    this process's alone. To be called by all processes of a host: the first one decodes and logs that to ``progress``;
    what would be the same from all of them only ``is_main`` logs. Raises ``UserError`` with the path of the
    first file that is no image; with ``skip_bad`` they are told by the result, and an error is only what
    ``first_readable`` takes for one.
    """
    shape = (len(images), 1 if images.colour == "L" else 3, view.size, view.size)

    def make() -> Decoded:
        return decode(images, view, workers=workers, progress=progress, skip_bad=skip_bad)

    if folder is None:
        pixels, bad = make()
    else:
        path = folder / f"{fingerprint(images, view, folder)}.npy"
        pixels, bad = _kept(path, shape, make, progress.log, is_main, heed_mistakes=not skip_bad)
    unreadable = _try_again(_Chunks(images, view, skip_bad), pixels, bad)
    return MemoryImages(pixels, images.labels, unreadable)


def shared(
    images: MemoryImages, folder: Path | None, *, local_world_size: int, log: Log, is_main: bool = True
) -> MemoryImages:
    """The same images, their pixels mapped from a file in ``folder`` where several processes would each hold them.

    The file is named after the pixels' SHA-256. With one process, or without a folder, ``images`` is returned.
    """
    if local_world_size == 1 or folder is None or images.pixels.device.type != "cpu":
        return images
    pixels = images.pixels.contiguous()
    path = folder / f"{hashlib.sha256(pixels.numpy()).hexdigest()[:32]}.npy"
    pixels, _ = _kept(path, tuple(pixels.shape), lambda: (pixels, []), log, is_main, heed_mistakes=True)
    return MemoryImages(pixels, images.labels)


def fingerprint(images: ImageFiles, view: View, folder: Path) -> str:
    """32 hexadecimal digits of the SHA-256 over all that shapes the pixels, the files' contents by size and time.

    Paths count from ``folder``: a tree that is moved together with its cache keeps its fingerprint, and two trees of
    one cache never share one.
    """
    start = os.path.commonpath([min(images.paths), max(images.paths)]).rfind(os.sep) + 1
    above = os.path.relpath(images.paths[0][:start] or ".", folder)
    parts = [f"{DECODING_VERSION} {images.colour} {f'{view.size} whole' if view.whole else view}", above]
    for path in images.paths:
        try:
            status = os.stat(path)
            parts.append(f"{path[start:]}\0{status.st_size}\0{status.st_mtime_ns}")
        except OSError:  # whoever decodes it tells
            parts.append(f"{path[start:]}\0missing")
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


# ------------------------------------------------------------------------------------------ decoding


class _Chunks(Dataset):
    """What a worker does: a range of the files into one uint8 array; and the images that are unreadable.

    An array, because it comes through a pipe, whereas tensors need /dev/shm, which containers keep small.
    """

    def __init__(self, images: ImageFiles, view: View, skip_bad: bool) -> None:
        self.images, self.view, self.skip_bad = images, view, skip_bad
        self.channels = 1 if images.colour == "L" else 3

    def __getitem__(self, part: range) -> tuple[np.ndarray, dict[int, UnreadableImage]]:
        pixels = torch.zeros(len(part), self.channels, self.view.size, self.view.size, dtype=torch.uint8)
        unreadable = {}
        for place, index in zip(pixels, part, strict=True):
            try:
                place.copy_(self._read(self.images.paths[index]))
            except UnreadableImage as error:
                if not self.skip_bad:
                    raise
                unreadable[index] = error
        return pixels.numpy(), unreadable

    def _read(self, path: str) -> torch.Tensor:
        if self.view.whole:
            return decode_whole(path, self.view.size, self.images.colour)
        return decode_crop(path, self.view, self.images.colour)


def _try_again(chunks: _Chunks, pixels: torch.Tensor, bad: list[int]) -> dict[int, str]:
    """The paths of the images ``bad`` that are unreadable now, too; the others' pixels are put in.

    They may have been decoded long ago, for a run with ``--skip-bad-images``, or when a network was down.
    """
    unreadable = {}
    for index in bad:
        decoded_now, still = chunks[range(index, index + 1)]
        pixels[index] = torch.from_numpy(decoded_now[0])
        if still:
            unreadable[index] = chunks.images.paths[index]
    return unreadable


def decode(images: ImageFiles, view: View, *, workers: int, progress: ProgressLog, skip_bad: bool = False) -> Decoded:
    """Files decoded into uint8 (n, c, size, size) by ``workers`` processes.

    Processes, because threads that read small images wait for Python's lock: 2 threads on 2 cores took three times as
    long for 32x32 PNG files as one process without threads.
    """
    count, channels = len(images), 1 if images.colour == "L" else 3
    pixels = torch.empty(count, channels, view.size, view.size, dtype=torch.uint8)
    step = max(1, CHUNK_BYTES // pixels[0].numel())
    parts = [range(first, min(first + step, count)) for first in range(0, count, step)]
    pool = WorkerPool(_Chunks(images, view, skip_bad), min(workers, len(parts)))
    unreadable: dict[int, UnreadableImage] = {}
    with progress.counting("Decoding", count, "images") as advance:
        for part, (decoded_part, bad) in zip(parts, pool.read(parts), strict=True):
            pixels[part.start : part.stop] = torch.from_numpy(decoded_part)
            unreadable |= bad
            advance(len(part))

    def look(index: int) -> None:
        if index in unreadable:
            raise unreadable[index]

    for index in unreadable:
        first_readable(index, count, look)
    return pixels, list(unreadable)


# ------------------------------------------------------------------------------------------ the file


def _kept(
    path: Path, shape: Shape, make: Callable[[], Decoded], log: Log, is_main: bool, heed_mistakes: bool
) -> Decoded:
    """The pixels mapped from ``path``, made and put there when they are missing; from memory when that fails."""
    say: Log = log if is_main else lambda line: None
    while (found := _mapped(path, shape)) is None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            waiting = f"Waiting until these images are decoded into {path}"  # by another run, or a rank of this one
            file = claim(path, waiting, say, heed_mistakes)
        except OSError as error:
            say(_cannot_keep(path, error))
            return make()
        if file is not None:
            return _build(file, path, shape, make, log, say)
    say(f"Decoded images: {path} ({path.stat().st_size / 1e6:,.0f} MB)")
    return found


def _build(file: FileIO, path: Path, shape: Shape, make: Callable[[], Decoded], log: Log, say: Log) -> Decoded:
    """Make the pixels and write them; ``file`` is the claimed temporary file."""
    made = None
    with file:  # closing it ends the claim
        try:
            if (found := _mapped(path, shape)) is not None:  # finished by another process since this one looked
                os.unlink(file.name)
                return found
            if path.exists():
                log(f"{path}: is not a whole file of decoded images; it is made anew")
            remove_abandoned(path.parent, Path(file.name))
            _reserve(file, HEADER_BYTES + int(np.prod(shape)))
            began = time.monotonic()
            made = make()
            seconds = time.monotonic() - began
            _save(file, path, *made)
            log(f"Decoded images: {path} (made in {seconds:.1f} s; {_contents(path.parent)})")
            found = _mapped(path, shape)
            return made if found is None else found
        except BaseException as error:
            if isinstance(error, UserError):
                leave(file, error)
            with suppress(OSError):
                os.unlink(file.name)
            if not isinstance(error, OSError):
                raise
            say(_cannot_keep(path, error))
    return make() if made is None else made


def _cannot_keep(path: Path, error: OSError) -> str:
    return (
        f"warning: decoded images cannot be kept in {path.parent} ({error.strerror or error}), so each process makes "
        "and holds its own at every start; --cache-dir names another folder"
    )


def _contents(folder: Path) -> str:
    """How much the cache holds: changed data leaves files behind that nobody can tell from those still needed."""
    sizes = [path.stat().st_size for path in folder.glob("*.npy")]
    return f"{len(sizes)} file(s) of {sum(sizes) / 1e6:,.0f} MB there, which may be deleted at any time"


def _header(shape: Shape) -> bytes:
    """The header of a .npy file (version 1.0, see numpy.lib.format) of uint8 in C order, always of one length."""
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}"
    length = HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", length) + text.ljust(length - 1).encode() + b"\n"


def _mapped(path: Path, shape: Shape) -> Decoded | None:
    """The file's content, None when it is missing, cannot be read or is not what ``shape`` promises."""
    end = HEADER_BYTES + int(np.prod(shape))
    try:
        with open(path, "rb") as file:
            if file.read(HEADER_BYTES) != _header(shape) or os.fstat(file.fileno()).st_size < end:
                return None
            file.seek(end)
            bad = json.loads(file.read() or b"[]")
            if not isinstance(bad, list) or not all(type(index) is int and 0 <= index < shape[0] for index in bad):
                return None
            # Mode c is a private map: pages are shared until a process writes to one, which gives it a copy.
            return torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="c", offset=HEADER_BYTES, shape=shape)), bad
    except (OSError, ValueError):
        return None


def _reserve(file: FileIO, size: int) -> None:
    """Take ``size`` bytes of the disk at once: one that is too full shall not show after minutes of decoding."""
    file.truncate(0)
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # else: a file system that cannot reserve
            raise


def _save(file: FileIO, path: Path, pixels: torch.Tensor, bad: list[int]) -> None:
    for content in (_header(tuple(pixels.shape)), pixels.numpy(), json.dumps(bad).encode() if bad else b""):
        rest = memoryview(content).cast("B")
        while rest:  # one write takes 2 GB at most
            rest = rest[file.write(rest) :]
    os.fsync(file.fileno())
    os.replace(file.name, path)
