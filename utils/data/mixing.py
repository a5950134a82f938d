"""Mixup and CutMix within pairs of neighbours in the global batch: pure functions of (seed, epoch, sample or step)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from utils.config.groups.augmentation import AugmentationSettings
from utils.config.spelling import counted
from utils.data.augment.base import Stream
from utils.data.augmentations import inside, take
from utils.data.sample_plan import MicroBatch, sample_uniforms
from utils.data.sources import keys_of
from utils.runtime.devices import to_device

MIX_NUMBERS = 5  # random numbers per pair or step: share, mixup or CutMix, box's row and column, whether to mix at all


@dataclass(frozen=True)
class Blend:
    """The mixture of each of n images with another one.

    ``partner``: int64 (n,), the image that each is mixed with, itself if none. ``opacity``: float64 (n,), the weight of
    the own pixels outside the box. ``box``: int64 (n, 4), top, bottom, left and right in pixels (ends exclusive) of the
    box pasted from the partner, which may be empty. ``kept``: float64 (n,), the weight of the own label.
    """

    partner: np.ndarray
    opacity: np.ndarray
    box: np.ndarray
    kept: np.ndarray


@dataclass(frozen=True)
class Mixing:
    """Mixup (Zhang et al., 2017) and CutMix (Yun et al., 2019); with both, a random draw chooses between them.

    ``settings.mixup`` and ``settings.cutmix`` are the alphas of the beta distributions of the mixing share; 0 switches
    one off. Neighbouring images of a step form pairs, and the two images of a pair are mixed with each other, with the
    same share and box; if a step has an odd number of images, the last three are mixed in a circle. (The papers' code
    mixes with a permutation of the batch.) Each epoch is in random order, so every other image of it is equally likely
    to be the partner: share, box and partner are distributed as in the papers. The result does not depend on the number
    of ranks or on gradient accumulation, provided that pairs stay together in a micro-batch (``SamplePlan.pairs``).

    Mode 'pair' draws for each pair, so the batch size does not matter either; mode 'batch' draws once for all images of
    a step, on all ranks. Names and meaning are those of timm's ``Mixup``, whose mode 'batch' draws on each rank.
    """

    settings: AugmentationSettings
    classes: int
    seed: int

    def __str__(self) -> str:
        settings = self.settings
        kinds = {"mixup": settings.mixup, "cutmix": settings.cutmix}
        words = [", ".join(f"{name} alpha {alpha:g}" for name, alpha in kinds.items() if alpha)]
        by_step = settings.mixup_mode == "batch"
        words += ["drawn once a step"] if by_step else []
        if all(kinds.values()):
            words.append(f"CutMix with probability {settings.mixup_switch_prob:g}, otherwise mixup")
        if settings.mixup_prob < 1:
            words.append(f"{100 * settings.mixup_prob:g} % of the {'steps' if by_step else 'pairs'}")
        if settings.mixup_off_epoch:
            words.append(f"off after {counted(settings.mixup_off_epoch, 'epoch')}")
        return "; ".join(words)

    def __call__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        micro_batches: Sequence[MicroBatch],
        image_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Mix in place ``images`` (n, c, h, w), those of one epoch's ``micro_batches``, concatenated.

        ``labels``: int64 (n,), or float32 (n, classes) with NaN for missing ones; a mixture's label is missing if
        either image's is. Returns the images, their targets, float32 (n, classes), and their weights: both images'
        ``image_weights``, float32 (n,), averaged by the shares of their labels, or None.
        """
        blend = self.draw(micro_batches, *images.shape[-2:])
        places = to_device(torch.from_numpy(np.column_stack([blend.partner, blend.box])), images.device)
        weights = np.column_stack([blend.opacity, blend.kept]).astype(np.float32)
        opacity, kept = to_device(torch.from_numpy(weights), images.device).split(1, dim=1)
        partner, top, bottom, left, right = places.unbind(1)
        opacity = opacity[:, :, None, None]
        if self.settings.cutmix:
            rows = inside(top, bottom, images.shape[2])[:, None, :, None].float()
            columns = inside(left, right, images.shape[3])[:, None, None, :].float()
            opacity = opacity * (1 - rows * columns)
        # Operations that round the same for any number of images (lerp may not), and are exact for 0 and 1.
        others = take(images, partner)
        images.mul_(opacity).add_(others.mul_(1 - opacity))
        if labels.ndim > 1:  # an image with a share of 0 must not pass on missing labels: 0 times NaN is NaN
            own, other = labels.where(kept > 0, 0.0), labels[partner].where(kept < 1, 0.0)
        else:
            own, other = (functional.one_hot(of, self.classes).float() for of in (labels, labels[partner]))
        if image_weights is not None:
            image_weights = image_weights * kept[:, 0] + image_weights[partner] * (1 - kept[:, 0])
        return images, own.mul_(kept).add_(other.mul_(1 - kept)), image_weights

    def draw(self, micro_batches: Sequence[MicroBatch], height: int, width: int) -> Blend:
        """Draw how to mix the images of ``micro_batches``, which have ``height`` x ``width`` pixels."""
        from scipy.special import betaincinv  # here, so that only runs that mix pay for the import

        partner, first = _places(micro_batches)
        settings = self.settings
        if settings.mixup_mode == "batch":
            sizes = [len(one.indices) for one in micro_batches]
            keys, group = np.unique(np.repeat([one.step for one in micro_batches], sizes), return_inverse=True)
        else:
            leaders, group = np.unique(first, return_inverse=True)
            keys = keys_of(micro_batches)[leaders]
        epoch = micro_batches[0].epoch
        uniforms = sample_uniforms(self.seed, epoch, keys, Stream.MIX, MIX_NUMBERS).astype(np.float64)
        both = settings.mixup and settings.cutmix
        by_box = uniforms[:, 1] < settings.mixup_switch_prob if both else np.full(len(keys), settings.cutmix > 0)
        alpha = np.where(by_box, settings.cutmix, settings.mixup)
        drawn = betaincinv(alpha, alpha, uniforms[:, 0])  # the quantile of a uniform number
        drawn = np.where(uniforms[:, 4] < settings.mixup_prob, drawn, 1.0)[group]
        by_box = by_box[group]
        alone = partner == np.arange(len(partner))
        drawn[alone] = 1.0
        box = boxes(height, width, np.where(by_box, drawn, 1.0), uniforms[group, 2:4])
        pasted = (box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2]) / (height * width)
        return Blend(partner, np.where(by_box, 1.0, drawn), box, np.where(by_box, 1 - pasted, drawn))


def boxes(height: int, width: int, kept: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """CutMix's boxes: int64 (n, 4), top, bottom, left and right, the ends exclusive.

    Each box has the image's aspect ratio and ``1 - kept`` (n,) of its area, less if clipped at an edge. ``uniforms``
    (n, 2) choose any pixel as the centre. As in the paper's code, half sides are rounded down.
    """
    sides = np.array([height, width])
    halves = (sides * np.sqrt(1 - kept)[:, None]).astype(np.int64) // 2
    centres = (sides * uniforms).astype(np.int64)
    low = np.maximum(centres - halves, 0)
    high = np.minimum(centres + halves, sides)
    return np.column_stack([low[:, 0], high[:, 0], low[:, 1], high[:, 1]])


def _places(micro_batches: Sequence[MicroBatch]) -> tuple[np.ndarray, np.ndarray]:
    """Partner of each image of ``micro_batches``, and the first image of its pair: int64 (n,) each.

    In a micro-batch, padding images are their own partners, and so is an image that is alone.
    """
    partners = []
    firsts = []
    begin = 0
    for micro_batch in micro_batches:
        own = np.arange(len(micro_batch.indices))
        partner = own ^ 1
        first = own & ~1
        if micro_batch.count % 2:
            last = max(0, micro_batch.count - 3)
            partner[last : micro_batch.count] = np.roll(own[last : micro_batch.count], -1)
            first[last : micro_batch.count] = last
        partner[micro_batch.count :] = first[micro_batch.count :] = own[micro_batch.count :]
        partners.append(begin + partner)
        firsts.append(begin + first)
        begin += len(own)
    return np.concatenate(partners), np.concatenate(firsts)
