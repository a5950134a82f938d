"""Comparisons of decoding JPEG files on one core, into the input of training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchvision import datasets, io, transforms
from torchvision.transforms import v2

from scripts.lab.benchmarks import data
from scripts.lab.benchmarks.measure import RATE, Match, Measure, Rival, Setup, throughput
from utils.config import arguments
from utils.config.datasets import SPECS
from utils.data.datasets import Data
from utils.data.formats.readers import ImageFiles
from utils.data.images import jpeg
from utils.data.loaders import TrainLoader, ValidationLoader, loaders
from utils.data.preprocessing import resolve
from utils.runtime.distributed import Distributed, RankInfo

CPU = torch.device("cpu")
SIZE = 224
RESIZED = 256
BATCH_SIZE = 64


def decode(setup: Setup) -> Iterator[Match | str]:
    """Compare speed on scikit-learn's two photographs, cropped to 224 pixels in one thread. Yields ``Match``es.

    Our workers hand over bytes and leave flips and normalisation to the device, in batches; torchvision's workers hand
    over normalised floats. So the first row compares what a worker's core does, and the other rows the whole way to
    floats.
    """
    paths = data.photographs()
    spec = SPECS["folder"]
    images = ImageFiles([paths[n % 2] for n in range(BATCH_SIZE)], torch.arange(BATCH_SIZE) % 2, "RGB")
    training, validation = both_loaders(images)

    def bytes_of(epoch: int) -> Iterator[tuple[torch.Tensor, ...]]:
        return (item[1:] for item in training.source.batches(training.plan.micro_batches(epoch, 0)))

    def each(open_image: Callable, transform: Callable) -> Measure:
        return loading(setup, lambda _: [(torch.stack([transform(open_image(p)) for p in images.paths]),)])

    to_float = [transforms.ToTensor(), transforms.Normalize(spec.mean, spec.std)]
    crop = transforms.Compose([transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), *to_float])
    resize = transforms.Compose([transforms.Resize(RESIZED), transforms.CenterCrop(SIZE), *to_float])
    with one_thread(torch.get_num_threads()):
        reference = each(datasets.folder.pil_loader, crop)
        rivals = [Rival("a worker with Pillow, transforms", reference, 1.7 if jpeg.nvimgcodec is None else 2.0)]
        yield Match("JPEG to training crop, a worker", RATE, loading(setup, bytes_of), rivals)
        rivals = [
            Rival("Pillow, torchvision transforms", reference, 1.7),
            Rival("decode_jpeg, transforms.v2", each(tensor, tensor_crop(spec))),
        ]
        yield Match("JPEG to floats for training, one core", RATE, loading(setup, training.batches), rivals)
        rivals = [Rival("Pillow, torchvision transforms", each(datasets.folder.pil_loader, resize), 1.9)]
        ours = loading(setup, lambda _: validation.batches())
        yield Match("JPEG to floats for evaluation, one core", RATE, ours, rivals)


def loading(setup: Setup, batches: Callable[[int], Iterable[Any]]) -> Measure:
    """Measurement of ``batches(epoch)``, epoch after epoch, in images per second."""

    def sizes() -> Iterator[int]:
        epoch = 0
        while True:
            for batch in batches(epoch):
                yield len(batch.images if hasattr(batch, "images") else batch[0])
            epoch += 1

    endless = sizes()
    return lambda: throughput(endless, setup.seconds, CPU, warm_up=2)


def both_loaders(images: ImageFiles) -> tuple[TrainLoader, ValidationLoader]:
    """main.py's two loaders, both of ``images``, in the channels-last layout of its networks."""
    flags = ("--dataname", "folder", "--datapath", ".", "--workers", "0", "--batch-size", str(BATCH_SIZE))
    args = arguments.parse([*flags, "--device", "cpu"])
    made = Data(SPECS["folder"], *resolve(args.data, None), ("0", "1"), images, images)
    with Distributed(RankInfo(), args.run) as distributed:
        return loaders(made, args, distributed, channels_last=True)[:2]


@contextmanager
def one_thread(before: int) -> Iterator[None]:
    """Context in which torch computes with one thread; afterwards it uses ``before`` threads."""
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tensor(path: str) -> torch.Tensor:
    """Image decoded by torchvision's own decoder, uint8 (3, height, width)."""
    return io.decode_jpeg(io.read_file(path), mode=io.ImageReadMode.RGB)


def tensor_crop(spec: Any) -> v2.Compose:
    """torchvision's transforms for training on ImageNet, for a uint8 tensor."""
    crop = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    return v2.Compose([*crop, v2.ToDtype(torch.float32, scale=True), v2.Normalize(spec.mean, spec.std)])
