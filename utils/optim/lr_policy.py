"""Learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from utils.config import plugins
from utils.config.groups.average import AverageSettings
from utils.config.groups.optimisation import (
    RESTARTING_POLICIES,
    RISING_POLICIES,
    SCHEDULE_FREE,
    OptimisationSettings,
)
from utils.config.spelling import some

GAUSSIAN_WIDTHS = 3.0  # the gaussian policy ends at this many standard deviations, 1.1 % of its peak
ROUNDING = 1e-6  # steps by which sums of floats may miss a whole step
ONE_CYCLE_END = 1e-4  # of its first rate, as in torch's OneCycleLR


@dataclass(frozen=True)
class LRPolicy:
    """Learning-rate schedule: ``policy(step)`` is the rate of optimizer step ``step`` (from 0).

    ``total_steps`` is the planned length. Over ``warmup_steps`` the rate rises linearly: step k has (k + 1) /
    warmup_steps of ``lr``; with a ``warmup_lr``, the rate begins there and has risen in step k by k / warmup_steps of
    the difference. Later steps have ``lr`` times the factor that ``POLICIES`` gives for ``policy``, and at least
    ``lr_min``. From ``swa_step`` on, if there is one, all steps have ``swa_lr``. The rate changes every ``hold_steps``
    steps.

    Policies that fall smoothly begin after the warm-up if ``warmup_prefix`` is True, otherwise with it, and may
    restart: the first cycle takes ``cycle_steps``; each further one takes ``cycle_mul`` times as many as the one before
    it, and begins at ``cycle_decay`` times its rate. ``power``: the exponent of ``poly``. ``step_length``: the steps
    between two drops of ``step``. Cycles and drops may take fractions of steps, to keep to their epochs; each begins
    with a whole step. ``one-cycle`` and ``triangular`` rise from ``lr`` / ``div_factor`` over the fraction
    ``pct_start`` of all steps.
    """

    policy: str
    lr: float
    total_steps: int
    warmup_steps: int = 0
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    lr_min: float = 0.0
    cycle_steps: float | None = None
    cycle_mul: float = 1.0
    cycle_decay: float = 1.0
    power: float = 2.0
    step_length: float = 1
    pct_start: float = 0.0
    div_factor: float = 1.0
    swa_step: int | None = None
    swa_lr: float = 0.0
    warmup_lr: float | None = None
    warmup_prefix: bool = True
    hold_steps: int = 1

    def at(self, epoch: int, updates: int) -> float:
        """The rate in epoch ``epoch`` (from 0), ``updates`` steps into the schedule, not counting skipped steps.

        A rate that is held for a whole epoch depends on the epoch alone, so that skipped steps do not make it change in
        the middle of an epoch.
        """
        return self(epoch * self.hold_steps if self.hold_steps > 1 else updates)

    def __call__(self, step: int) -> float:
        step -= step % self.hold_steps
        if self.swa_step is not None and step >= self.swa_step:
            return self.swa_lr
        if step < self.warmup_steps:
            return self._warm(step)
        own = plugins.added("lr_policy").get(self.policy)
        if own is None:
            factor = POLICIES[self.policy](self, step)
        else:
            factor = float(own(step - self.warmup_steps, max(1, self.total_steps - self.warmup_steps)))
        return self.lr * max(self.floor, factor)

    def _warm(self, step: int) -> float:
        if self.warmup_lr is not None:
            return self.warmup_lr + (self.lr - self.warmup_lr) * step / self.warmup_steps
        return self.lr * min(1.0, (step + self.hold_steps) / self.warmup_steps)

    @property
    def floor(self) -> float:
        """``lr_min`` as a fraction of ``lr``."""
        return self.lr_min / self.lr

    def position(self, step: int) -> tuple[int, float]:
        """Number of ``step``'s cycle, from 0, and the part of the cycle that is over, 0 to 1; 1 at the planned end."""
        done = step - self._begin
        length = self.total_steps - self._begin
        if self.cycle_steps is None or length < 1:
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
        length = float(self.cycle_steps or math.inf)
        yield begin, length
        while end - (begin := begin + length) >= max(1.0, length / 1000) - ROUNDING:
            length *= self.cycle_mul
            yield begin, length

    @property
    def _begin(self) -> int:
        """The step at which a smoothly falling policy begins."""
        return self.warmup_steps if self.warmup_prefix else 0

    def restarts(self) -> list[int]:
        """First step of each cycle after the first."""
        return [self._begin + _whole(begin) for begin, _ in self._cycles()][1:]


def _whole(begin: float) -> int:
    """The first whole step of a cycle that begins at ``begin``, a number of steps that may be fractional."""
    return math.ceil(begin - ROUNDING)


def _falling(curve: Callable[[LRPolicy, float], float]) -> Callable[[LRPolicy, int], float]:
    """Return a policy that falls from peak to floor in each cycle, as ``curve`` falls from 1 to about 0."""

    def factor(policy: LRPolicy, step: int) -> float:
        cycle, time = policy.position(step)
        return policy.floor + (policy.cycle_decay**cycle - policy.floor) * curve(policy, time)

    return factor


def _one_cycle(policy: LRPolicy, step: int) -> float:
    """Factor of Smith and Topin, Super-convergence, 2018, in the two cosine phases of torch's OneCycleLR."""
    first = 1 / policy.div_factor
    last = policy.total_steps - 1
    peak = max(0.0, policy.pct_start * policy.total_steps - 1)
    if step < peak:
        return 1 + (first - 1) * _half_cosine(step / peak)
    end = policy.floor or first * ONE_CYCLE_END
    return end + (1 - end) * _half_cosine(min(1.0, (step - peak) / max(1.0, last - peak)))


def _triangular(policy: LRPolicy, step: int) -> float:
    """Factor that rises and falls linearly (Jordan, 94% on CIFAR-10 in 3.29 seconds on a single GPU, 2024)."""
    first = 1 / policy.div_factor
    peak = int(policy.pct_start * policy.total_steps)
    if step < peak:
        return first + (1 - first) * step / peak
    return 1 + (policy.floor - 1) * min(1.0, (step - peak) / max(1, policy.total_steps - peak))


def _half_cosine(time: float) -> float:
    """Half a cosine wave, which falls from 1 at time 0 to 0 at time 1."""
    return (1 + math.cos(math.pi * time)) / 2


# A name here stands in LR_POLICIES of utils/config/groups/optimisation.py too, where it is a choice of the flag.
POLICIES: dict[str, Callable[[LRPolicy, int], float]] = {
    "constant": lambda policy, step: 1.0,
    "multistep": lambda policy, step: policy.gamma ** sum(step >= milestone for milestone in policy.milestones),
    # Loshchilov and Hutter, SGDR, 2016
    "cosine": _falling(lambda policy, time: _half_cosine(time)),
    # flat at first, then falling fast, then flat near 1 %
    "gaussian": _falling(lambda policy, time: math.exp(-0.5 * (GAUSSIAN_WIDTHS * time) ** 2)),
    "step": lambda policy, step: policy.gamma ** int((step + 0.5) // policy.step_length),
    "linear": _falling(lambda policy, time: 1 - time),
    "poly": _falling(lambda policy, time: (1 - time) ** policy.power),
    "one-cycle": _one_cycle,
    "triangular": _triangular,
}


def build_lr_policy(
    settings: OptimisationSettings, steps_per_epoch: int, average: AverageSettings | None = None
) -> LRPolicy:
    """The policy that ``settings`` name, with the constant rate for ``average`` at the end, if it asks for one.

    Settings give epochs, which become steps only here.
    """

    def steps(epochs: float) -> int:
        return round(epochs * steps_per_epoch)

    cycle = settings.lr_cycle_epochs
    constant_from = average and average.swa_lr and average.first_averaged_epoch(settings.epochs)
    return LRPolicy(
        policy=settings.lr_policy,
        lr=settings.lr,
        total_steps=settings.epochs * steps_per_epoch,
        warmup_steps=steps(settings.warmup_epochs),
        milestones=tuple(steps(epoch) for epoch in settings.lr_milestones or ()),
        gamma=settings.lr_gamma,
        lr_min=settings.lr_min,
        cycle_steps=None if cycle is None else max(1.0, cycle * steps_per_epoch),
        cycle_mul=settings.lr_cycle_mul,
        cycle_decay=settings.lr_cycle_decay,
        power=settings.lr_power,
        step_length=max(1.0, (settings.lr_step_epochs or 0) * steps_per_epoch),
        pct_start=settings.lr_pct_start or 0.0,
        div_factor=settings.lr_div_factor or 1.0,
        swa_step=(constant_from - 1) * steps_per_epoch if constant_from else None,
        swa_lr=(average.swa_lr or 0.0) if average is not None and constant_from else 0.0,
        warmup_lr=settings.warmup_lr,
        warmup_prefix=settings.warmup_prefix,
        hold_steps=steps_per_epoch if settings.lr_per_epoch else 1,
    )


def describe(policy: LRPolicy, settings: OptimisationSettings, steps: int, global_batch_size: int) -> str:
    """Describe the schedule: rates at some points, and what shapes them. ``steps``: per epoch."""
    total = policy.total_steps
    swa = set() if policy.swa_step is None else {policy.swa_step}
    points = sorted({*swa, 0, policy.warmup_steps, total // 4, total // 2, 3 * total // 4, total - 1})
    values = "  ".join(f"epoch {point / steps:.3g}: {policy(point):.4g}" for point in points if point < total)
    words = [f"{policy.policy}  {values}", *_shape(policy, settings, steps)]
    if settings.lr_base is not None:
        ratio = f"{global_batch_size} / {settings.lr_base_size}"
        ratio = f"sqrt({ratio})" if settings.lr_base_scale == "sqrt" else ratio
        words.append(f"peak {settings.lr:g} = --lr-base {settings.lr_base:g} x {ratio}")
    return "; ".join(words)


def _shape(policy: LRPolicy, settings: OptimisationSettings, steps: int) -> Iterator[str]:
    if settings.optimizer in SCHEDULE_FREE:
        yield "the optimizer averages the weights instead of a schedule"
    if policy.policy == "multistep":
        yield f"x {policy.gamma:g} at epochs {', '.join(f'{epoch:g}' for epoch in settings.lr_milestones or ())}"
    if policy.policy == "step":
        yield f"x {policy.gamma:g} every {settings.lr_step_epochs:g} epochs"
    if policy.policy == "poly":
        yield f"power {policy.power:g}"
    if policy.policy in RISING_POLICIES:
        yield f"rises from 1/{policy.div_factor:g} of the peak over {policy.pct_start:g} of the steps"
    if policy.policy in RESTARTING_POLICIES and (restarts := policy.restarts()):
        decay = f" at {policy.cycle_decay:g} of the peak before" if policy.cycle_decay < 1 else ""
        yield f"restarts at epochs {some([f'{step / steps:.3g}' for step in restarts], 6)}{decay}"
    if policy.lr_min:
        yield f"not below {policy.lr_min:g}"
    if settings.warmup_epochs:
        first = f" from {policy.warmup_lr:g}" if policy.warmup_lr is not None else ""
        within = "" if policy.warmup_prefix else ", in which the schedule begins"
        yield f"warm-up over {settings.warmup_epochs:g} epochs{first}{within}"
    if settings.lr_per_epoch:
        yield "changes with each epoch"
    if policy.swa_step is not None:
        yield f"constant from epoch {policy.swa_step // steps + 1} on"
