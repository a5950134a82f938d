"""Images into normalised float batches, without training: resident, streamed from JPEG files, decoded on one core.

All of it is on the CPU, in this process, with the same augmentation on both sides but where RandAugment is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import timm.data
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, io, transforms
from torchvision.transforms import v2

from scripts.lab.benchmarks import data
from scripts.lab.benchmarks.measure import RATE, Match, Measure, Rival, Setup, throughput
from utils.config import arguments
from utils.config.datasets import SPECS
from utils.data.datasets import Data
from utils.data.formats.readers import ImageFiles, Images, MemoryImages
from utils.data.images import jpeg
from utils.data.loaders import TrainLoader, ValidationLoader, loaders
from utils.data.preprocessing import resolve
from utils.runtime.distributed import Distributed, RankInfo

CPU = torch.device("cpu")
CIFAR10_IMAGES = 50_000
BATCH_SIZE = 128
SIZE = 224
RESIZED = 256
JPEG_BATCH_SIZE = 64
POLICY = ("--auto-augment", "ra")
PREFETCHED = 4  # at most this many batches per worker are ready in any loader here


def data_path(setup: Setup) -> Iterator[Match | str]:
    """Loaders alone, against torchvision's transforms of each sample and timm's loader."""
    yield resident(setup)
    yield streamed(setup)


def loading(setup: Setup, batches: Callable[[int], Iterable[Any]], workers: int = 0) -> Measure:
    """Images a second of ``batches(epoch)``, epoch after epoch. Batches that workers have ready are not timed."""

    def sizes() -> Iterator[int]:
        epoch = 0
        while True:
            for batch in batches(epoch):
                yield len(batch.images if hasattr(batch, "images") else batch[0])
            epoch += 1

    endless = sizes()
    return lambda: throughput(endless, setup.seconds, CPU, warm_up=2 + PREFETCHED * workers)


# ------------------------------------------------------------------------------ resident, CIFAR-10's shape


def resident(setup: Setup) -> Match:
    """50,000 images of 32 pixels in memory: shift, flip, normalise. Random images take the same time."""
    ours, pixels = resident_loader(setup)
    spec = SPECS["cifar10"]
    samples = PillowSamples(pixels, small_crop(spec))
    torchvision_ways = {
        f"{workers} workers": loading(setup, endlessly(torch_loader(samples, BATCH_SIZE, workers)), workers)
        for workers in (0, 1, 2)
    }
    for_timm = PillowSamples(pixels, None)
    timm_ways = {
        f"{workers} workers": timm_loading(setup, for_timm, 32, BATCH_SIZE, workers, spec) for workers in (1, 2)
    }
    rivals = [Rival("torchvision transforms", torchvision_ways, 25), Rival("timm create_loader", timm_ways)]
    return Match("resident loader, 32 pixels, batch 128", RATE, loading(setup, ours.batches), rivals)


def resident_loader(setup: Setup, *flags: str, own_images: bool = False) -> tuple[TrainLoader, np.ndarray]:
    """main.py's loader of images in memory, and these, uint8 (n, 32, 32, 3): random, or the user's CIFAR-10."""
    pixels = np.random.default_rng(0).integers(256, size=(CIFAR10_IMAGES, 3, 32, 32), dtype=np.uint8)
    if own_images and setup.cifar10:
        args = arguments.parse(["--dataname", "cifar10", "--datapath", setup.cifar10, "--device", "cpu"])
        images = data.get_data(args.data, CPU).train
        pixels = images.pixels.numpy() if isinstance(images, MemoryImages) else pixels
    images = MemoryImages(torch.from_numpy(pixels), torch.arange(len(pixels)) % data.CLASSES)
    usual = ("--dataname", "cifar10", "--datapath", ".", "--loader", "resident", "--batch-size", str(BATCH_SIZE))
    return train_loader(images, *usual, *flags), np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))


def small_crop(spec: Any, *more: Callable) -> transforms.Compose:
    """torchvision's training transforms of a CIFAR image, on a Pillow image, with ``more`` of them."""
    crop = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    return transforms.Compose([*crop, *more, transforms.ToTensor(), transforms.Normalize(spec.mean, spec.std)])


class PillowSamples(Dataset):
    """Images as torchvision's CIFAR10 gives them: from one uint8 array (n, height, width, 3), through Pillow."""

    def __init__(self, pixels: np.ndarray, transform: Callable | None) -> None:
        self.pixels = pixels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.pixels[index])), index % data.CLASSES


# -------------------------------------------------------------------------------- streamed JPEG files


def streamed(setup: Setup) -> Match:
    """JPEG files through worker processes, the same number on each side: random-resized-crop, flip, normalise."""
    workers = setup.threads
    spec = SPECS["folder"]
    ours, tree = stream_loader(setup)
    reference = torch_loader(datasets.ImageFolder(str(tree / "train"), pillow_crop(spec)), JPEG_BATCH_SIZE, workers)
    for_timm = timm.data.create_dataset("", root=str(tree), split="train", is_training=True)
    rivals = [
        Rival("ImageFolder, torchvision transforms", {"": loading(setup, endlessly(reference), workers)}),
        Rival("timm create_loader", {"": timm_loading(setup, for_timm, SIZE, JPEG_BATCH_SIZE, workers, spec)}),
    ]
    what = f"stream loader, JPEG, {workers} workers"
    return Match(what, RATE, loading(setup, ours.batches, workers), rivals)


def stream_loader(setup: Setup, *flags: str) -> tuple[TrainLoader, Path]:
    """main.py's loader of JPEG files, and their folder."""
    tree = data.jpeg_tree(setup.images, setup.scratch)
    usual = f"--dataname folder --loader stream --workers {setup.threads} --batch-size {JPEG_BATCH_SIZE}".split()
    usual += ["--datapath", str(tree)]
    return train_loader(data.get_data(arguments.parse(usual).data, CPU).train, *usual, *flags), tree


# ---------------------------------------------------------------------------------------- RandAugment


def augment(setup: Setup) -> Iterator[Match | str]:
    """RandAugment of images in memory, against torchvision's in two workers; and of JPEG files, against none."""
    ours, pixels = resident_loader(setup, *POLICY, own_images=True)
    samples = PillowSamples(pixels, small_crop(SPECS["cifar10"], transforms.RandAugment()))
    reference = loading(setup, endlessly(torch_loader(samples, BATCH_SIZE, 2)), 2)
    rival = Rival("torchvision RandAugment, 2 workers", {"": reference}, 8.0)
    yield Match("resident loader with RandAugment, 32 pixels", RATE, loading(setup, ours.batches), [rival])
    workers = setup.threads
    with_policy, without = (stream_loader(setup, *flags)[0] for flags in (POLICY, ()))
    rival = Rival("the same without", {"": loading(setup, without.batches, workers)}, 0.85)
    what = f"stream loader with RandAugment, JPEG, {workers} workers"
    yield Match(what, RATE, loading(setup, with_policy.batches, workers), [rival])


# -------------------------------------------------------------------------------------------- loaders


def train_loader(images: Images, *flags: str) -> TrainLoader:
    """main.py's training loader under ``flags``, of ``images``."""
    return both_loaders(images, *flags)[0]


def both_loaders(images: Images, *flags: str) -> tuple[TrainLoader, ValidationLoader]:
    """main.py's loaders under ``flags``, both of ``images``; files in channels-last, as its networks take them."""
    args = arguments.parse([*flags, "--device", "cpu"])
    spec = SPECS[args.data.dataname]
    classes = tuple(str(label) for label in range(int(images.labels.max()) + 1))
    made = Data(spec, *resolve(args.data, None), classes, images, images)
    with Distributed(RankInfo(), args.run) as distributed:
        return loaders(made, args, distributed, channels_last=not spec.fixed_size)[:2]


def torch_loader(samples: Dataset, batch_size: int, workers: int) -> DataLoader:
    """A shuffled DataLoader with persistent workers."""
    return DataLoader(
        samples, batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0, drop_last=True
    )


def timm_loading(setup: Setup, samples: Dataset, size: int, batch_size: int, workers: int, spec: Any) -> Measure:
    """timm's loader with random-resized-crop, flip and normalisation, and without its colour jitter."""
    loader = timm.data.create_loader(
        samples,
        (3, size, size),
        batch_size,
        is_training=True,
        color_jitter=0.0,
        interpolation="bilinear",
        mean=spec.mean,
        std=spec.std,
        num_workers=workers,
        device=CPU,
    )
    return loading(setup, endlessly(loader), workers)


def endlessly(loader: Iterable[Any]) -> Callable[[int], Iterable[Any]]:
    """Adapts a loader that reshuffles by itself to the form that takes the epoch's number."""
    return lambda _: loader


def pillow_crop(spec: Any) -> transforms.Compose:
    """torchvision's training transforms of an ImageNet image, on a Pillow image."""
    crop = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    return transforms.Compose([*crop, transforms.ToTensor(), transforms.Normalize(spec.mean, spec.std)])


# ------------------------------------------------------------------------------- decoding on one core


def decode(setup: Setup) -> Iterator[Match | str]:
    """scikit-learn's two photographs, 640 x 427 pixels, as crops of 224 pixels, with one thread.

    A worker of ours hands over bytes and leaves flip and normalisation to the device, in batches; torchvision's ends
    with normalised floats. So the first row compares what a worker's core does, the others the whole way to floats.
    """
    paths = data.photographs()
    spec = SPECS["folder"]
    count = JPEG_BATCH_SIZE
    images = ImageFiles([paths[n % 2] for n in range(count)], torch.arange(count) % 2, "RGB")
    flags = ("--dataname", "folder", "--datapath", ".", "--workers", "0", "--batch-size", str(count))
    training, validation = both_loaders(images, *flags)

    def bytes_of(epoch: int) -> Iterator[tuple[torch.Tensor, ...]]:
        return (item[1:] for item in training.source.batches(training.plan.micro_batches(epoch, 0)))

    def each(open_image: Callable, transform: Callable) -> dict[str, Measure]:
        return {"": loading(setup, lambda _: [(torch.stack([transform(open_image(p)) for p in images.paths]),)])}

    target = 1.7 if jpeg.nvimgcodec is None else 2.0
    to_float = [transforms.ToTensor(), transforms.Normalize(spec.mean, spec.std)]
    resize = transforms.Compose([transforms.Resize(RESIZED), transforms.CenterCrop(SIZE), *to_float])
    with one_thread(torch.get_num_threads()):
        reference = each(datasets.folder.pil_loader, pillow_crop(spec))
        rivals = [Rival("a worker with Pillow, transforms", reference, target)]
        yield Match("JPEG to training crop, a worker", RATE, loading(setup, bytes_of), rivals)
        rivals = [
            Rival("Pillow, torchvision transforms", reference, 1.7),
            Rival("decode_jpeg, transforms.v2", each(tensor, tensor_crop(spec))),
        ]
        yield Match("JPEG to floats for training, one core", RATE, loading(setup, training.batches), rivals)
        rivals = [Rival("Pillow, torchvision transforms", each(datasets.folder.pil_loader, resize), 1.9)]
        ours = loading(setup, lambda _: validation.batches())
        yield Match("JPEG to floats for evaluation, one core", RATE, ours, rivals)


@contextmanager
def one_thread(before: int) -> Iterator[None]:
    """Inside, torch computes with one thread; afterwards with ``before`` again."""
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tensor(path: str) -> torch.Tensor:
    """An image as torchvision's own decoder reads it: uint8 (3, height, width)."""
    return io.decode_jpeg(io.read_file(path), mode=io.ImageReadMode.RGB)


def tensor_crop(spec: Any) -> v2.Compose:
    """torchvision's training transforms of an ImageNet image, on a uint8 tensor."""
    crop = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    return v2.Compose([*crop, v2.ToDtype(torch.float32, scale=True), v2.Normalize(spec.mean, spec.std)])
