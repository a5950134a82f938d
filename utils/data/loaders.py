"""Loaders: resident (images in the device's memory) or streaming (worker processes read them).

Both follow the same ``SamplePlan`` and yield ``Batch`` objects; the choice changes neither the samples nor the random
numbers of their augmentation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, starmap
from pathlib import Path

import numpy as np
import torch

from utils.config.datasets import DatasetSpec
from utils.config.groups.data import DataSettings
from utils.config.image_size import sides
from utils.config.settings import Settings, UserError
from utils.data.augment.base import Numbers
from utils.data.augmentations import Context, build_augmentations, chosen_names, refuse_colour
from utils.data.data_set import Data
from utils.data.decoded import decoded, folder_for
from utils.data.formats.readers import ImageFiles, Images, MemoryImages
from utils.data.formats.shards.members import members_of
from utils.data.formats.shards.read_ahead import ReadAhead
from utils.data.images.decoding import decoder
from utils.data.images.gpu_decoding import require_decoder
from utils.data.images.unreadable import LEAVE_OUT, REFUSE, REPLACE
from utils.data.images.view import View
from utils.data.mixing import Mixing
from utils.data.progress_log import ProgressLog
from utils.data.resolution import Resolution, build_resolution
from utils.data.sample_plan import MicroBatch, SamplePlan, permutation
from utils.data.sampling import build_sampling, described, first_samples
from utils.data.sources import MicroBatchReader, ResidentSource, Source, StreamSource, keys_of
from utils.data.transforms import BatchTransform
from utils.runtime.cpu import cores_per_process
from utils.runtime.devices import memory_bytes, runs_ahead, to_device
from utils.runtime.distributed import Distributed

PASS_SIZE = 64  # images in a pass without gradients: memory that is enough to train on 8 is enough to evaluate 64
RESIDENT_MEMORY_SHARE = 0.25  # of the device's memory that --loader auto lets a resident data set take


@dataclass(frozen=True)
class Batch:
    """Images and targets of one forward pass on one rank.

    ``images``: float32 (m, c, h, w), normalised, on the device. ``targets``: int64 (n,), n <= m; for mixed images
    float32 (n, classes), the share of each class; for multi-label data float32 (n, classes), NaN if a label is missing.
    Images beyond n only pad a micro-batch that is too small and do not count (see ``MicroBatch``). ``indices``: int64
    (n,) on the CPU, the samples' numbers. ``number``: the step within the epoch (training) or the batch's number over
    all ranks (validation). ``unreadable``, ``replaced``: as in ``MicroBatch``, again in every epoch; a replacement has
    its own label. Validation leaves unreadable images out, so a batch may be empty. ``counted``: False for a batch that
    a step trains on again, whose figures are already recorded. ``image_weights``: float32 (n,) on the device, each
    image's weight in the training loss; None if all count alike.
    """

    images: torch.Tensor
    targets: torch.Tensor
    indices: np.ndarray
    number: int
    weight: float = 1.0
    ends_step: bool = True
    unreadable: tuple[str, ...] = ()
    replaced: int = 0
    counted: bool = True
    image_weights: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The batch's tensors on the device, by field name."""
        fields = {"images": self.images, "targets": self.targets, "image_weights": self.image_weights}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}


@dataclass(eq=False)
class TrainLoader:
    """Training batches of any epoch, starting at any step.

    ``image_weights``: float32 (n,), the weight of each of the source's images in the loss; None if all count alike.
    ``paths``: of the images' files; None if the data set has none.
    """

    source: Source
    plan: SamplePlan
    transform: BatchTransform
    mixing: Mixing | None = None
    resolution: Resolution | None = None
    image_weights: torch.Tensor | None = None
    paths: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self._prefetch = DevicePrefetcher(self.source.device)

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a batch's images; the final ones if image sizes are progressive."""
        return self.transform.image_shape

    @property
    def full_size_epoch(self) -> int:
        """The first epoch, counted from 0, whose images have their final size."""
        return self.resolution.end if self.resolution is not None else 0

    def describe(self, args: Settings, data: Data) -> dict[str, str]:
        """The rows of a run's plan about its training batches and steps; ``data`` has the images."""
        plan = self.plan
        epochs = args.optimisation.epochs
        total = self.steps_per_epoch * epochs
        cut = f", cut at {args.run.max_steps:,}" if args.run.max_steps and args.run.max_steps < total else ""
        compiled = ", compiled" if self.transform.compiled else ""
        rows = {
            "Augmentation": (", ".join(map(str, self.transform.augmentations)) or "none") + compiled,
            "Mixing": str(self.mixing or "none"),
        }
        if plan.sampling is not None and data.train is not None:
            rows["Sampling"] = described(plan.sampling, data.train.labels.cpu(), data.classes)
        if self.resolution is not None:
            rows["Training size"] = self.resolution.table(epochs)
        rows["Batch"] = (
            f"{args.data.batch_size} images x {plan.world_size} process(es) x {args.optimisation.accumulate} forward "
            f"pass(es): {plan.global_batch_size} in total" + (plan.remainder and f", {plan.remainder}")
        )
        rows["Steps"] = f"{self.steps_per_epoch} an epoch x {epochs} epochs = {total:,}{cut}"
        return rows

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The forward passes of ``epoch``, starting at step ``first_step``."""
        steps = range(first_step, self.steps_per_epoch)
        return self._read(micro_batch for step in steps for micro_batch in self.plan.micro_batches(epoch, step))

    def shared_out(self, epoch: int, steps: int) -> tuple[int, Iterator[Batch]]:
        """The first ``steps`` steps of ``epoch`` in forward passes that are the same on any number of ranks.

        Returns the number of all passes, and this rank's batches: every world_size-th, as in validation.
        """
        micro_batches = self._of_any_rank(epoch, steps)
        return len(micro_batches), self._read(micro_batches[self.plan.rank :: self.plan.world_size])

    def first_images(self, count: int) -> torch.Tensor:
        """The first ``count`` images of epoch 0, or a few more, as validation shows them: on the CPU, on every rank."""
        parts = []
        for micro_batch in self._of_any_rank(0, -(-count // self.plan.global_batch_size)):
            _, pixels, _ = self.source.read(micro_batch)
            parts.append(self.transform.evaluation(pixels).cpu())
            count -= len(pixels)
            if count <= 0:
                break
        return torch.cat(parts)

    def _of_any_rank(self, epoch: int, steps: int) -> list[MicroBatch]:
        """The micro-batches of the first ``steps`` steps of ``epoch``, as a single process would take them."""
        alone = replace(self.plan, batch_size=PASS_SIZE, rank=0, world_size=1)
        of_steps = (alone.micro_batches(epoch, step) for step in range(min(steps, self.steps_per_epoch)))
        return [*chain.from_iterable(of_steps)]

    def _read(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Batch]:
        return self._prefetch(chain.from_iterable(map(self.prepared, self.source.chunks(micro_batches))))

    def prepared(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Batch]:
        """Batches of one epoch's ``micro_batches``; if images are in memory, draws all their random numbers at once."""
        drawn = None
        shape = self.source.stored_shape
        if shape is not None:
            assert isinstance(micro_batches, list)  # as those of a source in memory are
            epoch = micro_batches[0].epoch
            drawn = self._transform(epoch).draw(keys_of(micro_batches), epoch, shape, self.source.device)
        begin = 0
        for read, pixels, labels in self.source.batches(micro_batches):
            end = begin + len(pixels)
            own = drawn and [tuple(each[begin:end] for each in numbers) for numbers in drawn]
            yield from self.prepare(read, pixels, labels, own)
            begin = end

    def _transform(self, epoch: int) -> BatchTransform:
        return self.transform if self.resolution is None else self.transform.at_size(self.resolution.size(epoch))

    def replay_step(self, epoch: int, step: int) -> list[Batch]:
        """The forward passes of one step once more, read without the worker processes."""
        return [
            batch
            for micro_batch in self.plan.micro_batches(epoch, step)
            for batch in self.prepare(*self.source.read(micro_batch))
        ]

    def prepare(
        self,
        micro_batches: list[MicroBatch],
        pixels: torch.Tensor,
        labels: torch.Tensor,
        drawn: list[Numbers] | None = None,
    ) -> Iterator[Batch]:
        """Augment all micro-batches together and yield a batch of each. ``drawn``: random numbers, if drawn before."""
        labels = targets_of(labels)
        epoch = micro_batches[0].epoch
        together = self._transform(epoch).training(pixels, keys_of(micro_batches), epoch, drawn)
        weights = self._weights_of(micro_batches)
        if self.mixing is not None and self.mixing.settings.mixes(epoch):
            together, labels, weights = self.mixing(together, labels, micro_batches, weights)
        begin = 0
        for one, images, targets in _split(micro_batches, together, labels):
            its_weights = None if weights is None else weights[begin : begin + one.count]
            begin += len(images)
            yield Batch(
                images,
                targets[: one.count],
                one.indices[: one.count],
                one.step,
                one.weight,
                one.ends_step,
                one.unreadable,
                one.replaced,
                image_weights=its_weights,
            )

    def _weights_of(self, micro_batches: list[MicroBatch]) -> torch.Tensor | None:
        """The weights of all images that the micro-batches show: float32 on the device; None if all count alike."""
        if self.image_weights is None:
            return None
        shown = [one.indices if one.shown is None else one.shown for one in micro_batches]
        return to_device(self.image_weights[torch.from_numpy(np.concatenate(shown))], self.source.device)


@dataclass(eq=False)
class ValidationLoader:
    """Validation batches of this rank: every world_size-th, so that each sample is on exactly one rank.

    Ranks take whole batches, so every batch has the same samples, and hence the same result, on any number of ranks.

    ``groups``: str (n,), the group of each of the source's images; None without groups.
    """

    source: Source
    batch_size: int
    transform: BatchTransform
    rank: int = 0
    world_size: int = 1
    groups: np.ndarray | None = None

    def __post_init__(self) -> None:
        self._prefetch = DevicePrefetcher(self.source.device)
        self._take(np.arange(len(self.source)))

    def _take(self, samples: np.ndarray) -> None:
        size = self.batch_size
        self._all = [samples[first : first + size] for first in range(0, len(samples), size)]
        self._mine = range(self.rank, len(self._all), self.world_size)

    def part(self, samples: np.ndarray) -> ValidationLoader:
        """A loader of only these ``samples``, int64, the numbers of some of this loader's images."""
        part = copy.copy(self)
        part._take(samples)
        return part

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a batch's images."""
        return self.transform.image_shape

    @property
    def multilabel(self) -> bool:
        """True if images have several labels."""
        return self.source.labels.ndim > 1

    @property
    def num_images(self) -> int:
        """Number of images on all ranks together."""
        return sum(map(len, self._all))

    @property
    def is_cut(self) -> bool:
        """True if some of the source's images are left out."""
        return self.num_images < len(self.source)

    @property
    def num_batches(self) -> int:
        """Number of batches on all ranks together."""
        return len(self._all)

    def __len__(self) -> int:
        return len(self._mine)

    @property
    def rounds(self) -> int:
        """The largest number of batches on any rank."""
        return -(-len(self._all) // self.world_size)

    def batches(self) -> Iterator[Batch]:
        micro_batches = (MicroBatch(0, k, self._all[k], len(self._all[k]), 1.0, True) for k in self._mine)
        return self._prefetch(chain.from_iterable(starmap(self._prepare, self.source.batches(micro_batches))))

    def _prepare(self, micro_batches: list[MicroBatch], pixels: torch.Tensor, labels: torch.Tensor) -> Iterator[Batch]:
        for one, images, targets in _split(micro_batches, self.transform.evaluation(pixels), targets_of(labels)):
            yield Batch(images, targets, one.indices, one.step, unreadable=one.unreadable)


def targets_of(labels: torch.Tensor) -> torch.Tensor:
    """Targets for a loss: labels, int64 (n,), unchanged; int8 (n, classes) as float32, with NaN for -1 (missing)."""
    return labels.float().masked_fill(labels < 0, torch.nan) if labels.ndim > 1 else labels


def _split(
    micro_batches: list[MicroBatch], images: torch.Tensor, labels: torch.Tensor
) -> Iterator[tuple[MicroBatch, torch.Tensor, torch.Tensor]]:
    sizes = [len(micro_batch.indices) for micro_batch in micro_batches]
    return zip(micro_batches, images.split(sizes), labels.split(sizes), strict=True)


class DevicePrefetcher:
    """Yields batches unchanged; on a GPU, copies and augments each on a second stream while the previous one trains.

    A loader keeps its stream: torch's allocator pools freed memory per stream, so a new stream every epoch would use
    more and more memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if runs_ahead(device) else None

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return batches if self._stream is None else self._on_stream(self._stream, batches)

    def _on_stream(self, stream: torch.cuda.Stream, batches: Iterator[Batch]) -> Iterator[Batch]:
        stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still be writing the images

        def prepare() -> tuple[Batch | None, torch.cuda.Event]:
            with torch.cuda.stream(stream):
                return next(batches, None), stream.record_event()

        (batch, ready) = prepare()
        while batch is not None:
            ahead = prepare()
            training = torch.cuda.current_stream(self.device)
            training.wait_event(ready)
            for tensor in batch.tensors.values():  # so that it is not overwritten before training has read it
                tensor.record_stream(training)
            yield batch
            (batch, ready) = ahead


def loaders(
    data: Data,
    args: Settings,
    distributed: Distributed,
    *,
    channels_last: bool,
    progress: ProgressLog | None = None,
) -> tuple[TrainLoader | None, ValidationLoader, str]:
    """Build this process's loaders for training (None to evaluate) and validation; return them and text on their kind.

    The text says also why this kind was chosen. In a dry run, no image is read before the first batch and nothing is
    kept. ``progress`` logs in the one process of a host that decodes; by default, lines are printed. Raises
    ``UserError``.
    """
    device = distributed.device
    settings = args.data
    resident, why = choose(data, settings, device)
    if resident and data.train is not None and (difference := shown_otherwise_resident(args, data.spec)):
        raise UserError(f"--loader resident {difference}")
    if settings.decode == "gpu":
        if device.type != "cuda":
            raise UserError("--decode gpu: there is no GPU to decode on; use --decode cpu")
        require_decoder(device)
    reads_memory = resident or isinstance(data.validation, MemoryImages)
    sources = _SourceBuilder(data, args, distributed, resident, progress or ProgressLog())
    train = None
    workers = settings.workers
    if data.train is not None:
        plan = sample_plan(data.train, args, distributed.rank, distributed.world_size)
        mixes = args.augmentation.mixes(epoch=0)
        transform = _training_transform(data, args, channels_last, not (reads_memory or data.spec.fixed_size))
        source = sources.build(data.train, True, workers)
        train = TrainLoader(
            source,
            plan,
            transform,
            Mixing(args.augmentation, len(data.classes), args.run.seed) if mixes else None,
            sources.resolution,
            relative_weights(data.train, args),
            data.train.paths if isinstance(data.train, ImageFiles) else None,
        )
        workers = source.workers if isinstance(source, StreamSource) else workers
    validation = sources.build(data.validation, False, workers)
    reading = ""
    if isinstance(validation, StreamSource) and not args.run.dry_run:
        reading = f", {validation.workers} worker(s)"
    if not reads_memory and settings.decode == "cpu":
        reading += f", {decoder()}"
    evaluating = replace(
        data.preprocessing.evaluation_transform, channels_last=channels_last, compiled=args.model.compile_augment
    )
    val_batch_size = settings.val_batch_size or settings.batch_size
    ranks = (distributed.rank, distributed.world_size)
    validating = ValidationLoader(validation, val_batch_size, evaluating, *ranks, data.validation.groups)
    if settings.max_val_batches is not None:
        batch_size = settings.val_batch_size or settings.global_batch_size  # the same on any number of processes
        validating = validating.part(tried_out(len(data.validation), settings.max_val_batches * batch_size))
    return train, validating, f"{'resident' if resident else 'stream'} ({why}){reading}"


def _training_transform(data: Data, args: Settings, channels_last: bool, crop_while_decoding: bool) -> BatchTransform:
    """The transform of training batches of ``data``; with ``crop_while_decoding``, its images arrive cropped."""
    shown = data.preprocessing
    settings = args.augmentation
    refuse_colour(settings, shown.channels, shown.levels == "all")
    context = Context(
        settings,
        settings.max_shift or data.max_shift,
        shown.image_size,
        shown.interpolation,
        crop_while_decoding=crop_while_decoding,
        mean=shown.mean,
        keeps_levels=shown.levels == "all",
    )
    return BatchTransform(
        shown.image_size,
        shown.mean,
        shown.std,
        build_augmentations(chosen_names(settings, data.spec), context),
        args.run.seed,
        channels_last,
        args.model.compile_augment,
        shown.interpolation,
    )


def relative_weights(images: Images, args: Settings) -> torch.Tensor | None:
    """The weights of training images, divided by their mean over the samples to train on: float32 (n,), or None.

    A loss can therefore divide by the number of images, as with class weights (see ``class_weights``).

    Raises ``UserError``.
    """
    if images.weights is None:
        return None
    mean = images.weights[first_samples(len(images), args)].mean()
    if not mean > 0:
        raise UserError(f"--weight-column: no training image in {args.data.labels} has a weight above 0")
    return (images.weights / mean).float()


def tried_out(count: int, wanted: int) -> np.ndarray:
    """Choose up to ``wanted`` of ``count`` validation images at random: their numbers, int64, ascending.

    Class folders begin with the first class, so the first images would not do; all seeds choose alike, so that runs can
    be compared.
    """
    return np.sort(permutation(count, 0, 1)[:wanted])


@dataclass(frozen=True)
class _SourceBuilder:
    """Builder of a split's source from the arguments of ``loaders``. ``resident``: keep images in device memory."""

    data: Data
    args: Settings
    distributed: Distributed
    resident: bool
    progress: ProgressLog

    @property
    def resolution(self) -> Resolution | None:
        return build_resolution(self.args, self.data.image_size)

    def build(self, images: Images, training: bool, workers: int | str) -> Source:
        settings = self.args.data
        policy = (REPLACE if training else LEAVE_OUT) if settings.skip_bad_images else REFUSE
        shown = self.data.preprocessing
        view = replace(
            shown.view(shown.image_size if training else shown.val_image_size),
            least_area=self.args.augmentation.crop_min_area,  # used by training alone
        )
        if self.resident and not self.args.run.dry_run:
            processes = workers if isinstance(workers, int) else cores_per_process(1)  # one process of a host decodes
            return ResidentSource(self._in_memory(images, view, processes), self.distributed.device, policy)
        reader = MicroBatchReader(
            images,
            view,
            crop=training and "resized-crop" in chosen_names(self.args.augmentation, self.data.spec),
            seed=self.args.run.seed,
            as_files=settings.decode == "gpu",
            policy=policy,
            resolution=self.resolution if training else None,
        )
        cores = cores_per_process(self.distributed.local_world_size)
        return StreamSource(
            reader,
            self.distributed.device,
            workers=0 if self.args.run.dry_run else workers,
            cores=cores,
            read_ahead=self._read_ahead(images) if training else None,
            rank=self.distributed.rank,
        )

    def _read_ahead(self, images: Images) -> ReadAhead | None:
        settings = self.args.data
        if settings.shard_cache is None or self.args.run.dry_run:
            return None
        return ReadAhead(
            members_of(images, "--shard-cache"),
            Path(settings.shard_cache),
            int(settings.shard_cache_gb * 1e9),
            is_first=self.distributed.local_rank == 0,
            log=self.progress.log,
        )

    def _in_memory(self, images: Images, view: View, workers: int) -> MemoryImages:
        if isinstance(images, MemoryImages):
            return images
        return decoded(
            images,
            view,
            folder_for(self.args.data),
            workers=workers,
            progress=self.progress,
            is_main=self.distributed.is_main,
            skip_bad=self.args.data.skip_bad_images,
        )


def sample_plan(images: Images, args: Settings, rank: int, world_size: int) -> SamplePlan:
    """The plan for these settings and training images. Raises ``UserError`` if it has no step or too small ones."""
    settings = args.data
    sampling = build_sampling(images, args)
    num_samples = len(images) if sampling is None else sampling.num_samples
    if settings.global_batch_size < world_size:
        raise UserError(
            f"--global-batch-size {settings.global_batch_size} leaves some of {world_size} processes without an image"
        )
    pairs = args.augmentation.mixes(epoch=0)
    if pairs and settings.global_batch_size < 2 * world_size:
        raise UserError(
            f"--{'mixup' if args.augmentation.mixup else 'cutmix'} mixes pairs of images: --global-batch-size "
            f"{settings.global_batch_size} leaves some of {world_size} process(es) without one"
        )
    plan = SamplePlan(
        num_samples,
        settings.global_batch_size,
        settings.batch_size,
        args.run.seed,
        rank,
        world_size,
        settings.drop_last,
        pairs,
        sampling,
    )
    if not plan.steps_per_epoch:
        raise UserError(
            f"--drop-last leaves no step: {num_samples:,} training images are fewer than --global-batch-size "
            f"{settings.global_batch_size:,}; lower it or give --no-drop-last"
        )
    return plan


def choose(data: Data, settings: DataSettings, device: torch.device) -> tuple[bool, str]:
    """Choose the loader; return True for the resident one, else False, and the reason as text."""
    if settings.loader != "auto":
        return settings.loader == "resident", "as --loader says"
    if not data.spec.fixed_size:
        return False, "images of any size are cropped while they are read"
    of_one = data.preprocessing.channels * math.prod(sides(data.spec.image_size)) * data.validation.dtype.itemsize
    size = sum(
        images.pixels.numel() if isinstance(images, MemoryImages) else len(images) * of_one
        for images in (data.train, data.validation)
        if images is not None
    )
    memory = memory_bytes(device)
    fits = size <= RESIDENT_MEMORY_SHARE * memory
    return fits, f"{size / 1e6:,.1f} MB of uint8 images, {device.type} memory {memory / 1e9:,.0f} GB"


def shown_otherwise_resident(args: Settings, spec: DatasetSpec) -> str | None:
    """Text on why resident images would differ in pixels from streamed ones, and what to do; None if they would not.

    If files have various sizes, a resident loader keeps them as validation shows them. Neither a crop of the whole
    image nor a view at a smaller size can be made from that.
    """
    if spec.fixed_size:
        return None
    if "resized-crop" in chosen_names(args.augmentation, spec):
        return (
            "keeps images as validation shows them, and resized-crop takes its parts from the whole image; give "
            "--loader stream, or --augment without resized-crop"
        )
    if args.data.progressive_size is not None:
        return (
            "keeps images at their last size, and --progressive-size makes the smaller ones from the whole image; give "
            "--loader stream, or leave --progressive-size out"
        )
    return None
