"""Settings of the average of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from utils.config.field import between, needs, positive, setting
from utils.config.groups.optimisation import SCHEDULE_FREE


def _epoch_or_fraction(value: float) -> str | None:
    problem = between(0, 10**6, open_low=True)(value)
    return problem or (None if value < 1 or value == int(value) else "must be a whole epoch, or a fraction below 1")


def _averages_late(v: Any) -> str | None:
    late = f"does nothing: --epochs {v.epochs} end before" if v.ema_start_epoch > v.epochs else None
    return needs("--ema-decay", lambda v: v.ema_decay is not None)(v) or late


@dataclass(frozen=True)
class AverageSettings:
    """Averages of the weights, whose result counts in validation."""

    ema_decay: float | None = setting(
        None,
        "decay of a moving average of the weights, for example 0.999; validation reports its results",
        type=float,
        check=between(0, 1, open_low=True, open_high=True),
        synonyms="model-ema-decay ema",
    )
    ema_warmup: bool = setting(
        True,
        "let --ema-decay grow to its value: the first weights hardly count then",
        effect=needs("--ema-decay", lambda v: v.ema_decay is not None),
        synonyms="model-ema-warmup",
    )
    ema_start_epoch: int = setting(
        1,
        "begin the moving average in this epoch (from 1): until then it is the weights themselves",
        check=between(1, 10**6),
        metavar="EPOCH",
        effect=_averages_late,
    )
    ema_bn_batches: int = setting(
        16,
        "training batches to compute the average's batch-norm statistics over before each validation; 3 take about "
        "as long as a step",
        check=between(0, 10**6),
        metavar="N",
        effect=needs(
            "--ema-decay or --swa-start-epoch or a schedule-free optimizer, and batch norm in the network",
            lambda v: (v.ema_decay or v.swa_start_epoch or v.optimizer in SCHEDULE_FREE) and v.gathers_statistics,
        ),
    )
    swa_start_epoch: float | None = setting(
        None,
        "stochastic weight averaging: mean of the weights at the ends of this epoch (from 1) and of all later "
        "ones, or of those after this fraction of --epochs; validation reports its results",
        type=float,
        check=_epoch_or_fraction,
        metavar="EPOCH",
    )
    swa_lr: float | None = setting(
        None,
        "constant learning rate from the beginning of that epoch on [that of --lr-policy]",
        type=float,
        check=positive,
        effect=needs("--swa-start-epoch", lambda v: v.swa_start_epoch is not None),
    )

    def first_averaged_epoch(self, epochs: int) -> int | None:
        """The epoch, from 1, of a run of ``epochs`` that --swa-start-epoch means; None without it."""
        start = self.swa_start_epoch
        if start is None or start >= 1:
            return start and int(start)
        return min(epochs, round(start * epochs) + 1)
