"""Settings of the optimizer and its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from utils.config.field import Needs, between, group, positive, setting

LR_POLICIES = (
    "constant",
    "multistep",
    "cosine",
    "gaussian",
    "step",
    "linear",
    "poly",
    "one-cycle",
    "triangular",
    "plateau",
)
RISING_POLICIES = ("one-cycle", "triangular")  # these have a warm-up of their own
RESTARTING_POLICIES = ("cosine", "gaussian", "linear", "poly")
WITH_NESTEROV = ("sgd", "muon-sgd")
SHARDABLE = ("sgd", "adam", "adamw")  # these move a part of a parameter as within the whole
SCHEDULE_FREE = ("schedulefree-sgd", "schedulefree-adamw")  # these average the weights instead of a policy


_RISING = ", ".join(RISING_POLICIES)  # in help
_SMOOTH = ", ".join(RESTARTING_POLICIES)
_RISES = Needs(f"--lr-policy {' or '.join(RISING_POLICIES)}")
_RESTARTING = f"--lr-policy {' or '.join(RESTARTING_POLICIES)}"
_RESTARTS = Needs(f"--lr-cycle-epochs and {_RESTARTING}")
_DECAYS = Needs("a --weight-decay above 0", lambda v: v.weight_decay > 0)
_WARMS_UP = Needs("--warmup-epochs", lambda v: v.warmup_steps > 0)
_FROM_BASE = Needs("--lr-base")

rate_setting = partial(
    setting,
    effect=Needs("to change the rate of a parameter that trains", lambda v: v.rates_differ),
    shapes="groups",
)


def first_averaged_epoch(start: float | None, epochs: int) -> int | None:
    """The epoch, from 1, that ``start``, of --swa-start-epoch, means in a run of ``epochs``; None without the flag."""
    if start is None:
        return None
    if start >= 1:
        return int(start)
    return min(epochs, round(start * epochs) + 1)


def _schedule(v: Any) -> tuple[int, str]:
    """How many epochs have a rate by --lr-policy, and what says that these end before a change would come."""
    first = first_averaged_epoch(v.swa_start_epoch, v.epochs)
    if first and v.swa_lr:
        return first - 1, "--swa-lr begins before"
    return v.epochs, f"--epochs {v.epochs} end before"


def _replaced(v: Any) -> str | None:
    return None if _schedule(v)[0] else "does nothing: --swa-lr is the learning rate of all epochs"


def _replaced_but_for_decay(v: Any) -> str | None:
    # Those of timm's optimizers that end in c, or are told to, divide the weight decay by the peak learning rate.
    is_corrected = v.optimizer.endswith("c") or "corrected_weight_decay=" in " ".join(v.opt_kwargs or ())
    return None if is_corrected else _replaced(v)


def _restarts(v: Any) -> str | None:
    epochs, end_before = _schedule(v)
    if v.lr_cycle_epochs >= epochs - v.warmup_epochs * v.warmup_prefix:
        return f"never restarts: {end_before}"
    return None


def _changes_within_an_epoch(v: Any) -> bool:
    if not _schedule(v)[0]:
        return False
    if v.steps_per_epoch == 1 or v.warmup_steps > 0:
        return v.steps_per_epoch > 1
    drops = {
        "constant": (),
        "plateau": (),
        "multistep": v.lr_milestones or (),
        "step": (v.lr_step_epochs or 0,),
    }.get(v.lr_policy)
    return drops is None or any(epochs % 1 for epochs in drops)


def _at_the_full_rate(v: Any) -> str | None:
    postpones = v.warmup_prefix and v.lr_policy in RESTARTING_POLICIES
    held = v.lr_per_epoch and v.warmup_epochs <= 1 and v.warmup_lr is None
    if v.warmup_steps > 0 and held and not postpones:
        return "does nothing: with --lr-per-epoch, a warm-up of one epoch begins at the full rate; it needs --warmup-lr"
    return None


def _reaches_milestones(v: Any) -> str | None:
    epochs, end_before = _schedule(v)
    late = [f"{milestone:g}" for milestone in v.lr_milestones or () if milestone >= epochs]
    return f"does nothing at {' and '.join(late)}: {end_before}" if late else None


def _drops_in_time(v: Any) -> str | None:
    epochs, end_before = _schedule(v)
    if v.lr_policy == "plateau" and v.lr_patience >= epochs - math.ceil(v.warmup_epochs):
        warmup = " after the warm-up" if v.warmup_epochs else ""
        return f"keeps one rate: {end_before} --lr-patience {v.lr_patience}{warmup}"
    if v.lr_policy == "step" and v.lr_step_epochs and v.lr_step_epochs >= epochs:
        return f"keeps one rate: {end_before} --lr-step-epochs {v.lr_step_epochs:g}"
    return None


def _looks_ahead(v: Any) -> str | None:
    every, alpha = v.lookahead
    steps = v.epochs * v.steps_per_epoch
    if every > steps:
        return f"does nothing: the run's {steps} steps end before"
    return "does nothing: with an ALPHA of 1, the slow weights are the trained ones" if alpha == 1 else None


def _interval_and_fraction(value: tuple[float, ...]) -> str | None:
    if len(value) == 2 and value[0].is_integer() and 1 <= value[0] <= 10**6 and 0 < value[1] <= 1:
        return None
    return "must be a whole number of steps and a number above 0, at most 1; for example 6 0.5"


def scale_of(text: str) -> tuple[str, float]:
    """Split ``PATTERN=FACTOR`` into (pattern, factor). Raises ``ValueError`` for anything else."""
    pattern, equals, factor = text.rpartition("=")
    if not pattern or not equals or not 0 < float(factor) <= 1e6:
        raise ValueError(text)
    return pattern, float(factor)


def _pairs(values: tuple[str, ...]) -> str | None:
    for value in values:
        try:
            scale_of(value)
        except ValueError:
            return "must be a name or glob, =, and a factor above 0 and at most 1e6; for example '*.bias=2'"
    return None


@group(in_evaluation=False)
@dataclass(frozen=True)
class OptimisationSettings:
    """Optimizer and schedule; ``--evaluate`` uses none of it."""

    epochs: int = setting(
        "passes over the training data",
        default=20,
        check=between(1, 10**6),
        synonyms="max-epochs num-epochs n-epochs num-train-epochs",
    )
    optimizer: str = setting(
        "sgd, adam, adamw, muon (with adamw for all but matrices), muon-sgd, schedulefree-sgd, schedulefree-adamw or "
        "any timm optimizer by name",
        default="sgd",
        short="-o",
        synonyms="opt optim",
        shapes="state",
        example="lamb",
        within="--lr 0.1",
    )
    lr: float = setting(  # None until the settings are resolved
        "peak learning rate [0.1 for sgd, 1 for schedulefree-sgd, 0.001 for others]",
        check=positive,
        effect=_replaced_but_for_decay,
        synonyms="learning-rate init-lr lr0",
        example="0.2",
    )
    lr_base: float | None = setting(
        "peak learning rate for --lr-base-size images per step, instead of --lr",
        check=positive,
        effect=_replaced_but_for_decay,
        example="0.2",
    )
    lr_base_size: int = setting(
        "global batch size that --lr-base is for", default=256, check=between(1, 2**24), effect=_FROM_BASE
    )
    lr_base_scale: str | None = setting(
        "--lr = --lr-base x (global batch size / --lr-base-size), or x the root of that [as timm: sqrt for "
        "optimizers with ada or lamb in their name, otherwise linear]",
        choices=("linear", "sqrt"),
        effect=_FROM_BASE,
    )
    lr_min: float = setting(
        "lowest learning rate after the warm-up",
        default=0.0,
        effect=(
            _replaced,
            lambda v: "does nothing: --lr-policy constant never falls" if v.lr_policy == "constant" else None,
        ),
        synonyms="min-lr eta-min",
        example="0.01",
    )
    momentum: float = setting(
        "momentum of sgd (beta of schedulefree-sgd), and of timm's optimizers that have one",
        default=0.9,
        check=between(0, 1, open_high=True),
        effect=lambda v: None if v.has_momentum else f"does nothing: --optimizer {v.optimizer} has none",
    )
    opt_eps: float | None = setting(
        "eps of the optimizer, which it adds to what it divides by [that of the optimizer]",
        synonyms="eps epsilon adam-epsilon",
        example="0.001",
        within="--optimizer adamw",
    )
    opt_betas: tuple[float, ...] | None = setting(
        "betas of the optimizer, the decays of its averages, for example 0.9 0.95 [those of the optimizer]",
        check=between(0, 1, open_high=True),
        metavar="BETA",
        example="0.8 0.9",
        synonyms="betas",
        within="--optimizer adamw",
    )
    opt_kwargs: tuple[str, ...] | None = setting(
        "further arguments of the optimizer's constructor in torch or timm, for example amsgrad=true",
        metavar="NAME=VALUE",
        shapes="state",
        within="--optimizer adamw",
    )
    nesterov: bool = setting(
        f"Nesterov momentum ({', '.join(WITH_NESTEROV)})",
        default=False,
        effect=Needs(f"--optimizer {' or '.join(WITH_NESTEROV)}"),
        drops_out=True,
    )
    weight_decay: float = setting("weight decay", default=5e-4, synonyms="wd decay", shapes="groups", example="0.25")
    decay_norm_bias: bool = setting(
        "apply weight decay to norms and biases too", default=True, effect=_DECAYS, shapes="groups"
    )
    weight_decay_except: tuple[str, ...] | None = setting(
        "apply no weight decay to these parameters: names or globs, for example '*bn*'",
        metavar="PATTERN",
        effect=_DECAYS,
        shapes="groups",
        example="*.bias",
    )
    layer_decay: float | None = rate_setting(
        "layer-wise decay: each layer's learning rate is this times that of the layer after it, for example 0.75",
        check=between(0, 1, open_low=True),
    )
    backbone_lr_scale: float | None = rate_setting(
        "learning rate of all but the last layer as a fraction of --lr, for example 0.1",
        check=between(0, 1000, open_low=True),
        metavar="SHARE",
    )
    lr_scale: tuple[str, ...] | None = rate_setting(
        "learning rate of some parameters as a multiple of --lr, by name or glob, for example '*.bias=2'; the first "
        "that fits counts",
        metavar="PATTERN=FACTOR",
        check=_pairs,
    )
    lr_policy: str = setting(
        "learning-rate schedule after the warm-up; constant with schedule-free optimizers",
        default="cosine",
        choices=LR_POLICIES,
        effect=(_replaced, _drops_in_time),
        synonyms="sched scheduler lr-scheduler lr-schedule lr-scheduler-type",
        example="gaussian",
    )
    lr_milestones: tuple[float, ...] | None = setting(
        "multistep: epochs after which the learning rate drops [50 %% and 75 %% of --epochs]",
        check=positive,
        metavar="EPOCH",
        effect=(Needs("--lr-policy multistep", instead="lr_policy"), _reaches_milestones),
        synonyms="milestones schedule",
        drops_out=True,
        example="11 15",
    )
    lr_gamma: float = setting(
        "multistep, step, plateau: factor of the learning rate at each drop",
        default=0.1,
        check=between(0, 1, open_low=True),
        effect=Needs("--lr-policy multistep or step or plateau"),
        synonyms="gamma",
    )
    lr_step_epochs: float | None = setting(
        "step: epochs between two drops of the learning rate [a third of --epochs]",
        check=positive,
        metavar="EPOCHS",
        effect=Needs("--lr-policy step"),
        synonyms="decay-epochs lr-step-size step-size",
        example="5",
    )
    lr_patience: int = setting(
        "plateau: the learning rate drops after this many epochs in which --early-stopping-metric has not improved",
        default=10,
        check=between(1, 10**6),
        effect=Needs("--lr-policy plateau"),
        synonyms="lr-plateau-patience",
        example="1",
    )
    lr_power: float = setting(
        "poly: exponent of the remaining fraction of the schedule",
        default=2.0,
        check=positive,
        effect=Needs("--lr-policy poly"),
        synonyms="power",
    )
    lr_cycle_epochs: float | None = setting(
        f"{_SMOOTH}: start again after this many epochs, not counting the warm-up",
        check=positive,
        metavar="EPOCHS",
        effect=(Needs(_RESTARTING, instead="lr_policy"), _restarts),
        synonyms="t-initial t-0",
        example="5",
    )
    lr_cycle_mul: float = setting(
        "factor by which each cycle of --lr-cycle-epochs is longer than the one before",
        default=1.0,
        check=between(1, 100),
        effect=_RESTARTS,
        synonyms="t-mult",
        example="2",
    )
    lr_cycle_decay: float = setting(
        "factor by which the peak learning rate changes from cycle to cycle of --lr-cycle-epochs",
        default=1.0,
        check=between(0, 1, open_low=True),
        effect=_RESTARTS,
    )
    lr_pct_start: float | None = setting(
        f"{_RISING}: fraction of all steps over which the learning rate rises [0.3; triangular 0.23]",
        check=between(0, 1, open_high=True),
        metavar="SHARE",
        effect=_RISES,
        example="0.5",
    )
    lr_div_factor: float | None = setting(
        f"{_RISING}: begin at the peak learning rate divided by this [25; triangular 5]",
        check=between(1, 1e6),
        effect=_RISES,
        example="2",
    )
    warmup_epochs: float = setting(
        "epochs of linear warm-up",
        default=0.0,
        effect=(_replaced, _at_the_full_rate, Needs("to be at least half a step", lambda v: v.warmup_steps > 0)),
        synonyms="lr-warmup-epochs warmup",
    )
    warmup_lr: float | None = setting(
        "learning rate of the first step of the warm-up [--lr divided by its steps; with --lr-per-epoch by its epochs]",
        check=positive,
        effect=_WARMS_UP,
        synonyms="warmup-lr-init warmup-start-lr",
        example="0.02",
        within="--warmup-epochs 2",
    )
    warmup_prefix: bool = setting(
        f"begin the schedule after the warm-up; otherwise with it, as timm does by default ({_SMOOTH})",
        default=True,
        effect=Needs(
            f"--warmup-epochs and {_RESTARTING}", lambda v: v.warmup_steps > 0 and v.lr_policy in RESTARTING_POLICIES
        ),
        within="--warmup-epochs 2",
    )
    lr_per_epoch: bool = setting(
        "all steps of an epoch have the learning rate of its first",
        default=False,
        effect=Needs("a rate that changes within an epoch", _changes_within_an_epoch),
        within="--batch-size 16",
    )
    accumulate: int = setting(
        "forward passes per optimizer step",
        default=1,
        check=between(1, 2**16),
        synonyms="grad-accum-steps accumulate-grad-batches gradient-accumulation-steps accum-iter update-freq",
        within="--batch-size 16",
    )
    clip_grad_norm: float | None = setting(
        "clip the unscaled gradient to this norm",
        check=positive,
        synonyms="clip-grad gradient-clip-val max-grad-norm grad-clip",
        example="0.01",
    )
    clip_grad_value: float | None = setting(
        "clamp each element of the unscaled gradient to this absolute value", check=positive, example="0.001"
    )
    clip_grad_agc: float | None = setting(
        "adaptive clipping of each unit's gradient, except in the last layer, to this fraction of its weights' norm, "
        "for example 0.01",
        check=positive,
        effect=Needs("more than the last layer to train", lambda v: v.trains_backbone),
        unsharded="needs the norms of whole weights",
    )
    grad_penalty: float = setting(
        "gradient penalty: add this factor times the gradient's norm to the loss of each forward pass",
        default=0.0,
        unsharded="differentiates whole gradients",
        shapes="loss",
    )
    sam_rho: float = setting(
        "sharpness-aware minimisation: how far from the weights the gradient is taken, for example 0.05; a step "
        "takes twice as long",
        default=0.0,
        unsharded="moves whole weights within a step",
    )
    sam_adaptive: bool = setting(
        "measure --sam-rho relative to each weight (ASAM; then about ten times as large)",
        default=False,
        effect=Needs("--sam-rho"),
    )
    lookahead: tuple[float, ...] | None = setting(
        "lookahead: every K steps, move the slow weights ALPHA of the way to the trained ones, and go on from there; "
        "for example 6 0.5",
        check=_interval_and_fraction,
        metavar="K ALPHA",
        effect=_looks_ahead,
        unsharded="keeps a second copy of whole weights",
    )

    @staticmethod
    def contradictions(v: Any) -> Iterator[str]:
        if v.has(v.nesterov and v.optimizer not in WITH_NESTEROV and v.is_explicit("nesterov", against="optimizer")):
            yield f"--nesterov needs --optimizer {' or '.join(WITH_NESTEROV)}, not {v.optimizer}"
        if v.has(v.nesterov and v.momentum == 0):
            yield "--nesterov needs a --momentum above 0"
        words = "both say how fast the layers before the last one learn"
        yield from v.only_one(words, "layer_decay", "backbone_lr_scale")
        for name in ("layer_decay", "backbone_lr_scale"):
            yield from v.only_one("both say how fast each layer learns", "lr_scale", name)
        yield from v.only_one("are two ways to clip", "clip_grad_norm", "clip_grad_value", "clip_grad_agc")
        if v.has(v.grad_penalty and v.compile):
            yield "--grad-penalty needs second derivatives, which --compile cannot make; remove one"
        if v.has(v.lr and v.lr_base and v.same_layer("lr", "lr_base")):
            yield "--lr and --lr-base both say what the learning rate is; give one"
        if v.has(v.lr_min >= v.peak_lr):
            yield f"--lr-min {v.lr_min:g} is not below the peak learning rate, {v.peak_lr:g}"
        if v.has(v.warmup_lr and v.warmup_lr > v.peak_lr):
            yield f"--warmup-lr {v.warmup_lr:g} is above the peak learning rate, {v.peak_lr:g}"
        if v.has(
            v.lr_milestones and v.lr_policy != "multistep" and v.is_explicit("lr_milestones", against="lr_policy")
        ):
            yield f"--lr-milestones needs --lr-policy multistep, not {v.lr_policy}"
        rising = sorted(set(v.lr_milestones or ()))
        if v.has(v.lr_milestones and list(v.lr_milestones) != rising):
            yield "--lr-milestones must rise"
        if v.has(v.warmup_epochs > v.epochs):
            yield f"--warmup-epochs {v.warmup_epochs:g} is longer than --epochs {v.epochs}"
        if v.has(v.warmup_epochs and v.lr_policy in RISING_POLICIES and v.optimizer not in SCHEDULE_FREE):
            yield (
                f"--warmup-epochs contradicts --lr-policy {v.lr_policy}, which rises by itself; give --lr-pct-start "
                "instead"
            )
