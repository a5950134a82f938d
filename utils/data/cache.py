"""Decoded images in a file that every process of a host maps, so that they are decoded once and held in memory once.

A file of the cache is a plain .npy array, uint8 (n, c, size, size), named after a fingerprint of what it was made from.
It is written under another name, flushed and renamed, so what bears its own name is whole; the other name is locked
while it is written, so the first of several processes writes and the rest wait for it, without a collective. A file
system that knows no locks lets each of them write. The cache may be deleted at any time.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from utils.data.decoding import decode_crop, decode_whole
from utils.data.readers import ImageFiles, MemoryImages
from utils.settings import DataSettings, UserError

DECODING_VERSION = 1  # to be raised whenever decode_whole or decode_crop give other pixels than before
FOLDER = ".decoded"  # in --datapath; readers pass over hidden folders
CHUNK_BYTES = 3 << 19  # pixels that a worker hands over at a time; for 32x32 images larger chunks gained nothing
LOG_SECONDS = 10  # between two lines about the progress, where no bar is shown
ABANDONED_SECONDS = 24 * 3600  # without locks: age from which a temporary file is taken for a dead process's
HEADER_BYTES = 128
MISTAKE = b"UserError: "  # begins what a process that met a damaged image leaves to those waiting for it

Log = Callable[[str], None]
Shape = tuple[int, ...]


def folder_for(settings: DataSettings) -> Path | None:
    """Where decoded images are kept: ``--cache-dir``, else a hidden folder in ``--datapath``; None without either."""
    if settings.cache_dir is not None:
        return Path(settings.cache_dir)
    return None if settings.datapath is None else Path(settings.datapath) / FOLDER


def decoded(
    images: ImageFiles, size: int, fixed_size: bool, folder: Path | None, *, workers: int, progress: bool, log: Log,
    is_main: bool = True,
) -> MemoryImages:  # fmt: skip
    """Files as uint8 pixels (n, c, ``size``, ``size``): whole with ``fixed_size``, else their middle.

    They are read from ``folder``'s cache and, when they are not there, decoded by ``workers`` processes (0: in place)
    and put there; without a folder, or when it cannot be written, they stay in memory. Changing the pixels changes
    this process's alone. To be called by all processes of a host: one decodes, whichever comes first, and says so to
    ``log``; what would be the same from all of them only ``is_main`` says. Raises ``UserError`` with the path of the
    first file that is no image.
    """
    shape = (len(images), 1 if images.colour == "L" else 3, size, size)

    def make() -> torch.Tensor:
        return decode(images, size, fixed_size, workers=workers, progress=progress, log=log)

    if folder is None:
        return MemoryImages(make(), images.labels)
    path = folder / f"{fingerprint(images, size, fixed_size, folder)}.npy"
    return MemoryImages(_kept(path, shape, make, log, is_main), images.labels)


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
    return MemoryImages(_kept(path, tuple(pixels.shape), lambda: pixels, log, is_main), images.labels)


def fingerprint(images: ImageFiles, size: int, fixed_size: bool, folder: Path) -> str:
    """32 hexadecimal digits of the SHA-256 over all that shapes the pixels, the files' contents by size and time.

    Paths count from ``folder``: a tree that is moved together with its cache keeps its fingerprint, and two trees of
    one cache never share one.
    """
    start = os.path.commonpath([min(images.paths), max(images.paths)]).rfind(os.sep) + 1
    above = os.path.relpath(images.paths[0][:start] or ".", folder)
    parts = [f"{DECODING_VERSION} {images.colour} {size} {'whole' if fixed_size else 'middle'}", above]
    for path in images.paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); mend or remove the file") from error
        parts.append(f"{path[start:]}\0{status.st_size}\0{status.st_mtime_ns}")
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


# ------------------------------------------------------------------------------------------ decoding


class _Chunks(Dataset):
    """What a worker does: a range of the files into one uint8 array."""

    def __init__(self, images: ImageFiles, size: int, fixed_size: bool) -> None:
        self.images, self.size = images, size
        self.read_one = decode_whole if fixed_size else decode_crop

    def __getitem__(self, part: range) -> np.ndarray | UserError:
        paths = self.images.paths[part.start : part.stop]
        try:
            return torch.stack([self.read_one(path, self.size, self.images.colour) for path in paths]).numpy()
        except UserError as error:  # handed over, because DataLoader would bury it in a worker's traceback
            return error


def _as_it_is(read: Any) -> Any:
    """Keeps arrays arrays: they come through a pipe, whereas tensors need /dev/shm, which containers keep small."""
    return read


def decode(images: ImageFiles, size: int, fixed_size: bool, *, workers: int, progress: bool, log: Log) -> torch.Tensor:
    """Files decoded into uint8 (n, c, ``size``, ``size``) by ``workers`` processes, with a bar or lines to ``log``.

    Processes, because threads that read small images wait for Python's lock: 2 threads on 2 cores took three times as
    long for 32x32 PNG files as one process without threads.
    """
    count, channels = len(images), 1 if images.colour == "L" else 3
    pixels = torch.empty(count, channels, size, size, dtype=torch.uint8)
    step = max(1, CHUNK_BYTES // pixels[0].numel())
    parts = [range(first, min(first + step, count)) for first in range(0, count, step)]
    reads = DataLoader(
        _Chunks(images, size, fixed_size), batch_size=None, sampler=parts, collate_fn=_as_it_is,
        num_workers=min(workers, len(parts)), generator=torch.Generator(),  # its own: a cached set must draw as many
    )  # fmt: skip
    bar = tqdm(
        total=count, desc="Decoding", unit="image", leave=False, dynamic_ncols=True,
        disable=not (progress and sys.stderr.isatty()),
    )  # fmt: skip
    told = time.monotonic()
    with bar:
        for part, read in zip(parts, reads, strict=True):
            if isinstance(read, UserError):
                raise read
            pixels[part.start : part.stop] = torch.from_numpy(read)
            bar.update(len(part))
            if bar.disable and time.monotonic() - told >= LOG_SECONDS:
                told = time.monotonic()
                log(f"Decoding: {part.stop:,} of {count:,} images")
    return pixels


# ------------------------------------------------------------------------------------------ the file


def _kept(path: Path, shape: Shape, make: Callable[[], torch.Tensor], log: Log, is_main: bool) -> torch.Tensor:
    """The pixels mapped from ``path``, made and put there when they are missing; from memory when that fails."""
    say: Log = log if is_main else lambda line: None
    while (pixels := _mapped(path, shape)) is None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = _claim(path, say)
        except OSError as error:
            say(_cannot_keep(path, error))
            return make()
        if file is not None:
            return _build(file, path, shape, make, log, say)
    say(f"Decoded images: {path} ({path.stat().st_size / 1e6:,.0f} MB)")
    return pixels


def _build(
    file: FileIO, path: Path, shape: Shape, make: Callable[[], torch.Tensor], log: Log, say: Log
) -> torch.Tensor:
    """Make the pixels and write them; ``file`` is the claimed temporary file."""
    pixels = None
    with file:  # closing it ends the claim
        try:
            if (found := _mapped(path, shape)) is not None:  # finished by another process since this one looked
                os.unlink(file.name)
                return found
            if path.exists():
                log(f"{path}: is not a whole file of decoded images; it is made anew")
            _remove_abandoned(path.parent, Path(file.name))
            _reserve(file, HEADER_BYTES + int(np.prod(shape)))
            began = time.monotonic()
            pixels = make()
            seconds = time.monotonic() - began
            _save(file, path, pixels)
            log(f"Decoded images: {path} (made in {seconds:.1f} s; {_contents(path.parent)})")
            found = _mapped(path, shape)
            return pixels if found is None else found
        except BaseException as error:
            if isinstance(error, UserError):
                _leave(file, error)
            with suppress(OSError):
                os.unlink(file.name)
            if not isinstance(error, OSError):
                raise
            say(_cannot_keep(path, error))
    return make() if pixels is None else pixels


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


def _mapped(path: Path, shape: Shape) -> torch.Tensor | None:
    """The file's pixels, None when it is missing, cannot be read or is not what ``shape`` promises."""
    try:
        with open(path, "rb") as file:
            if file.read(HEADER_BYTES) != _header(shape):
                return None
            if os.fstat(file.fileno()).st_size != HEADER_BYTES + int(np.prod(shape)):
                return None
            # Mode c is a private map: pages are shared until a process writes to one, which gives it a copy.
            return torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="c", offset=HEADER_BYTES, shape=shape))
    except OSError:
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


def _save(file: FileIO, path: Path, pixels: torch.Tensor) -> None:
    for content in (_header(tuple(pixels.shape)), pixels.numpy()):
        rest = memoryview(content).cast("B")
        while rest:  # one write takes 2 GB at most
            rest = rest[file.write(rest) :]
    os.fsync(file.fileno())
    os.replace(file.name, path)


# ------------------------------------------------------------------------------------------ one writer


def _claim(path: Path, say: Log) -> FileIO | None:
    """The temporary file of ``path``, open and locked. None when another process ended its claim meanwhile.

    Raises ``UserError`` when that process met a damaged image, ``OSError`` when nothing can be written here.
    """
    import fcntl

    name = path.with_suffix(".partial")
    with ExitStack() as closed_on_return:
        file = closed_on_return.enter_context(open(name, "r+b", buffering=0, opener=_open_or_create))
        locked = _try_lock(file)
        if locked is None:
            return open(path.with_suffix(f".{uuid.uuid4().hex}.partial"), "x+b", buffering=0)
        if not locked:
            say(f"Waiting for another process that decodes these images into {path}")
            fcntl.lockf(file, fcntl.LOCK_EX)
        if _is_at(file, name):
            closed_on_return.pop_all()
            return file
        left = b""
        with suppress(OSError):  # a network file system may have dropped it
            left = file.read(1 << 16)
        if not locked and left.startswith(MISTAKE):
            raise UserError(left[len(MISTAKE) :].decode("utf-8", "surrogateescape"))
    return None


def _open_or_create(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_CREAT, 0o666)


def _try_lock(file: FileIO) -> bool | None:
    """Lock ``file`` until it is closed, by whatever end, also kill -9. False: another process has the lock.

    None on a file system that knows no locks. Worker processes do not inherit a record lock.
    """
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def _is_at(file: FileIO, name: Path) -> bool:
    """Whether ``name`` is still this file: the process that had it before has neither renamed nor removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name))
    except FileNotFoundError:
        return False


def _leave(file: FileIO, error: UserError) -> None:
    """Write the mistake into the temporary file, so that those who wait need not find it once more, in turn."""
    with suppress(OSError):
        file.truncate(0)
        file.seek(0)
        file.write(MISTAKE + str(error).encode("utf-8", "surrogateescape"))


def _remove_abandoned(folder: Path, own: Path) -> None:
    """Remove the temporary files of processes that were killed: those whose lock is free."""
    for path in folder.glob("*.partial"):
        if path != own:  # closing a second handle of it would end the lock
            with suppress(OSError), open(path, "r+b") as file:
                locked = _try_lock(file)
                if locked or (locked is None and time.time() - path.stat().st_mtime > ABANDONED_SECONDS):
                    os.unlink(path)
