"""What tests of several rooms share: small class folders, waiting, and the comparison of nested states."""

import time

import numpy as np
import torch
from PIL import Image


def image_tree(root, counts, classes="ab", size=8, ending="png"):
    """Class folders of noise below ``root``, the same each time: for each split so many images of each class."""
    generator = np.random.default_rng(0)
    for split, count in counts.items():
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.{ending}")
    return root


def wait_for(condition, seconds=60):
    """Wait until ``condition`` gives something true, and give it; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (given := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return given


def equal(left, right):
    """Whether nested states hold the same, tensors to the bit."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return type(left) is type(right) and (left == right or left != left)
