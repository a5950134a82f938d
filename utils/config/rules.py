"""Settings that must agree with each other, and those that follow from others.

A contradiction is a mistake: it answers one question in two ways (which algorithm, schedule, weights or device), or
asks for what cannot be done. A setting of something that the run does not have, such as the momentum of an optimizer
without one, only has no effect and is reported (``utils/loop/effects.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from utils.config.datasets import SPECS

DEFAULT, CHECKPOINT, RECIPE, FLAG = "default", "checkpoint", "recipe", "flag"  # where a value came from, lowest first


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
        is_explicit("nesterov", against="optimizer") and v.nesterov and v.optimizer != "sgd",
        f"--nesterov needs --optimizer sgd, not {v.optimizer}",
    )
    yield Rule(("nesterov", "momentum"), v.nesterov and v.momentum == 0, "--nesterov needs a --momentum above 0")
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
    clips = [name for name in ("clip_grad_norm", "clip_grad_value", "clip_grad_agc") if getattr(v, name) is not None]
    flags = " and ".join(f"--{name.replace('_', '-')}" for name in clips)
    yield Rule(tuple(clips), len(clips) > 1, f"{flags} are two ways to clip; give one")
    yield Rule(
        ("grad_penalty", "compile"),
        v.grad_penalty and v.compile,
        "--grad-penalty needs second derivatives, which --compile cannot make; remove one",
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
        v.resume and is_explicit("weights"),
        "--resume brings its own weights; remove --weights",
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
    yield Rule(("decode", "device"), v.decode == "gpu" and v.device == "cpu", "--decode gpu contradicts --device cpu")
    yield Rule(
        ("decode", "skip_bad_images"),
        v.decode == "gpu" and v.skip_bad_images,
        "--skip-bad-images does not work with --decode gpu; remove one",
    )
    yield Rule(
        ("download", "dataname"),
        v.download and (v.dataname == "folder" or not SPECS[v.dataname].needs_datapath),
        f"--download: {v.dataname} is never fetched",
    )


def _place_rules(v: SimpleNamespace) -> Iterator[Rule]:
    """Which data set, and where it lies."""
    yield Rule(
        ("val_split", "dataname"),
        v.val_split is not None and v.dataname != "folder",
        f"--val-split is for --dataname folder; {v.dataname} has its own validation images",
    )
    yield Rule(
        ("dataname", "datapath", "download"),
        SPECS[v.dataname].needs_datapath and v.datapath is None,
        f"--dataname {v.dataname} needs --datapath DIR, the folder that holds it"
        + (" (or where --download puts it)" if SPECS[v.dataname].can_be_fetched else ""),
    )


def derive(values: dict[str, Any], origins: dict[str, str], world_size: int) -> None:
    """Fill in the settings that follow from others, so that each is saved with the value that was used."""
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
    if values["arch"] is None:
        values["arch"] = SPECS[values["dataname"]].default_arch
    if values["lr"] is None:
        values["lr"] = 0.1 if values["optimizer"] == "sgd" else 0.001
    if values["lr_policy"] == "multistep" and values["lr_milestones"] is None:
        values["lr_milestones"] = (0.5 * values["epochs"], 0.75 * values["epochs"])
