"""Learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from utils.config.groups.optimisation import OptimisationSettings

GAUSSIAN_WIDTHS = 3.0  # the gaussian policy ends at this many standard deviations, 1.1 % of its peak


@dataclass(frozen=True)
class LRPolicy:
    """``policy(step)`` is the learning rate of optimizer step ``step`` (from 0).

    ``total_steps`` is the planned length. Over ``warmup_steps`` the rate rises linearly: step k has
    (k + 1) / warmup_steps of ``lr``. Later steps have ``lr`` times the factor that ``POLICIES`` gives for ``policy``.
    """

    policy: str
    lr: float
    total_steps: int
    warmup_steps: int = 0
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        return self.lr * POLICIES[self.policy](self, step)

    def time(self, step: int) -> float:
        """0 at the end of the warm-up, 1 at the planned end and after it."""
        return min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))


# A name here stands in LR_POLICIES of utils/config/groups/optimisation.py too, where it is a choice of the flag.
POLICIES: dict[str, Callable[[LRPolicy, int], float]] = {
    "constant": lambda policy, step: 1.0,
    "multistep": lambda policy, step: policy.gamma ** sum(step >= milestone for milestone in policy.milestones),
    # Loshchilov and Hutter, SGDR, 2016, without restarts
    "cosine": lambda policy, step: (1 + math.cos(math.pi * policy.time(step))) / 2,
    # flat at first, then falling fast, then flat near 1 %
    "gaussian": lambda policy, step: math.exp(-0.5 * (GAUSSIAN_WIDTHS * policy.time(step)) ** 2),
}


def build_lr_policy(settings: OptimisationSettings, steps_per_epoch: int) -> LRPolicy:
    """The policy that ``settings`` name. The only place where epochs become steps."""
    return LRPolicy(
        policy=settings.lr_policy,
        lr=settings.lr,
        total_steps=settings.epochs * steps_per_epoch,
        warmup_steps=round(settings.warmup_epochs * steps_per_epoch),
        milestones=tuple(round(epoch * steps_per_epoch) for epoch in settings.lr_milestones or ()),
        gamma=settings.lr_gamma,
    )
