"""Rivals as programs: the bare loop, a loop over torchvision's MNIST, timm's train.py with our network.

    python scripts/lab/benchmarks/peers.py NAME [flag ...]       # the last line is images per second

benchmark.py starts a new process for each round, so that thread pools and allocators do not mix.
"""

from __future__ import annotations

import argparse
import io
import re
import runpy
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.nn import functional
from torchvision.datasets import MNIST

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.common.timing import synchronise
from scripts.lab.benchmarks.measure import throughput
from utils.config.groups.model import ModelSettings

# MNIST's mean and standard deviation
MEAN = 0.1307
STD = 0.3081
TIMM_RATE = re.compile(r"Train: (\d+) \[.*\(\d+\.\d+s, +([\d.]+)/s\)")  # epoch, and its images per second so far
GIVEN_RATE = "given batches: epoch {} at {} images/s"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
GPU_WARM_UP_BATCHES = 20  # to compile, choose convolution algorithms and raise the clock


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="peers.py", allow_abbrev=False)
    parser.add_argument("name", choices=("bare", "torchvision-mnist", "timm"))
    for name, default in {"arch": "fc", "batch-size": 128, "image-size": 28, "channels": 1, "classes": 10}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--mnist", help="folder of the idx files")
    parser.add_argument("--tree", help="class folders below train/ and val/")
    parser.add_argument("--train-script", help="timm's train.py")
    parser.add_argument("--given-batches", type=int, default=0, help="timm: random batches an epoch, without a --tree")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--amp", choices=("off", *DTYPES), default="off")
    for name in ("channels-last", "compile", "plain-crops"):
        parser.add_argument(f"--{name}", action="store_true")
    own = parser.parse_args(argv)
    if own.name == "timm":
        print(timm(own))
        return
    torch.backends.cudnn.benchmark = True  # as in main.py; without effect on a CPU
    torch.manual_seed(0)
    batches = (
        torchvision_mnist(own) if own.name == "torchvision-mnist" else mnist_in_memory(own) if own.mnist else one(own)
    )
    warm_up = GPU_WARM_UP_BATCHES if own.device.type == "cuda" else 3
    print(throughput(training(own, batches), own.seconds, own.device, warm_up=warm_up))


# ---------------------------------------------------------------------------------------- the loop


def network(own: argparse.Namespace) -> nn.Module:
    """main.py's network, in training mode, on the device."""
    from models import build_model

    settings = ModelSettings(arch=own.arch)
    model = build_model(settings, classes=own.classes, channels=own.channels, image_size=own.image_size)
    return model.to(own.device, memory_format=torch.channels_last if own.channels_last else torch.contiguous_format)


def training(own: argparse.Namespace, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[int]:
    """Train with forward pass, loss, backward pass and step only, by torch's fastest SGD; yield each batch's size."""
    model = network(own)
    if own.compile:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    scaler = torch.amp.GradScaler(own.device.type, enabled=own.amp == "fp16")
    for images, targets in batches:
        with torch.autocast(own.device.type, DTYPES.get(own.amp), enabled=own.amp != "off"):
            loss = functional.cross_entropy(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        yield len(targets)


# --------------------------------------------------------------------------------------- the batches


def one(own: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same random batch again and again, on the network's device and in its memory format."""
    images = torch.randn(own.batch_size, own.channels, own.image_size, own.image_size, device=own.device)
    if own.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    targets = torch.randint(own.classes, (own.batch_size,), device=own.device)
    while True:
        yield images, targets


class IdxFiles(MNIST):
    """torchvision's MNIST, read from a folder that holds the four files itself."""

    @property
    def raw_folder(self) -> str:
        return self.root


def mnist_in_memory(own: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of MNIST, normalised floats in memory, in a new random order each epoch."""
    data = IdxFiles(own.mnist)
    images = ((data.data[:, None].float() / 255 - MEAN) / STD).to(own.device)
    targets = data.targets.to(own.device)
    while True:
        for rows in torch.randperm(len(images), device=own.device).split(own.batch_size):
            yield images[rows], targets[rows]


def torchvision_mnist(own: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of torchvision's MNIST, transformed sample by sample in a DataLoader as in PyTorch's examples."""
    from torch.utils.data import DataLoader
    from torchvision import transforms

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    data = IdxFiles(own.mnist, transform=transform)
    loader = DataLoader(data, own.batch_size, shuffle=True, num_workers=own.workers, persistent_workers=own.workers > 0)
    while True:
        for images, targets in loader:
            yield images.to(own.device), targets.to(own.device)


# ---------------------------------------------------------------------------------------------- timm


def timm(own: argparse.Namespace) -> float:
    """Images per second of timm's train.py, over the epochs after the first.

    With a ``tree``, train.py reads the images with its own loader and logs its speed. Its other settings are its
    defaults, except that ``plain_crops`` makes the augmentation ours. Without a ``tree`` it gets random batches,
    already on the device.
    """
    sys.path.insert(0, str(Path(own.train_script).resolve().parent))  # as for any script: timm may be beside it
    import timm.data
    from timm.models import register_model

    @register_model
    def benchmark_network(pretrained: bool = False, **_: object) -> nn.Module:
        return network(own)

    if own.given_batches:
        timm.data.create_dataset = lambda *_, **__: ()  # train.py only needs a dataset that is not None
        timm.data.create_loader = lambda _, **options: GivenBatches(own, options["is_training"])
    flags = ["--data-dir", own.tree or ".", "--num-classes", own.classes, "--batch-size", own.batch_size]
    flags += ["--input-size", own.channels, own.image_size, own.image_size, "--device", own.device]
    flags += ["--epochs", 3 if own.given_batches else 2, "--warmup-epochs", 0, "--cooldown-epochs", 0]
    flags += ["--val-split", "val", "--model", "benchmark_network", "--checkpoint-hist", 1]
    flags += ["--amp", "--amp-dtype", str(DTYPES[own.amp]).partition(".")[2]] if own.amp != "off" else []
    flags += ["--channels-last"] * own.channels_last + ["--torchcompile"] * own.compile
    flags += ["--workers", own.workers] if own.workers else []
    flags += ["--color-jitter", 0, "--train-interpolation", "bilinear"] * own.plain_crops
    said = io.StringIO()
    with TemporaryDirectory() as output, redirect_stdout(said), redirect_stderr(said):
        sys.argv = [own.train_script, *map(str, flags), "--output", output]
        try:
            runpy.run_path(own.train_script, run_name="__main__")
        except SystemExit as error:  # argparse says why on stderr
            if error.code:
                raise RuntimeError((said.getvalue().strip().splitlines() or ["train.py said nothing"])[-1]) from error
    return timm_rate(said.getvalue(), own.given_batches > 0)


def timm_rate(log: str, given_batches: bool) -> float:
    """Images per second over the epochs after the first, from the output of train.py.

    ``given_batches``: the output has the lines of ``GivenBatches``, not of train.py's own log.
    """
    pattern = re.compile(GIVEN_RATE.format(r"(\d+)", r"([\d.]+)")) if given_batches else TIMM_RATE
    last_of_epoch = dict(pattern.findall(log))
    return statistics.harmonic_mean([float(rate) for epoch, rate in last_of_epoch.items() if epoch != "0"])


class GivenBatches:
    """Replaces timm's loader: the same random batch on the device, ``given_batches`` times per epoch.

    Prints each training epoch's speed; synchronises the device only at the epoch's start and end.
    """

    dataset = sampler = batch_sampler = None
    mixup_enabled = False

    def __init__(self, own: argparse.Namespace, training: bool) -> None:
        self.device = own.device
        self.training = training
        self.count = own.given_batches if training else 1
        self.epoch = 0
        self.batch = next(one(own))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        synchronise(self.device)
        began = time.perf_counter()
        for _ in range(self.count):
            yield self.batch
        synchronise(self.device)
        if self.training:
            rate = self.count * len(self.batch[1]) / (time.perf_counter() - began)
            print(GIVEN_RATE.format(self.epoch, f"{rate:.2f}"), flush=True)
        self.epoch += 1


if __name__ == "__main__":
    main(sys.argv[1:])
