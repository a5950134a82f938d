"""Settings that must agree with each other, and those that follow from others.

A contradiction is a mistake: it answers one question in two ways (which algorithm, schedule, weights or device), or
asks for what cannot be done. A setting of something that the run does not have, such as the momentum of an optimizer
without one, only has no effect and is reported (``utils/config/effects.py``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from utils.config.datasets import SPECS
from utils.config.groups.loss import BALANCED
from utils.config.groups.optimisation import RISING_POLICIES, SCHEDULE_FREE, SHARDABLE, WITH_NESTEROV

DEFAULT_LR = {"sgd": 0.1, "schedulefree-sgd": 1.0}  # of the latter: the steps of sgd with its momentum of 0.9
# where a value came from, lowest first
DEFAULT = "default"
CHECKPOINT = "checkpoint"
RECIPE = "recipe"
FLAG = "flag"


def outranks(origin: str, other: str) -> bool:
    """Whether a value from ``origin`` takes the place of one from ``other``."""
    rank = [DEFAULT, CHECKPOINT, RECIPE, FLAG].index
    return rank(origin) > rank(other)


class Rule(NamedTuple):
    """``message`` is a mistake if ``broken``; ``settings`` are all those that it depends on or advises to change."""

    settings: tuple[str, ...]
    broken: object
    message: str


IsExplicit = Callable[..., bool]


def contradictions(
    values: dict[str, Any], origins: dict[str, str], world_size: int, checkpoint_known: bool = True
) -> list[Rule]:
    """The rules that these settings break. ``checkpoint_known``: no checkpoint remains to be read."""
    return [rule for rule in rules(values, origins, world_size, checkpoint_known) if rule.broken]


def rules(
    values: dict[str, Any], origins: dict[str, str], world_size: int, checkpoint_known: bool = True
) -> list[Rule]:
    """All rules that apply, kept or broken."""
    v = SimpleNamespace(**values)

    def is_explicit(name: str, against: str | None = None) -> bool:
        """Whether a flag or recipe sets ``name``, in no lower layer than the one that sets ``against``."""
        return origins[name] in (RECIPE, FLAG) and (against is None or not outranks(origins[against], origins[name]))

    begins = v.resume in (None, "auto") and not (v.evaluate and v.weights)  # otherwise a checkpoint may fill the gaps
    nameless = begins and origins["dataname"] == DEFAULT and is_explicit("datapath")
    return [
        *_batch_rules(v, is_explicit, origins, world_size),
        *_optimisation_rules(v, is_explicit),
        *_rate_rules(v, is_explicit, origins, learning_rate(values, origins, world_size)[0]),
        *_freezing_rules(v),
        Rule(
            ("balanced_sampler", "class_weights"),
            # A run of an earlier version, which has both, goes on.
            v.balanced_sampler
            and v.class_weights
            and (is_explicit("balanced_sampler") or is_explicit("class_weights")),
            "--balanced-sampler and --class-weights both make up for rare classes, together twice; give one",
        ),
        *_average_rules(v, is_explicit),
        *(_schedule_free_rules(v, is_explicit) if v.optimizer in SCHEDULE_FREE else ()),
        *(_sharding_rules(v) if v.shard_model and world_size > 1 and not v.evaluate else ()),
        *_start_rules(v, is_explicit),
        *_data_rules(v),
        *(_place_rules(v) if begins or checkpoint_known else ()),
        Rule(
            ("datapath", "dataname"),
            nameless,
            "--datapath needs --dataname: folder for class folders, mnist, cifar10, imagenet ...",
        ),
    ]


def _batch_rules(
    v: SimpleNamespace, is_explicit: IsExplicit, origins: dict[str, str], world_size: int
) -> Iterator[Rule]:
    # Of two sizes that disagree, one may come from a lower layer: then the higher layer simply wins.
    both = is_explicit("batch_size") and is_explicit("global_batch_size")
    same_layer = origins["batch_size"] == origins["global_batch_size"]
    expected = v.global_batch_size and math.ceil(v.global_batch_size / (world_size * v.accumulate))
    yield Rule(
        ("batch_size", "accumulate", "global_batch_size"),
        both and same_layer and v.global_batch_size and v.batch_size != expected,
        f"--batch-size {v.batch_size} x {world_size} processes x --accumulate {v.accumulate} is not "
        f"--global-batch-size {v.global_batch_size}; give one of the two",
    )


def _optimisation_rules(v: SimpleNamespace, is_explicit: IsExplicit) -> Iterator[Rule]:
    """Optimizer, learning rate, clipping, gradient penalty."""
    yield Rule(
        ("nesterov", "optimizer"),
        is_explicit("nesterov", against="optimizer") and v.nesterov and v.optimizer not in WITH_NESTEROV,
        f"--nesterov needs --optimizer {' or '.join(WITH_NESTEROV)}, not {v.optimizer}",
    )
    yield Rule(("nesterov", "momentum"), v.nesterov and v.momentum == 0, "--nesterov needs a --momentum above 0")
    yield Rule(
        ("grad_checkpointing", "compile"),
        v.grad_checkpointing and v.compile,
        "--compile decides itself what to compute again; remove --grad-checkpointing",
    )
    yield Rule(
        ("layer_decay", "backbone_lr_scale"),
        v.layer_decay is not None and v.backbone_lr_scale is not None,
        "--layer-decay and --backbone-lr-scale both say how fast the layers before the last one learn; give one",
    )
    for other in ("layer_decay", "backbone_lr_scale"):
        yield Rule(
            ("lr_scale", other),
            v.lr_scale is not None and getattr(v, other) is not None,
            f"--lr-scale and --{other.replace('_', '-')} both say how fast each layer learns; give one",
        )
    clips = [name for name in ("clip_grad_norm", "clip_grad_value", "clip_grad_agc") if getattr(v, name) is not None]
    flags = " and ".join(f"--{name.replace('_', '-')}" for name in clips)
    yield Rule(tuple(clips), len(clips) > 1, f"{flags} are two ways to clip; give one")
    for name in ("compile", "matmul_weight_grad"):
        yield Rule(
            ("grad_penalty", name),
            v.grad_penalty and getattr(v, name),
            f"--grad-penalty needs second derivatives, which --{name.replace('_', '-')} cannot make; remove one",
        )


def _rate_rules(v: SimpleNamespace, is_explicit: IsExplicit, origins: dict[str, str], lr: float) -> Iterator[Rule]:
    """The learning rate, ``lr`` at its peak, and its schedule."""
    both = v.lr is not None and v.lr_base is not None and is_explicit("lr") and is_explicit("lr_base")
    yield Rule(
        ("lr", "lr_base"),
        both and origins["lr"] == origins["lr_base"],
        "--lr and --lr-base both say what the learning rate is; give one",
    )
    peak = ("lr", "lr_base", "lr_base_size", "lr_base_scale", "optimizer", "global_batch_size", "batch_size")
    yield Rule(("lr_min", *peak), v.lr_min >= lr, f"--lr-min {v.lr_min:g} is not below the peak learning rate, {lr:g}")
    yield Rule(
        ("warmup_lr", *peak),
        v.warmup_lr is not None and v.warmup_lr > lr,
        f"--warmup-lr {v.warmup_lr or 0:g} is above the peak learning rate, {lr:g}",
    )
    yield Rule(
        ("lr_milestones", "lr_policy"),
        v.lr_policy != "multistep"
        and is_explicit("lr_milestones", against="lr_policy")
        and v.lr_milestones is not None,
        f"--lr-milestones needs --lr-policy multistep, not {v.lr_policy}",
    )
    yield Rule(
        ("lr_milestones",),
        v.lr_milestones is not None and list(v.lr_milestones) != sorted(set(v.lr_milestones)),
        "--lr-milestones must rise",
    )
    yield Rule(
        ("warmup_epochs", "epochs"),
        v.warmup_epochs > v.epochs,
        f"--warmup-epochs {v.warmup_epochs:g} is longer than --epochs {v.epochs}",
    )
    yield Rule(
        ("warmup_epochs", "lr_policy", "lr_pct_start"),
        v.warmup_epochs and v.lr_policy in RISING_POLICIES and v.optimizer not in SCHEDULE_FREE,
        f"--warmup-epochs contradicts --lr-policy {v.lr_policy}, which rises by itself; give --lr-pct-start instead",
    )


def _freezing_rules(v: SimpleNamespace) -> Iterator[Rule]:
    """When parameters are frozen and released."""
    both = v.freeze_epoch is not None and v.unfreeze_epoch is not None
    yield Rule(
        ("freeze_epoch", "unfreeze_epoch"),
        both and v.freeze_epoch >= v.unfreeze_epoch,
        f"--freeze-epoch {v.freeze_epoch} is not below --unfreeze-epoch {v.unfreeze_epoch}, so nothing would be frozen",
    )


def _average_rules(v: SimpleNamespace, is_explicit: IsExplicit) -> Iterator[Rule]:
    """Averages of the weights."""
    yield Rule(
        ("ema_decay", "swa_start_epoch"),
        v.ema_decay is not None and v.swa_start_epoch is not None,
        "--ema-decay and --swa-start-epoch are two averages of the weights; give one",
    )
    yield Rule(
        ("swa_start_epoch", "epochs"),
        v.swa_start_epoch is not None and v.swa_start_epoch > v.epochs,
        f"--swa-start-epoch {v.swa_start_epoch or 0:g} is beyond --epochs {v.epochs}",
    )
    yield Rule(
        ("ema_bn_batches", "swa_start_epoch"),
        is_explicit("ema_bn_batches") and v.ema_bn_batches == 0 and v.swa_start_epoch is not None,
        "--ema-bn-batches 0 contradicts --swa-start-epoch, whose weights need batch-norm statistics of their own",
    )


def _schedule_free_rules(v: SimpleNamespace, is_explicit: IsExplicit) -> Iterator[Rule]:
    """What a schedule-free optimizer brings itself."""
    yield Rule(
        ("lr_policy", "optimizer"),
        is_explicit("lr_policy", against="optimizer") and v.lr_policy != "constant",
        f"--lr-policy {v.lr_policy} contradicts --optimizer {v.optimizer}, whose learning rate is constant after the "
        "warm-up; remove it",
    )
    for name in ("ema_decay", "swa_start_epoch", "lookahead"):
        yield Rule(
            (name, "optimizer"),
            getattr(v, name) is not None,
            f"--{name.replace('_', '-')} contradicts --optimizer {v.optimizer}, which averages the weights itself; "
            "remove it",
        )
    yield Rule(
        ("ema_bn_batches", "optimizer"),
        is_explicit("ema_bn_batches") and v.ema_bn_batches == 0,
        f"--ema-bn-batches 0 contradicts --optimizer {v.optimizer}, whose averaged weights need batch-norm "
        "statistics of their own",
    )


def _sharding_rules(v: SimpleNamespace) -> Iterator[Rule]:
    """What needs whole parameters or gradients in each process."""
    yield Rule(
        ("shard_model", "optimizer"),
        v.optimizer not in SHARDABLE,
        f"--shard-model needs --optimizer {', '.join(SHARDABLE[:-1])} or {SHARDABLE[-1]}, which treat each number by "
        f"itself, not {v.optimizer}",
    )
    reasons = {
        "clip_grad_agc": "needs the norms of whole weights",
        "sam_rho": "moves whole weights within a step",
        "grad_penalty": "differentiates whole gradients",
        "lookahead": "keeps a second copy of whole weights",
        "swa_start_epoch": "keeps the mean of whole weights; --ema-decay works",
        "compile": "compiles a network with whole weights",
        "freeze_epoch": "changes in training which parameters have a gradient; --freeze works",
        "unfreeze_epoch": "changes in training which parameters have a gradient; --freeze works",
        "fp32_layers": "mixes formats within a block, whose weights arrive in one",
        "dump_bad_batch": "saves whole weights from each process",
        "bucket_mb": "cuts whole gradients into pieces",
    }
    for name, reason in reasons.items():
        flag = f"--{name.replace('_', '-')}"
        yield Rule(
            ("shard_model", name), getattr(v, name), f"--shard-model contradicts {flag}, which {reason}; remove one"
        )
    yield Rule(
        ("shard_model", "grad_compression"),
        v.grad_compression != "off",
        f"--shard-model contradicts --grad-compression {v.grad_compression}, which is for whole gradients; remove one",
    )


def _start_rules(v: SimpleNamespace, is_explicit: IsExplicit) -> Iterator[Rule]:
    """Where a run begins, and on which devices."""
    checkpoint = v.evaluate and (v.resume or v.weights)
    yield Rule(
        ("pretrained", "weights"),
        is_explicit("pretrained", against="weights")
        and v.pretrained
        and is_explicit("weights", against="pretrained")
        and v.weights,
        "--pretrained and --weights both say where to begin; give one",
    )
    yield Rule(
        ("init", "pretrained", "weights"),
        is_explicit("init") and v.init != "default" and (v.pretrained or v.weights),
        f"--init {v.init} would be overwritten by the {'pretrained' if v.pretrained else '--weights'} weights",
    )
    yield Rule(("gpu_ids", "device"), v.gpu_ids and v.device == "cpu", "--gpu-ids contradicts --device cpu")
    yield Rule(("gpu_ids",), v.gpu_ids and len(set(v.gpu_ids)) != len(v.gpu_ids), "--gpu-ids names a GPU twice")
    yield Rule(
        ("evaluate", "resume", "weights", "pretrained"),
        v.evaluate and not (checkpoint or v.pretrained),
        "--evaluate needs weights: --resume PATH, --weights PATH or --pretrained",
    )
    yield Rule(
        ("evaluate", "resume"),
        v.evaluate and v.resume == "auto",
        "--evaluate needs a path: --resume auto continues training",
    )
    yield Rule(
        ("resume", "weights"),
        v.resume not in (None, "auto") and v.weights and is_explicit("weights"),  # auto may begin a run, with these
        "--resume PATH brings its own weights; remove --weights",
    )
    yield Rule(
        ("resume_override", "resume"),
        v.resume_override and v.resume == "auto",
        "--resume-override contradicts --resume auto, which looks for a run with equal settings; give its path",
    )
    yield Rule(
        ("resume_override", "resume"),
        v.resume_override and not v.resume,
        "--resume-override needs --resume PATH, the run to go on with",
    )
    yield Rule(
        ("resume_override", "evaluate"),
        v.resume_override and v.evaluate,
        "--resume-override is for training; remove it or --evaluate",
    )


def _data_rules(v: SimpleNamespace) -> Iterator[Rule]:
    """Data set and augmentation."""
    augment = v.augment or ()
    yield Rule(
        ("augment",),
        "none" in augment and len(augment) > 1,
        "--augment none contradicts the other names after --augment",
    )
    yield Rule(
        ("augment",),
        {"flip", "alternating-flip"} <= set(augment),
        "--augment flip and alternating-flip are two ways to flip; give one",
    )
    yield Rule(
        ("balanced_sampler", "repeated_augmentation"),
        v.balanced_sampler and v.repeated_augmentation > 1,
        "--balanced-sampler and --repeated-augmentation are two ways to fill an epoch; give one",
    )
    for name in ("balanced_sampler", "repeated_augmentation"):
        yield Rule(
            ("shard_window", name),
            v.shard_window is not None and (v.balanced_sampler if name == "balanced_sampler" else getattr(v, name) > 1),
            f"--shard-window and --{name.replace('_', '-')} are two ways to fill an epoch; give one",
        )
    yield Rule(
        ("progressive_epochs", "epochs"),
        v.progressive_size and v.progressive_epochs and v.progressive_epochs[1] >= v.epochs,
        f"--progressive-epochs {' '.join(map(str, v.progressive_epochs or ()))}: --epochs {v.epochs} end before images "
        "have their full size",
    )
    yield Rule(("decode", "device"), v.decode == "gpu" and v.device == "cpu", "--decode gpu contradicts --device cpu")
    yield Rule(
        ("decode", "skip_bad_images"),
        v.decode == "gpu" and v.skip_bad_images,
        "--skip-bad-images does not work with --decode gpu; remove one",
    )
    yield Rule(
        ("download", "dataname"),
        v.download and (SPECS[v.dataname].of_the_user or not SPECS[v.dataname].needs_datapath),
        f"--download: {v.dataname} is never fetched",
    )


def _place_rules(v: SimpleNamespace) -> Iterator[Rule]:
    """Which data set, and where it lies."""
    yield Rule(
        ("val_split", "dataname"),
        v.val_split is not None and v.dataname not in ("folder", "hf"),
        f"--val-split is for --dataname folder and hf; {v.dataname} has its own validation images",
    )
    yield Rule(
        ("dataname", "datapath", "download"),
        SPECS[v.dataname].needs_datapath and v.datapath is None,
        f"--dataname {v.dataname} needs --datapath DIR, the folder that holds it"
        + (" (or where --download puts it)" if SPECS[v.dataname].can_be_fetched else ""),
    )


def global_batch_size(values: dict[str, Any], origins: dict[str, str], world_size: int) -> int:
    """The images of a step: what was given, unless a higher layer gives the batch of a process."""
    given = values["global_batch_size"]
    if given and not outranks(origins["batch_size"], origins["global_batch_size"]):
        return given
    return values["batch_size"] * world_size * values["accumulate"]


def learning_rate(values: dict[str, Any], origins: dict[str, str], world_size: int) -> tuple[float, str]:
    """The peak learning rate, and which scale it has been converted by ('' for none).

    ``lr_base`` is for ``lr_base_size`` images per step, as in timm's train.py; an ``lr`` of a higher layer replaces it.
    """
    base = values["lr_base"]
    lr = values["lr"]
    if base is None or (lr is not None and outranks(origins["lr"], origins["lr_base"])):
        return lr if lr is not None else DEFAULT_LR.get(values["optimizer"], 0.001), ""
    adaptive = any(part in values["optimizer"].lower() for part in ("ada", "lamb"))
    scale = values["lr_base_scale"] or ("sqrt" if adaptive else "linear")
    ratio = global_batch_size(values, origins, world_size) / values["lr_base_size"]
    return base * (ratio**0.5 if scale == "sqrt" else ratio), scale


def derive(values: dict[str, Any], origins: dict[str, str], world_size: int) -> None:
    """Fill in the settings that follow from others, so that each is saved with the value that was used."""
    lr, scale = learning_rate(values, origins, world_size)
    per_step = world_size * values["accumulate"]
    from_global = values["global_batch_size"] and outranks(origins["global_batch_size"], origins["batch_size"])
    if from_global:
        values["batch_size"] = math.ceil(values["global_batch_size"] / per_step)
        origins["batch_size"] = f"global-batch-size / {per_step}"
    elif not (values["global_batch_size"] and origins["global_batch_size"] == origins["batch_size"]):
        values["global_batch_size"] = values["batch_size"] * per_step
        origins["global_batch_size"] = f"batch-size x {per_step}"
    if values["weights"] and outranks(origins["weights"], origins["pretrained"]):
        values["pretrained"] = False  # of a recipe
    elif values["pretrained"] and outranks(origins["pretrained"], origins["weights"]):
        values["weights"] = None
    values.update(absolute_paths(values))
    if values["arch"] is None:
        values["arch"] = SPECS[values["dataname"]].default_arch
    values["lr"] = lr
    if scale:
        values["lr_base_scale"] = scale
        origins["lr"] = f"lr-base, {scale} in the batch"
    else:
        values["lr_base"] = None
    if values["optimizer"] in SCHEDULE_FREE and values["lr_policy"] != "constant":
        values["lr_policy"] = "constant"
        origins["lr_policy"] = "optimizer"
    for name, value in of_policy(values["lr_policy"], values["epochs"]).items():
        if values[name] is None:
            values[name] = value
            origins[name] = DEFAULT


def absolute_paths(values: dict[str, Any]) -> dict[str, str]:
    """Teacher and class weights that are files here: a run may be resumed from another working directory."""
    given = {"teacher": values["teacher"], "class_weights": values["class_weights"]}
    return {
        name: os.path.abspath(path)
        for name, path in given.items()
        if path and path != BALANCED and os.path.exists(path)
    }


def unused(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of an algorithm that a higher layer has replaced, each with its value for the one in use.

    In one layer they would contradict it (``rules``), so a run's ``config.yaml`` leaves them out.
    """
    of_others = {}
    if values["optimizer"] not in WITH_NESTEROV:
        of_others["nesterov"] = False
    if values["lr_policy"] != "multistep":
        of_others["lr_milestones"] = None
    if values["val_split"] is None:
        of_others["val_split_by"] = "name"
    return of_others


def of_policy(policy: str, epochs: int) -> dict[str, Any]:
    """What a learning-rate policy does unless something else is asked for, by setting."""
    return {
        "multistep": {"lr_milestones": (0.5 * epochs, 0.75 * epochs)},
        "step": {"lr_step_epochs": epochs / 3},
        "one-cycle": {"lr_pct_start": 0.3, "lr_div_factor": 25.0},  # those of torch's OneCycleLR
        "triangular": {"lr_pct_start": 0.23, "lr_div_factor": 5.0},  # those of airbench94
    }.get(policy, {})
