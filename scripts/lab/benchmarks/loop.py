"""Comparisons of main.py as a whole with bare loops and other programs, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.lab.benchmarks import data
from scripts.lab.benchmarks.measure import BARE, RATE, TIMM, WITHOUT_TIMM, Match, Rival, Setup, main_run, peer

COMMON = ("--batch-size", 128, "--device", "cpu")
RUN = (*COMMON, "--lr", 0.01)


def training(setup: Setup) -> Iterator[Match | str]:
    """Compare whole training runs. Yields ``Match``es; our figures come from metrics.csv, without the first epoch."""
    yield fc_on_mnist(setup)
    yield resnet18_on_cifar10(setup)
    if not setup.timm_train:
        yield WITHOUT_TIMM


def fc_on_mnist(setup: Setup) -> Match:
    """Comparison where the network is smallest, so that the training loop's own cost shows most."""
    folder = data.mnist(setup.mnist, setup.scratch)
    images = ("--dataname", "mnist", "--datapath", folder, "--augment", "none")
    ours = main_run(setup, *images, "--arch", "fc", *RUN, "--epochs", 1 + max(1, round(setup.seconds)))
    rivals = bare_loops(setup, 0.85, "--mnist", folder, *COMMON)
    for workers in (0, 2):
        loader = peer(setup, "torchvision-mnist", "--mnist", folder, "--workers", workers, *COMMON)
        rivals.append(Rival(f"torchvision MNIST, DataLoader, {workers} workers", loader, 12))
    return Match("fc on MNIST, batch 128", RATE, ours, rivals)


def resnet18_on_cifar10(setup: Setup) -> Match:
    """Comparison where the network takes nearly all the time; only a few batches, as each takes a second on a CPU."""
    tree = data.cifar10_tree(setup.cifar10, setup.scratch)
    shape = ("--arch", "resnet18", "--image-size", 32, "--channels", 3)
    rivals = bare_loops(setup, 0.97, *shape, "--channels-last", *COMMON)
    if setup.timm_train:
        timm = peer(setup, "timm", "--tree", tree, "--train-script", setup.timm_train, *shape, *COMMON)
        rivals.append(Rival(f"{TIMM}, its defaults", timm, 1.2))
    ours = main_run(setup, "--dataname", "cifar10", "--datapath", tree, "--arch", "resnet18", *RUN, "--epochs", 2)
    return Match("resnet18 on CIFAR-10, batch 128", RATE, ours, rivals)


def bare_loops(setup: Setup, target: float, *flags: object) -> list[Rival]:
    """Rivals: the bare loop with torch's default threads, and with threads that wait briefly, as main.py's do."""
    return [
        Rival(f"{BARE}, torch's threads", peer(setup, "bare", *flags), target),
        Rival(f"{BARE}, our threads", peer(setup, "bare", *flags, briefly=True), target),
    ]
