"""Where uint8 batches come from: the device's memory, or worker processes that read files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from utils.data.decoding import decode_crop, decode_whole
from utils.data.gpu_decoding import MixedBatch, decode_batch, pack, read_for_gpu
from utils.data.readers import Images, MemoryImages
from utils.data.sample_plan import Share, sample_uniforms
from utils.data.transforms import CROP_NUMBERS, CROP_STREAM
from utils.distributed import to_device
from utils.settings import UserError

# Shares of one epoch, their uint8 images (m, c, h, w) and their int64 labels (m,), one share's after the other's.
Item = tuple[list[Share], torch.Tensor, torch.Tensor]
TOGETHER_BYTES = 2**20  # of images that a resident source hands over together


class Source(Protocol):
    """Resident and streaming differ in this alone."""

    def __len__(self) -> int: ...

    def batches(self, shares: Iterable[Share]) -> Iterator[Item]:
        """All shares in order, one or more at a time, with their images and labels on the device."""
        ...

    def read(self, share: Share) -> Item:
        """One share's images and labels, on the device, read in this process."""
        ...


class ResidentSource:
    """All images in the device's memory as one uint8 tensor; a batch is an index.

    Several batches of small images are handed over together: to gather and augment one of them takes little more than
    the calls take, whatever they work on.
    """

    def __init__(self, images: MemoryImages, device: torch.device) -> None:
        self.device = device
        self.pixels, self.labels = images.pixels.to(device), images.labels.to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, shares: Iterable[Share]) -> Iterator[Item]:
        images_together = TOGETHER_BYTES // self.pixels[0].numel()
        together: list[Share] = []
        count = 0
        for share in shares:
            together.append(share)
            count += len(share.indices)
            if count >= images_together:
                yield self._read(together)
                together, count = [], 0
        if together:
            yield self._read(together)

    def read(self, share: Share) -> Item:
        return self._read([share])

    def _read(self, shares: list[Share]) -> Item:
        rows = to_device(torch.from_numpy(samples_of(shares)), self.device)
        return shares, *select(self.pixels, self.labels, rows)


def samples_of(shares: list[Share]) -> np.ndarray:
    """The samples of all shares, one share's after the other's: int64."""
    return np.concatenate([share.indices for share in shares])


def select(pixels: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples ``rows`` (int64) of a ``MemoryImages``; index_select copies whole images, unlike indexing."""
    places = rows if len(pixels) == len(labels) else rows % len(pixels)
    return pixels.index_select(0, places), labels.index_select(0, rows)


class StreamSource:
    """Worker processes read the images, ahead of the device.

    ``size`` is the side in pixels of what the workers hand over. ``crop`` makes them take random boxes.
    ``workers`` is their number, or 'auto' to measure how many of at most ``cores`` pay. With ``decode_on_device`` they
    hand over JPEG files as they are.
    """

    def __init__(
        self,
        images: Images,
        device: torch.device,
        *,
        size: int,
        crop: bool,
        fixed_size: bool,
        seed: int,
        workers: int | str,
        cores: int,
        decode_on_device: bool = False,
    ) -> None:
        self.device = device
        self._reads = _Reads(images, size, crop, fixed_size, seed, decode_on_device)
        self.workers = measured_workers(self._reads, cores) if workers == "auto" else workers
        self._queue: list[Share] = []
        self._loader = _data_loader(self._reads, self._queue, self.workers, pin=device.type == "cuda")

    def __len__(self) -> int:
        return len(self._reads.images)

    def batches(self, shares: Iterable[Share]) -> Iterator[Item]:
        self._queue[:] = list(shares)
        for share, read in zip(list(self._queue), self._loader, strict=True):
            yield self._on_device(share, read)

    def read(self, share: Share) -> Item:
        return self._on_device(share, self._reads[share])

    def _on_device(self, share: Share, read: Any) -> Item:
        if isinstance(read, UserError):
            raise read
        pixels, labels = read
        if isinstance(pixels, MixedBatch):
            pixels = decode_batch(pixels, self.device)
        # From pinned memory, and so beside what the device computes.
        return [share], pixels.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)


def _data_loader(reads: _Reads, shares: list[Share], workers: int, pin: bool) -> DataLoader:
    return DataLoader(
        reads,
        batch_size=None,  # the plan makes the batches
        sampler=shares,
        num_workers=workers,
        pin_memory=pin,
        persistent_workers=workers > 0,
        prefetch_factor=4 if workers else None,
        generator=torch.Generator(),  # its own: however many loaders there were, the run's random numbers are the same
    )


class _Reads(Dataset):
    """What a worker does: one share's files into one uint8 tensor, or for the device a ``MixedBatch``."""

    def __init__(self, images: Images, size: int, crop: bool, fixed_size: bool, seed: int, as_files: bool) -> None:
        self.images, self.size, self.crop, self.fixed_size, self.seed = images, size, crop, fixed_size, seed
        self.as_files = as_files and not fixed_size

    def __getitem__(self, share: Share) -> tuple[torch.Tensor | MixedBatch, torch.Tensor] | UserError:
        try:
            return self._read(share)
        except UserError as error:  # handed over, because DataLoader would bury it in a worker's traceback
            return error

    def _read(self, share: Share) -> tuple[torch.Tensor | MixedBatch, torch.Tensor]:
        indices = share.indices
        rows = torch.from_numpy(indices)
        if isinstance(self.images, MemoryImages):
            return select(self.images.pixels, self.images.labels, rows)
        draws: Any = [None] * len(indices)
        if self.crop and not self.fixed_size:
            draws = sample_uniforms(self.seed, share.epoch, indices, CROP_STREAM, CROP_NUMBERS)
        files = [self.images.paths[index] for index in indices]
        colour, labels = self.images.colour, self.images.labels[rows]
        if self.as_files:
            items = [read_for_gpu(path, self.size, colour, draw) for path, draw in zip(files, draws, strict=True)]
            return pack(items, self.size, colour), labels
        batch = empty_batch(len(files), 1 if colour == "L" else 3, self.size)
        for place, path, draw in zip(batch, files, draws, strict=True):
            if self.fixed_size:
                place.copy_(decode_whole(path, self.size, colour))
            else:
                place.copy_(decode_crop(path, self.size, colour, draw))
        return batch, labels


def empty_batch(count: int, channels: int, size: int) -> torch.Tensor:
    """uint8 (count, channels, size, size), channels-last as decoders write it; in a worker in shared memory.

    What lies in shared memory from the beginning is not copied on its way to the training process.
    """
    numbers = count * channels * size * size
    if get_worker_info() is None:
        flat = torch.empty(numbers, dtype=torch.uint8)
    else:
        flat = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(numbers))
    return flat.view(count, size, size, channels).permute(0, 3, 1, 2)


# ------------------------------------------------------------------------------- number of workers

TRIAL_BATCH = 32
WORTH = 1.1  # twice the workers must be faster by this factor


def measured_workers(reads: _Reads, cores: int) -> int:
    """How many worker processes read fastest here: 1, 2, 4 ... up to ``cores``.

    Each number reads other images, so that none finds its files in the system's memory already. A set that is too
    small to measure has one worker a core, at most two.
    """
    ladder = [2**k for k in range(cores.bit_length()) if 2**k < cores] + [cores]
    batches = [max(8, 4 * workers) for workers in ladder]
    if isinstance(reads.images, MemoryImages) or cores == 1 or len(reads.images) < TRIAL_BATCH * sum(batches):
        return min(2, cores)
    best, fastest = 1, 0.0
    order = np.random.default_rng(0).permutation(len(reads.images))[: TRIAL_BATCH * sum(batches)]
    parts = np.split(order, sum(batches))
    for workers, count in zip(ladder, batches, strict=True):
        trial, parts = parts[:count], parts[count:]
        speed = reading_speed(reads, trial, workers)
        if speed < WORTH * fastest:
            break
        best, fastest = workers, speed
    return best


def reading_speed(reads: _Reads, parts: list[np.ndarray], workers: int) -> float:
    """Images a second while all workers read, which they do once the first ``workers`` parts have arrived."""
    shares = [Share(0, 0, part, len(part), 1.0, True) for part in parts]
    batches = iter(_data_loader(reads, shares, workers, pin=False))
    arrived = []
    for read in batches:
        if isinstance(read, UserError):
            raise read
        arrived.append(time.perf_counter())
    return sum(map(len, parts[workers:])) / (arrived[-1] - arrived[workers - 1])
