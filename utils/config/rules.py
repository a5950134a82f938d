"""Contradictions between settings, and settings that follow from others.

A contradiction is a mistake: settings answer one question in two ways (which algorithm, schedule, weights or device),
or ask for what cannot be done. Each group has its own (``contradictions`` in ``utils/config/groups/``); this file has
those of an optimizer or a way to train that concern several groups. A setting of something that the run does not have,
such as the momentum of an optimizer without one, merely has no effect and is reported (``utils/loop/effects.py``).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

from utils.config.datasets import SPECS
from utils.config.field import DEFAULT, FLAG, RECIPE, outranks
from utils.config.groups.loss import BALANCED
from utils.config.groups.optimisation import SCHEDULE_FREE, SHARDABLE
from utils.config.settings import GROUPS, all_settings, as_flag, flag_of
from utils.config.spelling import either

DEFAULT_LR = {"sgd": 0.1, "schedulefree-sgd": 1.0}  # 1.0: steps as large as sgd's, with its momentum of 0.9
OPTIONS = {option.name: option for _, option in all_settings()}
# what a continued run takes from its checkpoint
INHERITED = {name for name, option in OPTIONS.items() if option.metadata["in_recipe"] and option.metadata["inherited"]}


class Given:
    """The settings of a command line for ``processes`` processes, each an attribute, and the origin of each.

    ``undecided``: names of settings that a checkpoint may still fill in. ``seen``: names of settings that were read
    since the last question to ``has``; ``seen_before``: those that were read for that question.
    """

    def __init__(
        self, values: dict[str, Any], origins: dict[str, str], processes: int = 1, checkpoint_known: bool = True
    ) -> None:
        self.values = values
        self.origins = origins
        self.processes = processes
        self.seen: set[str] = set()
        self.seen_before: set[str] = set()
        self.starts_here = values["resume"] in (None, "auto") and not (values["evaluate"] and values["weights"])
        gaps = () if self.starts_here or checkpoint_known else INHERITED
        self.undecided = {name for name in gaps if origins[name] == DEFAULT}

    def __getattr__(self, name: str) -> Any:
        try:
            value = self.values[name]
        except KeyError:
            raise AttributeError(name) from None
        self.seen.add(name)
        return value

    def is_explicit(self, name: str, against: str | None = None) -> bool:
        """True if a flag or recipe sets ``name``, and the origin of ``against`` has no higher precedence."""
        self.seen |= {name} | ({against} if against else set())
        origin = self.origins[name]
        return origin in (RECIPE, FLAG) and (against is None or not outranks(self.origins[against], origin))

    def same_layer(self, name: str, other: str) -> bool:
        """True if flags set both settings, or the recipe sets both. Otherwise precedence decides between them."""
        return self.is_explicit(name) and self.is_explicit(other) and self.origins[name] == self.origins[other]

    def has(self, combination: object) -> bool:
        """Whether the settings are as ``combination`` says. Each rule asks once; its line rests on what it read."""
        self.seen_before = self.seen
        self.seen = set()
        return bool(combination)

    def only_one(self, words: str, *names: str) -> Iterator[str]:
        """The rule that no more than one of ``names`` differs from its default."""
        given = [flag_of(name) for name in names if getattr(self, name) != OPTIONS[name].default]
        if self.has(len(given) > 1):
            yield f"{' and '.join(given)} {words}; give one"

    @property
    def peak_lr(self) -> float:
        return learning_rate(self)[0]


def contradictions(v: Given, unread: Collection[str] = ()) -> list[str]:
    """A line for each contradiction in which no setting is ``unread`` or undecided."""
    lines = []
    of_groups = (getattr(of_group, "contradictions", lambda v: ())(v) for of_group in GROUPS.values())
    for line in chain(*of_groups, _schedule_free(v), _sharding(v)):
        if not concerned(v, line) & {*unread, *v.undecided}:
            lines.append(line)
        v.seen.clear()
    return lines


def concerned(v: Given, line: str) -> set[str]:
    """Names of the settings that ``line`` mentions, or that were read for it or for its rule, the last one asked."""
    named = (flag[2:].replace("-", "_") for flag in re.findall(r"--[a-z][a-z0-9-]*[a-z0-9]", line))
    return v.seen_before | v.seen | set(named) & set(OPTIONS)


def _schedule_free(v: Given) -> Iterator[str]:
    """Contradictions with a schedule-free optimizer, which averages and schedules by itself."""
    if v.optimizer not in SCHEDULE_FREE:
        return
    contradicts = f"contradicts --optimizer {v.optimizer}, "
    if v.has(v.lr_policy != "constant" and v.is_explicit("lr_policy", against="optimizer")):
        yield f"--lr-policy {v.lr_policy} {contradicts}whose learning rate is constant after the warm-up; remove it"
    for name in ("ema_decay", "swa_start_epoch", "lookahead"):
        if v.has(getattr(v, name) is not None):
            yield f"{flag_of(name)} {contradicts}which averages the weights itself; remove it"
    if v.has(v.ema_bn_batches == 0 and v.is_explicit("ema_bn_batches")):
        yield f"--ema-bn-batches 0 {contradicts}whose averaged weights need batch-norm statistics of their own"


def _sharding(v: Given) -> Iterator[str]:
    """Contradictions with ``--shard-model``, under which no process has whole parameters or gradients."""
    if not v.shard_model or v.processes == 1 or v.evaluate:
        return
    if v.has(v.optimizer not in SHARDABLE):
        yield (
            f"--shard-model needs --optimizer {either(SHARDABLE)}, which treat each number by itself, not {v.optimizer}"
        )
    for name, option in OPTIONS.items():
        if reason := option.metadata["unsharded"]:
            value = getattr(v, name)
            flag = as_flag(name, value) if option.metadata["choices"] else flag_of(name)
            if v.has(value != option.default):
                yield f"--shard-model contradicts {flag}, which {reason}; remove one"


def global_batch_size(v: Given) -> int:
    """Images per step: ``global_batch_size``, or what ``batch_size`` implies if that has precedence or is alone."""
    if v.global_batch_size and not outranks(v.origins["batch_size"], v.origins["global_batch_size"]):
        return v.global_batch_size
    return v.batch_size * v.processes * v.accumulate


def learning_rate(v: Given) -> tuple[float, str]:
    """The peak learning rate, and the rule that scaled it ('' for none).

    ``lr_base`` is scaled from ``lr_base_size`` images per step, as in timm's train.py. Without it, or if ``lr`` comes
    from a source of higher precedence, ``lr`` (or its default) is taken as it is.
    """
    if v.lr_base is None or (v.lr is not None and outranks(v.origins["lr"], v.origins["lr_base"])):
        return v.lr if v.lr is not None else DEFAULT_LR.get(v.optimizer, 0.001), ""
    adaptive = any(part in v.optimizer.lower() for part in ("ada", "lamb"))
    scale = v.lr_base_scale or ("sqrt" if adaptive else "linear")
    ratio = global_batch_size(v) / v.lr_base_size
    return v.lr_base * (ratio**0.5 if scale == "sqrt" else ratio), scale


def derive(v: Given) -> None:
    """Fill in the settings that follow from others, so that the values that are used get saved."""
    values = v.values
    origins = v.origins
    lr, scale = learning_rate(v)
    per_step = v.processes * v.accumulate
    if values["global_batch_size"] and outranks(origins["global_batch_size"], origins["batch_size"]):
        values["batch_size"] = math.ceil(values["global_batch_size"] / per_step)
        origins["batch_size"] = f"global-batch-size / {per_step}"
    elif not (values["global_batch_size"] and origins["global_batch_size"] == origins["batch_size"]):
        values["global_batch_size"] = values["batch_size"] * per_step
        origins["global_batch_size"] = f"batch-size x {per_step}"
    if values["weights"] and outranks(origins["weights"], origins["pretrained"]):
        values["pretrained"] = False  # which a recipe has set
    elif values["pretrained"] and outranks(origins["pretrained"], origins["weights"]):
        values["weights"] = None
    for name in ("weights", "pretrained"):
        if values[name] and (origins["init"], origins[name]) == (RECIPE, FLAG):
            values["init"] = OPTIONS["init"].default
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
    """Absolute paths of the teacher and class weights that are files: a run may be resumed from another directory."""
    given = {"teacher": values["teacher"], "class_weights": values["class_weights"]}
    return {
        name: os.path.abspath(path)
        for name, path in given.items()
        if path and path != BALANCED and os.path.exists(path)
    }


def of_policy(policy: str, epochs: int) -> dict[str, Any]:
    """Defaults of the settings that belong to a learning-rate policy."""
    chosen: dict[str, dict[str, Any]] = {
        "multistep": {"lr_milestones": (0.5 * epochs, 0.75 * epochs)},
        "step": {"lr_step_epochs": epochs / 3},
        "one-cycle": {"lr_pct_start": 0.3, "lr_div_factor": 25.0},  # those of torch's OneCycleLR
        "triangular": {"lr_pct_start": 0.23, "lr_div_factor": 5.0},  # those of airbench94
    }
    return chosen.get(policy, {})
