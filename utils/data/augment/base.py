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
        """Random numbers in [0, 1): float32 (n, count); each row depends on (seed, epoch, index, stream) alone."""
        return sample_uniforms(self.seed, self.epoch, self.indices, stream, count)


class Augmentation(ABC):
    """An augmentation. Its text (``str``) describes it in the plan of a run.

    If ``normalised``, ``apply`` gets the network's input, float32 of the network's size with 0 at the mean, and may
    overwrite it. Otherwise it gets pixel levels from 0 to 255, uint8 or (after a crop) float32, and must not change
    them in place. ``compilable``: torch.compile can turn ``apply`` into one graph, as it needs no numbers on the host.
    """

    normalised: ClassVar[bool] = False
    compilable: ClassVar[bool] = False

    @abstractmethod
    def draw(self, samples: Samples, height: int, width: int) -> Numbers:
        """Draw numbers (n, ...) on the CPU for images stored at ``height`` x ``width`` pixels; () to change nothing."""

    def prepared(self, height: int, width: int, *numbers: Any) -> Numbers:
        """Convert the numbers from ``draw``, on the images' device, to those that ``apply`` takes, (n, ...)."""
        return numbers

    @abstractmethod
    def apply(self, images: torch.Tensor, *numbers: Any) -> torch.Tensor:
        """Augment images (n, c, h, w). ``numbers``: from ``draw``, then ``prepared`` on the images' device."""
