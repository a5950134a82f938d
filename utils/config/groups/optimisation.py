"""Settings of the optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from utils.config.field import between, needs, not_empty, not_negative, positive, setting

LR_POLICIES = ("constant", "multistep", "cosine", "gaussian")


def _reaches_milestones(v: Any) -> str | None:
    if v.lr_policy != "multistep":
        return f"does nothing: it needs --lr-policy multistep, not {v.lr_policy}"
    late = [f"{milestone:g}" for milestone in v.lr_milestones or () if milestone >= v.epochs]
    return f"does nothing at {' and '.join(late)}: --epochs {v.epochs} end before" if late else None


@dataclass(frozen=True)
class OptimisationSettings:
    """How the network is trained; ``--evaluate`` uses none of it."""

    epochs: int = setting(20, "passes over the training data", check=between(1, 10**6))
    optimizer: str = setting(
        "sgd", "sgd, adam, adamw, muon (with adamw for all but matrices) or any timm optimizer by name", short="-o",
        check=not_empty, metavar="NAME",
    )  # fmt: skip
    lr: float | None = setting(None, "peak learning rate [0.1 for sgd, 0.001 for others]", type=float, check=positive)
    momentum: float = setting(
        0.9, "momentum of sgd, and of timm's optimizers that have one", check=between(0, 1, open_high=True),
        effect=lambda v: None if v.has_momentum else f"does nothing: --optimizer {v.optimizer} has none",
    )  # fmt: skip
    nesterov: bool = setting(
        False, "Nesterov momentum (sgd)", effect=needs("--optimizer sgd", lambda v: v.optimizer == "sgd")
    )
    weight_decay: float = setting(5e-4, "weight decay", check=not_negative)
    decay_norm_bias: bool = setting(
        True, "apply weight decay to norms and biases too",
        effect=needs("a --weight-decay above 0", lambda v: v.weight_decay > 0),
    )  # fmt: skip
    lr_policy: str = setting("cosine", "learning-rate schedule after the warm-up", choices=LR_POLICIES)
    lr_milestones: tuple[float, ...] | None = setting(
        None, "multistep: epochs after which the learning rate drops [50 %% and 75 %% of --epochs]", type=float,
        many=True, check=positive, metavar="EPOCH", effect=_reaches_milestones,
    )  # fmt: skip
    lr_gamma: float = setting(
        0.1, "multistep: factor of the learning rate at each milestone", check=between(0, 1, open_low=True),
        effect=needs("--lr-policy multistep", lambda v: v.lr_policy == "multistep"),
    )  # fmt: skip
    warmup_epochs: float = setting(
        0.0, "epochs of linear warm-up", check=not_negative,
        effect=needs("to be at least half a step", lambda v: v.warmup_steps > 0),
    )  # fmt: skip
    accumulate: int = setting(1, "forward passes per optimizer step", check=between(1, 2**16))
    clip_grad_norm: float | None = setting(None, "clip the unscaled gradient to this norm", type=float, check=positive)
    clip_grad_value: float | None = setting(
        None, "clamp each element of the unscaled gradient to this absolute value", type=float, check=positive
    )
    clip_grad_agc: float | None = setting(
        None, "adaptive clipping of each unit's gradient to this fraction of its weights' norm, for example 0.01",
        type=float, check=positive,
    )  # fmt: skip
    grad_penalty: float = setting(
        0.0,
        "gradient penalty: add this factor times the gradient's norm to the loss of each forward pass",
        check=not_negative,
    )
