"""The techniques whose cost benchmark_techniques.py measures, and their flags. Imports nothing heavy, for --help."""

from __future__ import annotations

from typing import NamedTuple

STEP = "step"
LOADING = "loading"
VALIDATION = "validation"


class Technique(NamedTuple):
    """``flags`` turn it on, beside ``base`` on both sides. ``measured``: the work that it slows."""

    name: str
    flags: str
    base: str = ""
    measured: tuple[str, ...] = (STEP,)


IMAGES = (STEP, LOADING)

TECHNIQUES = (
    Technique("flip", "--augment flip", "--augment none"),
    Technique("shift", "--augment shift", "--augment none"),
    Technique("randaugment", "--auto-augment ra", measured=IMAGES),
    Technique("randaugment-timm", "--auto-augment rand-m9-mstd0.5-inc1", measured=IMAGES),
    Technique("trivialaugment", "--auto-augment ta_wide", measured=IMAGES),
    Technique("autoaugment", "--auto-augment imagenet", measured=IMAGES),
    Technique("augmix", "--auto-augment augmix", measured=IMAGES),
    Technique("color-jitter", "--color-jitter 0.4 0.4 0.4", measured=IMAGES),
    Technique("grayscale", "--grayscale-prob 0.2", measured=IMAGES),
    Technique("gaussian-blur", "--gaussian-blur-prob 0.2", measured=IMAGES),
    Technique("three-augment", "--auto-augment 3a --color-jitter 0.3", measured=IMAGES),
    Technique("vertical-flip", "--augment vertical-flip", "--augment none"),
    Technique("rotation", "--rotation 15", measured=IMAGES),
    Technique("random-erase", "--random-erase 0.25 --random-erase-mode pixel", measured=IMAGES),
    Technique("cutout", "--cutout 8", measured=IMAGES),
    Technique("mixup", "--mixup 0.2", measured=IMAGES),
    Technique("cutmix", "--cutmix 1", measured=IMAGES),
    Technique("repeated-augmentation", "--repeated-augmentation 4", measured=IMAGES),
    Technique("balanced-sampler", "--balanced-sampler", measured=IMAGES),
    Technique("tta-flip", "--tta flip", "--dataname digits --arch conv2", measured=(VALIDATION,)),
    Technique("tta-flip-shift", "--tta flip-shift", "--dataname digits --arch conv2", measured=(VALIDATION,)),
    Technique("label-smoothing", "--label-smoothing 0.1"),
    Technique("bce", "--loss bce --bce-target-thresh 0.2"),
    Technique("focal", "--loss focal"),
    Technique("class-weights", "--class-weights balanced"),
    Technique("freeze", "--freeze all-but-head"),
    Technique("freeze-bn", "--freeze-bn"),
    Technique("drop-path", "--drop-path 0.1"),
    Technique("grad-checkpointing", "--grad-checkpointing"),
    Technique("clip-norm", "--clip-grad-norm 1"),
    Technique("agc", "--clip-grad-agc 0.01"),
    Technique("layer-decay", "--layer-decay 0.75"),
    Technique("sam", "--sam-rho 0.05"),
    Technique("lookahead", "--lookahead 6 0.5"),
    Technique("muon", "--optimizer muon --lr 0.01"),
    Technique("schedule-free", "--optimizer schedulefree-sgd"),
    Technique("ema", "--ema-decay 0.999"),
    Technique("swa", "--swa-start-epoch 1 --swa-lr 0.05"),
)
