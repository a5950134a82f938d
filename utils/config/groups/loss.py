"""Settings of the training loss."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config.field import between, setting

LOSSES = ("cross-entropy", "bce")


@dataclass(frozen=True)
class LossSettings:
    """What training minimises; validation always measures cross entropy."""

    loss: str = setting("cross-entropy", "training loss; bce: binary cross entropy of each class", choices=LOSSES)
    label_smoothing: float = setting(0.0, "label smoothing", check=between(0, 1, open_high=True))
