"""Loaders as main.py makes them, and what they give in an order that does not depend on ranks and passes."""

import torch

from utils.config.arguments import parse
from utils.data.datasets import get_data
from utils.data.loaders import loaders
from utils.runtime.distributed import Distributed, RankInfo

CPU = torch.device("cpu")


def make(*flags, rank=0, world_size=1):
    """The loaders of training and validation, and which kind they are, on a CPU."""
    args = parse(["--device", "cpu", *map(str, flags)], world_size)
    data = get_data(args.data, CPU)
    return loaders(data, args, Distributed(RankInfo(rank, world_size), args.run), channels_last=False)


def steps_of(*flags, world_size=1, epoch=1, first_step=0):
    """{step: its samples, images and targets, over all ranks and passes, in the order of the plan}."""
    ranks = [make(*flags, rank=rank, world_size=world_size)[0] for rank in range(world_size)]
    steps = {}
    for passes in zip(*(list(train.batches(epoch, first_step)) for train in ranks), strict=True):
        for part in passes:
            images = part.images[: len(part.targets)]
            steps.setdefault(part.number, []).append((torch.as_tensor(part.indices), images, part.targets))
    return {step: [torch.cat(column) for column in zip(*parts, strict=True)] for step, parts in steps.items()}
