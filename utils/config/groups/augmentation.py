"""Settings of what training images go through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from utils.config.auto_augment import CHOICES, EXAMPLES, policy_check
from utils.config.field import between, needs, not_negative, setting

AUGMENTATIONS = ("shift", "flip", "alternating-flip", "resized-crop")

_MIXING = needs("--mixup or --cutmix", lambda v: v.mixup or v.cutmix)
_SHIFT = needs("shift in --augment", lambda v: "shift" in v.augmentation)


def _ends_mixing(v: Any) -> str | None:
    late = v.mixup_off_epoch >= v.epochs
    return _MIXING(v) or (f"does nothing: --epochs {v.epochs} end before" if late else None)


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
    auto_augment: str | None = setting(
        None, f"augmentation policy: {', '.join(CHOICES)}; timm's with options, such as {EXAMPLES}; or none", type=str,
        check=policy_check, metavar="POLICY", in_evaluation=False,
    )  # fmt: skip
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
    mixup_prob: float = setting(
        1.0, "probability that a pair is mixed", check=between(0, 1, open_low=True), in_evaluation=False,
        effect=_MIXING,
    )  # fmt: skip
    mixup_switch_prob: float = setting(
        0.5, "with both mixup and CutMix: probability that a pair's is CutMix", check=between(0, 1),
        in_evaluation=False, effect=needs("both --mixup and --cutmix", lambda v: v.mixup and v.cutmix),
    )  # fmt: skip
    mixup_off_epoch: int = setting(
        0, "train this many epochs with mixup and CutMix, the rest without; 0: all with", check=between(0, 10**6),
        metavar="N", in_evaluation=False, effect=_ends_mixing,
    )  # fmt: skip
    repeated_augmentation: int = setting(
        1, "repeated augmentation: an epoch of as many images shows fewer, each this many times, augmented differently",
        check=between(1, 64), metavar="N", in_evaluation=False,
    )  # fmt: skip

    def mixes(self, epoch: int) -> bool:
        """Whether images are mixed in ``epoch``, counted from 0."""
        return (self.mixup > 0 or self.cutmix > 0) and (not self.mixup_off_epoch or epoch < self.mixup_off_epoch)
