"""Names of augmentation policies, as accepted by the training scripts of torchvision and timm."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from utils.config.spelling import meant_value

TORCHVISION = "torchvision"
TIMM = "timm"
MOST_STEPS = 16  # operations one after the other, or chains side by side


class _Option(NamedTuple):
    """An option of a timm string: its default, the converter of its text, and its smallest and largest value."""

    default: Any  # a number, or text where ``convert`` is str
    convert: Callable[[str], Any] = int
    least: float = 0
    most: float = 1000


_NOISE = _Option(0.0, float)
# By the first word of a policy: the options that may follow it, each with a dash.
_TIMM = {
    "rand": {
        "m": _Option(10),
        "n": _Option(2, least=1, most=MOST_STEPS),
        "p": _Option(0.5, float, most=1),
        "mstd": _NOISE,
        "mmax": _Option(10, least=1),
        "inc": _Option(0, most=1),
        "t": _Option("", str),
    },
    **{key: {"mstd": _NOISE} for key in ("original", "originalr", "v0", "v0r", "3a")},
    "augmix": {
        "m": _Option(3),
        "w": _Option(3, least=1, most=MOST_STEPS),
        "d": _Option(-1, least=1, most=MOST_STEPS),
        "a": _Option(1.0, float, least=1e-3),
        "mstd": _Option(float("inf"), float),
    },
}
_TORCHVISION = ("ra", "ta_wide", "autoaugment", "imagenet", "cifar10", "svhn", "augmix")
CHOICES = (*_TORCHVISION, *(name for name in _TIMM if name not in _TORCHVISION))
EXAMPLES = "rand-m9-mstd0.5-inc1, augmix-m5-w4-d2"
_SETS = ("weights", "3a", "3aw")  # of operations, after t
_WITHOUT_END = 100  # timm: a larger deviation means any level up to m


@dataclass(frozen=True)
class PolicyName:
    """A policy: the library whose operations and magnitudes it uses, its name there, and timm's options."""

    library: str
    name: str
    options: dict[str, Any]


def read_policy(text: str) -> PolicyName:
    """Read the policy that ``text`` names. Raises ``ValueError``, whose message says what is allowed.

    ``augmix`` alone is torchvision's; with options it is timm's.
    """
    name, *sections = text.split("-")
    if not sections and name in _TORCHVISION:
        return PolicyName(TORCHVISION, "imagenet" if name == "autoaugment" else name, {})
    if name not in _TIMM:
        if name in _TORCHVISION:
            raise ValueError(f"{name} takes no options")
        raise ValueError(
            f"choose from {', '.join(CHOICES)}, the last {len(CHOICES) - len(_TORCHVISION)} and augmix with options as "
            f"in {EXAMPLES}" + meant_value(name, CHOICES)
        )
    options = {key: option.default for key, option in _TIMM[name].items()}
    seen = set()
    for section in sections:
        key, value = _read_option(name, section)
        if key in seen:
            raise ValueError(f"{key} is given twice")
        seen.add(key)
        options[key] = value
    if options.get("m", 0) > options.get("mmax", 10):
        raise ValueError(f"m{options['m']} is more than the largest magnitude, {options.get('mmax', 10)}")
    if options.get("mstd", 0) > _WITHOUT_END:
        options["mstd"] = float("inf")
    return PolicyName(TIMM, name, options)


def _read_option(name: str, section: str) -> tuple[str, Any]:
    known = _TIMM[name]
    if section.startswith("t") and "t" in known:
        if section[1:] not in _SETS:
            raise ValueError(f"{section}: operations are {', '.join('t' + word for word in _SETS)}")
        return "t", section[1:]
    match = re.fullmatch(r"([a-z]+)([0-9.]+)", section)
    if not match or match[1] not in known:
        keys = ", ".join(known)
        raise ValueError(f"{section!r} is no option of {name}; there are {keys}, each with its value, as in mstd0.5")
    option = known[match[1]]
    try:
        value = option.convert(match[2])
    except ValueError:
        raise ValueError(f"{section}: must be {'a whole number' if option.convert is int else 'a number'}") from None
    if not option.least <= value <= option.most:
        raise ValueError(f"{section}: must be from {option.least:g} to {option.most:g}")
    return match[1], value


def policy_check(text: str) -> str | None:
    """Check the name of a policy, or ``none``: return what it must be, or None if it is fine."""
    try:
        text == "none" or read_policy(text)
    except ValueError as error:
        return str(error)
    return None
