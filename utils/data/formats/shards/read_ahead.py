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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from utils.config.settings import UserError
from utils.data.formats.shards.index import Shard
from utils.data.formats.shards.members import COPY, Members, copy_of, look_for_copies_in
from utils.data.kept import claimed, remove_abandoned, whole_file
from utils.data.progress_log import Log

PART_BYTES = 4 << 20


@dataclass(frozen=True)
class Need:
    """A shard that training reads: its number, and the first and the last batch that need it."""

    shard: int
    first: int
    last: int


def needs_of(shards_of_batches: Sequence[np.ndarray]) -> list[Need]:
    """The shards that are needed and when, in the order of the first need."""
    firsts: dict[int, int] = {}
    lasts: dict[int, int] = {}
    for number, shards in enumerate(shards_of_batches):
        for shard in np.unique(shards).tolist():
            firsts.setdefault(shard, number)
            lasts[shard] = number
    return [Need(shard, first, lasts[shard]) for shard, first in firsts.items()]


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
        """Within it, the shards of ``batches``, the numbers of their samples, are copied ahead of their use."""
        if not self.is_first:
            yield self
            return
        needs = needs_of([self.members.shards[samples] for samples in batches])
        self._passed = -1
        self._stop = False
        thread = threading.Thread(target=self._copy_all, args=(needs,), daemon=True, name="shards read ahead")
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

    def _copy_all(self, needs: list[Need]) -> None:
        paths = {number: self._copy(number) for number in range(len(self.members.files))}
        self._remove_others(set(paths.values()))
        self._make_room(0, needs, paths)
        for need in needs:
            size = self._shard(need.shard).bytes
            if _bytes_of(paths[need.shard]) == size or size > self.limit_bytes:
                continue
            if not self._wait_for_room(size, needs, paths) or need.last <= self._passed:
                if self._stop:
                    return
                continue
            self._make(need.shard, paths[need.shard])

    def _wait_for_room(self, size: int, needs: list[Need], paths: dict[int, Path]) -> bool:
        """Wait until ``size`` bytes fit; False if nothing is to be done."""
        with self._changed:
            while not self._stop:
                if self._make_room(size, needs, paths):
                    return True
                self._changed.wait(timeout=60)
        return False

    def _make_room(self, size: int, needs: list[Need], paths: dict[int, Path]) -> bool:
        """Remove copies until ``size`` bytes fit: those that ``needs`` lack, then those used up. Whether they do.

        None is removed before: the next epoch may find it.
        """
        lasts = {need.shard: need.last for need in needs}
        spare = sorted((lasts.get(shard, -1), shard) for shard in paths if lasts.get(shard, -1) <= self._passed)
        held = {path: _bytes_of(path) for path in self.folder.glob(f"*{COPY}")}
        room = self.limit_bytes - sum(held.values())
        for _, shard in spare:
            if room >= size:
                break
            paths[shard].unlink(missing_ok=True)
            room += held.get(paths[shard], 0)
        return room >= size

    def _make(self, number: int, path: Path) -> None:
        """Copy a shard. What cannot be copied is read from the original, image by image, with a warning."""
        shard = self._shard(number)
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

    def _remove_others(self, own: set[Path]) -> None:
        """Remove what a killed run or another data set left, so that the folder stays within its bound."""
        for path in self.folder.glob(f"*{COPY}"):
            if path not in own:
                path.unlink(missing_ok=True)
        remove_abandoned(self.folder)

    def _shard(self, number: int) -> Shard:
        return self.members.split.shards[number]

    def _copy(self, number: int) -> Path:
        return Path(copy_of(self.members.files[number], str(self.folder)))


def _bytes_of(path: Path) -> int:
    """The size of a file, 0 if there is none: another run may have removed it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
