"""Settings of the training loss."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config.field import between, needs, not_empty, not_negative, positive, setting

LOSSES = ("cross-entropy", "bce", "focal")

_BCE = needs("--loss bce", lambda v: v.loss == "bce")


@dataclass(frozen=True)
class LossSettings:
    """What training minimises; validation always measures cross entropy."""

    loss: str = setting(
        "cross-entropy", "training loss; bce: binary cross entropy of each class, focal: less of what is learned well",
        choices=LOSSES,
    )  # fmt: skip
    label_smoothing: float = setting(0.0, "label smoothing", check=between(0, 1, open_high=True))
    bce_target_thresh: float | None = setting(
        None, "bce: targets above this, after mixing and smoothing, become 1 and the others 0, for example 0.2",
        type=float, check=between(0, 1, open_high=True), effect=_BCE,
    )  # fmt: skip
    bce_sum: bool = setting(False, "bce: the sum over classes instead of their mean", effect=_BCE)
    bce_pos_weight: float | None = setting(
        None, "bce: factor of the terms of classes that an image shows", type=float, check=positive, effect=_BCE
    )
    focal_gamma: float = setting(
        2.0, "focal: exponent of the factor (1 - p) of a class with probability p; 0 is cross entropy",
        check=not_negative, effect=needs("--loss focal", lambda v: v.loss == "focal"),
    )  # fmt: skip
    class_weights: str | None = setting(
        None, "weights of the classes: balanced (by how rare they are), or a CSV or YAML file of names and weights",
        type=str, check=not_empty, metavar="{balanced,FILE}",
    )  # fmt: skip
