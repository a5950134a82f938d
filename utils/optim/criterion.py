"""Losses by name."""

from __future__ import annotations

from torch import nn

from utils.config.settings import OptimisationSettings


def build_criterion(settings: OptimisationSettings) -> nn.Module:
    """Cross entropy with label smoothing (Szegedy et al., Rethinking the Inception architecture, 2015).

    Takes logits (n, classes) and int64 targets (n,), gives the mean over n. Validation always
    measures without smoothing, so that runs with different smoothing compare.
    """
    return nn.CrossEntropyLoss(label_smoothing=settings.label_smoothing)
