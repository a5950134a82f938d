"""How fast one core here decodes images as they are, and packed with their shorter side at 256 pixels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from utils.config.settings import UserError
from utils.data.images.decoding import decode_crop, open_image
from utils.data.images.view import View

PIXELS = 256
QUALITY = 90
CROP = 224
TURNS = 60  # of all images, with other crops each


class Decoding(NamedTuple):
    """Training crops a second of a core's time, mean thousand bytes an image, and the median ratio of turns."""

    rate: float
    packed_rate: float
    kb: float
    packed_kb: float
    ratio: float


def photographs() -> list[str]:
    """The two photographs that come with scikit-learn, JPEG, 640 x 427 pixels."""
    import sklearn.datasets

    return sorted(map(str, (Path(sklearn.datasets.__file__).parent / "images").glob("*.jpg")))


def measure(paths: Sequence[str], turns: int = TURNS) -> Decoding:
    """Decode each of ``paths`` and its packed copy in turns, ``turns`` times; processor time, on one thread.

    Raises ``UserError`` for a file that cannot be read.
    """
    torch.set_num_threads(1)
    view = View(CROP)
    chance = np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        pairs = [(path, _packed(path, Path(folder) / f"{number}.jpg")) for number, path in enumerate(paths)]
        taken = np.zeros((turns, 2))
        for turn in range(-1, turns):  # the first does not count
            for pair in pairs:
                uniforms = chance.random(22)
                for side in (0, 1) if turn % 2 else (1, 0):
                    began = time.process_time()
                    decode_crop(pair[side], view, "RGB", uniforms)
                    if turn >= 0:
                        taken[turn, side] += time.process_time() - began
        sizes = np.array([[Path(path).stat().st_size for path in pair] for pair in pairs]).mean(axis=0) / 1000
    if not taken.all():
        raise UserError("this system's processor clock is too coarse for so few images; give more files")
    rates = len(pairs) / np.median(taken, axis=0)
    ratio = statistics.median(taken[:, 0] / taken[:, 1])
    return Decoding(float(rates[0]), float(rates[1]), float(sizes[0]), float(sizes[1]), float(ratio))


def _packed(path: str, target: Path) -> str:
    """The path of a copy as ``pack.py --resize 256`` makes it; an image that is small enough keeps its bytes."""
    image = open_image(path, "RGB")
    share = PIXELS / min(image.size)
    if share >= 1:
        return path
    content = BytesIO()
    size = tuple(max(1, round(share * side)) for side in image.size)
    image.resize(size, Image.Resampling.BICUBIC).save(content, "JPEG", quality=QUALITY)
    target.write_bytes(content.getvalue())
    return str(target)
