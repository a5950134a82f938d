"""Single operations with random strength: colour jitter, grey, blur, rotation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from utils.data.augment.base import Augmentation, Numbers, Samples, Stream
from utils.data.augment.operations import Canvas, apply_layers, whole_levels

JITTER = ("Brightness", "Contrast", "Color", "Hue")


@dataclass(frozen=True)
class ColorJitter(Augmentation):
    """Random changes of brightness, contrast, saturation and hue, in random order, like torchvision's ColorJitter.

    ``amounts``: one for each of the four. Factors are uniform from 1 - amount, at least 0, to 1 + amount; the hue turns
    by up to its amount of a full circle in either direction. ``probability``: share of images that are changed.
    """

    amounts: tuple[float, float, float, float]
    probability: float = 1.0

    @classmethod
    def of(cls, values: Sequence[float], probability: float) -> ColorJitter:
        """Build from ``values``: one for brightness, contrast and saturation; or three; or four, the last for hue."""
        brightness, contrast, saturation, *hue = tuple(values) * (3 if len(values) == 1 else 1)
        return cls((brightness, contrast, saturation, hue[0] if hue else 0.0), probability)

    def draw(self, samples: Samples, height: int, width: int) -> Numbers:
        """Draw the operations (indices into ``JITTER``, -1 for none) in order, and their arguments: (n, 4) each."""
        uniforms = samples.uniforms(Stream.JITTER, 2 * len(JITTER) + 1).astype(np.float64)
        order = np.argsort(uniforms[:, : len(JITTER)], axis=1, kind="stable")
        amounts = np.array(self.amounts)
        low = np.maximum(1 - amounts, 0)
        high = 1 + amounts
        low[-1] = -amounts[-1]
        high[-1] = amounts[-1]
        arguments = low + (high - low) * uniforms[:, len(JITTER) : -1]
        applied = (uniforms[:, -1:] < self.probability) & (amounts > 0)[order]
        return np.where(applied, order, -1), np.take_along_axis(arguments, order, axis=1)

    def apply(self, images: torch.Tensor, *numbers: np.ndarray) -> torch.Tensor:
        choices, arguments = numbers
        return apply_layers(whole_levels(images), JITTER, choices, arguments, Canvas())

    def __str__(self) -> str:
        names = ("brightness", "contrast", "saturation", "hue")
        amounts = ", ".join(f"{name} {amount:g}" for name, amount in zip(names, self.amounts, strict=True) if amount)
        sometimes = f" of {100 * self.probability:g} % of the images" if self.probability < 1 else ""
        return f"color-jitter ({amounts or 'nothing'}{sometimes})"


@dataclass(frozen=True)
class Sometimes(Augmentation):
    """An operation on a random share of images, with a random argument from ``low`` to ``high``; ``text`` describes it.

    ``keeps_levels``: images arrive as float32 with more than 256 levels and are not rounded to uint8.
    """

    text: str
    operation: str
    stream: int
    probability: float = 1.0
    low: float = 0.0
    high: float = 0.0
    keeps_levels: bool = False

    def draw(self, samples: Samples, height: int, width: int) -> Numbers:
        """Draw a choice (0: apply the operation, -1: leave the image) and an argument per image: (n, 1) each."""
        uniforms = samples.uniforms(self.stream, 2).astype(np.float64)
        choices = np.where(uniforms[:, :1] < self.probability, 0, -1)
        return choices, self.low + (self.high - self.low) * uniforms[:, 1:]

    def apply(self, images: torch.Tensor, *numbers: np.ndarray) -> torch.Tensor:
        images = images if self.keeps_levels else whole_levels(images)
        choices, arguments = numbers
        return apply_layers(images, (self.operation,), choices, arguments, Canvas())

    def __str__(self) -> str:
        return self.text
