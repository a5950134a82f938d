"""Loaders: a resident one (images in the device's memory) and a streaming one (worker processes).

Both walk the same ``SamplePlan`` and yield ``Batch``; which one a run uses changes neither the samples
nor the random numbers of their augmentation.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from utils.data.datasets import Data, DatasetSpec
from utils.data.decoding import decode_crop, decode_whole
from utils.data.readers import Images, MemoryImages
from utils.data.sample_plan import SamplePlan, Share, sample_uniforms, validation_batches
from utils.data.transforms import CROP_NUMBERS, CROP_STREAM, BatchTransform
from utils.settings import DataSettings, UserError

RESIDENT_MEMORY_SHARE = 0.25  # of the device's memory that a resident data set may take under --loader auto


@dataclass(frozen=True)
class Batch:
    """One forward pass on one rank.

    ``images``: float32 (m, c, size, size), normalised, on the device. ``targets``: int64 (n,), n <= m;
    images beyond n only fill up a share that is too small and count for nothing (see ``Share``).
    ``indices``: int64 (n,) on the CPU, the samples' numbers. ``number``: the step within the epoch
    (training) or the batch's number over all ranks (validation).
    """

    images: torch.Tensor
    targets: torch.Tensor
    indices: np.ndarray
    number: int
    weight: float = 1.0
    ends_step: bool = True


class Source(Protocol):
    """Where uint8 batches come from; resident and streaming differ in this alone."""

    def __len__(self) -> int: ...

    def batches(self, shares: Iterable[Share]) -> Iterator[tuple[Share, torch.Tensor, torch.Tensor]]:
        """For each share its uint8 images and int64 labels, on the device."""
        ...

    def read(self, share: Share) -> tuple[torch.Tensor, torch.Tensor]:
        """One share's uint8 images and int64 labels, on the device, read in this process."""
        ...


class ResidentSource:
    """All images in the device's memory as one uint8 tensor; a batch is an index."""

    def __init__(self, images: MemoryImages, device: torch.device) -> None:
        self.device = device
        self.pixels, self.labels = images.pixels.to(device), images.labels.to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, shares: Iterable[Share]) -> Iterator[tuple[Share, torch.Tensor, torch.Tensor]]:
        for share in shares:
            yield share, *self.read(share)

    def read(self, share: Share) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(share.indices).to(self.device, non_blocking=True)
        return self.pixels[rows % len(self.pixels)], self.labels[rows]


class StreamSource:
    """Worker processes read the images, one batch ahead of the device.

    ``size`` is the side in pixels of what the workers hand over. ``crop`` makes them take random boxes.
    """

    def __init__(
        self, images: Images, device: torch.device, *, size: int, crop: bool, fixed_size: bool, seed: int, workers: int
    ) -> None:
        self.device = device
        self._count = len(images)
        self._queue: list[Share] = []
        self._loader = DataLoader(
            _Reads(images, size, crop, fixed_size, seed),
            batch_size=None,  # the plan makes the batches
            sampler=self._queue,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            prefetch_factor=4 if workers else None,
        )

    def __len__(self) -> int:
        return self._count

    def batches(self, shares: Iterable[Share]) -> Iterator[tuple[Share, torch.Tensor, torch.Tensor]]:
        self._queue[:] = list(shares)
        ready = zip(list(self._queue), self._loader, strict=True)
        copied = self._copy(next(ready, None))
        while copied is not None:
            current, copied = copied, self._copy(next(ready, None))
            yield current

    def read(self, share: Share) -> tuple[torch.Tensor, torch.Tensor]:
        _, pixels, labels = self._copy((share, self._loader.dataset[share]))
        return pixels, labels

    def _copy(self, item: Any) -> tuple[Share, torch.Tensor, torch.Tensor] | None:
        """Start the copy to the device; on a GPU it runs while the batch before it trains."""
        if item is None:
            return None
        share, read = item
        if isinstance(read, UserError):
            raise read
        pixels, labels = read
        return share, pixels.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)


class _Reads(Dataset):
    """What a worker does: one share's files into one uint8 tensor."""

    def __init__(self, images: Images, size: int, crop: bool, fixed_size: bool, seed: int) -> None:
        self.images, self.size, self.crop, self.fixed_size, self.seed = images, size, crop, fixed_size, seed

    def __getitem__(self, share: Share) -> tuple[torch.Tensor, torch.Tensor] | UserError:
        try:
            return self._read(share)
        except UserError as error:  # handed over, because DataLoader would bury it in a worker's traceback
            return error

    def _read(self, share: Share) -> tuple[torch.Tensor, torch.Tensor]:
        indices = share.indices
        labels = self.images.labels[torch.from_numpy(indices)]
        if isinstance(self.images, MemoryImages):
            return self.images.pixels[torch.from_numpy(indices) % len(self.images.pixels)], labels
        paths = [self.images.paths[index] for index in indices]
        if self.fixed_size:
            return torch.stack([decode_whole(path, self.size, self.images.colour) for path in paths]), labels
        draws: Any = [None] * len(paths)
        if self.crop:
            draws = sample_uniforms(self.seed, share.epoch, indices, CROP_STREAM, CROP_NUMBERS)
        crops = [
            decode_crop(path, self.size, self.images.colour, draw) for path, draw in zip(paths, draws, strict=True)
        ]
        return torch.stack(crops), labels


class TrainLoader:
    """Training batches of any epoch, from any step on."""

    def __init__(self, source: Source, plan: SamplePlan, transform: BatchTransform) -> None:
        self.source, self.plan, self.transform = source, plan, transform

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a batch's images."""
        return len(self.transform.mean), self.transform.size, self.transform.size

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The forward passes of ``epoch`` from step ``first_step`` on."""
        steps = range(first_step, self.steps_per_epoch)
        shares = (share for step in steps for share in self.plan.shares(epoch, step))
        for share, pixels, labels in self.source.batches(shares):
            yield self._batch(share, pixels, labels)

    def step_again(self, epoch: int, step: int) -> list[Batch]:
        """The same forward passes of one step once more, without the worker processes."""
        return [self._batch(share, *self.source.read(share)) for share in self.plan.shares(epoch, step)]

    def _batch(self, share: Share, pixels: torch.Tensor, labels: torch.Tensor) -> Batch:
        images, count = self.transform.training(pixels, share.indices, share.epoch), share.count
        return Batch(images, labels[:count], share.indices[:count], share.step, share.weight, share.ends_step)


class ValidationLoader:
    """This rank's validation batches: every world_size-th, each sample on exactly one rank."""

    def __init__(
        self, source: Source, batch_size: int, transform: BatchTransform, rank: int = 0, world_size: int = 1
    ) -> None:
        self.source, self.transform = source, transform
        self._all = validation_batches(len(source), batch_size)
        self._mine = range(rank, len(self._all), world_size)

    @property
    def num_batches(self) -> int:
        """Batches over all ranks."""
        return len(self._all)

    def __len__(self) -> int:
        return len(self._mine)

    def batches(self) -> Iterator[Batch]:
        shares = (Share(0, k, self._all[k], len(self._all[k]), 1.0, True) for k in self._mine)
        for share, pixels, labels in self.source.batches(shares):
            yield Batch(self.transform.evaluation(pixels), labels, share.indices, share.step)


def loaders(
    data: Data,
    settings: DataSettings,
    device: torch.device,
    *,
    seed: int,
    channels_last: bool,
    rank: int,
    world_size: int,
    progress: bool,
) -> tuple[TrainLoader, ValidationLoader, str]:
    """Both loaders, and in words which kind was chosen and why."""
    resident, why = choose(data, settings, device)
    crop = "resized-crop" in data.augment
    size = data.spec.image_size if data.spec.fixed_size else data.image_size

    def source(images: Images, training: bool) -> Source:
        if resident:
            return ResidentSource(in_memory(images, size, data.spec.fixed_size, progress), device)
        return StreamSource(
            images, device, size=size, crop=crop and training, fixed_size=data.spec.fixed_size, seed=seed,
            workers=2 if settings.workers == "auto" else settings.workers,
        )  # fmt: skip

    whole = resident or data.spec.fixed_size or isinstance(data.train, MemoryImages)
    transform = BatchTransform(
        data.image_size, data.spec.mean, data.spec.std, data.augment, data.spec.max_shift, seed,
        crop_here=whole, channels_last=channels_last,
    )  # fmt: skip
    plan = sample_plan(len(data.train), settings, seed, rank, world_size)
    val_batch_size = settings.val_batch_size or settings.batch_size
    return (
        TrainLoader(source(data.train, True), plan, transform),
        ValidationLoader(source(data.validation, False), val_batch_size, transform, rank, world_size),
        f"{'resident' if resident else 'stream'} ({why})",
    )


def sample_plan(num_samples: int, settings: DataSettings, seed: int, rank: int, world_size: int) -> SamplePlan:
    """The plan that the settings ask for."""
    if settings.global_batch_size < world_size:
        raise UserError(
            f"--global-batch-size {settings.global_batch_size} leaves some of {world_size} processes without an image"
        )
    return SamplePlan(num_samples, settings.global_batch_size, settings.batch_size, seed, rank, world_size)


def choose(data: Data, settings: DataSettings, device: torch.device) -> tuple[bool, str]:
    """Whether the data set shall be resident, and why."""
    if settings.loader != "auto":
        return settings.loader == "resident", "as --loader says"
    if not data.spec.fixed_size:
        return False, "images of any size are cropped while they are read"
    size = _stored_bytes(data.train, data.spec) + _stored_bytes(data.validation, data.spec)
    memory = _memory(device)
    fits = size <= RESIDENT_MEMORY_SHARE * memory
    return fits, f"{size / 1e6:,.0f} MB of uint8 images, {device.type} memory {memory / 1e9:,.0f} GB"


def _stored_bytes(images: Images, spec: DatasetSpec) -> int:
    if isinstance(images, MemoryImages):
        return images.pixels.numel()
    return len(images) * spec.channels * spec.image_size**2


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def in_memory(images: Images, size: int, fixed_size: bool, progress: bool) -> MemoryImages:
    """Files decoded once into one uint8 tensor of ``size`` pixels square, in parallel."""
    if isinstance(images, MemoryImages):
        return images
    colour = images.colour
    pixels = torch.empty(len(images), 1 if colour == "L" else 3, size, size, dtype=torch.uint8)

    def read(index: int) -> None:
        read_one = decode_whole if fixed_size else decode_crop
        pixels[index] = read_one(images.paths[index], size, colour)

    with ThreadPoolExecutor() as pool:
        bar = tqdm(total=len(images), desc="Decoding", unit="image", leave=False, disable=None if progress else True)
        with bar:
            for _ in pool.map(read, range(len(images)), chunksize=64):
                bar.update()
    return MemoryImages(pixels, images.labels)
