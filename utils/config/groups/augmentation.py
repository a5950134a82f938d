"""Settings of what training images go through."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config.field import between, needs, not_negative, setting

AUGMENTATIONS = ("shift", "flip", "alternating-flip", "resized-crop")

_SHIFT = needs("shift in --augment", lambda v: "shift" in v.augmentation)


@dataclass(frozen=True)
class AugmentationSettings:
    """What training images go through."""

    augment: tuple[str, ...] | None = setting(
        None, "training augmentation, or none [that of the data set]", type=str, many=True,
        choices=("none", *AUGMENTATIONS), metavar="NAME", in_evaluation=False,
    )  # fmt: skip
    max_shift: int | None = setting(
        None, "largest shift in pixels of the stored image [that of the data set]", type=int, check=between(1, 8192),
        in_evaluation=False, effect=_SHIFT,
    )  # fmt: skip
    shift_padding: str = setting(
        "zero", "padding that a shift uncovers", choices=("zero", "reflect"), in_evaluation=False, effect=_SHIFT
    )
    cutout: int = setting(
        0, "side in pixels of the square that cutout blanks in each image", check=between(0, 8192), in_evaluation=False
    )
    mixup: float = setting(
        0.0, "mixup: blend pairs of images; alpha of the beta distribution, for example 0.2", check=not_negative,
        in_evaluation=False,
    )  # fmt: skip
    cutmix: float = setting(
        0.0,
        "CutMix: paste a box of one image into another; alpha of the beta distribution, for example 1",
        check=not_negative,
        in_evaluation=False,
    )
