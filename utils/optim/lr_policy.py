"""Learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from utils.config.settings import OptimisationSettings

GAUSSIAN_WIDTHS = 3.0  # the gaussian policy ends this many standard deviations out, at 1.1 % of its peak


@dataclass(frozen=True)
class LRPolicy:
    """``policy(step)`` is the learning rate of optimizer step ``step`` (from 0).

    ``total_steps`` is the planned length. Over ``warmup_steps`` the rate rises linearly, step k having
    (k + 1) / warmup_steps of ``lr``; then, with t running from 0 to 1 over the rest:

    - constant: ``lr``
    - multistep: ``lr`` x ``gamma`` for each of ``milestones`` (steps) reached
    - cosine: ``lr`` x (1 + cos(pi t)) / 2, Loshchilov and Hutter, SGDR, 2016, without restarts
    - gaussian: ``lr`` x exp(-(3 t)^2 / 2), flat at first, then fast, then flat near 1 %
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
        if self.policy == "constant":
            return self.lr
        if self.policy == "multistep":
            return self.lr * self.gamma ** sum(step >= milestone for milestone in self.milestones)
        t = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        if self.policy == "cosine":
            return self.lr * (1 + math.cos(math.pi * t)) / 2
        assert self.policy == "gaussian", self.policy
        return self.lr * math.exp(-0.5 * (GAUSSIAN_WIDTHS * t) ** 2)


def build_lr_policy(settings: OptimisationSettings, steps_per_epoch: int) -> LRPolicy:
    """The policy that ``settings`` name: the one place where epochs become steps."""
    return LRPolicy(
        policy=settings.lr_policy,
        lr=settings.lr,
        total_steps=settings.epochs * steps_per_epoch,
        warmup_steps=round(settings.warmup_epochs * steps_per_epoch),
        milestones=tuple(round(epoch * steps_per_epoch) for epoch in settings.lr_milestones or ()),
        gamma=settings.lr_gamma,
    )
