"""The interface of augmentations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Any, ClassVar

import numpy as np
import torch

from utils.data.sample_plan import sample_uniforms

PLUGIN_STREAMS = 1 << 32  # and above: of names in users' files

# Of the samples, row by row. Tensors go to the images' device; numpy arrays stay on the host, to group images by them.
Numbers = tuple[torch.Tensor | np.ndarray, ...]


@unique
class Stream(IntEnum):
    """Each kind of randomness has its own stream, so that switching one off leaves the others as they were."""

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

    ``normalised``: it applies to what the network sees: float32 of the network's size, 0 at the mean, which it may
    overwrite. Otherwise it applies to pixel levels, 0 to 255, in uint8 or after a crop in float32, and leaves them.
    ``compilable``: torch.compile can make one graph of ``apply``, which does not depend on numbers on the host.
    """

    normalised: ClassVar[bool] = False
    compilable: ClassVar[bool] = False

    @abstractmethod
    def draw(self, samples: Samples, height: int, width: int) -> Numbers:
        """Numbers (n, ...) for stored images of ``height`` x ``width`` pixels, on the CPU; () if nothing is to do."""

    def prepared(self, height: int, width: int, *numbers: Any) -> Numbers:
        """Numbers (n, ...) for ``apply``, worked out on the images' device from those that ``draw`` gave."""
        return numbers

    @abstractmethod
    def apply(self, images: torch.Tensor, *numbers: Any) -> torch.Tensor:
        """The images (n, c, h, w), augmented by what ``draw`` gave, ``prepared`` on their device."""
