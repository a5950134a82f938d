"""Predictions of a trained network for every image of a data set, made by the same exact validation as in main.py."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d

from models.load import Loaded
from models.prepare import to_memory_format
from scripts.common.answers import Answers
from scripts.common.choice import Chosen, doubts, ids_of, picture, read_images, samples_of, settings_of
from scripts.common.command_line import say, warn
from scripts.common.label_answers import LabelAnswers
from utils.checkpoint.fingerprint import joined
from utils.config.datasets import SPECS
from utils.config.settings import Settings, UserError
from utils.config.spelling import some
from utils.data.data_set import Data, some_contents
from utils.data.formats.readers import ImageFiles, Images, class_numbers
from utils.data.loaders import Batch, ProgressLog, ValidationLoader, loaders
from utils.loop.bad_images import BadImages
from utils.loop.test_time_augmentation import in_views
from utils.loop.validation import validate
from utils.optim.head import SeenFeatures
from utils.precision.amp import autocast, keep_in_fp32
from utils.record.metrics import Report
from utils.record.reading import OneLabel
from utils.record.writer import Writer
from utils.runtime.distributed import Distributed, RankInfo
from utils.runtime.memory import lacks_memory

SHOWN = 5  # paths shown in a message
THUMBNAIL = 16  # pixels per side


class FromDataSet:
    """Images with the indices ``numbers``, int64 (n,), in the data set ``images``."""

    images: Images
    numbers: np.ndarray

    @property
    def groups(self) -> np.ndarray | None:
        """Group of each image, str (n,); None if the data set has no groups."""
        return None if self.images.groups is None else self.images.groups[self.numbers]

    def picture(self, place: int) -> Image.Image:
        """Whole image at ``place`` among the n, upright, in mode 'L' or 'RGB'."""
        return picture(self.images, int(self.numbers[place]))


@dataclass(frozen=True)
class PredictedImages(FromDataSet):
    """The n images of the predictions, in the data set's order, the same on every rank.

    ``ids``: paths, or numbers in the split such as 'val[17]'. ``report``: the metrics, as ``main.py --evaluate``
    computes them. ``notes``: lines about what the metrics leave out. On request: ``features``, float32 (n, d), and
    ``thumbnails``, float32 (n, 256), the images as the network saw them, in grey and 16 x 16 pixels.
    """

    classes: tuple[str, ...]
    ids: list[str]
    report: Report
    notes: tuple[str, ...]
    images: Images
    numbers: np.ndarray
    features: torch.Tensor | None = None
    thumbnails: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def digest(self) -> str:
        """Fingerprint (``same_images``) of the images' classes and names, without the folders above the class folders.

        It also covers the content of some files, for images of several splits may have the same names.
        """
        labels = self.labels.tolist()
        rows = (f"{'/'.join(Path(one).parts[-2:])}\0{label}" for one, label in zip(self.ids, labels, strict=True))
        listing = hashlib.sha256("\n".join([*self.classes, *rows]).encode("utf-8", "surrogateescape")).hexdigest()
        images = self.images
        return joined(listing, some_contents(images.paths, self.numbers) if isinstance(images, ImageFiles) else None)


@dataclass(frozen=True)
class Predictions(PredictedImages, Answers):
    """Predictions of a network with one label per image."""

    reading: ClassVar[OneLabel] = OneLabel()


@dataclass(frozen=True)
class LabelPredictions(PredictedImages, LabelAnswers):
    """Predictions of a multi-label network."""


AnyPredictions = Predictions | LabelPredictions


def predict_split(
    loaded: Loaded,
    chosen: Chosen,
    distributed: Distributed | None = None,
    *,
    features: bool = False,
    first: PredictedImages | None = None,
) -> AnyPredictions:
    """Predict the ``chosen`` images with ``loaded``'s network, on all ranks of ``distributed`` or in this process.

    ``features``: also return the output layer's inputs. ``first``: another network's predictions of the same images.
    Moves the network to the device; writes nothing to the disk. Raises ``UserError``.
    """
    args = settings_of(loaded, chosen)
    one = Distributed(RankInfo(), args.run, args.precision.tf32) if distributed is None else nullcontext(distributed)
    with one as processes:
        with processes.raise_on_all_ranks(), processes.without_timeout("Reading the data"):
            images, notes = _images(loaded, args, chosen, processes.device, first)
            loaded.network.to(processes.device)
            keep_in_fp32(loaded.network, args.precision.fp32_layers or (), processes.device)
            loader = _loader(loaded, args, images, processes)
            samples, left_out = samples_of(len(images), args, chosen)
            loader = loader.part(samples) if len(samples) < len(images) else loader
            notes = (*notes, *left_out, *doubts(images, loaded, args, chosen, first is not None))
        for note in notes:
            warn(note)
        warn_of_other_views(loaded, args.data.tta)
        with enough_memory(args.data.val_batch_size or args.data.batch_size):
            seen = SeenFeatures(loaded.network) if features else None
            report, batches, unreadable = _validated(loaded, args, loader, processes, chosen.progress, seen)
    if not batches:
        raise UserError(f"--split {chosen.split}: no image can be read", on_all_ranks=True)
    if unreadable:
        shown = ", ".join(sorted(unreadable)[:SHOWN])
        notes = (*notes, f"{len(unreadable):,} image(s) that cannot be read are left out: {shown}")
        warn(notes[-1])
    numbers, logits, labels, found, small = (list(parts) for parts in zip(*batches, strict=True))
    if features and any(part is None for part in found):
        raise UserError(f"{loaded.arch}: its output layer takes no features of each image alone", on_all_ranks=True)
    numbers = np.concatenate(numbers)
    if lost := sorted(classes_of(images.labels) - classes_of(torch.cat(labels)) if unreadable else ()):
        names = some([loaded.classes[label] for label in lost])
        notes = (*notes, f"no image can be read of these classes, of which the figures say nothing: {names}")
        warn(notes[-1])
    order = np.argsort(numbers)
    kind = partial(LabelPredictions, reading=loaded.reading) if loaded.reading.several else Predictions
    return kind(
        logits=torch.cat(logits)[order],
        labels=torch.cat(labels)[order],
        classes=loaded.classes,
        ids=ids_of(images, chosen.split, numbers[order]),
        report=report,
        notes=notes,
        images=images,
        numbers=numbers[order],
        features=torch.cat(found)[order] if features else None,
        thumbnails=torch.cat(small)[order] if features else None,
    )


def classes_of(labels: torch.Tensor) -> set[int]:
    """Classes that occur in ``labels`` (n,) or targets (n, classes)."""
    return set((labels if labels.ndim == 1 else (labels == 1).any(0).nonzero()[:, 0]).tolist())


def warn_of_other_views(loaded: Loaded, tta: str) -> None:
    """Warn if the checkpoint's temperature and distances were fitted with other views than ``tta``."""
    if loaded.confidence is not None and loaded.confidence.tta != tta:
        warn(f"{loaded.path}: its temperature and distances were fitted with --tta {loaded.confidence.tta}, not {tta}")


def _images(
    loaded: Loaded, args: Settings, chosen: Chosen, device: torch.device, first: PredictedImages | None
) -> tuple[Images, tuple[str, ...]]:
    """Images to predict, those of ``first`` if they are files, and notes about what is missing or left out."""
    if first is not None and isinstance(first.images, ImageFiles):
        return files_of(first, loaded)
    return read_images(loaded, args, chosen, device)


def files_of(first: PredictedImages, loaded: Loaded) -> tuple[ImageFiles, tuple[str, ...]]:
    """Image files of ``first`` with the labels that ``loaded``'s network has for them, and a note on those left out.

    Classes are matched by name. Images of classes that the network does not know are left out.
    """
    images = first.images
    assert isinstance(images, ImageFiles)
    images = dataclasses.replace(images, colour=loaded.preprocessing.colour)
    if images.labels.ndim > 1:
        if {*first.classes} != {*loaded.classes}:
            raise UserError(f"{loaded.path}: its classes are not those of the other network")
        places = [first.classes.index(name) for name in loaded.classes]
        return dataclasses.replace(images, labels=images.labels[:, places]), ()
    labels = torch.from_numpy(class_numbers(first.classes, loaded.classes))[images.labels]
    images = dataclasses.replace(images, labels=labels)
    known = np.flatnonzero((labels >= 0).numpy())
    if len(known) == len(images):
        return images, ()
    if not len(known):
        raise UserError(f"{loaded.path}: knows none of the images' classes")
    left_out = len(images) - len(known)
    return images.take(known), (f"{left_out:,} images of classes that {loaded.path} does not know are left out",)


def _loader(loaded: Loaded, args: Settings, images: Images, distributed: Distributed) -> ValidationLoader:
    """main.py's validation loader for ``images``; image files are streamed, and nothing is cached on the disk."""
    files = isinstance(images, ImageFiles)
    loader = "stream" if files else args.data.loader
    data = Data(SPECS[args.data.dataname], loaded.preprocessing, "", loaded.classes, train=None, validation=images)
    _, loader, _ = loaders(
        data,
        args.with_values(loader=loader, datapath=None, cache_dir=None),
        distributed,
        channels_last=to_memory_format(args, loaded.network, distributed.device),
        progress=ProgressLog(say, args.logging.progress),
    )
    return loader


# indices, logits, labels, features, thumbnails
Recorded = tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class _Recorder(nn.Module):
    """Wrapper of ``network`` for ``validate`` that keeps logits, unreadable paths and, given ``seen``, the features."""

    def __init__(self, network: nn.Module, advance: Callable[[int], None], seen: SeenFeatures | None) -> None:
        super().__init__()
        self.network = network
        self.advance = advance
        self.seen = seen
        self.kept: list[Recorded] = []
        self.unreadable: list[str] = []

    def before_batch(self, batch: Batch) -> None:
        """Remember ``batch``, whose logits come next."""
        self.batch = batch
        self.unreadable += batch.unreadable
        self.advance(1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.seen is not None:
            self.seen.forget()
        logits = self.network(images)
        features = None if self.seen is None else self.seen.of(len(images))
        small = None if self.seen is None else adaptive_avg_pool2d(images.float().mean(1), THUMBNAIL).flatten(1)
        answer = (logits.float(), self.batch.targets, features, small)
        self.kept.append((self.batch.indices, *(part if part is None else part.cpu() for part in answer)))
        return logits


def _validated(
    loaded: Loaded,
    args: Settings,
    loader: ValidationLoader,
    distributed: Distributed,
    progress: bool,
    seen: SeenFeatures | None,
) -> tuple[Report, list[Recorded], list[str]]:
    """Validate; return the report and, from all ranks, what was recorded of each batch and the unreadable paths."""
    log = ProgressLog(say if distributed.is_main else lambda line: None, bar=progress and distributed.is_main)
    with log.counting("Validation", len(loader), "batches") as advance:
        recorder = _Recorder(in_views(loaded.network, args.data.tta), advance, seen)
        report = validate(
            recorder,
            loader,
            distributed,
            autocast(args.precision, distributed.device),
            Writer(silent=True),
            BadImages(False, distributed, Writer(silent=True)),
            lambda: None,
            recorder.before_batch,
        )
    loaded.network.eval()
    if seen is not None:
        seen.close()
    kept, paths = zip(*distributed.gather((recorder.kept, recorder.unreadable)), strict=True)
    return report, [*chain.from_iterable(kept)], [*chain.from_iterable(paths)]


@contextmanager
def enough_memory(batch_size: int) -> Iterator[None]:
    """Context for forward passes that turns lack of memory into a ``UserError``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        raise UserError(
            f"--batch-size {batch_size}: there is not enough memory for so many images; lower it"
        ) from error


class Predictor:
    """The network of ``loaded``, run as by ``main.py --evaluate``: same precision, views and memory format.

    ``own``: a tool's command line, whose --amp, --tta, --batch-size and --workers replace the run's. ``batch_size``,
    ``workers`` (a number or 'auto') and ``tta``: the resulting settings. ``device``: where the network is.
    """

    def __init__(self, loaded: Loaded, own: argparse.Namespace) -> None:
        args = settings_of(loaded, Chosen.of(own))
        with Distributed(RankInfo(), args.run, args.precision.tf32) as here:  # sets threads, TF32 and memory up
            self.loaded = loaded
            self.device = here.device
        self.batch_size = args.data.val_batch_size or args.data.batch_size
        self.workers = args.data.workers
        self.tta = args.data.tta
        self.channels_last = to_memory_format(args, loaded.network, self.device)
        self._autocast = autocast(args.precision, self.device)
        self._network = in_views(loaded.network, self.tta)
        self.distance = None if loaded.confidence is None else loaded.confidence.distance
        self._seen = None if self.distance is None else SeenFeatures(loaded.network)
        warn_of_other_views(loaded, self.tta)

    @torch.inference_mode()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Logits, float32 (n, classes) on the CPU, of preprocessed images (n, channels, h, w)."""
        if self._seen is not None:
            self._seen.forget()
        with self._autocast:
            return self._network(images.to(self.device)).float().cpu()

    def distances(self, images: int) -> list[float] | None:
        """Distance of each of the last ``images`` images given to ``logits``; None if the checkpoint keeps none."""
        return None if self.distance is None else self.distance(self._seen.of(images).cpu()).tolist()

    @property
    def temperature(self) -> str:
        """The checkpoint's temperature as text to append to a list, such as ', temperature 1.5'; '' if it has none."""
        kept = self.loaded.confidence
        return f", temperature {kept.temperature:.4g}" if kept is not None and kept.temperature is not None else ""
