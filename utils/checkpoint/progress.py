"""The progress of a run: everything that resuming needs besides tensors."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from utils.config.settings import Settings

NOTHING = (0.0, 0.0, 0.0, 0.0)
NUMBERS_OF_A_STEP = 8  # in a ``StepRecord``
MOST_STEPS = 2**53
REQUIRED = {"required": True}  # marks a field that every checkpoint of ``checkpoint.FORMAT`` holds


@dataclass
class Progress:
    """Position in a run and running sums: plain numbers and texts, exact in a checkpoint.

    A new field needs a plain default, with which older checkpoints resume.

    ``epoch``: epochs completed. ``step_in_epoch``: optimizer steps done in the current epoch. ``step``: optimizer steps
    in total, including skipped ones. ``skipped_steps``: steps that moved no weights; ``skipped_in_row``: how many of
    them came last in a row; ``partly_skipped_steps``: steps that moved only some optimizers' weights. ``epoch_sums``
    and ``window_sums``: summed loss, top-1 and top-5 hits, count, and the losses in ``loss_names``, since the beginning
    of the epoch and since the last log line. ``bad_images``: paths of unreadable images so far; ``replaced_images``:
    how often training used another image instead. ``last_step``: the latest ``StepRecord``, which may hold NaN.
    ``last_validation``: the ``numbers`` of the report after step ``validated_step``. ``shifted_steps``: what
    --resume-override added to the position in the learning-rate schedule because the number of steps per epoch changed.
    For multi-label data, the sums are those of ``MultilabelReport.from_sums``, and ``best_top1`` is a mean average
    precision.

    ``best_value``: value of --best-metric in best.pt. ``best_top1``: top-1 of best.pt in percent, once a whole epoch
    made it. ``stopping_value`` and ``stopping_epoch``: value and epoch of the last improvement that early stopping saw.
    ``best_value`` and ``stopping_value`` are None until there is one. ``lr_drops``: how often --lr-policy plateau has
    lowered the learning rate, last at the end of epoch ``lr_drop_epoch``. ``averaged_epochs``: epochs whose weights are
    in the stochastic weight average; the last of them ended with step ``averaged_step``. ``epoch_seconds``: time that
    an unfinished epoch has taken so far.
    """

    epoch: int = field(default=0, metadata=REQUIRED)
    step_in_epoch: int = field(default=0, metadata=REQUIRED)
    step: int = field(default=0, metadata=REQUIRED)
    samples_seen: int = field(default=0, metadata=REQUIRED)
    skipped_steps: int = field(default=0, metadata=REQUIRED)
    skipped_in_row: int = field(default=0, metadata=REQUIRED)
    partly_skipped_steps: int = field(default=0, metadata=REQUIRED)
    best_top1: float = field(default=-1.0, metadata=REQUIRED)
    best_epoch: int = field(default=0, metadata=REQUIRED)
    epoch_sums: list[float] = field(default_factory=lambda: list(NOTHING), metadata=REQUIRED)
    window_sums: list[float] = field(default_factory=lambda: list(NOTHING), metadata=REQUIRED)
    last_validation: list[float] = field(default_factory=lambda: list(NOTHING), metadata=REQUIRED)
    validated_step: int = field(default=0, metadata=REQUIRED)
    loss_names: list[str] = field(default_factory=list, metadata=REQUIRED)
    bad_images: list[str] = field(default_factory=list, metadata=REQUIRED)
    replaced_images: int = field(default=0, metadata=REQUIRED)
    last_step: list[float] = field(default_factory=list, metadata=REQUIRED)
    shifted_steps: int = field(default=0, metadata=REQUIRED)
    best_value: float | None = None
    stopping_value: float | None = None
    stopping_epoch: int = 0
    lr_drops: int = 0
    lr_drop_epoch: int = 0
    averaged_epochs: int = 0
    averaged_step: int = 0
    epoch_seconds: float = 0.0

    @property
    def best_headline(self) -> float:
        """``best_top1``; NaN if best.pt has none: mean average precision without any positive label."""
        return self.best_top1 if self.best_top1 >= 0 else math.nan

    @property
    def moved_steps(self) -> int:
        """Number of optimizer steps that moved any weights, which the moving average counts."""
        return self.step - self.skipped_steps

    @property
    def updates(self) -> int:
        """The position in the learning-rate schedule."""
        return self.moved_steps + self.shifted_steps

    def is_trained(self, args: Settings) -> bool:
        """True if ``args`` leave no step to take."""
        planned = self.epoch < args.optimisation.epochs and self.step < (args.run.max_steps or math.inf)
        return not planned or self.stops_early(args)

    def stops_early(self, args: Settings) -> bool:
        """True if early stopping has waited long enough for an improvement."""
        patience = args.run.early_stopping
        return patience is not None and self.epoch - self.stopping_epoch >= patience

    def drop_lr(self, epoch: int, args: Settings) -> bool:
        """Lower the learning rate if --lr-policy plateau has waited long enough after the warm-up; return True if so.

        ``epoch``: the epoch that has just been validated.
        """
        settings = args.optimisation
        waited = epoch - max(self.stopping_epoch, self.lr_drop_epoch, math.ceil(settings.warmup_epochs))
        if settings.lr_policy != "plateau" or waited < settings.lr_patience:
            return False
        self.lr_drops += 1
        self.lr_drop_epoch = epoch
        return True

    def may_end(self, args: Settings) -> bool:
        """True if the run may end with the current epoch, whose steps are done; its validation decides."""
        return dataclasses.replace(self, epoch=self.epoch + 1).is_trained(args)

    def validation_is_due(self, args: Settings) -> bool:
        """True if the current epoch, whose steps are done, is to be validated; always if the run may end with it."""
        return self.may_end(args) or (self.epoch + 1) % args.run.val_every_epochs == 0

    def is_finished(self, args: Settings) -> bool:
        """True if nothing is left to do: neither a step nor the validation after the last one."""
        return self.is_trained(args) and self.validated_step == self.step

    def forget_best(self) -> None:
        """Forget the best epoch, so that the next whole epoch becomes the best."""
        self.best_top1 = -1.0
        self.best_epoch = 0
        self.best_value = None

    def wait_anew(self) -> None:
        """Make early stopping wait for an improvement from the current epoch on."""
        self.stopping_value = None
        self.stopping_epoch = self.epoch

    def add(self, row: list[float]) -> None:
        """Add one step's sums, ``row``; add steps singly and in order, because grouping could change the bits."""
        for sums in (self.epoch_sums, self.window_sums):
            sums += [0.0] * (len(row) - len(sums))
            for place, value in enumerate(row):
                sums[place] += value

    def advance(self, steps: int = 1) -> None:
        """Go on by ``steps`` optimizer steps, before it is known whether they moved any weights."""
        self.step += steps
        self.step_in_epoch += steps

    def count_moved(self, moved: int, optimizers: int) -> None:
        """Count that ``moved`` of ``optimizers`` moved their weights in the latest step."""
        self.skipped_steps += moved == 0
        self.skipped_in_row = 0 if moved else self.skipped_in_row + 1
        self.partly_skipped_steps += 0 < moved < optimizers

    def named_losses(self, sums: list[float]) -> dict[str, float]:
        """Means of the named losses in ``sums``, by name."""
        count = max(sums[3], 1)
        return {name: value / count for name, value in zip(self.loss_names, sums[len(NOTHING) :], strict=False)}

    def finish_epoch(self) -> None:
        """Count the epoch as done."""
        self.epoch += 1
        self.step_in_epoch = 0
        self.epoch_seconds = 0.0
        self.forget_sums()

    def forget_sums(self) -> None:
        """Restart the epoch's training figures from zero."""
        self.epoch_sums = list(NOTHING)
        self.window_sums = list(NOTHING)

    def state(self) -> dict[str, Any]:
        """The fields by name, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """Progress from a checkpoint's ``state``, in which ``problems`` finds nothing wrong."""
        # Older checkpoints have no metric but top-1, and did not watch for early stopping.
        older = {"best_value": state["best_top1"] if state["best_epoch"] else None, "stopping_epoch": state["epoch"]}
        return cls(**older | state)

    @classmethod
    def problems(cls, state: Any) -> list[str]:
        """Mistakes in the progress ``state`` of a checkpoint, one phrase each."""
        if not isinstance(state, dict):
            return []  # ``inventory.wrong_kinds`` reports it
        fields = {item.name: item for item in dataclasses.fields(cls)}
        problems = [f"progress lacks {name}" for name, item in fields.items() if name not in state and item.metadata]
        problems += [f"progress has {str(name)[:40]}, unknown to this version" for name in state if name not in fields]
        problems += [
            f"progress/{name} is {str(state[name])[:40]}"
            for name, item in fields.items()
            if name in state and not _possible(name, str(item.type), state[name])
        ]
        if problems:
            return problems
        if max(state["step_in_epoch"], state["skipped_steps"], state["skipped_in_row"]) > state["step"]:
            return ["progress counts more steps in the epoch, or skipped steps, than steps in all"]
        return []


def _possible(name: str, kind: str, value: Any) -> bool:
    """True if a field of type ``kind`` can have ``value``."""
    if kind == "int":
        low = -MOST_STEPS if name == "shifted_steps" else 0
        return type(value) is int and low <= value < MOST_STEPS
    if kind == "float | None" and value is None:
        return True
    if kind in ("float", "float | None"):
        return isinstance(value, float) and math.isfinite(value)
    if kind == "list[str]":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if not isinstance(value, list) or any(type(item) not in (int, float) for item in value):
        return False
    if name == "last_step":  # may hold NaN: a skipped step has no finite gradient
        return len(value) in (0, NUMBERS_OF_A_STEP)
    if name == "last_validation":  # the loss of a diverged network is NaN
        return len(value) in (len(NOTHING), len(NOTHING) + 1)
    return len(value) >= len(NOTHING) and all(map(math.isfinite, value))
