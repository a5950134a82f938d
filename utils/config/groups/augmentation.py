"""Settings of the augmentation of training images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from utils.config.auto_augment import CHOICES, EXAMPLES, policy_check
from utils.config.field import Needs, between, ends_before, group, setting

MIX_MODES = ("pair", "batch")
AUGMENTATIONS = ("shift", "flip", "alternating-flip", "vertical-flip", "resized-crop")

mixing_setting = partial(setting, shapes="loss")

_MIXING = Needs("--mixup or --cutmix")
_SHIFT = Needs("shift in --augment", lambda v: "shift" in v.augmentation)
_ERASING = Needs("--random-erase")


def _jitter_check(values: tuple[float, ...]) -> str | None:
    if len(values) not in (1, 3, 4):
        return "must be one amount, or brightness, contrast and saturation, and for a fourth the hue"
    if len(values) == 4 and values[3] > 0.5:
        return "the hue, the fourth, must be at most 0.5"
    return between(0, 100)(values)


def _jitters(v: Any) -> str | None:
    changes_grey = any((v.color_jitter or ())[:2])  # brightness and contrast
    return None if v.colour or changes_grey else "does nothing: grey images have no saturation and no hue"


@group(in_evaluation=False)
@dataclass(frozen=True)
class AugmentationSettings:
    """Augmentation of training images."""

    augment: tuple[str, ...] | None = setting(
        "training augmentation, or none [that of the data set]",
        choices=("none", *AUGMENTATIONS),
        metavar="NAME",
        synonyms="aug augmentation",
        example="none",
    )
    max_shift: int | None = setting(
        "largest shift in pixels of the stored image [that of the data set, or an eighth of the image's side]",
        check=between(1, 8192),
        effect=_SHIFT,
        example="2",
    )
    crop_min_area: float = setting(
        "least part of an image's area that resized-crop shows",
        default=0.08,
        check=between(0, 1, open_low=True),
        metavar="PART",
        effect=Needs("resized-crop in --augment", lambda v: "resized-crop" in v.augmentation),
        example="0.35",
        within="--augment resized-crop",
    )
    shift_padding: str = setting(
        "padding that the shift of --augment uncovers", default="zero", choices=("zero", "reflect"), effect=_SHIFT
    )
    auto_augment: str | None = setting(
        f"augmentation policy: {', '.join(CHOICES)}; timm's with options, such as {EXAMPLES}; or none",
        check=policy_check,
        metavar="POLICY",
        synonyms="aa autoaugment",
        example="ra",
    )
    rotation: float = setting(
        "rotate by a random angle of at most this many degrees, for example 15",
        default=0.0,
        check=between(0, 180),
        metavar="DEGREES",
    )
    color_jitter: tuple[float, ...] | None = setting(
        "change brightness, contrast, saturation and hue at random by up to these amounts; one number for the first "
        "three",
        check=_jitter_check,
        metavar="AMOUNT",
        effect=_jitters,
        example="0.4",
    )
    color_jitter_prob: float = setting(
        "probability of --color-jitter", default=1.0, check=between(0, 1, open_low=True), effect=Needs("--color-jitter")
    )
    grayscale_prob: float = setting(
        "probability that an image becomes grey",
        default=0.0,
        check=between(0, 1),
        effect=Needs("colour images", lambda v: v.colour),
        within="--dataname synthetic --image-size 8",
    )
    gaussian_blur_prob: float = setting(
        "probability that an image is blurred, by 0.1 to 2 pixels", default=0.0, check=between(0, 1)
    )
    random_erase: float = setting(
        "probability that boxes of an image are erased",
        default=0.0,
        check=between(0, 1),
        metavar="PROB",
        synonyms="reprob random-erasing erasing",
    )
    random_erase_mode: str = setting(
        "erase with the mean (const), a random colour (rand) or noise (pixel)",
        default="const",
        choices=("const", "rand", "pixel"),
        effect=_ERASING,
        synonyms="remode",
    )
    random_erase_count: int = setting(
        "erase from 1 to this many boxes", default=1, check=between(1, 16), effect=_ERASING, synonyms="recount"
    )
    cutout: int = setting(
        "side in pixels of the square that cutout blanks in each image", default=0, check=between(0, 8192)
    )
    mixup: float = mixing_setting(
        "mixup: blend pairs of images; alpha of the beta distribution, for example 0.2",
        default=0.0,
        synonyms="mixup-alpha",
    )
    cutmix: float = mixing_setting(
        "CutMix: paste a box of one image into another; alpha of the beta distribution, for example 1",
        default=0.0,
        synonyms="cutmix-alpha",
    )
    mixup_mode: str = mixing_setting(
        "draw how images are mixed for each pair, or once for all images of a step (batch)",
        default="pair",
        choices=MIX_MODES,
        effect=_MIXING,
    )
    mixup_prob: float = mixing_setting(
        "probability that --mixup or --cutmix mixes a pair, or a step",
        default=1.0,
        check=between(0, 1, open_low=True),
        effect=_MIXING,
    )
    mixup_switch_prob: float = mixing_setting(
        "with both --mixup and --cutmix: probability of --cutmix",
        default=0.5,
        check=between(0, 1),
        effect=Needs("both --mixup and --cutmix"),
    )
    mixup_off_epoch: int = mixing_setting(
        "train this many epochs with mixup and CutMix, the rest without; 0: all of them",
        default=0,
        check=between(0, 10**6),
        effect=(_MIXING, ends_before("mixup_off_epoch")),
        example="15",
    )
    repeated_augmentation: int = setting(
        "repeated augmentation: an epoch is as long, but shows fewer images, each this many times, augmented "
        "differently",
        default=1,
        check=between(1, 64),
        synonyms="aug-repeats ra-reps repeated-aug",
        shapes="samples",
    )

    def mixes(self, epoch: int) -> bool:
        """True if images are mixed in ``epoch``, counted from 0."""
        return (self.mixup > 0 or self.cutmix > 0) and (not self.mixup_off_epoch or epoch < self.mixup_off_epoch)

    @staticmethod
    def contradictions(v: Any) -> Iterator[str]:
        names = v.augment or ()
        if v.has("none" in names and len(names) > 1):
            yield "--augment none contradicts the other names after --augment"
        if v.has({"flip", "alternating-flip"} <= set(names)):
            yield "--augment flip and alternating-flip are two ways to flip; give one"
