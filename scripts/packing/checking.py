"""Check shards by reading them again: compare checksums with the index or, if it has none, headers and sizes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from torch.utils.data import Dataset

from utils.config.settings import UserError
from utils.config.spelling import reason_of
from utils.data.formats.shards.index import BLOCK, Split
from utils.data.progress_log import ProgressLog
from utils.data.worker_pool import WorkerPool
from utils.runtime.files import sha256

SHOWN = 10  # faults shown in a message


def faults_of(folder: Path, splits: Mapping[str, Split], workers: int, progress: ProgressLog) -> list[str]:
    """Faults of the shards in ``folder``, one line each; empty if all is as the index says."""
    keys = [(name, number) for name, split in splits.items() for number in range(len(split.shards))]
    faults = []
    pool = WorkerPool(_Checker(folder, splits), min(workers, len(keys)))
    with progress.counting("Verifying", sum(len(split.records) for split in splits.values()), "images") as advance:
        for (name, number), found in zip(keys, pool.read(keys), strict=True):
            faults += found
            advance(splits[name].shards[number].samples)
    return faults


class _Checker(Dataset):
    """A worker's task: read one shard and return its faults."""

    def __init__(self, folder: Path, splits: Mapping[str, Split]) -> None:
        self.folder = folder
        self.splits = splits

    def __getitem__(self, key: tuple[str, int]) -> list[str]:
        name, number = key
        split = self.splits[name]
        path = self.folder / split.shards[number].file
        try:
            return _faults_of_shard(path, split, number)
        except OSError as error:
            return [f"{path}: cannot be read ({reason_of(error)})"]


def _faults_of_shard(path: Path, split: Split, number: int) -> list[str]:
    shard = split.shards[number]
    records = split.records[split.records["shard"] == number]
    faults = []
    if shard.sha256 and sha256(path) != shard.sha256:
        faults.append(f"{path}: its bytes are not those that the index was written for (SHA-256)")
    if len(records) != shard.samples:
        faults.append(f"{path}: the index lists {len(records):,} of its {shard.samples:,} images")
    with open(path, "rb") as file:
        bad = [record for record in np.sort(records, order="offset") if not _is_whole(file, record, split.checked)]
    # tar files of others may have any bytes as names
    names = [record["name"].decode("utf-8", "surrogateescape") for record in bad]
    return faults + [f"{path}/{name}: is damaged or lies elsewhere" for name in names]


def _is_whole(file: BinaryIO, record: np.void, checked: bool) -> bool:
    offset = int(record["offset"])
    size = int(record["size"])
    file.seek(offset - BLOCK)
    head = file.read(BLOCK)
    content = file.read(size)
    right = zlib.crc32(head) == record["head"] and len(content) == size
    return right and (not checked or zlib.crc32(content) == record["crc"])


def refuse_faults(faults: list[str], advice: str = "copy these shards again, or pack anew") -> None:
    """Raise ``UserError`` with the faults and the ``advice``, if there are any."""
    if faults:
        raise UserError(*faults[:SHOWN], f"{len(faults):,} fault(s) in all; {advice}")
