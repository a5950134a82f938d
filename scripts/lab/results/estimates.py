"""Estimates of a recipe's time and memory from its network alone, for recipes that nobody has run."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

from utils.config import arguments
from utils.config.datasets import SPECS
from utils.config.groups.model import ModelSettings
from utils.config.image_size import Size, sides
from utils.config.settings import Settings
from utils.data.resolution import build_resolution

if TYPE_CHECKING:
    from torch import Tensor, nn

TRAINING_IMAGES = {
    "digits": 1_437,
    "mnist": 60_000,
    "fashionmnist": 60_000,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "imagenet": 1_281_167,
    "imagenette": 9_469,
}
CLASSES_OF_A_FOLDER = 10  # Imagenette's
STATES = {"sgd": 1, "muon-sgd": 1}  # numbers that an optimizer keeps per weight; others keep 2
PASSES = 3  # a backward pass takes twice the arithmetic of a forward pass


class Cost(NamedTuple):
    """What one image costs a network: ``kept`` is the bytes that a forward pass keeps for the backward pass."""

    multiply_adds: int
    kept: int
    parameters: int


def cost(recipe: str) -> Cost:
    """Cost of one image of the size --image-size in the network of ``recipe``, such as 'cifar10/conv2'."""
    args = settings(recipe)
    dataname = args.data.dataname
    return _cost(args.model, dataname, args.data.image_size or SPECS[dataname].image_size)


@functools.cache  # several recipes train one network
def _cost(model: ModelSettings, dataname: str, image_size: Size) -> Cost:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    network, image = network_and_image(model, dataname, image_size)
    own = {value.untyped_storage()._cdata for value in network.state_dict().values()}
    kept: dict[int, int] = {}  # bytes of each storage

    def note(value: Tensor) -> Tensor:
        size = 2 if value.is_floating_point() else value.element_size()
        kept[value.untyped_storage()._cdata] = value.untyped_storage().nbytes() // value.element_size() * size
        return value

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value), counter:
        logits = network.train()(image.repeat(2, 1, 1, 1))  # batch norm needs two images
    activations = sum(size for storage, size in kept.items() if storage not in own) // len(logits)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Cost(counter.get_total_flops() // (2 * len(logits)), activations, parameters)


def training_multiply_adds(recipe: str) -> int:
    """Multiply-adds of all matrix products and convolutions in training with ``recipe``, without validation."""
    data = recipe.partition("/")[0]
    assert data in TRAINING_IMAGES, f"TRAINING_IMAGES lacks the number of {data}"
    args = settings(recipe)
    dataname = args.data.dataname
    epochs = range(args.optimisation.epochs)
    largest = args.data.image_size or SPECS[dataname].image_size
    resolution = build_resolution(args, largest)
    sizes = Counter(largest if resolution is None else resolution.size(epoch) for epoch in epochs)
    of_epochs = sum(_cost(args.model, dataname, size).multiply_adds * count for size, count in sizes.items())
    return of_epochs * PASSES * TRAINING_IMAGES[data]


def training_bytes(recipe: str, gpus: int) -> int:
    """Bytes that a step of ``recipe`` in half precision takes on each of ``gpus`` GPUs, which share the global batch.

    Counts weights, gradients, the optimizer's state and a moving average in float32; autocast's copy of the weights,
    and all values that a forward pass keeps for the backward pass, in half precision.
    """
    args = settings(recipe)
    state = STATES.get(args.optimisation.optimizer, 2) + (args.average.ema_decay is not None)
    images = global_batch(recipe) // (gpus * args.optimisation.accumulate)
    return cost(recipe).parameters * (4 + 4 + 4 * state + 2) + images * cost(recipe).kept


def global_batch(recipe: str) -> int:
    """Number of images in a step of ``recipe``."""
    args = settings(recipe)
    return args.data.global_batch_size or args.data.batch_size


@functools.cache
def settings(recipe: str) -> Settings:
    """Settings of ``recipe``."""
    return arguments.parse(["--config", recipe, "--datapath", "DATA"])


def network_and_image(model: ModelSettings, dataname: str, size: Size) -> tuple[nn.Module, Tensor]:
    """A recipe's network and one black image for it, both on the meta device unless the network is one of our own."""
    import torch

    from models import build_model
    from models.initialisation import shapes_alone
    from models.small import OWN

    spec = SPECS[dataname]
    own = model.arch in OWN
    with nullcontext() if own else shapes_alone():
        network = build_model(
            model, classes=spec.classes or CLASSES_OF_A_FOLDER, channels=spec.channels, image_size=size
        )
    return network, torch.zeros(1, spec.channels, *sides(size), device="cpu" if own else "meta")


def duration(recipe: str, multiply_adds_per_second: float) -> str:
    """Training time of ``recipe`` at this rate, such as '9.7 h' or '14 min'; 'minutes' for less than five."""
    hours = training_multiply_adds(recipe) / multiply_adds_per_second / 3600
    if hours < 5 / 60:
        return "minutes"
    if hours < 1:
        return f"{60 * hours:.0f} min"
    if hours < 10:
        return f"{hours:.1f} h"
    return f"{float(f'{hours:.2g}'):,.0f} h"  # an estimate has no more than two digits


def memory(recipe: str, gpus: int) -> str:
    """Memory that a step of ``recipe`` takes on each of ``gpus`` GPUs, such as '28 GB' or 'below 1 GB'."""
    gigabytes = training_bytes(recipe, gpus) / 1e9
    if gigabytes < 1:
        return "below 1 GB"
    return f"{gigabytes:.0f} GB" if gigabytes >= 10 else f"{gigabytes:.1f} GB"
