"""The settings with which a run goes on: its own or, with ``--resume-override``, other ones, even with other data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from utils.checkpoint.progress import Progress
from utils.checkpoint.resume import DEFAULTS, WHY_FIXED, ResumePoint
from utils.config import plugins
from utils.config.groups.average import AverageSettings
from utils.config.groups.optimisation import OptimisationSettings
from utils.config.rules import OPTIONS
from utils.config.settings import Settings, UserError, as_flag, shaping

# of an optimizer's group, except the learning rate, which each step sets
HYPERPARAMETERS = (
    *("momentum", "nesterov", "eps", "betas", "betas_1d", "beta1", "weight_decay", "lr_scale", "name"),
    "max_lr_snapshot",  # the peak rate, to which some of timm's relate the weight decay
)
HAS_BEGUN = "the checkpoint holds an average that has begun"


def settings_to_go_on(point: ResumePoint, args: Settings) -> Settings:
    """The settings ``args``, completed by what the run of ``point`` measured when it began.

    Raises ``UserError`` for settings that the run's state does not fit or, without --resume-override, for any that
    would change the experiment.
    """
    if args.run.resume_override:
        refuse_impossible(point, args)
    else:
        point.refuse_differences(args)
    return args.with_values(**{name: point.state["settings"].get(name) for name in args.unmeasured()})


def refuse_impossible(resume_point: ResumePoint, args: Settings) -> None:
    """Raise ``UserError`` with a line for each setting in ``args`` that the checkpoint's state does not fit."""
    differences = resume_point.differences(args)
    mistakes = [
        f"{difference}; {WHY_FIXED[OPTIONS[name].metadata['shapes']]}"
        for name, difference in differences.items()
        if resume_point.can_never_change(name, args)
    ]
    if resume_point.state["ema"] is not None and (moved := _of_another_epoch(resume_point, args, differences)):
        mistakes.append(moved)
    if mistakes:
        raise UserError(*mistakes, on_all_ranks=True)


def _of_another_epoch(resume_point: ResumePoint, args: Settings, differences: dict[str, str]) -> str:
    """Message if the average would now begin in another epoch than that in which the checkpoint's began; or ''.

    A fraction as --swa-start-epoch means another epoch with other --epochs: until that epoch, the average would stand
    still.
    """
    begun = DEFAULTS | resume_point.state["settings"]
    progress = resume_point.state["progress"]
    averaged = (progress["epoch"] + 1, progress["step_in_epoch"]) > (begun["ema_start_epoch"], 0)
    if "ema_start_epoch" in differences and averaged:
        return f"{differences['ema_start_epoch']}; {HAS_BEGUN}"
    start = AverageSettings(swa_start_epoch=begun["swa_start_epoch"]).first_averaged_epoch(begun["epochs"])
    now = args.average.first_averaged_epoch(args.optimisation.epochs)
    if start == now:
        return ""
    if "swa_start_epoch" in differences:
        return f"{differences['swa_start_epoch']}; {HAS_BEGUN}"
    return (
        f"{differences['epochs']}; --swa-start-epoch {args.average.swa_start_epoch:g} would mean epoch {now}, and "
        f"{HAS_BEGUN} in epoch {start}; add --swa-start-epoch {start}"
    )


def refuse_other_groups(
    resume_point: ResumePoint, args: Settings, groups_of: Callable[[OptimisationSettings], list[dict[str, Any]]]
) -> None:
    """Raise ``UserError`` if ``args`` group the parameters differently from the checkpoint's settings.

    ``groups_of`` returns an optimizer's groups. An optimizer's state identifies a parameter only by its place in the
    groups: in other groups, it would get another parameter's momentum.
    """
    differences = resume_point.differences(args)
    changed = [differences[name] for name in shaping("groups") if name in differences]
    if not changed:
        return
    stored = DEFAULTS | resume_point.state["settings"]
    names = [option.name for option in dataclasses.fields(OptimisationSettings)]
    begun = OptimisationSettings(**{name: stored[name] for name in names})
    before, now = (
        [[id(parameter) for parameter in group["params"]] for group in groups_of(settings)]
        for settings in (begun, args.optimisation)
    )
    if before != now:
        words = "its state fits no other groups of parameters, not even with --resume-override"
        raise UserError(*(f"{difference}; {words}" for difference in changed), on_all_ranks=True)


def refuse_other_head(resume_point: ResumePoint, classes: tuple[str, ...], multilabel: bool) -> None:
    """Raise ``UserError`` if data set and checkpoint differ in number of classes or in being multi-label."""
    if len(classes) != len(resume_point.state["classes"]) or multilabel != resume_point.multilabel:
        difference = resume_point.data_differences(classes, None, multilabel)[0]
        fits = "number of classes" if multilabel == resume_point.multilabel else "kind of labels"
        raise UserError(
            f"{difference}; its last layer fits no other {fits}: begin anew with --weights", on_all_ranks=True
        )


def carry_over(
    resume_point: ResumePoint,
    args: Settings,
    classes: tuple[str, ...],
    fingerprint: str,
    steps_per_epoch: int,
    optimizers: Sequence[torch.optim.Optimizer],
) -> tuple[dict[str, Any], list[str]]:
    """The state from which to continue with ``args`` and this data, and a line for each change.

    The settings of ``args`` replace those in the optimizers' state. If steps now see other samples, the rest of an
    unfinished epoch is skipped, and the learning rate is that of the beginning of an epoch. Raises ``UserError``.
    """
    differences = resume_point.differences(args)
    shaped = {OPTIONS[name].metadata["shapes"] for name in differences}
    data = resume_point.data_differences(classes, fingerprint, resume_point.multilabel)  # see ``refuse_other_head``
    values = args.result_values()
    changes = [f"{line}; going on without it" for line in resume_point.gone]
    changes += [f"{line}; going on with {as_flag(name, values[name])}" for name, line in differences.items()]
    changes += [f"{line}; going on with these" for line in data]
    others = resume_point.other_plugins
    changes += [f"{line}; going on with the files as they are now" for line in others]
    own_metrics = plugins.added("metric") if others else {}
    progress = Progress.from_state(resume_point.state["progress"])
    cut_by_step_batches = args.data.max_val_batches is not None and args.data.val_batch_size is None
    if cut_by_step_batches and "global_batch_size" in differences:
        shaped.add("validation images")  # --max-val-batches then counts batches of this size
    of_images = ("validation images", "views of the validation images")
    of_others = "data" if data else next((what for what in of_images if what in shaped), None)
    if of_others or shaped & {"validation", "network"}:
        progress.validated_step = 0  # a checkpoint would show its figures beside settings that did not give them
    if of_others or "best_metric" in differences or args.run.best_metric in own_metrics:
        progress.forget_best()
        what = f"other {of_others}" if of_others else "another metric"
        changes.append(f"the best result so far is of {what}, and is forgotten")
    if data or "samples" in shaped:
        if progress.step_in_epoch:
            changes.append(_skip_rest(progress, args))
        progress.shifted_steps += progress.epoch * steps_per_epoch - progress.updates
    if 0 < progress.step_in_epoch < steps_per_epoch and "loss" in shaped:
        progress.forget_sums()
        changes.append(f"another loss: epoch {progress.epoch + 1}'s training figures are of its remaining steps")
    if args.optimisation.lr_policy == "plateau" and progress.lr_drops and {"lr", "lr_gamma"} & differences.keys():
        changes.append(_of_drops(args.optimisation, progress.lr_drops))
    if of_others or "stopping" in shaped or {args.run.best_metric, args.run.early_stopping_metric} & own_metrics.keys():
        progress.wait_anew()
    state = resume_point.state | {
        "progress": progress.state(),
        "optimizer": _with_settings_of(optimizers, resume_point.state["optimizer"]),
    }
    if "init_scale" in differences and state["scaler"]:  # a disabled scaler has no state
        state["scaler"] = state["scaler"] | {"scale": args.precision.init_scale, "_growth_tracker": 0}
    return state, changes


def _of_drops(settings: OptimisationSettings, drops: int) -> str:
    """A line about the rate with which a plateau's ``drops`` so far go on, under another --lr or --lr-gamma."""
    assert settings.lr is not None  # filled in
    rate = max(settings.lr_min, settings.lr * settings.lr_gamma**drops)
    floor = f", but at least --lr-min {settings.lr_min:g}" if settings.lr_min else ""
    return (
        f"the {drops} drop(s) so far count: the learning rate goes on at {rate:g}, --lr {settings.lr:g} times "
        f"--lr-gamma {settings.lr_gamma:g} for each{floor}"
    )


def _skip_rest(progress: Progress, args: Settings) -> str:
    """Skip to the next epoch's beginning, or start this epoch again if it is the last; return a line for the log."""
    step = progress.step_in_epoch
    is_last = progress.epoch + 1 >= args.optimisation.epochs
    if not is_last:
        progress.finish_epoch()
    progress.step_in_epoch = 0
    progress.epoch_seconds = 0.0
    progress.forget_sums()
    again = " again" * is_last
    return f"steps have other samples now: after step {step} of an epoch, epoch {progress.epoch + 1} begins{again}"


def _with_settings_of(optimizers: Sequence[torch.optim.Optimizer], stored: Any) -> Any:
    """The ``stored`` state, or list of states, with the hyperparameters of ``optimizers``. Raises ``UserError``."""
    states = stored if isinstance(stored, list) else [stored]
    results = []
    for optimizer, state in zip(optimizers, states, strict=True):
        groups = optimizer.state_dict()["param_groups"]
        values = [{name: group[name] for name in HYPERPARAMETERS if name in group} for group in groups]
        for old, new in zip(state["param_groups"], values, strict=True):
            if (old.get("beta1") is None) != (new.get("beta1") is None):  # Adafactor keeps a momentum only with it
                words = "the state holds a momentum only with them, so they can neither begin nor end there"
                raise UserError(f"--opt-betas: {words}", on_all_ranks=True)
        # A factor that is there no more becomes 1: what is left out here, the file completes.
        kept = (old | ({"lr_scale": 1.0} if "lr_scale" in old else {}) for old in state["param_groups"])
        results.append(state | {"param_groups": [old | new for old, new in zip(kept, values, strict=True)]})
    return results if isinstance(stored, list) else results[0]
