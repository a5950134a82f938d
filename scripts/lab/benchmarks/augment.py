"""RandAugment in our loaders: resident against torchvision's for each sample, streamed against none. On the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torchvision import transforms

from scripts.lab.benchmarks import data
from scripts.lab.benchmarks.loading import (
    BATCH_SIZE,
    CIFAR10_IMAGES,
    CPU,
    JPEG_BATCH_SIZE,
    PillowSamples,
    endlessly,
    loading,
    torch_loader,
    train_loader,
)
from scripts.lab.benchmarks.measure import RATE, Match, Rival, Setup
from utils.config import arguments
from utils.config.datasets import SPECS
from utils.data.formats.readers import MemoryImages

RESIDENT_TARGET = 8.0
STREAM_TARGET = 0.85
POLICY = ("--auto-augment", "ra")


def augment(setup: Setup) -> Iterator[Match | str]:
    """RandAugment of images in memory and of JPEG files."""
    yield resident(setup)
    yield streamed(setup)


def resident(setup: Setup) -> Match:
    """50,000 images of 32 pixels in memory: shift, flip, RandAugment, normalise; torchvision's in two workers."""
    pixels = np.random.default_rng(0).integers(256, size=(CIFAR10_IMAGES, 3, 32, 32), dtype=np.uint8)
    if setup.cifar10:
        args = arguments.parse(["--dataname", "cifar10", "--datapath", setup.cifar10, "--device", "cpu"])
        images = data.get_data(args.data, CPU).train
        if isinstance(images, MemoryImages):
            pixels = images.pixels.numpy()
    images = MemoryImages(torch.from_numpy(pixels), torch.arange(len(pixels)) % data.CLASSES)
    flags = ("--dataname", "cifar10", "--datapath", ".", "--loader", "resident", "--batch-size", str(BATCH_SIZE))
    ours = train_loader(images, *flags, *POLICY)
    spec = SPECS["cifar10"]
    per_sample = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.RandAugment(),
            transforms.ToTensor(),
            transforms.Normalize(spec.mean, spec.std),
        ]
    )
    samples = PillowSamples(np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), per_sample)
    reference = loading(setup, endlessly(torch_loader(samples, BATCH_SIZE, 2)), 2)
    rival = Rival("torchvision RandAugment, 2 workers", {"": reference}, RESIDENT_TARGET)
    return Match("resident loader with RandAugment, 32 pixels", RATE, loading(setup, ours.batches), [rival])


def streamed(setup: Setup) -> Match:
    """JPEG files through worker processes, with RandAugment and without."""
    tree = data.jpeg_tree(setup.images, setup.scratch)
    workers = setup.threads
    stream = f"--dataname folder --loader stream --workers {workers} --batch-size {JPEG_BATCH_SIZE}".split()
    flags = (*stream, "--datapath", str(tree))
    images = data.get_data(arguments.parse(list(flags)).data, CPU).train
    with_policy, without = (train_loader(images, *flags, *more) for more in (POLICY, ()))
    rival = Rival("the same without", {"": loading(setup, without.batches, workers)}, STREAM_TARGET)
    what = f"stream loader with RandAugment, JPEG, {workers} workers"
    return Match(what, RATE, loading(setup, with_policy.batches, workers), [rival])
