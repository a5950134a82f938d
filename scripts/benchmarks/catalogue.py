"""The techniques whose cost benchmark_techniques.py measures, and their flags. Imports nothing heavy, for --help."""

from __future__ import annotations

from typing import NamedTuple

STEP, LOADING, VALIDATION = "step", "loading", "validation"


class Technique(NamedTuple):
    """``flags`` turn it on, beside ``base`` on both sides. ``measured``: the work that it slows."""

    name: str
    flags: str
    base: str = ""
    measured: tuple[str, ...] = (STEP,)


IMAGES = (STEP, LOADING)

TECHNIQUES = (
    Technique("flip", "--augment flip", "--augment none", (STEP,)),
    Technique("cutout", "--cutout 8", measured=IMAGES),
    Technique("mixup", "--mixup 0.2", measured=IMAGES),
    Technique("cutmix", "--cutmix 1", measured=IMAGES),
    Technique("label-smoothing", "--label-smoothing 0.1"),
    Technique("bce", "--loss bce"),
    Technique("ema", "--ema-decay 0.999"),
    Technique("clip-norm", "--clip-grad-norm 1"),
    Technique("agc", "--clip-grad-agc 0.01"),
    Technique("muon", "--optimizer muon --lr 0.01"),
)
