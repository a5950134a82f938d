"""The other sides as programs: the bare loop, a loop over torchvision's MNIST, timm's train.py with our network.

    python scripts/benchmarks/peers.py NAME [flag ...]       # the last line is images a second

benchmark.py starts each anew for each round, so that thread pools and allocators do not mix.
"""

from __future__ import annotations

import argparse
import re
import runpy
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks.measure import throughput
from utils.config.groups.model import ModelSettings

MEAN, STD = 0.1307, 0.3081  # of MNIST
TIMM_RATE = re.compile(r"Train: (\d+) \[.*\(\d+\.\d+s, +([\d.]+)/s\)")  # an epoch's number, its images a second so far


def main(argv: list[str]) -> None:
    if argv[:1] == ["timm-script"]:
        run_timm_script(argv[1], argv[2:])
        return
    parser = argparse.ArgumentParser(prog="peers.py", allow_abbrev=False)
    parser.add_argument("name", choices=("bare", "torchvision-mnist", "timm"))
    for name, default in {"arch": "fc", "batch-size": 128, "image-size": 28, "channels": 1, "classes": 10}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--mnist", help="folder as torchvision's MNIST wants it")
    parser.add_argument("--tree", help="class folders below train/ and val/")
    parser.add_argument("--train-script", help="timm's train.py")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--device", type=torch.device, default="cpu")
    for name in ("amp", "channels-last", "compile"):
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
    print(throughput(training(own, batches), own.seconds, own.device, warm_up=20 if own.device.type == "cuda" else 3))


# ---------------------------------------------------------------------------------------- the loop


def network(own: argparse.Namespace) -> nn.Module:
    """main.py's network, in training mode, on the device."""
    from models import build_model

    settings = ModelSettings(arch=own.arch)
    model = build_model(settings, classes=own.classes, channels=own.channels, image_size=own.image_size)
    return model.to(own.device, memory_format=torch.channels_last if own.channels_last else torch.contiguous_format)


def training(own: argparse.Namespace, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[int]:
    """Forward, loss, backward and step, and nothing else; yields each batch's size. Uses torch's fastest SGD."""
    model = network(own)
    if own.compile:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    scaler = torch.amp.GradScaler(own.device.type, enabled=own.amp)
    for images, targets in batches:
        with torch.autocast(own.device.type, torch.float16, enabled=own.amp):
            loss = functional.cross_entropy(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        yield len(targets)


# --------------------------------------------------------------------------------------- the batches


def one(own: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same random batch again and again, on the network's device and in its memory format."""
    images = torch.randn(own.batch_size, own.channels, own.image_size, own.image_size, device=own.device)
    if own.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    targets = torch.randint(own.classes, (own.batch_size,), device=own.device)
    while True:
        yield images, targets


def mnist_in_memory(own: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """MNIST as normalised floats in memory; a batch is an index into a random permutation."""
    from torchvision.datasets import MNIST

    data = MNIST(own.mnist)
    images = ((data.data[:, None].float() / 255 - MEAN) / STD).to(own.device)
    targets = data.targets.to(own.device)
    while True:
        for rows in torch.randperm(len(images), device=own.device).split(own.batch_size):
            yield images[rows], targets[rows]


def torchvision_mnist(own: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """torchvision's MNIST with per-sample transforms in a DataLoader, as PyTorch's examples train on it."""
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import MNIST

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    data = MNIST(own.mnist, transform=transform)
    loader = DataLoader(data, own.batch_size, shuffle=True, num_workers=own.workers, persistent_workers=own.workers > 0)
    while True:
        for images, targets in loader:
            yield images.to(own.device), targets.to(own.device)


# ---------------------------------------------------------------------------------------------- timm


def timm(own: argparse.Namespace) -> float:
    """Images a second of timm's train.py with its defaults, from its log of each epoch after the first."""
    command = [
        sys.executable, __file__, "timm-script", own.train_script, "--data-dir", own.tree, "--val-split", "val",
        "--model", "benchmark_network", "--num-classes", own.classes, "--batch-size", own.batch_size,
        "--input-size", own.channels, own.image_size, own.image_size, "--epochs", 2, "--warmup-epochs", 0,
        "--cooldown-epochs", 0, "--device", own.device, "--output", Path(own.tree).parent / "timm",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"timm's train.py: {done.stderr.strip().splitlines()[-1]}")
    last_of_epoch = dict(TIMM_RATE.findall(done.stdout + done.stderr))
    return statistics.harmonic_mean([float(rate) for epoch, rate in last_of_epoch.items() if epoch != "0"])


def run_timm_script(script: str, flags: list[str]) -> None:
    """timm's train.py, with our network for small images registered under a name."""
    sys.path.insert(0, str(Path(script).resolve().parent))  # as for any script: its folder may contain a timm
    from timm.models import register_model

    from models import build_model

    @register_model
    def benchmark_network(pretrained: bool = False, num_classes: int = 10, in_chans: int = 3, **_: object) -> nn.Module:
        return build_model(ModelSettings(arch="resnet18"), classes=num_classes, channels=in_chans, image_size=32)

    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
