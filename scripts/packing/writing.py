"""Write one shard: a tar file with KEY.jpg, KEY.cls and KEY.json for each image, the same bytes each time."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from torch.utils.data import Dataset

from scripts.packing.plan import Part, Plan
from utils.config.settings import as_user_error
from utils.data.formats.readers import ImageFiles
from utils.data.formats.shards.index import BLOCK, Shard
from utils.data.images.decoding import UnreadableImage
from utils.data.kept import whole_file


class ShardMaker(Dataset):
    """A worker's task: make one shard, which appears under its name only when it is complete."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __getitem__(self, key: tuple[str, int]) -> tuple[str, int, Part]:
        split, number = key
        name = f"{split}-{number:06}.tar"
        path = self.plan.folder / name
        sources = self.plan.sources(split, number)  # before the files are read: later changes will show
        with as_user_error(f"{path}: cannot be written"), whole_file(path) as file:
            hashed = _Hashed(file)
            with tarfile.open(fileobj=hashed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                numbers, rows, left_out = self._write(tar, split, number)
        shard = Shard(name, hashed.bytes, len(rows), hashed.digest.hexdigest())
        records = np.array(rows, dtype=self.plan.records)
        return split, number, Part(shard, np.array(numbers, dtype=np.int64), records, left_out, sources)

    def _write(self, tar: tarfile.TarFile, split: str, shard: int) -> tuple[list[int], list[tuple], list[str]]:
        images = self.plan.splits[split]
        labels = images.labels.cpu()
        encoding = self.plan.encodings[split]
        numbers = []
        rows = []
        left_out = []
        for number in self.plan.numbers(split, shard).tolist():
            try:
                ending, content = encoding.encode(images, number)
            except UnreadableImage as error:
                if not self.plan.skip_bad:
                    raise
                left_out.append(f"{error.path}\t{error.reason}")
                continue
            key = f"{number:09}"
            label = labels[number].tolist()
            offset, head = _add(tar, f"{key}.{ending}", content)
            if isinstance(label, int):
                _add(tar, f"{key}.cls", str(label).encode())
                about = {"class": self.plan.classes[label], "label": label}
            else:
                named = list(zip(self.plan.classes, label, strict=True))
                about = {"labels": [name for name, own in named if own == 1]}
                about["missing"] = [name for name, own in named if own < 0]
                label = tuple(label)
            about["name"] = _name(images, split, number)
            _add(tar, f"{key}.json", json.dumps(about, sort_keys=True).encode())
            numbers.append(number)
            rows.append((offset, len(content), shard, label, head, zlib.crc32(content), f"{key}.{ending}".encode()))
        return numbers, rows, left_out


def _name(images: object, split: str, number: int) -> str:
    """Image's folder and file name, or its number in the split."""
    return "/".join(Path(images.paths[number]).parts[-2:]) if isinstance(images, ImageFiles) else f"{split}[{number}]"


class _Hashed:
    """A file to write, with the number and the SHA-256 of the bytes meant for it: a disk's mistakes will show."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.bytes = 0
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return self.file.write(data)

    def tell(self) -> int:
        return self.bytes


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> tuple[int, int]:
    """Append a file without times and owners, so that equal contents give equal bytes.

    Returns the offset of its content, and the CRC-32 of its header.
    """
    info = tarfile.TarInfo(name)
    info.size = len(content)
    offset = tar.offset + BLOCK
    tar.addfile(info, io.BytesIO(content))
    return offset, zlib.crc32(info.tobuf(tarfile.USTAR_FORMAT))
