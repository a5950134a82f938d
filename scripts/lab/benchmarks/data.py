"""A few of CIFAR-10's images in class folders, which main.py and timm both read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from utils.config import arguments
from utils.data.datasets import get_data
from utils.data.formats.readers import ImageFiles

CLASSES = 10
TREE_IMAGES = {"train": 640, "val": 100}  # five training batches of 128; a CPU takes seconds for each


def cifar10_tree(given: str | None, scratch: Path) -> Path:
    """Class folders with ``TREE_IMAGES`` PNG files: the first of each class in the user's data, or random images."""
    root = scratch / "cifar10"
    if root.is_dir():
        return root
    if given is None:
        generator = np.random.default_rng(0)
        parts = [generator.integers(256, size=(count, 3, 32, 32), dtype=np.uint8) for count in TREE_IMAGES.values()]
        labels = [torch.arange(count) % CLASSES for count in TREE_IMAGES.values()]
    else:
        data = get_data(arguments.parse(["--dataname", "cifar10", "--datapath", given]).data, torch.device("cpu"))
        splits = (data.train, data.validation)
        parts = [split.paths if isinstance(split, ImageFiles) else split.pixels.numpy() for split in splits]
        labels = [split.labels for split in splits]
    for (split, count), images, its_labels in zip(TREE_IMAGES.items(), parts, labels, strict=True):
        for label in range(CLASSES):
            folder = root / split / str(label)
            folder.mkdir(parents=True)
            for index in (its_labels == label).nonzero().flatten()[: count // CLASSES].tolist():
                place = folder / f"{index}.png"
                image = images[index]
                if isinstance(image, str):
                    shutil.copyfile(image, place)
                else:
                    Image.fromarray(image.transpose(1, 2, 0)).save(place)
    return root
