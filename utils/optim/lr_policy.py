"""Learning rate as a pure function of the optimizer step and, on a plateau, of the drops so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from utils.config import plugins
from utils.config.groups.average import AverageSettings
from utils.config.groups.optimisation import RESTARTING_POLICIES, RISING_POLICIES, SCHEDULE_FREE, OptimisationSettings
from utils.config.settings import UserError
from utils.config.spelling import counted, some

GAUSSIAN_WIDTHS = 3.0  # the gaussian policy ends at this many standard deviations, 1.1 % of its peak
ROUNDING = 1e-6  # by which sums of floats may miss a whole step, and a user's factor 0
NO_AVERAGE = AverageSettings()
ONE_CYCLE_END = 1e-4  # of its first rate, as in torch's OneCycleLR


@dataclass(frozen=True)
class LRPolicy:
    """Learning-rate schedule of ``settings``: ``policy(step)`` is the rate of optimizer step ``step`` (from 0).

    Settings give epochs, which become steps only here. Over ``warmup_steps`` the rate rises linearly: step k has (k +
    1) / warmup_steps of ``lr``; with a ``warmup_lr``, the rate begins there and has risen in step k by k / warmup_steps
    of the difference. Later steps have ``lr`` times the factor that ``POLICIES`` gives for ``lr_policy``, and at least
    ``lr_min``. From ``swa_step`` on, if there is one, all steps have the constant rate of ``average``. The rate changes
    every ``hold_steps`` steps.

    Policies that fall smoothly begin after the warm-up, or with it without ``warmup_prefix``, and may restart. Cycles
    and the drops of ``step`` may take fractions of steps, to keep to their epochs; each begins with a whole step.
    """

    settings: OptimisationSettings
    steps_per_epoch: int
    average: AverageSettings = NO_AVERAGE

    def __post_init__(self) -> None:
        """Raise ``UserError`` if a user's function is mistaken at the first step, the last, or about 100 between."""
        if self.settings.lr_policy in plugins.added("lr_policy"):
            last = self.total_steps - 1
            for step in (*range(0, last, max(1, last // 100)), last):
                self(step)

    def steps(self, epochs: float) -> int:
        """Number of whole steps in ``epochs``."""
        return round(epochs * self.steps_per_epoch)

    @property
    def total_steps(self) -> int:
        """The planned length."""
        return self.settings.epochs * self.steps_per_epoch

    @property
    def warmup_steps(self) -> int:
        return self.steps(self.settings.warmup_epochs)

    @property
    def hold_steps(self) -> int:
        return self.steps_per_epoch if self.settings.lr_per_epoch else 1

    @property
    def swa_step(self) -> int | None:
        first = self.average.swa_lr and self.average.first_averaged_epoch(self.settings.epochs)
        return (first - 1) * self.steps_per_epoch if first else None

    def at(self, epoch: int, updates: int, drops: int) -> float:
        """The rate in epoch ``epoch`` (from 0), ``updates`` steps into the schedule, not counting skipped steps.

        A rate that is held for a whole epoch, and that of weight averaging, depends on the epoch alone, so that skipped
        steps do not make it change in the middle of an epoch. ``drops``: how often the policy ``plateau`` has dropped.
        """
        if self.swa_step is not None and epoch * self.steps_per_epoch >= self.swa_step:
            updates = max(updates, self.swa_step)
        return self(epoch * self.hold_steps if self.hold_steps > 1 else updates, drops)

    def __call__(self, step: int, drops: int = 0) -> float:
        step -= step % self.hold_steps
        settings = self.settings
        if self.swa_step is not None and self.average.swa_lr is not None and step >= self.swa_step:
            return self.average.swa_lr
        if step < self.warmup_steps and settings.warmup_lr is not None:
            return settings.warmup_lr + (settings.lr - settings.warmup_lr) * step / self.warmup_steps
        if step < self.warmup_steps:
            return settings.lr * min(1.0, (step + self.hold_steps) / self.warmup_steps)
        own = plugins.added("lr_policy").get(settings.lr_policy)
        if own is None:
            factor = POLICIES[settings.lr_policy](self, step)
        else:
            factor = _own_factor(own, step - self.warmup_steps, max(1, self.total_steps - self.warmup_steps))
        if settings.lr_policy == "plateau":
            factor *= settings.lr_gamma**drops
        return settings.lr * max(self.floor, factor)

    @property
    def floor(self) -> float:
        """``lr_min`` as a fraction of ``lr``."""
        return self.settings.lr_min / self.settings.lr

    def position(self, step: int) -> tuple[int, float]:
        """Number of ``step``'s cycle, from 0, and the part of the cycle that is over, 0 to 1; 1 at the planned end."""
        done = step - self._begin
        length = self.total_steps - self._begin
        if self.settings.lr_cycle_epochs is None or length < 1:
            return 0, min(1.0, done / max(1, length))
        *_, (cycle, (begin, cycle_length)) = enumerate(
            takewhile(lambda own: _whole(own[0]) <= max(0, done), self._cycles())
        )
        return cycle, min(1.0, max(0.0, (done - begin) / cycle_length)) if step < self.total_steps else 1.0

    def _cycles(self) -> Iterator[tuple[float, float]]:
        """Yield beginning and length of each cycle, in steps after ``_begin``.

        A remainder below one step or a thousandth of a cycle, as a rounded cycle length leaves, begins no further
        cycle.
        """
        end = self.total_steps - self._begin
        begin = 0.0
        length = max(1.0, (self.settings.lr_cycle_epochs or math.inf) * self.steps_per_epoch)
        yield begin, length
        while end - (begin := begin + length) >= max(1.0, length / 1000) - ROUNDING:
            length *= self.settings.lr_cycle_mul
            yield begin, length

    @property
    def _begin(self) -> int:
        """The step at which a smoothly falling policy begins."""
        return self.warmup_steps if self.settings.warmup_prefix else 0

    def restarts(self) -> list[int]:
        """First step of each cycle after the first."""
        return [self._begin + _whole(begin) for begin, _ in self._cycles()][1:]


def _own_factor(own: plugins.Entry, step: int, steps: int) -> float:
    """The factor that a user's function gives. Raises ``UserError`` unless it is a number of 0 or more."""
    given = own(step, steps)
    try:
        factor = float(given)
    except (TypeError, ValueError):
        factor = math.nan
    if not -ROUNDING <= factor < math.inf:
        raise UserError(f"{own.where} must return a number of 0 or more, not {given!r} (step {step})")
    return factor


def _whole(begin: float) -> int:
    """The first whole step of a cycle that begins at ``begin``, a number of steps that may be fractional."""
    return math.ceil(begin - ROUNDING)


def _falling(curve: Callable[[LRPolicy, float], float]) -> Callable[[LRPolicy, int], float]:
    """Return a policy that falls from peak to floor in each cycle, as ``curve`` falls from 1 to about 0."""

    def factor(policy: LRPolicy, step: int) -> float:
        cycle, time = policy.position(step)
        return policy.floor + (policy.settings.lr_cycle_decay**cycle - policy.floor) * curve(policy, time)

    return factor


def _one_cycle(policy: LRPolicy, step: int) -> float:
    """Factor of Smith and Topin, Super-convergence, 2018, in the two cosine phases of torch's OneCycleLR."""
    first = 1 / (policy.settings.lr_div_factor or 1.0)
    last = policy.total_steps - 1
    peak = max(0.0, (policy.settings.lr_pct_start or 0.0) * policy.total_steps - 1)
    if step < peak:
        return 1 + (first - 1) * _half_cosine(step / peak)
    end = policy.floor or first * ONE_CYCLE_END
    return end + (1 - end) * _half_cosine(min(1.0, (step - peak) / max(1.0, last - peak)))


def _triangular(policy: LRPolicy, step: int) -> float:
    """Factor that rises and falls linearly (Jordan, 94% on CIFAR-10 in 3.29 seconds on a single GPU, 2024)."""
    first = 1 / (policy.settings.lr_div_factor or 1.0)
    peak = int((policy.settings.lr_pct_start or 0.0) * policy.total_steps)
    if step < peak:
        return first + (1 - first) * step / peak
    return 1 + (policy.floor - 1) * min(1.0, (step - peak) / max(1, policy.total_steps - peak))


def _half_cosine(time: float) -> float:
    """Half a cosine wave, which falls from 1 at time 0 to 0 at time 1."""
    return (1 + math.cos(math.pi * time)) / 2


def _multistep(policy: LRPolicy, step: int) -> float:
    drops = sum(step >= policy.steps(milestone) for milestone in policy.settings.lr_milestones or ())
    return policy.settings.lr_gamma**drops


def _step(policy: LRPolicy, step: int) -> float:
    length = max(1.0, (policy.settings.lr_step_epochs or 0) * policy.steps_per_epoch)
    return policy.settings.lr_gamma ** int((step + 0.5) // length)


# A name here stands in LR_POLICIES of utils/config/groups/optimisation.py too, where it is a choice of the flag.
POLICIES: dict[str, Callable[[LRPolicy, int], float]] = {
    "constant": lambda policy, step: 1.0,
    "multistep": _multistep,
    # Loshchilov and Hutter, SGDR, 2016
    "cosine": _falling(lambda policy, time: _half_cosine(time)),
    # flat at first, then falling fast, then flat near 1 %
    "gaussian": _falling(lambda policy, time: math.exp(-0.5 * (GAUSSIAN_WIDTHS * time) ** 2)),
    "step": _step,
    "linear": _falling(lambda policy, time: 1 - time),
    "poly": _falling(lambda policy, time: (1 - time) ** policy.settings.lr_power),
    "one-cycle": _one_cycle,
    "triangular": _triangular,
    "plateau": lambda policy, step: 1.0,  # and lower with each of the drops, which no step tells
}


def describe(policy: LRPolicy, global_batch_size: int) -> str:
    """Describe the schedule: rates at some points, and what shapes them."""
    settings = policy.settings
    total = policy.total_steps
    swa = set() if policy.swa_step is None else {policy.swa_step}
    later = {total // 4, total // 2, 3 * total // 4, total - 1}
    # Nobody knows when a plateau will be.
    points = sorted({*swa, 0, policy.warmup_steps, *(later if settings.lr_policy != "plateau" else ())})
    steps = policy.steps_per_epoch
    values = "  ".join(f"epoch {point / steps:.3g}: {policy(point):.4g}" for point in points if point < total)
    words = [f"{settings.lr_policy}  {values}", *_shape(policy)]
    if settings.lr_base is not None:
        ratio = f"{global_batch_size} / {settings.lr_base_size}"
        ratio = f"sqrt({ratio})" if settings.lr_base_scale == "sqrt" else ratio
        words.append(f"peak {settings.lr:g} = --lr-base {settings.lr_base:g} x {ratio}")
    return "; ".join(words)


def _shape(policy: LRPolicy) -> Iterator[str]:
    settings = policy.settings
    steps = policy.steps_per_epoch
    if policy.swa_step == 0:
        yield "constant from epoch 1 on"
        return
    if settings.optimizer in SCHEDULE_FREE:
        yield "the optimizer averages the weights instead of a schedule"
    if settings.lr_policy == "multistep":
        yield f"x {settings.lr_gamma:g} at epochs {', '.join(f'{epoch:g}' for epoch in settings.lr_milestones or ())}"
    if settings.lr_policy == "step":
        yield f"x {settings.lr_gamma:g} every {counted(settings.lr_step_epochs or 1.0, 'epoch')}"
    if settings.lr_policy == "plateau":
        yield f"x {settings.lr_gamma:g} after {settings.lr_patience} epoch(s) without improvement"
    if settings.lr_policy == "poly":
        yield f"power {settings.lr_power:g}"
    if settings.lr_policy in RISING_POLICIES:
        yield f"rises from 1/{settings.lr_div_factor:g} of the peak over {settings.lr_pct_start:g} of the steps"
    if settings.lr_policy in RESTARTING_POLICIES and (restarts := policy.restarts()):
        decay = f" at {settings.lr_cycle_decay:g} of the peak before" if settings.lr_cycle_decay < 1 else ""
        yield f"restarts at epochs {some([f'{step / steps:.3g}' for step in restarts], 6)}{decay}"
    if settings.lr_min:
        yield f"not below {settings.lr_min:g}"
    if settings.warmup_epochs:
        first = f" from {settings.warmup_lr:g}" if settings.warmup_lr is not None else ""
        within = "" if settings.warmup_prefix else ", in which the schedule begins"
        yield f"warm-up over {counted(settings.warmup_epochs, 'epoch')}{first}{within}"
    if settings.lr_per_epoch:
        yield "changes with each epoch"
    if policy.swa_step is not None:
        yield f"constant from epoch {policy.swa_step // steps + 1} on"
