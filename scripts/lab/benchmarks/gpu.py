"""Comparisons of training on a GPU: images in memory (ResNet-50, ViT-S/16, ResNet-18 on CIFAR-10), and JPEG files.

The runs compared in a row of the table use the same network, batch, dtype and memory format. None sets TF32; all let
cuDNN choose its algorithms. Nothing before a run's second epoch is timed, not even compiling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from scripts.lab.benchmarks import data
from scripts.lab.benchmarks.measure import (
    BARE,
    PERCENT,
    RATE,
    TIMM,
    WITHOUT_TIMM,
    CommandFailure,
    Match,
    Measure,
    Rival,
    Setup,
    main_run,
    peer,
    warm_data_wait,
    warm_images_per_second,
)

# main.py's synthetic data
SYNTHETIC_IMAGES = 12_800
SYNTHETIC_CLASSES = 1000
CIFAR_IMAGES = 50_000
GUESSED_RATE = 50_000  # images per second of ResNet-18 at 32 pixels, to choose how many epochs take --seconds
TINY_IMAGES = 16
FEW = ("--train-samples", TINY_IMAGES, "--val-batch-size", 640)
LR = ("--lr", 0.01)


def in_memory(setup: Setup, arch: str, amp: str, compiled: bool = False) -> Iterator[Match | str]:
    """Compare speed on random images of 224 pixels in GPU memory, two timed epochs of 100 steps. Yields a ``Match``."""
    shape = ("--arch", arch, "--image-size", 224)
    batch_size = 128
    if setup.tiny:
        shape = ("--arch", "fc", "--image-size", 8)
        batch_size = 8
    batch = ("--batch-size", batch_size)
    images = TINY_IMAGES if setup.tiny else SYNTHETIC_IMAGES
    common = ("--amp", amp, "--channels-last", *["--compile"] * compiled, "--device", setup.device.type)
    few = FEW if setup.tiny else ()
    epochs = 2 if setup.tiny else 3
    run = ("--dataname", "synthetic", *shape, *batch, *common, *few, "--epochs", epochs, *LR)
    ours = main_run(setup, *run)
    rgb = ("--channels", 3, "--classes", SYNTHETIC_CLASSES)
    rivals = [Rival(f"{BARE}, one batch", peer(setup, "bare", *shape, *rgb, *batch, *common), 0.98)]
    rivals.append(_as_graphs(setup, *run))
    if setup.timm_train:
        given = ("--train-script", setup.timm_train, "--given-batches", images // batch_size)
        timm = peer(setup, "timm", *shape, *rgb, *batch, *common, *given)
        rivals.append(Rival(f"{TIMM}, one batch", timm, 1.0))
    else:
        yield WITHOUT_TIMM
    yield Match(f"{arch}, 224 pixels, {amp}{', compiled' * compiled}", RATE, ours, rivals)


def resident(setup: Setup) -> Iterator[Match | str]:
    """Compare speed of ResNet-18 on CIFAR-10 held and augmented in GPU memory, in fp16. Yields a ``Match``."""
    shape = ("--arch", "fc" if setup.tiny else "resnet18", "--image-size", 32)
    batch_size = 512
    which = ("--dataname", "synthetic")
    classes = SYNTHETIC_CLASSES
    images = SYNTHETIC_IMAGES
    if setup.cifar10:
        which = ("--dataname", "cifar10", "--datapath", setup.cifar10)
        classes = 10
        images = CIFAR_IMAGES
    epochs = 1 + max(2, math.ceil(setup.seconds * GUESSED_RATE / images))
    few = ()
    if setup.tiny:
        batch_size = 8
        epochs = 2
        few = FEW
    common = ("--batch-size", batch_size, "--amp", "fp16", "--channels-last", "--device", setup.device.type)
    run = (*which, *shape, "--loader", "resident", *common, *few, "--epochs", epochs, *LR)
    ours = main_run(setup, *run)
    bare = peer(setup, "bare", *shape, "--channels", 3, "--classes", classes, *common)
    what = f"resnet18, {'CIFAR-10' if setup.cifar10 else 'synthetic images'}, fp16"
    yield Match(what, RATE, ours, [Rival(f"{BARE}, one batch", bare, 0.95), _as_graphs(setup, *run)])


def _as_graphs(setup: Setup, *flags: object) -> Rival:
    """Rival: the same run of main.py with its steps recorded as CUDA graphs."""
    return Rival("--cuda-graph auto", main_run(setup, *flags, "--cuda-graph", "auto"))


# ---------------------------------------------------------------------------------------- JPEG files


def jpeg(setup: Setup, arch: str) -> Iterator[Match | str]:
    """Compare JPEG files decoded by the CPU with images in memory and, if possible, with decoding on the GPU.

    Yields a ``Match`` of speeds, then one for each decoder with the host's wait for data. Only the ratios tell what
    waiting costs: while the host waits, the GPU may still have steps to do, and a host that decodes on the GPU (nvJPEG)
    waits for the GPU.
    """
    tree = data.jpeg_tree(setup.images, setup.scratch)
    if not setup.images:
        yield "the JPEG files are cut from two photographs; give --images DIR, class folders below train/ and val/"
    size, batch_size, epochs = (8, 8, 2) if setup.tiny else (224, 128, 4)
    shape = ("--arch", "fc" if setup.tiny else arch, "--image-size", size, "--batch-size", batch_size)
    common = (*shape, "--amp", "fp16", "--channels-last", "--device", setup.device.type)
    few = FEW if setup.tiny else ()
    training = (*common, *few, "--epochs", epochs, *LR, "--print-freq", 1 if setup.tiny else 10)
    files = ("--dataname", "folder", "--datapath", tree, "--loader", "stream")
    by_cpu = _FilesRun(setup, *files, "--decode", "cpu", *training)
    rivals = [Rival("images in memory", main_run(setup, "--dataname", "synthetic", *training))]
    waits = {"CPU": by_cpu}
    if not setup.on_gpu:
        yield "decoding on a GPU is left out: there is none"
    else:
        waits["GPU"] = _FilesRun(setup, *files, "--decode", "gpu", *training)
        rivals.append(Rival("decoded by the GPU", waits["GPU"].rate))
    if setup.timm_train and arch == "resnet50":
        rivals.append(Rival(f"{TIMM}, {setup.threads} workers", timm_on_files(setup, tree, *common)))
    yield Match(f"{arch}, JPEG files decoded by the CPU, fp16", RATE, by_cpu.rate, rivals)
    for decoder, run in waits.items():
        yield Match(f"{arch}, JPEG files decoded by the {decoder}: the host waits", PERCENT, run.wait, [Rival()])


def timm_on_files(setup: Setup, tree: Path, *common: object) -> Measure:
    """Measurement of timm's train.py on the same files, with our augmentation and one worker per thread."""
    classes = sum(path.is_dir() for path in (tree / "train").iterdir())
    given = ("--train-script", setup.timm_train, "--tree", tree, "--workers", setup.threads, "--plain-crops")
    return peer(setup, "timm", *common, "--channels", 3, "--classes", classes, *given)


class _FilesRun:
    """Two measures of runs: ``rate`` makes a run and returns its speed, ``wait`` returns a run's data wait in percent.

    Each call of ``wait`` takes the oldest run not yet reported.
    """

    def __init__(self, setup: Setup, *flags: object) -> None:
        self._waits: list[float] = []
        self.rate = main_run(setup, *flags, read=self._read)

    def _read(self, folder: Path) -> float:
        self._waits.append(warm_data_wait(folder))
        return warm_images_per_second(folder)

    def wait(self) -> float:
        if not self._waits:
            raise CommandFailure("the run before failed")
        return self._waits.pop(0)
