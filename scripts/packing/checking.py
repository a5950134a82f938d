"""Reads shards again and compares every byte with the index."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from utils.config.settings import UserError
from utils.data.progress_log import ProgressLog
from utils.data.shards.index import BLOCK, Split
from utils.data.worker_pool.pool import WorkerPool

SHOWN = 10  # faults


def faults_of(folder: Path, splits: Mapping[str, Split], workers: int, progress: ProgressLog) -> list[str]:
    """What is wrong with the shards in ``folder``, a line each; empty if all is as the index says."""
    keys = [(name, number) for name, split in splits.items() for number in range(len(split.shards))]
    faults = []
    pool = WorkerPool(_Checker(folder, splits), min(workers, len(keys)))
    with progress.counting("Verifying", sum(len(split.records) for split in splits.values()), "images") as advance:
        for (name, number), found in zip(keys, pool.read(keys), strict=True):
            faults += found
            advance(splits[name].shards[number].samples)
    return faults


class _Checker(Dataset):
    """What a worker does: it reads one shard."""

    def __init__(self, folder: Path, splits: Mapping[str, Split]) -> None:
        self.folder, self.splits = folder, splits

    def __getitem__(self, key: tuple[str, int]) -> list[str]:
        split, shard = self.splits[key[0]], self.splits[key[0]].shards[key[1]]
        path = self.folder / shard.file
        try:
            data = path.read_bytes()
        except OSError as error:
            return [f"{path}: cannot be read ({error.strerror or error})"]
        records = split.records[split.records["shard"] == key[1]]
        faults = []
        if shard.sha256 and hashlib.sha256(data).hexdigest() != shard.sha256:
            faults.append(f"{path}: its bytes are not those that the index was written for (SHA-256)")
        if len(records) != shard.samples:
            faults.append(f"{path}: the index lists {len(records):,} of its {shard.samples:,} images")
        bad = [record for record in records if not _is_whole(data, record, split.checked)]
        faults += [f"{path}/{record['name'].decode()}: is damaged or lies elsewhere" for record in bad]
        return faults


def _is_whole(data: bytes, record: np.void, checked: bool) -> bool:
    offset, size = int(record["offset"]), int(record["size"])
    content = data[offset : offset + size]
    right = zlib.crc32(data[offset - BLOCK : offset]) == record["head"] and len(content) == size
    return right and (not checked or zlib.crc32(content) == record["crc"])


def refuse_faults(faults: list[str], advice: str = "copy these shards again, or pack anew") -> None:
    """Raise ``UserError`` with what is wrong."""
    if faults:
        raise UserError(*faults[:SHOWN], f"{len(faults):,} fault(s) in all; {advice}")
