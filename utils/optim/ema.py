"""Averages of the weights: exponential, after each step; uniform, after each epoch; or the optimizer's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from utils.checkpoint.progress import Progress
from utils.config.groups.average import AverageSettings
from utils.config.groups.optimisation import SCHEDULE_FREE
from utils.optim.batch_norm_statistics import layers_with_statistics
from utils.optim.schedule_free import ScheduleFreeSGD
from utils.runtime.sharding import local
from utils.runtime.state_dicts import load_state_dict

Pairs = dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]]  # the average's tensors and the model's
Earlier = Callable[[torch.Tensor], torch.Tensor]


class WeightAverage:
    """An average of a model's weights. ``module``: a network that holds the average once ``has_begun`` is True.

    Its batch-norm statistics do not fit its weights: recompute them before using it
    (``utils/optim/batch_norm_statistics.py``).
    """

    module: nn.Module
    has_begun = True

    def update(self, updates: int, epoch: int = 0, after_step: Earlier | None = None) -> None:
        """Update the average with the model's weights, in ``epoch`` (from 0), after ``updates`` earlier calls.

        ``after_step`` maps each of the model's tensors to a tensor with its value after the step; None if the model's
        tensors have these values now.
        """

    def end_epoch(self, progress: Progress) -> None:
        """Update the average after the last step of an epoch; calling it again for the same step changes nothing."""

    def state(self) -> dict[str, Any] | None:
        """The average for a checkpoint, by the model's own parameter names; None before the average has begun."""
        return {"model": self.module.state_dict()} if self.has_begun else None

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore what ``state`` returned. Raises ``TypeError`` for None if this kind of average begins at once."""
        if state is None:
            raise TypeError("the average of the weights is missing")
        load_state_dict(self.module, state["model"])


class MovingAverage(WeightAverage):
    """Moving average in ``module``, a copy of ``model``: in each step, average = d x average + (1 - d) x weights.

    Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992. d is ``ema_decay``, but with
    ``ema_warmup`` at most (1 + n) / (10 + n) in update n, from 0, as in TensorFlow's ``ExponentialMovingAverage``: with
    the full decay from the beginning, the average would consist of initial weights for some 1 / (1 - decay) updates.
    Before epoch ``ema_start_epoch``, from 1, the average equals the weights, as during the warm-up of torchvision's
    training script.

    Running statistics (buffers named ``running_*``) are averaged like the weights, and lag behind what these need. All
    other buffers are copied. ``module``: a copy that exists already; a sharded ``model`` cannot be copied.
    """

    def __init__(self, model: nn.Module, settings: AverageSettings, module: nn.Module | None = None) -> None:
        assert settings.ema_decay is not None
        self.module = module if module is not None else copy.deepcopy(model)
        self.decay = settings.ema_decay
        self.warmup = settings.ema_warmup
        self.first_epoch = settings.ema_start_epoch
        self._averaged: Pairs = {}
        self._copied: Pairs = {}
        pairs = zip(_tensors(self.module), _tensors(model), strict=True)
        for (own, averaged), (models, _) in pairs:
            ours, theirs = (self._averaged if averaged else self._copied).setdefault(own.dtype, ([], []))
            ours.append(own)
            theirs.append(models)

    def decay_of(self, updates: int, epoch: int) -> float:
        """The decay of an update in ``epoch`` (from 0) that follows ``updates`` others."""
        if epoch + 1 < self.first_epoch:
            return 0.0
        return min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, updates: int, epoch: int = 0, after_step: Earlier | None = None) -> None:
        for averages, models in self._averaged.values():
            now = [*map(after_step, models)] if after_step else models
            torch._foreach_lerp_(averages, now, 1 - self.decay_of(updates, epoch))
        for copies, models in self._copied.values():
            torch._foreach_copy_(copies, [*map(after_step, models)] if after_step else models)


class EpochAverage(WeightAverage):
    """Mean of ``model``'s weights at the ends of epochs from ``first_epoch`` (from 1) on. ``module`` holds it.

    Stochastic weight averaging: Izmailov et al., Averaging weights leads to wider optima and better generalization,
    2018; computed by torch's ``AveragedModel``. Buffers are those of the latest epoch. ``has_begun`` is True once an
    epoch has entered the mean.
    """

    def __init__(self, model: nn.Module, first_epoch: int) -> None:
        self.model = model
        self.first_epoch = first_epoch
        self._average = AveragedModel(model)
        self.module = self._average.module
        self.has_begun = False

    def end_epoch(self, progress: Progress) -> None:
        if progress.epoch + 1 < self.first_epoch or progress.averaged_step == progress.step:
            return
        self._average.n_averaged.fill_(progress.averaged_epochs)
        self._average.update_parameters(self.model)
        progress.averaged_epochs += 1
        progress.averaged_step = progress.step
        self.has_begun = True

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        self.has_begun = state is not None
        if state is not None:
            super().load_state(state)


class ScheduleFreeAverage(WeightAverage):
    """The averaged weights x of a schedule-free ``optimizer``, in ``module``, a copy of ``model``.

    They are copied when ``module`` is first read after a step, with all buffers of ``model``; recomputed statistics
    last until the next step. Parameters without a state, which have never moved, are copied from ``model``; so are
    frozen parameters, because all others are trained with the weights y, at which the frozen ones stay.
    """

    def __init__(self, model: nn.Module, optimizer: ScheduleFreeSGD) -> None:
        self.model = model
        self.optimizer = optimizer
        self._module = copy.deepcopy(model)
        self._has_moved = False

    @property
    def module(self) -> nn.Module:  # type: ignore[override]  # read-only, and copied when read
        if self._has_moved:
            self._copy()
        return self._module

    @torch.no_grad()
    def _copy(self) -> None:
        states = self.optimizer.state
        weights = [states[p]["x"] if p in states and p.requires_grad else p for p in self.model.parameters()]
        torch._foreach_copy_([*self._module.parameters()], weights)
        for own, models in zip(self._module.buffers(), self.model.buffers(), strict=True):
            own.copy_(models)
        self._has_moved = False

    def update(self, updates: int, epoch: int = 0, after_step: Earlier | None = None) -> None:
        self._has_moved = True

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        self._has_moved = False
        super().load_state(state)


def build_average(
    model: nn.Module,
    settings: AverageSettings,
    epochs: int,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    module: nn.Module | None = None,
) -> WeightAverage | None:
    """The average of ``model``'s weights that one of its ``optimizers`` keeps or ``settings`` ask for; None if neither.

    ``epochs``: of the whole run. ``module``: a copy of ``model`` for a moving average, if there is one already.
    """
    if optimizers and isinstance(optimizers[0], ScheduleFreeSGD):
        return ScheduleFreeAverage(model, optimizers[0])
    if settings.ema_decay is not None:
        return MovingAverage(model, settings, module)
    first = settings.first_averaged_epoch(epochs)
    return EpochAverage(model, first) if first is not None else None


def _tensors(model: nn.Module) -> list[tuple[torch.Tensor, bool]]:
    """Parameters and buffers, each with whether it is averaged rather than copied."""
    tensors = [(local(parameter), _has_a_mean(parameter)) for parameter in model.parameters()]
    for name, buffer in model.named_buffers():
        is_statistic = name.rpartition(".")[2].startswith("running_")
        tensors.append((buffer, is_statistic and _has_a_mean(buffer)))
    return tensors


def _has_a_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def describe(settings: AverageSettings, epochs: int, optimizer: str, model: nn.Module) -> str:
    """Describe the average of ``model``'s weights over a run of ``epochs``; 'none' without one."""
    decay = settings.ema_decay
    first = settings.first_averaged_epoch(epochs)
    if optimizer in SCHEDULE_FREE:
        kind = "that of the schedule-free optimizer"
    elif decay is not None:
        start = settings.ema_start_epoch
        kind = f"decay {decay:g}{'' if settings.ema_warmup else ' from the first step on'}"
        kind += f", begun in epoch {start}" if start > 1 else ""
    elif first is not None:
        kind = f"mean of the weights after each epoch from epoch {first} on"
    else:
        return "none"
    batches = settings.ema_bn_batches
    source = f"computed over at most {batches} training batches before each validation" if batches else "averaged"
    return kind + (f", batch-norm statistics {source}" if layers_with_statistics(model) else "")
