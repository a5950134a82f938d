"""main.py as a whole against bare loops and other programs, and on one and two processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from scripts.lab.benchmarks import data
from scripts.lab.benchmarks.measure import BARE, RATE, TIMM, WITHOUT_TIMM, Match, Measure, Rival, Setup, main_run, peer

BATCH = ("--batch-size", 128)


def efficiency(setup: Setup) -> Iterator[Match | str]:
    """Training end to end on a CPU. Our figures come from a run's metrics.csv, without the first epoch."""
    yield fc_on_mnist(setup)
    yield resnet18_on_cifar10(setup)
    if not setup.timm_train:
        yield WITHOUT_TIMM


def fc_on_mnist(setup: Setup) -> Match:
    """The smallest network, where the loop's own cost shows most."""
    folder = data.mnist(setup.mnist, setup.scratch)
    cpu = ("--device", "cpu")
    ours = main_run(
        setup,
        "--dataname",
        "mnist",
        "--datapath",
        folder,
        "--arch",
        "fc",
        *BATCH,
        "--augment",
        "none",
        "--lr",
        0.01,
        "--epochs",
        1 + max(1, round(setup.seconds)),
        *cpu,
    )
    bare = bare_ways(setup, "--mnist", folder, *BATCH, *cpu)
    loaders = {
        f"{workers} workers": peer(setup, "torchvision-mnist", "--mnist", folder, "--workers", workers, *BATCH, *cpu)
        for workers in (0, 2)
    }
    rivals = [Rival(BARE, bare, 0.85), Rival("torchvision MNIST, DataLoader", loaders, 12)]
    return Match("fc on MNIST, batch 128", RATE, ours, rivals)


def resnet18_on_cifar10(setup: Setup) -> Match:
    """A network that takes nearly all of the time; a few batches, since a CPU takes a second for each."""
    tree = data.cifar10_tree(setup.cifar10, setup.scratch)
    shape = ("--arch", "resnet18", "--image-size", 32, "--channels", 3, "--channels-last", "--device", "cpu")
    rivals = [Rival(f"{BARE}, one batch", bare_ways(setup, *shape, *BATCH), 0.97)]
    if setup.timm_train:
        shape = ("--arch", "resnet18", "--image-size", 32, "--channels", 3)
        flags = ("--tree", tree, "--train-script", setup.timm_train, *shape, *BATCH)
        rivals.append(Rival(TIMM, {"its defaults": peer(setup, "timm", *flags)}, 1.2))
    return Match("resnet18 on CIFAR-10, batch 128", RATE, cifar10_run(setup, tree, "resnet18", 2), rivals)


def cifar10_run(setup: Setup, tree: Path, arch: str, epochs: int, *, ranks: int = 0, threads: int = 0) -> Measure:
    """main.py on class folders of 32-pixel images on a CPU; 128 images a step over all processes."""
    return main_run(
        setup,
        "--dataname",
        "cifar10",
        "--datapath",
        tree,
        "--arch",
        arch,
        "--global-batch-size",
        128,
        "--epochs",
        epochs,
        "--lr",
        0.01,
        "--device",
        "cpu",
        ranks=ranks,
        threads=threads,
    )


def bare_ways(setup: Setup, *flags: object) -> dict[str, Measure]:
    """The bare loop with torch's own threads and with threads that wait as main.py's do."""
    return {
        "torch's threads": peer(setup, "bare", *flags),
        "our threads": peer(setup, "bare", *flags, briefly=True),
    }


# ------------------------------------------------------------------------------- one and two processes


def ranks(setup: Setup) -> Iterator[Match | str]:
    """The same global batch on one process and on two: on two GPUs, or on the CPU with the same threads in all."""
    if setup.on_gpu and torch.cuda.device_count() >= 2:
        flags = (
            "--dataname",
            "synthetic",
            "--arch",
            "resnet50",
            "--global-batch-size",
            256,
            "--epochs",
            3,
            "--amp",
            "fp16",
            "--channels-last",
            "--lr",
            0.01,
        )
        one, two = (main_run(setup, *flags, ranks=number) for number in (1, 2))
        yield Match("two GPUs, resnet50, 256 images a step", RATE, two, [Rival("one GPU", {"": one})])
    if not setup.on_cpu:
        return
    if setup.threads < 2:
        yield "two processes on the CPU are left out: they would share one thread"
        return
    tree = data.cifar10_tree(setup.cifar10, setup.scratch)
    one, two = (
        cifar10_run(setup, tree, "conv6", 3, ranks=number, threads=setup.threads // number) for number in (1, 2)
    )
    what = "conv6 on two processes, 128 a step"
    yield Match(what, RATE, two, [Rival("one process, as many threads in all", {"": one})])
