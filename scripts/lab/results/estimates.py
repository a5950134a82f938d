"""The hours that a recipe would take where nobody has run it, from its network's multiply-adds."""

from __future__ import annotations

import functools

from utils.config import arguments
from utils.config.datasets import SPECS
from utils.config.image_size import sides

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
PASSES = 3  # a backward pass takes twice the arithmetic of a forward pass


@functools.cache
def training_multiply_adds(recipe: str) -> int:
    """Multiply-adds of all matrix products and convolutions of a training by ``recipe``, such as 'cifar10/conv2'.

    Images count as large as --image-size says, though --progressive-size begins with smaller ones; validation is left
    out.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from models import build_model
    from models.small import OWN

    args = arguments.parse(["--config", recipe, "--datapath", "DATA"])
    spec = SPECS[args.data.dataname]
    size = args.data.image_size or spec.image_size
    device = "cpu" if args.model.arch in OWN else "meta"  # large ones without their numbers
    with torch.device(device):
        network = build_model(
            args.model, classes=spec.classes or CLASSES_OF_A_FOLDER, channels=spec.channels, image_size=size
        )
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        network.eval()(torch.zeros(1, spec.channels, *sides(size), device=device))
    images = TRAINING_IMAGES[recipe.partition("/")[0]] * args.optimisation.epochs
    return counter.get_total_flops() // 2 * PASSES * images


def duration(recipe: str, multiply_adds_per_second: float) -> str:
    """How long ``recipe`` would train at this rate, such as '9.7 h' or '14 min'; 'minutes' below five."""
    hours = training_multiply_adds(recipe) / multiply_adds_per_second / 3600
    if hours < 5 / 60:
        return "minutes"
    if hours < 1:
        return f"{60 * hours:.0f} min"
    return f"{hours:,.0f} h" if hours >= 10 else f"{hours:.1f} h"
