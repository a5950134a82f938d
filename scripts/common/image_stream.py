"""Image files from a command line, in order, in batches as a network sees them in validation."""

from __future__ import annotations

import glob
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch.utils.data import Dataset

from scripts.common.command_line import each_of, warn
from utils.config.settings import UserError, as_user_error
from utils.config.spelling import reason_of
from utils.data.formats.listing import is_image, left_out, no_images
from utils.data.images.decoding import UnreadableImage, decode_crop, dtype_of, why_unreadable
from utils.data.preprocessing import Preprocessing
from utils.data.sources import empty_batch
from utils.data.worker_pool import WorkerPool

STDIN = "-"
LIST = "@"
CPU = torch.device("cpu")


class ImageBatch(NamedTuple):
    """Consecutive files: n ``paths`` as given, ``images`` float32 (n, channels, h, w) on the device, normalised.

    ``errors``: for each file None, or in one line why it cannot be read; the pixels of an unreadable file are
    meaningless.
    """

    paths: tuple[str, ...]
    images: torch.Tensor
    errors: tuple[str | None, ...]


def image_names(arguments: Sequence[str], unread: Counter[str] | None = None) -> Iterator[str]:
    """The image files that ``arguments`` name, one after the other, as written.

    An argument is a file, a folder (all images in and below it, by name), a pattern such as 'photos/**/*.jpg', '@FILE'
    for a text file with one name per line, or '-' for such lines from standard input. In folders, hidden entries, files
    with other endings, and links to folders below the top level are skipped; ``unread`` counts files as ``left_out``
    names them. Lists are read only as far as the iterator has advanced. Raises ``UserError`` at once for
    arguments that name nothing.
    """
    unread = Counter() if unread is None else unread
    if arguments.count(STDIN) > 1:
        raise UserError(f"IMAGES: {STDIN} stands twice, and standard input holds one list; give it once")
    return chain.from_iterable(each_of(partial(_named_by, unread=unread), arguments))


def warn_of(unread: Counter[str]) -> None:
    """Warn of the files that ``image_names`` has counted as ``unread``."""
    if unread:
        counts = ", ".join(f"{count:,} {ending}" for ending, count in sorted(unread.items()))
        warn(f"files are left out: {counts}; convert them to .jpg or .png files")


def _named_by(argument: str, unread: Counter[str]) -> Iterable[str]:
    if "\0" in argument or not argument:
        raise UserError("IMAGES: a name must not be empty or hold a NUL character")
    if argument == STDIN:
        return _lines_of(sys.stdin.buffer)
    if os.path.lexists(argument):
        return _file_or_folder(argument, unread)
    if argument.startswith(LIST):
        with as_user_error(f"{argument}: the list cannot be read"):
            return _lines_of(Path(argument[len(LIST) :]).open("rb"))
    matches = sorted(glob.iglob(argument, recursive=True)) if glob.has_magic(argument) else []
    if not matches:
        raise UserError(f"{argument}: no such file or folder{', and no file matches it' * glob.has_magic(argument)}")
    found = chain.from_iterable(_below(match, unread) if os.path.isdir(match) else (match,) for match in matches)
    return dict.fromkeys(found)  # each once: 'photos/**' matches a folder and the files in it


def _file_or_folder(path: str, unread: Counter[str]) -> Iterable[str]:
    if os.path.isdir(path):
        before = unread.copy()
        images = _below(path, unread)
        first = next(images, None)
        if first is None:
            raise UserError(f"{path}: {no_images(unread - before)}")
        return chain([first], images)
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path}: is neither a file nor a folder")
    return (path,)


def _below(folder: str, unread: Counter[str], follows: bool = True) -> Iterator[str]:
    """Images in ``folder`` and below, by name; ``folder`` itself if it cannot be listed, which then causes an error.

    As in training, class folders may be links: with ``follows``, links to folders are followed in ``folder`` only.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        yield folder
        return
    for entry in entries:
        leads_to_folder = entry.is_symlink() and os.path.isdir(entry.path)
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False) or (leads_to_folder and follows and not _contains(entry.path, folder)):
            yield from _below(entry.path, unread, follows=False)
        elif leads_to_folder:
            continue
        elif is_image(entry.name):
            yield entry.path
        else:
            unread.update(left_out(entry.name))


def _contains(link: str, folder: str) -> bool:
    """True if ``link`` leads to ``folder`` itself or to a folder above it."""
    return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(link))


def _lines_of(file: BinaryIO) -> Iterator[str]:
    """Names, one from each non-empty line, decoded as the system's file names, so that any bytes are allowed."""
    with file:
        for line in file:
            if name := os.fsdecode(line.rstrip(b"\r\n")):
                yield name


def stream(
    paths: Iterable[str | os.PathLike[str]],
    preprocessing: Preprocessing,
    batch_size: int,
    workers: int,
    *,
    device: torch.device = CPU,
    channels_last: bool = False,
) -> Iterator[ImageBatch]:
    """Read the files ``paths`` in order, in batches of ``batch_size``, with the pixels that validation gives a network.

    ``workers`` processes each read a few batches ahead; with 0, or a single batch, there are none. ``paths`` is not
    consumed further ahead, and no batch is kept. A file that is damaged, missing or not an image has an error in its
    batch. Raises ``UserError`` if a process ends or the system runs short of memory or file descriptors.
    """
    names = map(os.fspath, paths)
    batches = iter(lambda: tuple(islice(names, batch_size)), ())
    first = list(islice(batches, 2))
    pool = WorkerPool(_FileBatches(preprocessing), workers if len(first) > 1 else 0, pin=device.type == "cuda")
    transform = replace(preprocessing.evaluation_transform, channels_last=channels_last)
    for batch, pixels, errors in pool.read(chain(first, batches)):
        yield ImageBatch(batch, transform.evaluation(pixels.to(device, non_blocking=True)), errors)


class _FileBatches(Dataset):
    """A worker's task: read a batch's files as uint8 (n, channels, h, w), as validation does, and note the errors."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        self.preprocessing = preprocessing
        self.view = preprocessing.view(preprocessing.val_image_size)

    def __getitem__(self, paths: tuple[str, ...]) -> tuple[tuple[str, ...], torch.Tensor, tuple[str | None, ...]]:
        batch = empty_batch(
            len(paths), self.preprocessing.channels, self.view.size, dtype_of(self.preprocessing.colour)
        )
        errors = tuple(self._read(path, place) for path, place in zip(paths, batch, strict=True))
        return paths, batch, errors

    def _read(self, path: str, place: torch.Tensor) -> str | None:
        """Read a file into ``place``; return why it cannot be read, or None."""
        problem = problem_of(path)
        try:
            if problem is None:
                place.copy_(decode_crop(path, self.view, self.preprocessing.colour))
        except UnreadableImage as error:
            problem = reason(error)
        if problem is not None:
            place.zero_()
        return problem


def problem_of(path: str) -> str | None:
    """Fault that a file shows before it is opened, or None; opening a pipe could block forever."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        return f"cannot be opened ({reason_of(error)})"
    if stat.S_ISDIR(status.st_mode):
        return "is a folder"
    if not stat.S_ISREG(status.st_mode):
        return "is no file"
    return None if status.st_size else "is empty (0 bytes)"


def reason(error: Exception) -> str:
    """Reason why an image cannot be decoded, in one line without its path."""
    cause = error.__cause__ if isinstance(error, UserError) and isinstance(error.__cause__, Exception) else error
    return why_unreadable(cause)
