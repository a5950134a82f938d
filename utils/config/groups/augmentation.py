"""Settings of what training images go through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from utils.config.auto_augment import CHOICES, EXAMPLES, policy_check
from utils.config.field import between, needs, not_negative, setting

ERASE_MODES = ("const", "rand", "pixel")
MIX_MODES = ("pair", "batch")
AUGMENTATIONS = ("shift", "flip", "alternating-flip", "vertical-flip", "resized-crop")

_MIXING = needs("--mixup or --cutmix", lambda v: v.mixup or v.cutmix)
_SHIFT = needs("shift in --augment", lambda v: "shift" in v.augmentation)


_ERASING = needs("--random-erase", lambda v: v.random_erase)


def _jitter_check(values: tuple[float, ...]) -> str | None:
    if len(values) not in (1, 3, 4):
        return "must be one amount, or brightness, contrast and saturation, and for a fourth the hue"
    if len(values) == 4 and values[3] > 0.5:
        return "the hue, the fourth, must be at most 0.5"
    return between(0, 100)(values)


def _jitters(v: Any) -> str | None:
    changes_grey = any((v.color_jitter or ())[:2])  # brightness and contrast
    return None if v.colour or changes_grey else "does nothing: grey images have no saturation and no hue"


def _ends_mixing(v: Any) -> str | None:
    late = v.mixup_off_epoch >= v.epochs
    return _MIXING(v) or (f"does nothing: --epochs {v.epochs} end before" if late else None)


@dataclass(frozen=True)
class AugmentationSettings:
    """What training images go through."""

    augment: tuple[str, ...] | None = setting(
        None,
        "training augmentation, or none [that of the data set]",
        type=str,
        many=True,
        choices=("none", *AUGMENTATIONS),
        metavar="NAME",
        in_evaluation=False,
        synonyms="aug augmentation",
    )
    max_shift: int | None = setting(
        None,
        "largest shift in pixels of the stored image [that of the data set, or an eighth of the image's side]",
        type=int,
        check=between(1, 8192),
        in_evaluation=False,
        effect=_SHIFT,
    )
    crop_min_area: float = setting(
        0.08,
        "least part of an image's area that resized-crop shows",
        check=between(0, 1, open_low=True),
        metavar="PART",
        in_evaluation=False,
        effect=needs("resized-crop in --augment", lambda v: "resized-crop" in v.augmentation),
    )
    shift_padding: str = setting(
        "zero", "padding that a shift uncovers", choices=("zero", "reflect"), in_evaluation=False, effect=_SHIFT
    )
    auto_augment: str | None = setting(
        None,
        f"augmentation policy: {', '.join(CHOICES)}; timm's with options, such as {EXAMPLES}; or none",
        type=str,
        check=policy_check,
        metavar="POLICY",
        in_evaluation=False,
        synonyms="aa autoaugment",
    )
    rotation: float = setting(
        0.0,
        "rotate by a random angle of at most this many degrees",
        check=between(0, 180),
        metavar="DEGREES",
        in_evaluation=False,
    )
    color_jitter: tuple[float, ...] | None = setting(
        None,
        "change brightness, contrast, saturation and hue at random by up to these amounts; one number for the "
        "first three",
        type=float,
        many=True,
        check=_jitter_check,
        metavar="AMOUNT",
        in_evaluation=False,
        effect=_jitters,
    )
    color_jitter_prob: float = setting(
        1.0,
        "probability of --color-jitter",
        check=between(0, 1, open_low=True),
        in_evaluation=False,
        effect=needs("--color-jitter", lambda v: v.color_jitter),
    )
    grayscale_prob: float = setting(
        0.0,
        "probability that an image becomes grey",
        check=between(0, 1),
        in_evaluation=False,
        effect=needs("colour images", lambda v: v.colour),
    )
    gaussian_blur_prob: float = setting(
        0.0, "probability that an image is blurred, by 0.1 to 2 pixels", check=between(0, 1), in_evaluation=False
    )
    random_erase: float = setting(
        0.0,
        "probability that boxes of an image are erased",
        check=between(0, 1),
        metavar="PROB",
        in_evaluation=False,
        synonyms="reprob random-erasing erasing",
    )
    random_erase_mode: str = setting(
        "const",
        "erase with the mean (const), a random colour (rand) or noise (pixel)",
        choices=ERASE_MODES,
        in_evaluation=False,
        effect=_ERASING,
        synonyms="remode",
    )
    random_erase_count: int = setting(
        1,
        "erase from 1 to this many boxes",
        check=between(1, 16),
        in_evaluation=False,
        effect=_ERASING,
        synonyms="recount",
    )
    cutout: int = setting(
        0, "side in pixels of the square that cutout blanks in each image", check=between(0, 8192), in_evaluation=False
    )
    mixup: float = setting(
        0.0,
        "mixup: blend pairs of images; alpha of the beta distribution, for example 0.2",
        check=not_negative,
        in_evaluation=False,
        synonyms="mixup-alpha",
    )
    cutmix: float = setting(
        0.0,
        "CutMix: paste a box of one image into another; alpha of the beta distribution, for example 1",
        check=not_negative,
        in_evaluation=False,
        synonyms="cutmix-alpha",
    )
    mixup_mode: str = setting(
        "pair",
        "draw how images are mixed for each pair, or once for all images of a step (batch)",
        choices=MIX_MODES,
        in_evaluation=False,
        effect=_MIXING,
    )
    mixup_prob: float = setting(
        1.0,
        "probability that a pair, or a step, is mixed",
        check=between(0, 1, open_low=True),
        in_evaluation=False,
        effect=_MIXING,
    )
    mixup_switch_prob: float = setting(
        0.5,
        "with both mixup and CutMix: probability that it is CutMix",
        check=between(0, 1),
        in_evaluation=False,
        effect=needs("both --mixup and --cutmix", lambda v: v.mixup and v.cutmix),
    )
    mixup_off_epoch: int = setting(
        0,
        "train this many epochs with mixup and CutMix, the rest without; 0: all of them",
        check=between(0, 10**6),
        metavar="N",
        in_evaluation=False,
        effect=_ends_mixing,
    )
    repeated_augmentation: int = setting(
        1,
        "repeated augmentation: an epoch is as long, but shows fewer images, each this many times, augmented "
        "differently",
        check=between(1, 64),
        metavar="N",
        in_evaluation=False,
        synonyms="aug-repeats ra-reps repeated-aug",
    )

    def mixes(self, epoch: int) -> bool:
        """Whether images are mixed in ``epoch``, counted from 0."""
        return (self.mixup > 0 or self.cutmix > 0) and (not self.mixup_off_epoch or epoch < self.mixup_off_epoch)
