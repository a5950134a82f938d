"""Data and loaders as main.py makes them, their steps in an order that ranks and passes do not change, and images."""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from utils.checkpoint.resume import ResumePoint
from utils.config.arguments import parse
from utils.data.augment.base import Samples
from utils.data.datasets import get_data, get_test_data, known_to
from utils.data.loaders import loaders
from utils.runtime.distributed import Distributed, RankInfo

CPU = torch.device("cpu")


def read(*flags):
    """The data set that main.py reads with these flags, on a CPU."""
    return get_data(parse([*map(str, flags)]).data, CPU)


def read_folder(folder, *flags):
    """The images below ``folder``, in class folders or of a table."""
    return read("--dataname", "folder", "--datapath", folder, *flags)


def evaluated(folder, *flags, trained=None, **how):
    """The images below ``folder`` to validate ``trained`` on, read without those to train on, if it has others."""
    settings = parse(["--dataname", "folder", "--datapath", str(folder), *map(str, flags)]).data
    return get_test_data(settings, CPU, trained, **how)


def read_tree(folder, *flags, trained=None):
    """The images below ``folder``, as known to the checkpoint ``trained``, and a checkpoint of a run on them."""
    settings = parse(["--dataname", "folder", "--datapath", str(folder), *map(str, flags)]).data
    data = known_to(get_data(settings, CPU), trained, settings)
    state = {"settings": dataclasses.asdict(settings), "classes": [*data.classes], "fingerprint": data.fingerprint}
    return data, ResumePoint(Path("old.pt"), state, digest="")


def save(path, level=0):
    """Save an image of one colour, 4 pixels wide and high."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (level, 0, 0)).save(path)


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


def bits(tensor):
    """A tensor's bits, so that a NaN is equal to itself."""
    return tensor.view(torch.int32) if tensor.is_floating_point() else tensor


def same_steps(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(*map(bits, pair)) for step in expected for pair in zip(found[step], expected[step], strict=True)
    )


def same_batches(found, expected):
    """Whether two walks of a loader give the same batches, to the bit."""
    return all(
        torch.equal(one.images, other.images)
        and torch.equal(one.targets, other.targets)
        and (one.indices.tolist(), one.number, one.ends_step) == (other.indices.tolist(), other.number, other.ends_step)
        for one, other in zip(found, expected, strict=True)
    )


def steps_in_any_way(*flags, ways):
    """The steps, after a look that each of ``ways`` (ranks, passes, loader) gives the same bits, from any step."""
    alone = steps_of(*flags)
    for world_size, passes, loader in ways:
        more = ("--accumulate", passes, "--loader", loader, "--workers", 0)
        assert same_steps(steps_of(*flags, *more, world_size=world_size), alone)
    late = dict(list(alone.items())[-2:])
    assert same_steps(steps_of(*flags, first_step=min(late)), late)
    return alone


def images_of(count, channels=3, height=32, width=None):
    """Random images, uint8 (count, channels, height, width)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, height, width or height), dtype=torch.uint8, generator=generator)


def samples_of(count):
    return Samples(0, 0, np.arange(count))


def augmented(augmentation, images):
    return augmentation.apply(images, *augmentation.draw(samples_of(len(images)), *images.shape[-2:]))


def is_the_same_in_any_batch_and_memory_format(transform, images):
    """Whether each image is augmented alike in any company, read and wanted in either memory format."""
    count = len(images)
    whole = transform.training(images, np.arange(count), 1)
    last = dataclasses.replace(transform, channels_last=True)
    return all(
        torch.equal(transform.training(images[part], part, 1), whole[part])
        and torch.equal(last.training(images[part].contiguous(memory_format=torch.channels_last), part, 1), whole[part])
        for part in np.split(np.random.default_rng(0).permutation(count), [1, 4, 20])
    )
