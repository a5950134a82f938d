"""The interface of augmentations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Any, ClassVar

import numpy as np
import torch

from utils.data.sample_plan import sample_uniforms

PLUGIN_STREAMS = 1 << 32  # streams of augmentations in users' files start here

# One row per sample. Tensors go to the images' device; numpy arrays stay on the host, which groups images by them.
Numbers = tuple[torch.Tensor | np.ndarray, ...]


@unique
class Stream(IntEnum):
    """Stream of random numbers, one per kind of randomness, so that switching one off leaves the others unchanged."""

    SHIFT = 1
    FLIP = 2
    CROP = 3
    CUTOUT = 4
    MIX = 5
    POLICY = 10
    CHAIN = 11
    JITTER = 12
    GREY = 13
    BLUR = 14
    ERASE = 15
    VERTICAL_FLIP = 16
    ROTATION = 17


@dataclass(frozen=True)
class Samples:
    """The samples of a batch; ``indices``: int64 (n,), their numbers in the data set."""

    seed: int
    epoch: int
    indices: np.ndarray

    def uniforms(self, stream: int, count: int) -> np.ndarray:
        """Random numbers in [0, 1): float32 (n, count), row by row a function of (seed, epoch, index, stream) alone."""
        return sample_uniforms(self.seed, self.epoch, self.indices, stream, count)


class Augmentation(ABC):
    """An augmentation. Its text (``str``) describes it in the plan of a run.

    ``normalised``: applied to the network's input, float32 of the network's size with 0 at the mean, which it may
    overwrite. Otherwise applied to pixel levels, 0 to 255, in uint8 or, after a crop, float32, left unchanged.
    ``compilable``: torch.compile can turn ``apply`` into one graph, because it uses no numbers on the host.
    """

    normalised: ClassVar[bool] = False
    compilable: ClassVar[bool] = False

    @abstractmethod
    def draw(self, samples: Samples, height: int, width: int) -> Numbers:
        """Random numbers (n, ...) for stored images of ``height`` x ``width`` pixels, on the CPU; () if none needed."""

    def prepared(self, height: int, width: int, *numbers: Any) -> Numbers:
        """Convert the numbers from ``draw``, on the images' device, to those that ``apply`` takes, (n, ...)."""
        return numbers

    @abstractmethod
    def apply(self, images: torch.Tensor, *numbers: Any) -> torch.Tensor:
        """Augment images (n, c, h, w). ``numbers``: from ``draw``, then ``prepared`` on the images' device."""
