"""Comparisons of training on a GPU: images in memory (ResNet-50, ViT-S/16, ResNet-18 on CIFAR-10), and JPEG files.

The runs compared in a row of the table use the same network, batch, dtype and memory format. None sets TF32; all let
cuDNN choose its algorithms. Nothing before a run's second epoch is timed, not even compiling. With ``--tiny``, flags at
the end of each command replace its size.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from scripts.lab.benchmarks.lines import RATE
from scripts.lab.benchmarks.measure import BARE, TIMM, WITHOUT_TIMM, Match, Rival, main_run, peer

SYNTHETIC_IMAGES = 12_800  # main.py's, of as many classes as ImageNet
RGB = ("--channels", 3, "--classes", 1000)
CIFAR_IMAGES = 50_000
GUESSED_RATE = 50_000  # images per second of ResNet-18 at 32 pixels, to choose how many epochs take --seconds
TINY_SHAPE = ("--arch", "fc", "--batch-size", 8)
TINY_RUN = ("--train-samples", 16, "--val-batch-size", 640, "--epochs", 2, "--picture-epochs", "off")


def in_memory(own: argparse.Namespace, arch: str, amp: str, compiled: bool = False) -> Iterator[Match | str]:
    """Compare speed on random images of 224 pixels in GPU memory, two timed epochs of 100 steps."""
    common = (*at_224_pixels(own, arch), "--amp", amp, "--channels-last", *["--compile"] * compiled)
    rivals = [Rival(f"{BARE}, one batch", peer(own, "bare", *common, *RGB), 0.98)]
    run = ("--dataname", "synthetic", *training(own, *common, epochs=3))
    rivals.append(as_graphs(own, *run))
    if own.timm_train:
        steps = 2 if own.tiny else SYNTHETIC_IMAGES // 128
        given = ("--train-script", own.timm_train, "--given-batches", steps)
        rivals.append(Rival(f"{TIMM}, one batch", peer(own, "timm", *common, *RGB, *given), 1.0))
    else:
        yield WITHOUT_TIMM
    yield Match(f"{arch}, 224 pixels, {amp}{', compiled' * compiled}", RATE, main_run(own, *run), rivals)


def resident(own: argparse.Namespace) -> Iterator[Match | str]:
    """Compare speed of ResNet-18 on CIFAR-10 held and augmented in GPU memory, in fp16."""
    if not own.cifar10:
        yield "resident is left out: give --cifar10 DIR"
        return
    shape = ("--arch", "resnet18", "--image-size", 32, "--batch-size", 512, *TINY_SHAPE * own.tiny)
    common = (*shape, "--amp", "fp16", "--channels-last", "--device", own.device)
    epochs = 1 + max(2, math.ceil(own.seconds * GUESSED_RATE / CIFAR_IMAGES))
    data = ("--dataname", "cifar10", "--datapath", own.cifar10, "--loader", "resident")
    run = (*data, *training(own, *common, epochs=epochs))
    bare = peer(own, "bare", *common, "--channels", 3, "--classes", 10)
    rivals = [Rival(f"{BARE}, one batch", bare, 0.95), as_graphs(own, *run)]
    yield Match("resnet18, CIFAR-10, fp16", RATE, main_run(own, *run), rivals)


def jpeg(own: argparse.Namespace, arch: str) -> Iterator[Match | str]:
    """Compare JPEG files decoded by the CPU with images in memory and, if there is one, with decoding on the GPU."""
    if not own.images:
        yield f"jpeg-{arch} is left out: give --images DIR, class folders below train/ and val/"
        return
    common = (*at_224_pixels(own, arch), "--amp", "fp16", "--channels-last")
    run = training(own, *common, epochs=4)
    files = ("--dataname", "folder", "--datapath", own.images, "--loader", "stream", *run)
    rivals = [Rival("images in memory", main_run(own, "--dataname", "synthetic", *run))]
    if own.device == "cuda":
        rivals.append(Rival("decoded by the GPU", main_run(own, *files, "--decode", "gpu")))
    if own.timm_train and arch == "resnet50":  # with our augmentation, and a worker for each thread
        classes = sum(path.is_dir() for path in (Path(own.images) / "train").iterdir())
        given = ("--train-script", own.timm_train, "--tree", own.images, "--workers", own.threads, "--plain-crops")
        timm = peer(own, "timm", *common, "--channels", 3, "--classes", classes, *given)
        rivals.append(Rival(f"{TIMM}, {own.threads} workers", timm))
    ours = main_run(own, *files, "--decode", "cpu")
    yield Match(f"{arch}, JPEG files decoded by the CPU, fp16", RATE, ours, rivals)


def at_224_pixels(own: argparse.Namespace, arch: str) -> tuple[object, ...]:
    """Flags of network, batch and device that all sides of a row have."""
    tiny = (*TINY_SHAPE, "--image-size", 8) * own.tiny
    return ("--arch", arch, "--image-size", 224, "--batch-size", 128, *tiny, "--device", own.device)


def training(own: argparse.Namespace, *flags: object, epochs: int) -> tuple[object, ...]:
    """``flags`` with those that only main.py has."""
    return (*flags, "--lr", 0.01, "--epochs", epochs, *TINY_RUN * own.tiny)


def as_graphs(own: argparse.Namespace, *flags: object) -> Rival:
    """Rival: the same run of main.py with its steps recorded as CUDA graphs."""
    return Rival("--cuda-graph auto", main_run(own, *flags, "--cuda-graph", "auto"))
