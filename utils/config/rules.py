"""Settings that must agree with each other, and those that follow from others.

A contradiction is a question answered in two ways (which algorithm, which schedule, which weights, which device), or
something to be done that cannot be: a mistake. A setting of what the run does not have, such as the momentum of an
optimizer without one, only does nothing, and is told (``utils/loop/effects.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

DEFAULT, CHECKPOINT, RECIPE, FLAG = "default", "checkpoint", "recipe", "flag"  # where a value came from, lowest first


def outranks(origin: str, other: str) -> bool:
    """Whether a value from ``origin`` takes the place of one from ``other``."""
    rank = [DEFAULT, CHECKPOINT, RECIPE, FLAG].index
    return rank(origin) > rank(other)


# Data sets without a small size of their own get a network that pools its features, the others a plain one.
LARGE_IMAGES = ("imagenet", "folder", "synthetic")
LARGE_IMAGES_ARCH, SMALL_IMAGES_ARCH = "resnet18", "conv2"

Rule = tuple[object, str]  # what is wrong when it is true, and the line that says so


def contradictions(
    values: dict[str, Any], origins: dict[str, str], world_size: int, checkpoint_known: bool = True
) -> list[str]:
    """Pairs of settings that cannot both hold, a line each. ``checkpoint_known``: no checkpoint is still to be read."""
    v = SimpleNamespace(**values)

    def told(name: str, against: str | None = None) -> bool:
        """Whether the setting was given, by no lower layer than the one that it speaks ``against``."""
        return origins[name] in (RECIPE, FLAG) and (against is None or not outranks(origins[against], origins[name]))

    begins = v.resume in (None, "auto") and not (v.evaluate and v.weights)  # else a checkpoint may say the rest
    forgotten = begins and origins["dataname"] == DEFAULT and told("datapath")
    rules = [*_optimisation_rules(v, told, origins, world_size), *_start_rules(v, told), *_data_rules(v)]
    if begins or checkpoint_known:
        rules += _place_rules(v)
    rules.append((forgotten, "--datapath needs --dataname: folder for class folders, mnist, cifar10, imagenet ..."))
    return [line for wrong, line in rules if wrong]


def _optimisation_rules(
    v: SimpleNamespace, told: Callable[..., bool], origins: dict[str, str], world_size: int
) -> list[Rule]:
    """Batches, optimizer, learning rate, precision."""
    per_step = world_size * v.accumulate
    # The smaller of two that disagree may come from a lower layer: then the higher layer simply wins.
    both = told("batch_size") and told("global_batch_size") and origins["batch_size"] == origins["global_batch_size"]
    sizes = {"norm": v.clip_grad_norm, "value": v.clip_grad_value, "agc": v.clip_grad_agc}
    clips = [f"--clip-grad-{way}" for way, size in sizes.items() if size is not None]
    return [
        (
            both and v.global_batch_size and v.batch_size != math.ceil(v.global_batch_size / per_step),
            f"--batch-size {v.batch_size} x {world_size} processes x --accumulate {v.accumulate} is not "
            f"--global-batch-size {v.global_batch_size}; give one of the two",
        ),
        (
            told("nesterov", against="optimizer") and v.nesterov and v.optimizer != "sgd",
            f"--nesterov needs --optimizer sgd, not {v.optimizer}",
        ),
        (v.nesterov and v.momentum == 0, "--nesterov needs a --momentum above 0"),
        (
            v.lr_policy != "multistep" and told("lr_milestones", against="lr_policy") and v.lr_milestones is not None,
            f"--lr-milestones needs --lr-policy multistep, not {v.lr_policy}",
        ),
        (
            v.lr_milestones is not None and list(v.lr_milestones) != sorted(set(v.lr_milestones)),
            "--lr-milestones must rise",
        ),
        (
            v.warmup_epochs > v.epochs,
            f"--warmup-epochs {v.warmup_epochs:g} is longer than --epochs {v.epochs}",
        ),
        (len(clips) > 1, f"{' and '.join(clips)} are two ways to clip; give one"),
        (
            v.grad_penalty and v.compile,
            "--grad-penalty needs second derivatives, which --compile cannot make; remove one",
        ),
    ]


def _start_rules(v: SimpleNamespace, told: Callable[..., bool]) -> list[Rule]:
    """Where a run begins, and on which devices."""
    checkpoint = v.evaluate and (v.resume or v.weights)
    return [
        (
            told("pretrained") and v.pretrained and told("weights"),
            "--pretrained and --weights both say where to begin; give one",
        ),
        (
            told("init") and v.init != "default" and (v.pretrained or v.weights),
            f"--init {v.init} would be overwritten by the {'pretrained' if v.pretrained else '--weights'} weights",
        ),
        (v.gpu_ids and v.device == "cpu", "--gpu-ids contradicts --device cpu"),
        (v.gpu_ids and len(set(v.gpu_ids)) != len(v.gpu_ids), "--gpu-ids names a GPU twice"),
        (
            v.evaluate and not (checkpoint or v.pretrained),
            "--evaluate needs weights: --resume PATH, --weights PATH or --pretrained",
        ),
        (v.evaluate and v.resume == "auto", "--evaluate needs a path: --resume auto continues training"),
        (v.resume and told("weights"), "--resume brings its own weights; remove --weights"),
        (
            v.resume_override and v.resume == "auto",
            "--resume-override contradicts --resume auto, which looks for a run with equal settings; give its path",
        ),
        (v.resume_override and not v.resume, "--resume-override needs --resume PATH, the run to go on with"),
        (v.resume_override and v.evaluate, "--resume-override is for training; remove it or --evaluate"),
    ]


def _data_rules(v: SimpleNamespace) -> list[Rule]:
    """Data set and augmentation."""
    names = v.augment or ()
    return [
        (
            v.augment is not None and "none" in v.augment and len(v.augment) > 1,
            "--augment none contradicts the other names after --augment",
        ),
        (
            {"flip", "alternating-flip"} <= set(names),
            "--augment flip and alternating-flip are two ways to flip; give one",
        ),
        (v.decode == "gpu" and v.device == "cpu", "--decode gpu contradicts --device cpu"),
        (v.decode == "gpu" and v.skip_bad_images, "--skip-bad-images cannot be had with --decode gpu; remove one"),
        (v.download and v.dataname in ("digits", "synthetic", "folder"), f"--download: {v.dataname} is never fetched"),
    ]


def _place_rules(v: SimpleNamespace) -> list[Rule]:
    """Which data set, and where it lies."""
    return [
        (
            v.val_split is not None and v.dataname != "folder",
            f"--val-split is for --dataname folder; {v.dataname} has its own validation images",
        ),
        (
            v.dataname not in ("digits", "synthetic") and v.datapath is None,
            f"--dataname {v.dataname} needs --datapath DIR, the folder that holds it"
            + (" (or where --download puts it)" if v.dataname not in ("folder", "imagenet") else ""),
        ),
    ]


def derive(values: dict[str, Any], origins: dict[str, str], world_size: int) -> None:
    """Fill what follows from other settings, so that each setting is written with the value that was used."""
    per_step = world_size * values["accumulate"]
    from_global = values["global_batch_size"] and outranks(origins["global_batch_size"], origins["batch_size"])
    if from_global:
        values["batch_size"] = math.ceil(values["global_batch_size"] / per_step)
        origins["batch_size"] = f"global-batch-size / {per_step}"
    elif not (values["global_batch_size"] and origins["global_batch_size"] == origins["batch_size"]):
        values["global_batch_size"] = values["batch_size"] * per_step
        origins["global_batch_size"] = f"batch-size x {per_step}"
    if values["arch"] is None:
        values["arch"] = LARGE_IMAGES_ARCH if values["dataname"] in LARGE_IMAGES else SMALL_IMAGES_ARCH
    if values["lr"] is None:
        values["lr"] = 0.1 if values["optimizer"] == "sgd" else 0.001
    if values["lr_policy"] == "multistep" and values["lr_milestones"] is None:
        values["lr_milestones"] = (0.5 * values["epochs"], 0.75 * values["epochs"])
