"""Augmentation policies: which operations an image goes through, and how strongly.

Operations, magnitudes and tables are torchvision's or timm's own; here they are drawn for a whole batch, from the
samples' random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from utils.data.augment.base import Augmentation, Numbers, Samples, Stream
from utils.data.augment.operations import NEED_COLOUR, Canvas, apply_layers, per_image, whole_levels

# Maps levels (k,), details (k,), height and width to an operation's arguments, float64 (k,). A detail is one more
# random number, which gives most operations their direction.
Arguments = Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]
LEAST_GAMMA = 1e-300  # near the smallest float
NUMBERS = 4  # random numbers per operation: whether it is applied, its detail, two for its level


@dataclass(frozen=True)
class Operations:
    """The operations that a policy chooses from: their names in ``operations`` and what their levels mean."""

    names: tuple[str, ...]
    arguments: tuple[Arguments, ...]
    canvas: Canvas
    channels: int = 3  # of the images, for the description

    def apply(self, images: torch.Tensor, choices: np.ndarray, levels: np.ndarray, details: np.ndarray) -> torch.Tensor:
        """Apply to each image the operations of its row of ``choices`` (indices, negative for none), in order.

        Their strengths are ``levels``; ``details``, from 0 to 1, decide signs and the like. All are (n, layers).
        """
        values = np.zeros(choices.shape)
        for choice in np.unique(choices[choices >= 0]):
            own = choices == choice
            values[own] = self.arguments[choice](levels[own], details[own], *images.shape[-2:])
        return apply_layers(images, self.names, choices, values, self.canvas)

    def __str__(self) -> str:
        idle = sorted({name for name in self.names if name in NEED_COLOUR}) if self.channels == 1 else ()
        return f"{self.canvas}" + (f"; {' and '.join(idle)} leave grey images as they are" if idle else "")


@dataclass(frozen=True)
class Level:
    """The strength of an operation.

    With ``bins``, a random whole number from 0 to ``bins`` - 1. Otherwise normally distributed around ``mean`` with
    standard deviation ``std`` (inf: uniform from 0 to ``mean``), and limited to 0 to ``largest``.
    """

    mean: float = 0.0
    std: float = 0.0
    largest: float = math.inf
    bins: int = 0

    def draw(self, uniforms: np.ndarray, means: np.ndarray | float | None = None) -> np.ndarray:
        """Draw levels, float64 (n, layers), from ``uniforms`` (n, layers, 2); ``means`` replace ``mean`` if given."""
        first, second = np.moveaxis(uniforms.astype(np.float64), -1, 0)
        mean = self.mean if means is None else means
        if self.bins:
            return np.floor(first * self.bins)
        if math.isinf(self.std):
            levels = mean * first
        elif self.std:
            levels = mean + self.std * np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)
        else:
            levels = np.broadcast_to(mean, first.shape)
        return np.clip(levels, 0, self.largest)

    def __str__(self) -> str:
        if self.bins:
            return f"bins 0 to {self.bins - 1}"
        if math.isinf(self.std):
            return f"magnitude 0 to {self.mean:g}"
        return f"magnitude {self.mean:g}" + (f", std {self.std:g}" if self.std else "")


@dataclass(frozen=True)
class Policy(Augmentation):
    """Base class of policies that apply ``operations`` to images."""

    name: str
    operations: Operations

    def apply(self, images: torch.Tensor, *numbers: np.ndarray) -> torch.Tensor:
        return self.operations.apply(whole_levels(images), *numbers)


@dataclass(frozen=True)
class RandomOperations(Policy):
    """``layers`` random operations, each applied with a probability.

    RandAugment (Cubuk et al., 2019) or, with one operation, TrivialAugment (Müller and Hutter, 2021). With ``weights``,
    one per operation, none is applied twice to an image; without, all are equally likely each time.
    """

    layers: int
    level: Level
    probability: float = 1.0
    weights: tuple[float, ...] = ()

    def draw(self, samples: Samples, height: int, width: int) -> Numbers:
        """Operations (-1: none), levels and details: (n, layers) each."""
        choosing = len(self.weights) or self.layers
        uniforms = samples.uniforms(Stream.POLICY, choosing + self.layers * NUMBERS)
        first = uniforms[:, :choosing]
        others = uniforms[:, choosing:].reshape(len(uniforms), self.layers, NUMBERS)
        if self.weights:
            # Smallest exponential times: the same as drawing without replacement (Efraimidis and Spirakis, 2006).
            times = -np.log1p(-first.astype(np.float64)) / np.array(self.weights)
            choices = np.argsort(times, axis=1, kind="stable")[:, : self.layers]
        else:
            choices = (first * len(self.operations.names)).astype(np.int64)
        choices = np.where(others[..., 0] < self.probability, choices, -1)
        return choices, self.level.draw(others[..., 2:]), others[..., 1].astype(np.float64)

    def __str__(self) -> str:
        sometimes = f", each with probability {self.probability:g}" if self.probability < 1 else ""
        kinds = f"{'weighted ' if self.weights else ''}operations"
        return (
            f"{self.name} ({self.layers} of {len(self.operations.names)} {kinds}{sometimes}, {self.level}, "
            f"{self.operations})"
        )


@dataclass(frozen=True)
class SubPolicies(Policy):
    """One of several fixed sequences of operations, chosen at random: AutoAugment (Cubuk et al., 2018).

    ``choices``, ``probabilities`` and ``levels``: (sequences, longest); a shorter sequence ends in choices of -1.
    """

    choices: np.ndarray
    probabilities: np.ndarray
    levels: np.ndarray
    level: Level

    def draw(self, samples: Samples, height: int, width: int) -> Numbers:
        """Operations (-1: none), levels and details: (n, longest) each."""
        count, longest = self.choices.shape
        uniforms = samples.uniforms(Stream.POLICY, 1 + longest * NUMBERS)
        sequence = (uniforms[:, 0] * count).astype(np.int64)
        others = uniforms[:, 1:].reshape(len(uniforms), longest, NUMBERS)
        choices = np.where(others[..., 0] < self.probabilities[sequence], self.choices[sequence], -1)
        return choices, self.level.draw(others[..., 2:], self.levels[sequence]), others[..., 1].astype(np.float64)

    def __str__(self) -> str:
        noise = f", magnitudes with std {self.level.std:g}" if self.level.std else ""
        return f"{self.name} (one of {len(self.choices)} sequences{noise}, {self.operations})"


@dataclass(frozen=True)
class AugMix(Policy):
    """Several random chains of operations, mixed with each other and with the image (Hendrycks et al., 2019).

    ``width``: number of chains. ``depth``: operations per chain, -1 for 1 to 3. ``alpha``: parameter of the Dirichlet
    distribution of the chains' weights and the beta distribution of the image's. ``rounds_twice``: the mixture of the
    chains is truncated to whole levels before the image is mixed in, as in timm.
    """

    level: Level
    width: int = 3
    depth: int = -1
    alpha: float = 1.0
    rounds_twice: bool = False

    def draw(self, samples: Samples, height: int, width: int) -> Numbers:
        """Operations (-1: none), levels, details: (n, width, longest) each; weights (image, chains): (n, 1 + width)."""
        from scipy.special import betaincinv  # here, so that only runs that mix pay for the import

        longest = self.depth if self.depth > 0 else 3
        uniforms = samples.uniforms(Stream.POLICY, self.width * (1 + longest * (NUMBERS + 1)))
        uniforms = uniforms.reshape(-1, self.width, 1 + longest * (NUMBERS + 1))
        depth = longest if self.depth > 0 else 1 + (uniforms[..., :1] * longest).astype(np.int64)
        others = uniforms[..., 1:].reshape(*uniforms.shape[:2], longest, NUMBERS + 1)
        choices = (others[..., NUMBERS] * len(self.operations.names)).astype(np.int64)
        choices = np.where(np.arange(longest) < depth, choices, -1)
        mixing = samples.uniforms(Stream.CHAIN, 1 + self.width).astype(np.float64)
        own = betaincinv(self.alpha, self.alpha, mixing[:, :1])
        weights = np.concatenate([own, dirichlet(self.alpha, np.maximum(mixing[:, 1:], 2.0**-25))], axis=1)
        return choices, self.level.draw(others[..., 2:4]), others[..., 1].astype(np.float64), weights

    def apply(self, images: torch.Tensor, *numbers: np.ndarray) -> torch.Tensor:
        choices, levels, details, weights = numbers
        images = whole_levels(images)
        chains = images.repeat_interleave(self.width, dim=0)
        chains = self.operations.apply(chains, *(each.reshape(len(chains), -1) for each in (choices, levels, details)))
        chains = chains.view(len(images), self.width, *images.shape[1:])
        weights = weights.astype(np.float32)
        own = weights[:, 0]
        rest = 1 - weights[:, 0]
        parts = weights[:, 1:] if self.rounds_twice else weights[:, 1:] * rest[:, None]
        mixed = torch.zeros_like(images, dtype=torch.float32) if self.rounds_twice else images * per_image(own, images)
        for number in range(self.width):
            mixed.add_(chains[:, number] * per_image(parts[:, number], images))
        if self.rounds_twice:
            mixed = mixed.clamp_(0, 255).floor_()
            mixed = images + (mixed - images) * per_image(own, images)  # in timm ``own`` is the chains' weight
        return mixed.to(torch.uint8)

    def __str__(self) -> str:
        depth = f"{self.depth}" if self.depth > 0 else "1 to 3"
        return (
            f"{self.name} ({self.width} chains of {depth} of {len(self.operations.names)} operations, {self.level}, "
            f"alpha {self.alpha:g}, {self.operations})"
        )


def dirichlet(alpha: float, uniforms: np.ndarray) -> np.ndarray:
    """Draw from the symmetric Dirichlet distribution: (n, k), each row sums to 1. ``uniforms``: (n, k), above 0.

    Draws are shares of gamma variates. With a small ``alpha`` all variates of a row may be too small for floats; such a
    row is made from their logarithms, by the first term of the incomplete gamma function's series.
    """
    from scipy.special import gammaincinv, gammaln

    parts = gammaincinv(alpha, uniforms)
    small = parts.max(1) < LEAST_GAMMA
    logarithms = (np.log(uniforms[small]) + gammaln(1 + alpha)) / alpha
    parts[small] = np.exp(logarithms - logarithms.max(1, keepdims=True))
    return parts / parts.sum(1, keepdims=True)
