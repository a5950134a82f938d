"""Settings of what several processes exchange while they train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from utils.config.field import between, needs, not_negative, setting

_LOCAL = needs("--local-sgd-steps", lambda v: v.local_sgd_steps is not None)


def _sends_gradients(v: Any) -> str | None:
    """Why no gradient ever leaves its process, if that is so."""
    if v.processes == 1:
        return "does nothing: it needs several processes"
    alone = v.local_sgd_group == "process" or v.local_processes == 1
    if v.local_sgd_steps is not None and alone and not v.local_sgd_after_epochs:
        return "does nothing: with --local-sgd-steps each process keeps its gradients"
    return None


def _has_groups(v: Any) -> str | None:
    if v.processes == 1:
        return "does nothing: it needs several processes"
    if v.local_sgd_group == "machine" and v.processes == v.local_processes:
        return "does nothing: it needs several machines, or --local-sgd-group process"
    return None


def _begins(v: Any) -> str | None:
    if v.local_sgd_steps is None:
        return "does nothing: it needs --local-sgd-steps"
    if v.local_sgd_after_epochs >= v.epochs:
        return f"leaves --local-sgd-steps without effect: --epochs {v.epochs} end before"
    return None


@dataclass(frozen=True)
class ExchangeSettings:
    """What several processes exchange while they train, and when."""

    grad_compression: str = setting(
        "off", "number format in which gradients cross the network: bf16 halves the bytes, and rounds them and their "
        "sums to 8 significant bits", choices=("off", "bf16"), in_evaluation=False, effect=_sends_gradients,
    )  # fmt: skip
    bucket_mb: int | None = setting(
        None, "size of the pieces, in MiB, in which gradients are exchanged during the backward pass [25, the first 1, "
        "as torch does]", type=int, check=between(1, 2**14), affects_result=False, in_evaluation=False,
        effect=_sends_gradients,
    )  # fmt: skip
    local_sgd_steps: int | None = setting(
        None, "local SGD, for slow networks: each machine takes steps of its own, and the weights of all are averaged "
        "every K steps", type=int, check=between(2, 2**20), metavar="K", in_evaluation=False, effect=_has_groups,
    )  # fmt: skip
    local_sgd_after_epochs: float = setting(
        0.0, "post-local SGD: exchange gradients in every step for this many epochs first", check=not_negative,
        metavar="EPOCHS", in_evaluation=False, effect=_begins,
    )  # fmt: skip
    local_sgd_group: str = setting(
        "machine", "what takes steps of its own: all processes of a machine together, or each process",
        choices=("machine", "process"), in_evaluation=False, effect=_LOCAL,
    )  # fmt: skip
