"""Sources of batches of pixels: the device's memory, or worker processes that read files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from utils.config.image_size import Size, sides
from utils.data.augment.base import Stream
from utils.data.formats.readers import ImageFiles, Images, MemoryImages
from utils.data.formats.shards.read_ahead import ReadAhead
from utils.data.images.decoding import CROP_NUMBERS, UnreadableImage, decode_crop
from utils.data.images.gpu_decoding import MixedBatch, decode_batch, read_for_gpu
from utils.data.images.unreadable import REFUSE, read_micro_batch
from utils.data.images.view import View
from utils.data.resolution import Resolution
from utils.data.sample_plan import MicroBatch, hashed, sample_uniforms
from utils.data.worker_pool import WorkerPool, in_shared_memory, shared_bytes
from utils.runtime.devices import runs_ahead, to_device

# Micro-batches of one epoch with their uint8 images (m, c, h, w) and int64 labels (m,), concatenated.
Item = tuple[list[MicroBatch], torch.Tensor, torch.Tensor]
# What a worker hands over: a micro-batch as read, its images, and their numbers in the data set (int64, m).
ReadMicroBatch = tuple[MicroBatch, torch.Tensor | MixedBatch, np.ndarray]
TOGETHER_BYTES = 2**20  # size of the images that a resident source hands over at once
AHEAD = 2**16  # images whose micro-batches a resident source collects at once: an epoch of a small set


class ResidentSource:
    """Images in the device's memory as one tensor; a batch is a selection from it.

    Small images come several batches at once, since launching operations takes longer than their work on one batch.
    ``policy``: what happens to unreadable images, see ``read_micro_batch``. ``labels``: of all images, int64 (n,) or
    int8 (n, classes). ``stored_shape``: the images' height and width.
    """

    def __init__(self, images: MemoryImages, device: torch.device, policy: str = REFUSE) -> None:
        self.device = device
        self.policy = policy
        self.pixels = images.pixels.to(device)
        self.labels = images.labels.to(device)
        self._unreadable = images.unreadable
        self.stored_shape = (self.pixels.shape[-2], self.pixels.shape[-1])

    def __len__(self) -> int:
        return len(self.labels)

    def chunks(self, micro_batches: Iterable[MicroBatch]) -> Iterator[list[MicroBatch]]:
        """The micro-batches in parts to be read one after the other."""
        return _cut(micro_batches, AHEAD)

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Item]:
        """The ``micro_batches`` in order, one or more at a time, with their images and labels on the device."""
        images_together = TOGETHER_BYTES // self.pixels[0].numel()
        for chunk in self.chunks(micro_batches):
            read, shown = self._shown(chunk)
            rows = to_device(torch.from_numpy(np.concatenate(shown)), self.device)
            labels = self.labels.index_select(0, rows)
            begin = 0
            for together in _cut(read, images_together):
                end = begin + sum(len(micro_batch.indices) for micro_batch in together)
                yield together, pixels_of(self.pixels, len(self), rows[begin:end]), labels[begin:end]
                begin = end

    def read(self, micro_batch: MicroBatch) -> Item:
        """Read a micro-batch in this process; its images and labels are on the device."""
        return next(self.batches([micro_batch]))

    def _shown(self, micro_batches: list[MicroBatch]) -> tuple[Sequence[MicroBatch], Sequence[np.ndarray]]:
        """The micro-batches as read, and the numbers of the images that each shows."""
        if not self._unreadable:
            return micro_batches, [micro_batch.indices for micro_batch in micro_batches]
        read = [read_micro_batch(micro_batch, len(self), self.policy, self._look) for micro_batch in micro_batches]
        return tuple(zip(*read, strict=True))

    def _look(self, index: int, *_: int, **__: int) -> None:
        if index in self._unreadable:
            raise UnreadableImage(self._unreadable[index], "found when the images were decoded")


def keys_of(micro_batches: Sequence[MicroBatch]) -> np.ndarray:
    """Random-number keys of all micro-batches' samples, concatenated: int64."""
    return np.concatenate([micro_batch.keys for micro_batch in micro_batches])


def _cut(micro_batches: Iterable[MicroBatch], images: int) -> Iterator[list[MicroBatch]]:
    """Group micro-batches: yield groups of at least ``images`` images, the last of the rest."""
    run: list[MicroBatch] = []
    count = 0
    for micro_batch in micro_batches:
        run.append(micro_batch)
        count += len(micro_batch.indices)
        if count >= images:
            yield run
            run = []
            count = 0
    if run:
        yield run


def pixels_of(pixels: torch.Tensor, count: int, rows: torch.Tensor) -> torch.Tensor:
    """Select images ``rows``, int64, of ``count`` images; if ``pixels`` holds fewer, they repeat.

    It uses index_select, which copies whole images, unlike indexing.
    """
    return pixels.index_select(0, rows if len(pixels) == count else rows % len(pixels))


class StreamSource:
    """Images that worker processes read ahead of the device; its methods and fields are those of ``ResidentSource``.

    ``workers``: how many there are, or 'auto' to measure how many, at most ``cores``, are worthwhile. JPEG files that
    ``reader`` hands over undecoded are decoded on ``device``. ``read_ahead``: copies shards from slow storage ahead.
    ``rank``: of this process, whose workers draw random numbers of their own.
    """

    stored_shape = None

    def __init__(
        self,
        reader: MicroBatchReader,
        device: torch.device,
        *,
        workers: int | str,
        cores: int,
        read_ahead: ReadAhead | None = None,
        rank: int = 0,
    ) -> None:
        self.reader = reader
        self.device = device
        self.read_ahead = read_ahead
        self.workers = workers if isinstance(workers, int) else measured_workers(reader, cores)
        seed = hashed(reader.seed, rank)
        self._pool = WorkerPool(reader, self.workers, pin=runs_ahead(device), keep=True, seed=seed)

    def __len__(self) -> int:
        return len(self.reader.images)

    @property
    def labels(self) -> torch.Tensor:
        return self.reader.images.labels

    def chunks(self, micro_batches: Iterable[MicroBatch]) -> list[Iterable[MicroBatch]]:
        return [micro_batches]

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Item]:
        if self.read_ahead is None:
            yield from map(self._on_device, self._pool.read(micro_batches))
            return
        micro_batches = list(micro_batches)
        with self.read_ahead.of([micro_batch.indices for micro_batch in micro_batches]) as ahead:
            for number, read in enumerate(self._pool.read(micro_batches)):
                yield self._on_device(read)
                ahead.passed(number)

    def read(self, micro_batch: MicroBatch) -> Item:
        return self._on_device(self.reader[micro_batch])

    def _on_device(self, read: ReadMicroBatch) -> Item:
        micro_batch, pixels, shown = read
        if isinstance(pixels, MixedBatch):
            pixels = decode_batch(pixels, self.device)
        labels = to_device(self.reader.images.labels[torch.from_numpy(shown)], self.device)
        # From pinned memory, so the copy runs while the device computes.
        return [micro_batch], pixels.to(self.device, non_blocking=True), labels


# Where a loader's images come from: the only part in which resident and streaming loaders differ.
Source = ResidentSource | StreamSource


@dataclass(eq=False)
class MicroBatchReader(Dataset):
    """The work of a worker: reads one micro-batch's images into one tensor.

    From files it reads what ``view`` shows or, with ``crop``, random boxes, which depend on ``seed``, epoch and sample.
    With ``as_files`` it hands over the JPEG files themselves, as a ``MixedBatch`` for the device to decode. ``policy``:
    what happens to unreadable images, see ``read_micro_batch``; those found only by the device are refused.
    ``resolution``: the size of each epoch's images, instead of the view's.
    """

    images: Images
    view: View
    crop: bool = False
    seed: int = 0
    as_files: bool = False
    policy: str = REFUSE
    resolution: Resolution | None = None

    def __post_init__(self) -> None:
        images = self.images
        if isinstance(images, MemoryImages):  # forked processes can use no GPU, and only the CPU's memory can be pinned
            self.images = replace(images, pixels=images.pixels.cpu(), labels=images.labels.cpu())
        self.crop = self.crop and not self.view.whole
        self.as_files = self.as_files and not self.view.whole

    def __getitem__(self, micro_batch: MicroBatch) -> ReadMicroBatch:
        if isinstance(self.images, MemoryImages):
            rows = torch.from_numpy(micro_batch.indices)
            pixels = pixels_of(self.images.pixels, len(self.images.labels), rows)
            return micro_batch, in_shared_memory(pixels), micro_batch.indices
        return self._read_files(micro_batch, self.images)

    def _read_files(self, micro_batch: MicroBatch, files: ImageFiles) -> ReadMicroBatch:
        draws: Any = [None] * len(micro_batch.indices)
        view = self.view
        if self.resolution is not None and not view.whole:
            view = replace(view, size=self.resolution.size(micro_batch.epoch))
        if self.crop:
            draws = sample_uniforms(self.seed, micro_batch.epoch, micro_batch.keys, Stream.CROP, CROP_NUMBERS)
        if self.as_files:
            paths = [files.paths[index] for index in micro_batch.indices]
            return micro_batch, read_for_gpu(paths, view, files.colour, draws), micro_batch.indices
        batch = empty_batch(len(micro_batch.indices), files.channels, view.size, files.dtype)

        def read(image: int, sample: int, place: int) -> None:
            batch[place].copy_(decode_crop(files.paths[image], view, files.colour, draws[sample]))

        micro_batch, shown = read_micro_batch(micro_batch, len(files), self.policy, read)
        return micro_batch, batch[: len(shown)], shown


def empty_batch(count: int, channels: int, size: Size, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised tensor (count, channels, h, w), channels-last as decoders write it; in a worker, in shared memory.

    A tensor allocated in shared memory is not copied on its way to the training process.
    """
    height, width = sides(size)
    memory = shared_bytes(count * channels * height * width * dtype.itemsize)
    return memory.view(dtype).view(count, height, width, channels).permute(0, 3, 1, 2)


# ------------------------------------------------------------------------------- number of workers

TRIAL_BATCH = 32
MIN_SPEED_UP = 1.1  # that twice as many workers must bring


def measured_workers(reader: MicroBatchReader, cores: int) -> int:
    """The number of worker processes (1, 2, 4, ..., ``cores``) beyond which more hardly speed up ``reader``.

    Each trial reads other images, so that no trial profits from cached files. A set that is in memory or too small to
    measure gets one worker per core, at most two.
    """
    ladder = [2**k for k in range(cores.bit_length()) if 2**k < cores] + [cores]
    batches = [max(8, 4 * workers) for workers in ladder]
    if isinstance(reader.images, MemoryImages) or cores == 1 or len(reader.images) < TRIAL_BATCH * sum(batches):
        return min(2, cores)
    best = 1
    fastest = 0.0
    order = np.random.default_rng(0).permutation(len(reader.images))[: TRIAL_BATCH * sum(batches)]
    unread = iter(np.split(order, sum(batches)))
    for workers, count in zip(ladder, batches, strict=True):
        speed = reading_speed(reader, [*islice(unread, count)], workers)
        if speed < MIN_SPEED_UP * fastest:
            break
        best = workers
        fastest = speed
    return best


def reading_speed(reader: MicroBatchReader, batches: list[np.ndarray], workers: int) -> float:
    """Images per second while all workers read, that is, after the first ``workers`` batches have arrived."""
    micro_batches = [MicroBatch(0, 0, indices, len(indices), 1.0, True) for indices in batches]
    arrived = [time.perf_counter() for _ in WorkerPool(reader, workers).read(micro_batches)]
    return sum(map(len, batches[workers:])) / (arrived[-1] - arrived[workers - 1])
