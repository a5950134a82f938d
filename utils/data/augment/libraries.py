"""The augmentation policies of torchvision and timm, built from those libraries' own tables.

timm's strings mean what its train.py makes of them, with two differences: operations work on tensors as torchvision's
do, and shears, translations and rotations are always bilinear (timm chooses bilinear or bicubic at random).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from utils.config.auto_augment import TORCHVISION, PolicyName, read_policy
from utils.data.augment.base import Augmentation
from utils.data.augment.operations import Canvas
from utils.data.augment.policies import Arguments, AugMix, Level, Operations, RandomOperations, SubPolicies

# torchvision's numbers of magnitudes
BINS = 31
AUTO_AUGMENT_BINS = 10
AUGMIX_BINS = 10
# torchvision's defaults
RA_BIN = 9
AUGMIX_SEVERITY = 3
TIMM_LEVELS = 10.0  # magnitude 10 is the full range of timm's arguments
# timm's full range, as a fraction of the image's side
TRANSLATION = 0.45
AUGMIX_TRANSLATION = 0.3
BLUR_SIGMA = (0.1, 2.0)  # pixels
_MOVING = ("Brightness", "Color", "Contrast", "Sharpness")  # torchvision's magnitude is their distance from 1


def build_policy(text: str, mean: Sequence[float]) -> Augmentation:
    """Build the policy named ``text``. ``mean``: per channel, 0 to 1; timm's policies fill with it outside an image."""
    policy = read_policy(text)
    if policy.library == TORCHVISION:
        return _torchvision_policy(policy.name, len(mean))
    canvas = Canvas("bilinear", tuple(min(255, max(0, round(255 * level))) for level in mean))
    build = {"rand": _timm_rand, "augmix": _timm_augmix}.get(policy.name, _timm_sequences)
    return build(text, policy, canvas)


# -------------------------------------------------------------------------------------- torchvision


def _torchvision_policy(name: str, channels: int) -> Augmentation:
    from torchvision.transforms import v2

    if name == "ra":
        table = _torchvision_operations(v2.RandAugment._AUGMENTATION_SPACE, channels, BINS)
        return RandomOperations("RandAugment", table, 2, Level(RA_BIN))
    if name == "ta_wide":
        table = _torchvision_operations(v2.TrivialAugmentWide._AUGMENTATION_SPACE, channels, BINS)
        return RandomOperations("TrivialAugment-wide", table, 1, Level(bins=BINS))
    if name == "augmix":
        table = _torchvision_operations(v2.AugMix._AUGMENTATION_SPACE, channels, AUGMIX_BINS, Canvas("bilinear"))
        return AugMix("AugMix", table, Level(bins=AUGMIX_SEVERITY))
    table = _torchvision_operations(v2.AutoAugment._AUGMENTATION_SPACE, channels, AUTO_AUGMENT_BINS)
    return _sub_policies(f"AutoAugment {name}", table, v2.AutoAugment(v2.AutoAugmentPolicy(name))._policies, Level())


def _torchvision_operations(
    space: dict[str, Any], channels: int, bins: int, canvas: Canvas | None = None
) -> Operations:
    """Turn torchvision's augmentation ``space``, with ``bins`` magnitudes per operation, into ``Operations``."""
    arguments = [partial(_torchvision_arguments, name, *entry, bins) for name, entry in space.items()]
    return Operations(tuple(space), tuple(arguments), canvas or Canvas(), channels)


def _torchvision_arguments(
    name: str, magnitudes: Any, signed: bool, bins: int, levels: np.ndarray, details: np.ndarray, *size: int
) -> np.ndarray:
    table = magnitudes(bins, *size)
    if table is None:
        return np.zeros(len(levels))
    values = table.numpy().astype(np.float64)[levels.astype(np.int64)]
    if signed:
        values = _signed(values, details)
    if name in _MOVING:
        return 1.0 + values
    if name in ("TranslateX", "TranslateY"):
        return np.trunc(values)
    return 255.0 * values if name == "Solarize" else values


def _sub_policies(
    name: str, operations: Operations, sequences: Sequence[Any], level: Level, names: Sequence[str] = ()
) -> SubPolicies:
    """Build ``SubPolicies`` from ``sequences`` of (operation, probability, level or None).

    ``names``: what ``sequences`` call the ``operations``, in their order, if not by ``operations.names``.
    """
    places = {called: place for place, called in enumerate(names or operations.names)}
    choices = np.full((len(sequences), max(map(len, sequences))), -1)
    probabilities = np.zeros(choices.shape)
    levels = np.zeros(choices.shape)
    for row, sequence in enumerate(sequences):
        for column, (operation, probability, magnitude) in enumerate(sequence):
            choices[row, column] = places[operation]
            probabilities[row, column] = probability
            levels[row, column] = magnitude or 0
    return SubPolicies(name, operations, choices, probabilities, levels, level)


# --------------------------------------------------------------------------------------------- timm


def _timm_rand(text: str, policy: PolicyName, canvas: Canvas) -> RandomOperations:
    from timm.data.auto_augment import rand_augment_choices

    options = policy.options
    choices = rand_augment_choices(options["t"], increasing=bool(options["inc"]))
    weights = tuple(choices.values()) if isinstance(choices, dict) else ()
    operations = _timm_operations(choices, canvas)
    level = _timm_level(options)
    layers = min(options["n"], len(weights)) if weights else options["n"]
    return RandomOperations(text, operations, layers, level, options["p"], weights)


def _timm_sequences(text: str, policy: PolicyName, canvas: Canvas) -> SubPolicies:
    from timm.data.auto_augment import auto_augment_policy

    sequences = [[(op.name, op.prob, op.magnitude) for op in one] for one in auto_augment_policy(policy.name)]
    names = tuple(dict.fromkeys(name for sequence in sequences for name, _, _ in sequence))
    return _sub_policies(text, _timm_operations(names, canvas), sequences, _timm_level(policy.options), names)


def _timm_augmix(text: str, policy: PolicyName, canvas: Canvas) -> AugMix:
    from timm.data.auto_augment import augmix_ops

    options = policy.options
    operations = _timm_operations([op.name for op in augmix_ops()], canvas, AUGMIX_TRANSLATION)
    return AugMix(text, operations, _timm_level(options), options["w"], options["d"], options["a"], rounds_twice=True)


def _timm_level(options: dict[str, Any]) -> Level:
    return Level(options.get("m", 0), options["mstd"], options.get("mmax", TIMM_LEVELS))


def _timm_operations(names: Sequence[str], canvas: Canvas, translation: float = TRANSLATION) -> Operations:
    """``Operations`` for timm's ``names``; an ending such as 'Increasing' says only what a level means."""
    ranges = _timm_ranges(translation)
    plain = []
    for name in names:
        for ending in ("Increasing", "Original", "Rel", "Rand"):
            name = name.removesuffix(ending)
        plain.append(name)
    return Operations(tuple(plain), tuple(ranges[name] for name in names), canvas, len(canvas.fill))


def _timm_ranges(translation: float) -> dict[str, Arguments]:
    """Functions, by timm's name of an operation, that turn levels into arguments; level 10 gives the full range."""

    def part(full: float, levels: np.ndarray) -> np.ndarray:
        return levels / TIMM_LEVELS * full

    def either_way(full: float) -> Arguments:
        return lambda levels, details, *_: _signed(part(full, levels), details)

    def translate(axis: int) -> Arguments:
        return lambda levels, details, *size: _signed(part(translation, levels), details) * size[axis]

    def whole(full: float, begin: float = 0, sign: int = 1, most: float = math.inf) -> Arguments:
        return lambda levels, *_: begin + sign * np.minimum(most, np.trunc(part(full, levels)))

    def blur(levels: np.ndarray, *_: Any) -> np.ndarray:
        return BLUR_SIGMA[0] + np.clip(part(1, levels), 0, 1) * (BLUR_SIGMA[1] - BLUR_SIGMA[0])

    def random_blur(levels: np.ndarray, details: np.ndarray, *_: Any) -> np.ndarray:
        return BLUR_SIGMA[0] + details * (BLUR_SIGMA[1] * np.clip(part(1, levels), 0, 1) - BLUR_SIGMA[0])

    def nothing(levels: np.ndarray, *_: Any) -> np.ndarray:
        return np.zeros(len(levels))

    ranges: dict[str, Arguments] = dict.fromkeys(("AutoContrast", "Equalize", "Invert"), nothing)
    ranges |= {"ShearX": either_way(0.3), "ShearY": either_way(0.3), "Rotate": either_way(30.0)}
    ranges |= {"TranslateXRel": translate(1), "TranslateYRel": translate(0)}
    ranges |= {name: lambda levels, *_: part(1.8, levels) + 0.1 for name in _MOVING}
    ranges |= {
        f"{name}Increasing": lambda levels, details, *_: np.maximum(0.1, 1.0 + _signed(part(0.9, levels), details))
        for name in _MOVING
    }
    ranges |= {
        "Posterize": whole(4),
        "PosterizeIncreasing": whole(4, 4, -1),
        "PosterizeOriginal": whole(4, 4),
        "Solarize": whole(256, most=256),
        "SolarizeIncreasing": whole(256, 256, -1, most=256),
        "SolarizeAdd": whole(110, most=128),
        "Desaturate": lambda levels, *_: 0.5 + 0.5 * np.clip(part(1, levels), 0, 1),
        "GaussianBlur": blur,
        "GaussianBlurRand": random_blur,
    }
    return ranges


def _signed(values: np.ndarray, details: np.ndarray) -> np.ndarray:
    return np.where(details < 0.5, -values, values)
