"""Decoded images in a file that all processes of a host map: decoded once, in memory once.

A cache file is a plain .npy array (n, c, h, w), uint8 or, for all levels, float32, named after a fingerprint of its
sources. With ``--skip-bad-images`` the numbers of unreadable images follow as JSON; a process that reads the file tries
to decode those again. The first of several processes writes the file and the others wait, without a collective; on a
file system without locks each process writes its own. The cache may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from utils.config.groups.data import DataSettings
from utils.config.image_size import sides, size_text
from utils.config.spelling import reason_of
from utils.data.formats.readers import ImageFiles, MemoryImages
from utils.data.images.decoding import UnreadableImage, decode_crop
from utils.data.images.levels import keeps_levels, range_of
from utils.data.images.stored import version_of
from utils.data.images.unreadable import first_readable
from utils.data.images.view import View
from utils.data.kept import claimed, remove_abandoned, whole_file
from utils.data.progress_log import Log, ProgressLog, silent
from utils.data.worker_pool import in_chunks

DECODING_VERSION = 2  # raise it whenever decode_crop gives other pixels than before
FOLDER = ".decoded"  # in --datapath; readers skip hidden folders
CHUNK_BYTES = 3 << 19  # handed over by a worker at a time; larger chunks are no faster for 32x32 images
HEADER_BYTES = 128  # of a .npy file of these shapes

Layout = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of the pixels
Decoded = tuple[torch.Tensor, list[int]]  # pixels, and the numbers of unreadable images, in order


def folder_for(settings: DataSettings) -> Path | None:
    """The folder for decoded images and lists of files: ``--cache-dir``, else a hidden folder in ``--datapath``."""
    if settings.cache_dir is not None:
        return Path(settings.cache_dir)
    return None if settings.datapath is None else Path(settings.datapath) / FOLDER


def decoded(
    images: ImageFiles,
    view: View,
    folder: Path | None,
    *,
    workers: int,
    progress: ProgressLog,
    is_main: bool = True,
    skip_bad: bool = False,
) -> MemoryImages:
    """Decode image files as ``view`` shows them: pixels (n, c, h, w), uint8 or, for all levels, float32.

    Pixels are read from the cache in ``folder``; if they are missing there, ``workers`` processes (0: this one) decode
    the files into it. Without a folder, or if it cannot be written, pixels stay in memory. The caller may change them.
    All processes of a host call this: the first one decodes and logs to ``progress``; lines that would be the same
    from all are logged with ``is_main`` only. Raises ``UserError`` with the path of the first unreadable file; with
    ``skip_bad`` the result lists such files, and only too many in a row are an error (see ``first_readable``).
    """
    shape = (len(images), images.channels, *sides(view.size))
    decoder = _ChunkDecoder(images, view, skip_bad)
    make = partial(decode, decoder, workers, progress)
    if folder is None:
        pixels, bad = make()
    else:
        path = folder / f"{fingerprint(images, view, folder)}.npy"
        pixels, bad = _kept(path, (shape, images.dtype), make, progress.log, is_main)
    unreadable = _try_again(decoder, pixels, bad)
    return MemoryImages(pixels, images.labels, unreadable, images.groups, images.weights)


def fingerprint(images: ImageFiles, view: View, folder: Path) -> str:
    """Fingerprint of all that determines the pixels, of files by ``version_of``: 32 hexadecimal digits of a SHA-256.

    Paths are relative to ``folder``: a tree moved together with its cache keeps its fingerprint, and two trees in one
    cache never share one.
    """
    start = os.path.commonpath([min(images.paths), max(images.paths)]).rfind(os.sep) + 1
    above = os.path.relpath(images.paths[0][:start] or ".", folder)
    shown = f"{images.colour} {f'{size_text(view.size)} whole' if view.whole else view}"
    kept = " all levels" * keeps_levels(images.colour)
    facts = [f"{DECODING_VERSION} {shown} {range_of(images.colour)}{kept}", above]
    facts += [f"{path[start:]}\0{version_of(path)}" for path in images.paths]
    return hashlib.sha256("\0".join(facts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


# ------------------------------------------------------------------------------------------ decoding


class _ChunkDecoder(Dataset):
    """The work of a worker: decodes a range of the files into one array and lists the unreadable ones.

    It returns an array, which goes through a pipe; a tensor would need /dev/shm, which is small in containers.
    """

    def __init__(self, images: ImageFiles, view: View, skip_bad: bool) -> None:
        self.images = images
        self.view = view
        self.skip_bad = skip_bad

    def __getitem__(self, chunk: range) -> tuple[np.ndarray, dict[int, UnreadableImage]]:
        pixels = torch.zeros(len(chunk), self.images.channels, *sides(self.view.size), dtype=self.images.dtype)
        unreadable = {}
        for place, index in zip(pixels, chunk, strict=True):
            try:
                place.copy_(decode_crop(self.images.paths[index], self.view, self.images.colour))
            except UnreadableImage as error:
                if not self.skip_bad:
                    raise
                unreadable[index] = error
        return pixels.numpy(), unreadable


def _try_again(decoder: _ChunkDecoder, pixels: torch.Tensor, bad: list[int]) -> dict[int, str]:
    """Decode the images numbered ``bad`` again into ``pixels``; return the paths of those that are still unreadable.

    The cache may be old, or made while a network drive was down.
    """
    unreadable = {}
    for index in bad:
        decoded_now, still_bad = decoder[range(index, index + 1)]
        pixels[index] = torch.from_numpy(decoded_now[0])
        if still_bad:
            unreadable[index] = decoder.images.paths[index]
    return unreadable


def decode(decoder: _ChunkDecoder, workers: int, progress: ProgressLog) -> Decoded:
    """Decode files with ``workers`` processes: pixels (n, c, h, w), uint8 or float32, and the unreadable images.

    Threads would wait for the GIL if images are small: for 32x32 PNG files, 2 threads on 2 cores took three times as
    long as one process without threads. Raises ``UserError`` as ``decoded`` does.
    """
    images = decoder.images
    count = len(images)
    pixels = torch.empty(count, images.channels, *sides(decoder.view.size), dtype=images.dtype)
    step = max(1, CHUNK_BYTES // pixels[0].nbytes)
    unreadable: dict[int, UnreadableImage] = {}
    for chunk, (made, bad) in in_chunks(decoder, count, step, "Decoding", workers=workers, progress=progress):
        pixels[chunk.start : chunk.stop] = torch.from_numpy(made)
        unreadable |= bad

    def look(index: int) -> None:
        if index in unreadable:
            raise unreadable[index]

    for index in unreadable:
        first_readable(index, count, look)
    return pixels, list(unreadable)


# ------------------------------------------------------------------------------------------ the file


def _kept(path: Path, layout: Layout, make: Callable[[], Decoded], log: Log, is_main: bool) -> Decoded:
    """Map the pixels in file ``path``, which ``make`` makes if it is missing; return them in memory if not writable."""
    log_once: Log = log if is_main else silent
    if (mapped := _mapped(path, layout)) is None:
        made = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(path.parent)
            with claimed(path, f"Waiting until these images are decoded into {path}", log_once):
                if (mapped := _mapped(path, layout)) is None:
                    if path.exists():
                        log(f"{path}: is not a complete file of decoded images; making it again")
                    began = time.monotonic()
                    with whole_file(path, reserved=HEADER_BYTES + layout[1].itemsize * int(np.prod(layout[0]))) as file:
                        made = make()
                        seconds = time.monotonic() - began
                        np.save(file, made[0].numpy())
                        file.write(json.dumps(made[1]).encode() if made[1] else b"")
                    log(f"Decoded images: {path} (made in {seconds:.1f} s; {_contents(path.parent)})")
                    return _mapped(path, layout) or made
        except OSError as error:
            log_once(
                f"warning: decoded images cannot be kept in {path.parent} ({reason_of(error)}), so each process "
                "makes and holds its own at every start; --cache-dir names another folder"
            )
            return make() if made is None else made
    log_once(f"Decoded images: {path} ({path.stat().st_size / 1e6:,.0f} MB)")
    return mapped


def _contents(folder: Path) -> str:
    """Text on the size of the cache, so that users notice old files left by changed data, as they look like others."""
    sizes = [path.stat().st_size for path in folder.glob("*.npy")]
    return f"{len(sizes)} file(s) of {sum(sizes) / 1e6:,.0f} MB there, which may be deleted at any time"


def _mapped(path: Path, layout: Layout) -> Decoded | None:
    """The content of file ``path``, mapped; None if it is missing, unreadable or not of this ``layout``."""
    try:
        # Mode c is a private map: processes share a page until one of them writes to it and gets a copy.
        pixels = np.lib.format.open_memmap(path, mode="c")
        shape, dtype = layout
        kind = np.dtype(np.uint8 if dtype == torch.uint8 else np.float32)
        if (pixels.dtype, pixels.shape, pixels.flags.c_contiguous) != (kind, shape, True):
            return None
        with open(path, "rb") as file:
            file.seek(pixels.offset + pixels.nbytes)
            bad = json.loads(file.read() or b"[]")
    except (OSError, ValueError):
        return None
    if not isinstance(bad, list) or not all(type(index) is int and 0 <= index < shape[0] for index in bad):
        return None
    return torch.from_numpy(pixels), bad
