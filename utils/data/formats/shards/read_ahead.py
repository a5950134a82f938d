"""Copies of shards in slow storage, made in a local folder of limited size before training needs them.

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

from utils.config.settings import as_user_error
from utils.config.spelling import reason_of
from utils.data.formats.shards.members import COPY, Members, copy_of
from utils.data.kept import claimed, remove_abandoned, whole_file
from utils.data.progress_log import Log

PART_BYTES = 4 << 20
COPIES = "[0-9a-f]" * 32 + COPY  # as ``copy_of`` names them: other files of the folder are the user's


def last_needs(shards_of_batches: Sequence[np.ndarray]) -> dict[int, int]:
    """The last batch that needs each shard, by shard number, in the order in which the shards are first needed."""
    lasts: dict[int, int] = {}
    for number, shards in enumerate(shards_of_batches):
        lasts |= dict.fromkeys(np.unique(shards).tolist(), number)  # a shard met again keeps its place
    return lasts


class ReadAhead:
    """Copies of the shards of ``members`` in ``folder``, of at most ``limit_bytes`` in total.

    On each host, the process with ``is_first`` makes and removes the copies; all processes read them. Must be created
    before the worker processes, which get ``members`` as they are then. Raises ``UserError`` if ``folder`` cannot be
    used.
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
        with as_user_error(f"--shard-cache {folder}: cannot be used", advice="; choose another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(0, "it is not writable")
        members.copies = str(folder)

    @contextmanager
    def of(self, batches: Sequence[np.ndarray]) -> Iterator[ReadAhead]:
        """Context in which the shards that ``batches`` (arrays of sample numbers) need are copied ahead of use."""
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
        """Note that ``batch`` has been read: copies that only it and earlier batches needed may be removed."""
        if self.is_first:
            with self._changed:
                self._passed = batch
                self._changed.notify_all()

    # ------------------------------------------------------------------------------------ in the thread

    def _copy_all(self, lasts: dict[int, int]) -> None:
        paths = [Path(copy_of(file, str(self.folder))) for file in self.members.files]
        for path in {*self.folder.glob(COPIES)} - {*paths}:  # left by a killed run or for another data set
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
        """Remove copies until ``size`` bytes fit; return whether they do.

        First go copies of shards that are not in ``lasts`` (see ``last_needs``), then those no longer needed. No copy
        is removed before its space is needed, as the next epoch may use it.
        """
        spare = sorted((lasts.get(number, -1), number, path) for number, path in enumerate(paths))
        held = {path: _bytes_of(path) for path in self.folder.glob(COPIES)}
        room = self.limit_bytes - sum(held.values())
        for last, _, path in spare:
            if room >= size or last > self._passed:
                break
            path.unlink(missing_ok=True)
            room += held.get(path, 0)
        return room >= size

    def _make(self, number: int, path: Path) -> None:
        """Copy shard ``number`` to ``path``; if that fails, warn: images are then read from the original."""
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
                    f"({reason_of(error)}), but image by image"
                )


def _bytes_of(path: Path) -> int:
    """The size of a file in bytes; 0 if there is no such file, as another run may have removed it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
