"""Settings of the average of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config.field import between, needs, setting


@dataclass(frozen=True)
class AverageSettings:
    """Averages of the weights, whose result counts in validation."""

    ema_decay: float | None = setting(
        None, "decay of a moving average of the weights, for example 0.999; validation reports its results",
        type=float, check=between(0, 1, open_low=True, open_high=True),
    )  # fmt: skip
    ema_bn_batches: int = setting(
        16, "training batches to compute the average's batch-norm statistics over before each validation; 3 take about "
        "as long as a step",
        check=between(0, 10**6), metavar="N",
        effect=needs(
            "--ema-decay, and batch norm in the network", lambda v: v.ema_decay is not None and v.gathers_statistics
        ),
    )  # fmt: skip
