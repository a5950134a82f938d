"""Test-time augmentation: validation by the mean logits of several views of each image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

MOST_NUMBERS = 2**24  # of the images in a pass of several views: over 5,000 of 32 pixels, about 100 of 224


class MeanOfViews(nn.Module):
    """Wrapper of ``model`` that returns the mean logits of several views of each image, in float32.

    'flip': the image and its mirror image. 'flip-shift': these two, and the same two of the image moved by one pixel to
    the top left and to the bottom right, with the edge mirrored; the unmoved two have half of the total weight. Views
    and weights are those of airbench (Jordan, 94 % on CIFAR-10 in 3.29 seconds, 2024), which also averages logits, not
    probabilities.
    """

    def __init__(self, model: nn.Module, tta: str) -> None:
        super().__init__()
        self.model = model
        self.moved = tta == "flip-shift"

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes) of images (n, c, h, w)."""
        shown = [images]
        if self.moved:
            height, width = images.shape[-2:]
            mode = "reflect" if min(height, width) > 1 else "replicate"  # a single pixel is its own mirror image
            padded = functional.pad(images, (1, 1, 1, 1), mode=mode)
            shown += [padded[..., first : first + height, first : first + width] for first in (0, 2)]
        logits = self._logits([view for one in shown for view in (one, one.flip(-1))])
        means = [0.5 * (own + mirrored) for own, mirrored in zip(logits[::2], logits[1::2], strict=True)]
        if not self.moved:
            return means[0]
        return 0.5 * (means[0] + 0.5 * means[1] + 0.5 * means[2])

    def _logits(self, views: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if views_fit_together(views):
            return self.model(torch.cat(views)).float().chunk(len(views))
        return [self.model(view).float() for view in views]


def views_fit_together(views: list[torch.Tensor]) -> bool:
    """True if one pass takes all views: small images on a GPU, where launching takes longer than computing."""
    return views[0].device.type != "cpu" and len(views) * views[0].numel() <= MOST_NUMBERS


def in_views(model: nn.Module, tta: str) -> nn.Module:
    """Wrap ``model`` for validation with ``--tta``; return it unchanged if ``tta`` is 'none'."""
    return model if tta == "none" else MeanOfViews(model, tta)
