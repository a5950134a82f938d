"""Copies shards from a slow place into a local folder of bounded size, before training needs them.

Each shard is read once from end to end, which is what disks, network drives and object stores are good at. A read that
finds no copy goes to the original: the copies change the speed and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from utils.config.settings import UserError
from utils.data.formats.shards.members import COPY, Members, copy_of, look_for_copies_in
from utils.data.kept import claimed, remove_abandoned, whole_file
from utils.data.progress_log import Log

PART_BYTES = 4 << 20


def last_needs(shards_of_batches: Sequence[np.ndarray]) -> dict[int, int]:
    """The last batch that needs each shard, by the shards' numbers in the order of the first need."""
    lasts: dict[int, int] = {}
    for number, shards in enumerate(shards_of_batches):
        lasts |= dict.fromkeys(np.unique(shards).tolist(), number)  # a shard keeps its place
    return lasts


class ReadAhead:
    """The copies of ``members``' shards in ``folder``, together at most ``limit_bytes``.

    Of the processes of a host one makes and removes them, the one with ``is_first``; all read them. Must be made
    before the worker processes, which inherit where to look.
    """

    def __init__(self, members: Members, folder: Path, limit_bytes: int, *, is_first: bool, log: Log) -> None:
        self.members = members
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.is_first = is_first
        self.log = log
        self._changed = threading.Condition()
        self._passed = -1
        self._stop = False
        self._told = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(0, "it is not writable")
        except OSError as error:
            raise UserError(
                f"--shard-cache {folder}: cannot be used ({error.strerror}); choose another folder"
            ) from error
        look_for_copies_in(str(folder))

    @contextmanager
    def of(self, batches: Sequence[np.ndarray]) -> Iterator[ReadAhead]:
        """Copy, within it, the shards of ``batches``, the numbers of their samples, ahead of their use."""
        if not self.is_first:
            yield self
            return
        shards = self.members.shards
        lasts = last_needs([shards[samples] for samples in batches])
        self._passed = -1
        self._stop = False
        thread = threading.Thread(target=self._copy_all, args=(lasts,), daemon=True, name="shards read ahead")
        thread.start()
        try:
            yield self
        finally:
            with self._changed:
                self._stop = True
                self._changed.notify_all()
            thread.join()

    def passed(self, batch: int) -> None:
        """Batch ``batch`` has been read: shards that only it and earlier ones needed may go."""
        if self.is_first:
            with self._changed:
                self._passed = batch
                self._changed.notify_all()

    # ------------------------------------------------------------------------------------ in the thread

    def _copy_all(self, lasts: dict[int, int]) -> None:
        paths = [Path(copy_of(file, str(self.folder))) for file in self.members.files]
        for path in {*self.folder.glob(f"*{COPY}")} - {*paths}:  # of a killed run or another data set
            path.unlink(missing_ok=True)
        remove_abandoned(self.folder)
        self._make_room(0, lasts, paths)
        for number, last in lasts.items():
            size = self.members.split.shards[number].bytes
            if _bytes_of(paths[number]) == size or size > self.limit_bytes:
                continue
            with self._changed:
                while not (self._stop or self._make_room(size, lasts, paths)):
                    self._changed.wait(timeout=60)
            if self._stop:
                return
            if last > self._passed:
                self._make(number, paths[number])

    def _make_room(self, size: int, lasts: dict[int, int], paths: list[Path]) -> bool:
        """Remove copies until ``size`` bytes fit: those that ``lasts`` lack, then those used up. Whether they do.

        None is removed before: the next epoch may find it.
        """
        spare = sorted((lasts.get(number, -1), number, path) for number, path in enumerate(paths))
        held = {path: _bytes_of(path) for path in self.folder.glob(f"*{COPY}")}
        room = self.limit_bytes - sum(held.values())
        for last, _, path in spare:
            if room >= size or last > self._passed:
                break
            path.unlink(missing_ok=True)
            room += held.get(path, 0)
        return room >= size

    def _make(self, number: int, path: Path) -> None:
        """Copy a shard. What cannot be copied is read from the original, image by image, with a warning."""
        shard = self.members.split.shards[number]
        digest = hashlib.sha256()
        count = 0
        try:
            with claimed(path):  # another run may make the same copy
                if _bytes_of(path) == shard.bytes:
                    return
                with open(self.members.files[number], "rb", buffering=0) as source, whole_file(path) as target:
                    while not self._stop and (part := source.read(PART_BYTES)):
                        digest.update(part)
                        count += len(part)
                        target.write(part)
                    if count != shard.bytes or (shard.sha256 and digest.hexdigest() != shard.sha256):
                        raise OSError("its bytes are not those that the index was written for")
        except OSError as error:
            if not (self._told or self._stop):  # once: a full disk would fill the log
                self._told = True
                self.log(
                    f"warning: --shard-cache: {self.members.files[number]} is not read ahead "
                    f"({error.strerror or error}), but image by image"
                )


def _bytes_of(path: Path) -> int:
    """The size of a file, 0 if there is none: another run may have removed it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
