"""Lookahead: slow weights that follow an optimizer's weights."""

from __future__ import annotations

from typing import Any

import torch

STATE = "lookahead"  # its key in the optimizer's state_dict


class Lookahead:
    """Slow weights: after each ``every`` steps they go ``alpha`` of the way to the optimizer's, which then equal them.

    Zhang et al., Lookahead optimizer: k steps forward, 1 step back, 2019. The slow weights begin as the initial
    weights, as in the paper; in timm's class they begin as the weights after the first ``every`` steps. Steps that a
    scaler skips do not count, and frozen parameters stay as they are. The state is part of the optimizer's
    ``state_dict``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, every: int, alpha: float) -> None:
        self.every = every
        self.alpha = alpha
        self._fast = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._state: dict[str, Any] = {"steps": 0, "slow": [parameter.detach().clone() for parameter in self._fast]}
        vars(optimizer)["lookahead_state"] = self._state  # for ``HeldBySelection`` (``utils/optim/held.py``)
        optimizer.register_step_post_hook(self._step)
        optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._load)

    @torch.no_grad()
    def _step(self, *_: Any) -> None:
        self._state["steps"] += 1
        if self._state["steps"] % self.every == 0:
            both = [(s, f) for s, f in zip(self._state["slow"], self._fast, strict=True) if f.requires_grad]
            slow, fast = ([*tensors] for tensors in zip(*both, strict=True))
            torch._foreach_lerp_(slow, fast, self.alpha)
            torch._foreach_copy_(fast, slow)

    def _save(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state[STATE] = {"steps": self._state["steps"], "slow": list(self._state["slow"])}

    @torch.no_grad()
    def _load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Continue from ``state``, or begin with the present weights if ``state`` is from a run without lookahead."""
        stored = state.get(STATE, {"steps": 0, "slow": self._fast})
        self._state["steps"] = stored["steps"]
        for slow, value in zip(self._state["slow"], stored["slow"], strict=True):
            slow.copy_(value)
