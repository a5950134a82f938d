"""Training losses: ``CRITERIA`` holds one for each choice of ``--loss``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from utils.config.groups.loss import LossSettings


class BinaryCrossEntropy(nn.Module):
    """Binary cross entropy of each class on its own, the mean over images and classes.

    Wightman et al., ResNet strikes back, 2021. timm's ``BinaryCrossEntropy`` with its defaults, except that mixed
    targets are smoothed too, as by cross entropy.
    """

    def __init__(self, label_smoothing: float) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        classes, dtype = logits.shape[1], torch.promote_types(logits.dtype, torch.float32)
        if not targets.is_floating_point():
            targets = functional.one_hot(targets, classes)
        targets = targets.to(dtype) * (1 - self.label_smoothing) + self.label_smoothing / classes
        return functional.binary_cross_entropy_with_logits(logits.to(dtype), targets)


# A name here stands in LOSSES of utils/config/groups/loss.py too, which must not import torch.
CRITERIA: dict[str, Callable[[LossSettings], nn.Module]] = {
    "cross-entropy": lambda settings: nn.CrossEntropyLoss(label_smoothing=settings.label_smoothing),
    "bce": lambda settings: BinaryCrossEntropy(settings.label_smoothing),
}


def build_criterion(settings: LossSettings) -> nn.Module:
    """The training loss that ``settings`` name, with label smoothing (Szegedy et al., Rethinking Inception, 2015).

    Takes logits (n, classes) and targets, int64 (n,) or the shares of mixed images (n, classes); gives the mean over n,
    a tensor (). Validation always measures cross entropy without smoothing, so that runs with other losses compare.
    """
    return CRITERIA[settings.loss](settings)
