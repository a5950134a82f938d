"""Mixup and CutMix: each image of a batch takes something of its neighbour, and so does its label."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from utils.data.sample_plan import Share, share_key

MIX_STREAM = 5


@dataclass(frozen=True)
class Mixing:
    """Mixup (Zhang et al., 2017) and CutMix (Yun et al., 2019); with both, each has half of the batches.

    The alphas are those of the beta distribution that the images' shares are drawn from, 0 for never. One share
    for a batch, as in both papers' code; the randomness belongs to (seed, epoch, first sample of the batch).
    """

    mixup: float
    cutmix: float
    classes: int
    seed: int

    def __call__(self, images: torch.Tensor, targets: torch.Tensor, share: Share) -> torch.Tensor:
        """Mix ``images`` (m, c, h, w) of ``targets`` int64 (n,), n <= m, in place; gives mixed targets (n, classes)."""
        generator = np.random.Generator(np.random.Philox(key=share_key(self.seed, share, MIX_STREAM)))
        by_box = self.cutmix > 0 and (self.mixup == 0 or generator.random() < 0.5)
        alpha = self.cutmix if by_box else self.mixup
        kept = float(generator.beta(alpha, alpha))
        count = len(targets)
        neighbours = images[:count].roll(1, 0)
        if by_box:
            top, bottom, left, right = box(*images.shape[-2:], kept, generator)
            images[:count, :, top:bottom, left:right] = neighbours[:, :, top:bottom, left:right]
            kept = 1 - (bottom - top) * (right - left) / (images.shape[-2] * images.shape[-1])
        else:
            images[:count].mul_(kept).add_(neighbours, alpha=1 - kept)
        own, other = (functional.one_hot(labels, self.classes).float() for labels in (targets, targets.roll(1, 0)))
        return own.mul_(kept).add_(other, alpha=1 - kept)


def box(height: int, width: int, kept: float, generator: np.random.Generator) -> tuple[int, int, int, int]:
    """Top, bottom, left and right of CutMix's box: ``1 - kept`` of the area, less where it would leave the image."""
    box_height, box_width = int(height * (1 - kept) ** 0.5), int(width * (1 - kept) ** 0.5)
    row, column = int(generator.integers(height)), int(generator.integers(width))
    top, left = row - box_height // 2, column - box_width // 2
    return max(0, top), min(height, top + box_height), max(0, left), min(width, left + box_width)
