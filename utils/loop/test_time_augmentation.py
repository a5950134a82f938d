"""Test-time augmentation: validation by the mean logits of several views of each image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from utils.optim.head import SeenFeatures
from utils.runtime.sharding import is_sharded

MOST_NUMBERS = 2**24  # of the images in a pass of several views: over 5,000 of 32 pixels, about 100 of 224
# Weights of an image moved down and right by (y, x) pixels, by choice of --tta. Each is seen with its mirror image.
WEIGHTS = {"flip": {(0, 0): 1.0}, "flip-shift": {(0, 0): 0.5, (1, 1): 0.25, (-1, -1): 0.25}}
AROUND = [(y, x) for y in range(-2, 3) for x in range(-2, 3) if y * y + x * x <= 4]


class MeanOfViews(nn.Module):
    """Wrapper of ``model`` that returns the mean logits of several views of each image, in float32.

    'flip': the image and its mirror image. 'flip-shift': these two, and the same two of the image moved by one pixel to
    the top left and to the bottom right, with the edge mirrored; the unmoved two have half of the total weight. Views
    and weights are those of airbench (Jordan, 94 % on CIFAR-10 in 3.29 seconds, 2024), which also averages logits, not
    probabilities. 'flip-shift-doubt': the same, unless the three positions, each with its mirror image, disagree on the
    class; then the plain mean of 26 views: the image and all moves of it by up to two pixels, each with its mirror
    image. A temperature does not change which images these are.
    """

    def __init__(self, model: nn.Module, tta: str) -> None:
        super().__init__()
        self.model = model
        self.weights = WEIGHTS[tta.removesuffix("-doubt")]
        self.doubts = tta.endswith("-doubt")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes) of images (n, c, h, w)."""
        halves = [0.5 * weight for weight in self.weights.values()]
        sums = self._sums(images, list(self.weights))
        logits = halves[0] * sums[0]
        for half, one in zip(halves[1:], sums[1:], strict=True):
            logits = logits.add(one, alpha=half)
        if not self.doubts:
            return logits
        answers = torch.stack(sums).argmax(2)
        places = (answers != answers[0]).any(0).nonzero().flatten()
        # One at least, if only for a sharded model: all ranks take part in each of its passes.
        seen = places if len(places) else places.new_zeros(1)
        if getattr(self.model, "_compiled_call_impl", None):  # for each number of images: so there are few numbers
            seen = functional.pad(seen, (0, min(len(images), 1 << (len(seen) - 1).bit_length()) - len(seen)))
        with SeenFeatures.paused():
            further = 0.5 * torch.stack(self._sums(images[seen], AROUND)).mean(0)
        return logits.index_copy(0, places, further[: len(places)])

    def _sums(self, images: torch.Tensor, moves: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Logits of the images moved by each of ``moves``, each plus those of the mirror images."""
        height, width = images.shape[-2:]
        reach = max(map(max, moves))
        mode = "reflect" if min(height, width) > reach else "replicate"  # a single pixel is its own mirror image
        padded = functional.pad(images, (reach,) * 4, mode=mode) if reach else images
        corners = [(reach - y, reach - x) for y, x in moves]
        shown = [padded[..., top : top + height, left : left + width] for top, left in corners]
        logits = self._logits([view for one in shown for view in (one, one.flip(-1))])
        return [own + mirrored for own, mirrored in zip(logits[::2], logits[1::2], strict=True)]

    def _logits(self, views: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        # Batches, and images in doubt, differ in number between ranks: a sharded model's passes must not.
        if views_fit_together(views) and not is_sharded(self.model):
            return self.model(torch.cat(views)).float().chunk(len(views))
        return [self.model(view).float() for view in views]


def views_fit_together(views: list[torch.Tensor]) -> bool:
    """True if one pass takes all views: small images on a GPU, where launching takes longer than computing."""
    return views[0].device.type != "cpu" and len(views) * views[0].numel() <= MOST_NUMBERS


def in_views(model: nn.Module, tta: str) -> nn.Module:
    """Wrap ``model`` for validation with ``--tta``; return it unchanged if ``tta`` is 'none'."""
    return model if tta == "none" else MeanOfViews(model, tta)
