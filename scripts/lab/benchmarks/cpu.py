"""Comparisons on a CPU: whole trainings, decoding of JPEG files on one core, and the time that a user waits."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sklearn.datasets
import torch
from torchvision import transforms
from torchvision.datasets.folder import pil_loader

from scripts.common.timing import timed
from scripts.lab.benchmarks.data import cifar10_tree
from scripts.lab.benchmarks.lines import RATE, SECONDS
from scripts.lab.benchmarks.measure import (
    BARE,
    MAIN,
    TIMM,
    WITHOUT_TIMM,
    CommandFailure,
    Match,
    Measure,
    Rival,
    main_run,
    peer,
    run_command,
    throughput,
)
from utils.config import arguments
from utils.config.datasets import SPECS
from utils.config.settings import UserError
from utils.data.data_set import Data
from utils.data.formats.readers import ImageFiles, find_idx
from utils.data.images import jpeg
from utils.data.loaders import TrainLoader, ValidationLoader, loaders
from utils.data.preprocessing import resolve
from utils.runtime.distributed import Distributed, RankInfo

CPU = torch.device("cpu")
COMMON = ("--batch-size", 128, "--device", "cpu")
AS_OURS = ("--channels-last", "--plain-crops")  # what main.py chooses, and cheap augmentation
# of the images that are decoded
SIZE = 224
RESIZED = 256
BATCH_SIZE = 64
# What a training run on the digits imports; torch's optimizers import torch._dynamo.
IMPORTS = """
import torch, torch._dynamo, numpy, PIL.Image
from torch.utils.tensorboard import SummaryWriter
print("imported", flush=True)
"""


# ------------------------------------------------------------------------------------ whole trainings


def loop(own: argparse.Namespace) -> Iterator[Match | str]:
    """Compare whole training runs: where the network is smallest, and where it takes nearly all the time."""
    if own.mnist:
        place = find_idx(Path(own.mnist), "MNIST")
        if place is None:
            raise UserError(f"--mnist {own.mnist}: holds no train-images-idx3-ubyte and its three companions")
        images = ("--dataname", "mnist", "--datapath", own.mnist, "--augment", "none")
        epochs = 1 + max(1, round(own.seconds))
        ours = main_run(own, *images, "--arch", "fc", *COMMON, "--lr", 0.01, "--epochs", epochs)
        rivals = [Rival(BARE, peer(own, "bare", "--mnist", place, *COMMON), 0.85)]
        for workers in (0, 2):
            loader = peer(own, "torchvision-mnist", "--mnist", place, "--workers", workers, *COMMON)
            rivals.append(Rival(f"torchvision MNIST, DataLoader, {workers} workers", loader, 12))
        yield Match("fc on MNIST, batch 128", RATE, ours, rivals)
    else:
        yield "fc on MNIST is left out: give --mnist DIR"
    tree = cifar10_tree(own.cifar10, own.scratch)  # few images, as each batch takes a second
    shape = ("--arch", "resnet18", "--image-size", 32, "--channels", 3)
    rivals = [Rival(BARE, peer(own, "bare", *shape, "--channels-last", *COMMON), 0.97)]
    if own.timm_train:
        timm = peer(own, "timm", "--tree", tree, "--train-script", own.timm_train, *shape, *COMMON)
        rivals.append(Rival(f"{TIMM}, its defaults", timm, 1.2))
        fair = peer(own, "timm", "--tree", tree, "--train-script", own.timm_train, *shape, *COMMON, *AS_OURS)
        rivals.append(Rival(f"{TIMM}, channels-last, no color jitter", fair, 1.0))
    else:
        yield WITHOUT_TIMM
    run = ("--dataname", "cifar10", "--datapath", tree, "--arch", "resnet18", *COMMON, "--lr", 0.01, "--epochs", 2)
    yield Match("resnet18 on CIFAR-10, batch 128", RATE, main_run(own, *run), rivals)


# ------------------------------------------------------------------------------------------- decoding


def decode(own: argparse.Namespace) -> Iterator[Match]:
    """Compare speed on scikit-learn's two photographs, cropped to 224 pixels in one thread.

    Our workers hand over bytes and leave flips and normalisation to the device, in batches; torchvision's workers hand
    over normalised floats. So the first row compares what a worker's core does, and the other rows the whole way to
    floats.
    """
    photographs = sorted((Path(sklearn.datasets.__file__).parent / "images").glob("*.jpg"))
    paths = [str(photographs[n % 2]) for n in range(BATCH_SIZE)]
    training, validation = both_loaders(ImageFiles(paths, torch.arange(BATCH_SIZE) % 2, "RGB"))

    def bytes_of(epoch: int) -> Iterator[tuple[torch.Tensor, ...]]:
        return (item[1:] for item in training.source.batches(training.plan.micro_batches(epoch, 0)))

    def pillow(*first: Callable) -> Measure:
        spec = SPECS["folder"]
        transform = transforms.Compose([*first, transforms.ToTensor(), transforms.Normalize(spec.mean, spec.std)])
        return loading(own, lambda _: [(torch.stack([transform(pil_loader(path)) for path in paths]),)])

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        crop = pillow(transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip())
        rivals = [Rival("a worker with Pillow, transforms", crop, 1.7 if jpeg.nvimgcodec is None else 2.0)]
        yield Match("JPEG to training crop, a worker", RATE, loading(own, bytes_of), rivals)
        rivals = [Rival("Pillow, torchvision transforms", crop, 1.7)]
        yield Match("JPEG to floats for training, one core", RATE, loading(own, training.batches), rivals)
        resize = pillow(transforms.Resize(RESIZED), transforms.CenterCrop(SIZE))
        rivals = [Rival("Pillow, torchvision transforms", resize, 1.9)]
        ours = loading(own, lambda _: validation.batches())
        yield Match("JPEG to floats for evaluation, one core", RATE, ours, rivals)
    finally:
        torch.set_num_threads(before)


def loading(own: argparse.Namespace, batches: Callable[[int], Iterable[Any]]) -> Measure:
    """Measurement of ``batches(epoch)``, epoch after epoch, in images per second."""

    def sizes() -> Iterator[int]:
        epoch = 0
        while True:
            for batch in batches(epoch):
                yield len(batch.images if hasattr(batch, "images") else batch[0])
            epoch += 1

    endless = sizes()
    return lambda: throughput(endless, own.seconds, CPU, warm_up=2)


def both_loaders(images: ImageFiles) -> tuple[TrainLoader, ValidationLoader]:
    """main.py's two loaders, both of ``images``, in the channels-last layout of its networks."""
    flags = ("--dataname", "folder", "--datapath", ".", "--workers", "0", "--batch-size", str(BATCH_SIZE))
    args = arguments.parse([*flags, "--device", "cpu"])
    made = Data(SPECS["folder"], *resolve(args.data, None), ("0", "1"), images, images)
    with Distributed(RankInfo(), args.run) as distributed:
        return loaders(made, args, distributed, channels_last=True)[:2]


# ------------------------------------------------------------------------------------------- start-up


def start_up(own: argparse.Namespace) -> Iterator[Match]:
    """Compare seconds since the start of the process: to --help, a mistake, the first training step."""

    def whole(*flags: str, code: int = 0) -> Measure:
        return lambda: timed(lambda: run_command([sys.executable, MAIN, *flags], own.environ, code), CPU)[0]

    yield Match("main.py --help", SECONDS, whole("--help"), [Rival(target=0.3)])
    mistake = whole("--epochs", "many", code=2)
    yield Match("main.py --epochs many: the mistake is reported", SECONDS, mistake, [Rival(target=0.3)])
    flags = ("--max-steps", "1", "--print-freq", "1", "--no-progress", "--device", "cpu", "--output", str(own.scratch))
    command = [sys.executable, str(MAIN), *flags]
    imports = [sys.executable, "-c", IMPORTS]
    ours = partial(seconds_to_line, command, "epoch 1/", own.environ)
    rivals = [Rival("import the same libraries", partial(seconds_to_line, imports, "imported", own.environ), 1.0)]
    yield Match("main.py: start to first step on the digits", SECONDS, ours, rivals)


def seconds_to_line(command: Sequence[str], begin: str, environ: Mapping[str, str]) -> float:
    """Seconds until ``command`` prints a line that begins with ``begin``; lets it end. Raises ``CommandFailure``."""
    began = time.perf_counter()
    seconds = None
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environ, text=True, **streams) as process:
        for line in process.stdout:
            if seconds is None and line.startswith(begin):
                seconds = time.perf_counter() - began
    if process.returncode or seconds is None:
        raise CommandFailure(f"{command[1]} ended with exit code {process.returncode} and no '{begin}' line")
    return seconds
