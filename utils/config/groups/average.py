"""Settings of the average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from utils.config.field import Needs, between, ends_before, group, positive, setting
from utils.config.groups.optimisation import SCHEDULE_FREE, first_averaged_epoch


def _epoch_or_fraction(value: float) -> str | None:
    problem = between(0, 10**6, open_low=True)(value)
    return problem or (None if value < 1 or value == int(value) else "must be a whole epoch, or a fraction below 1")


@group(in_evaluation=False)
@dataclass(frozen=True)
class AverageSettings:
    """Averages of the weights, whose result counts in validation."""

    ema_decay: float | None = setting(
        "decay of a moving average of the weights, for example 0.999; validation reports its results",
        check=between(0, 1, open_low=True, open_high=True),
        shapes="state at all",
        synonyms="model-ema-decay ema",
    )
    ema_warmup: bool = setting(
        "let --ema-decay grow to its value: the first weights hardly count then",
        default=True,
        effect=Needs("--ema-decay"),
    )
    ema_start_epoch: int = setting(
        "begin the moving average in this epoch (from 1): until then it is the weights themselves",
        default=1,
        check=between(1, 10**6),
        metavar="EPOCH",
        effect=(Needs("--ema-decay"), ends_before("ema_start_epoch", begins=True)),
    )
    ema_bn_batches: int = setting(
        "training batches that give the average its batch-norm statistics before each validation, each a forward pass",
        default=16,
        check=between(0, 10**6),
        effect=Needs(
            "--ema-decay or --swa-start-epoch or a schedule-free optimizer, and batch norm in the network",
            lambda v: (v.ema_decay or v.swa_start_epoch or v.optimizer in SCHEDULE_FREE) and v.gathers_statistics,
        ),
        example="1",
        within="--arch vgg11 --ema-decay 0.9 --train-samples 95",
    )
    swa_start_epoch: float | None = setting(
        "stochastic weight averaging: mean of the weights at the ends of all epochs from this one (from 1) or this "
        "fraction of --epochs on; validation reports its results",
        check=_epoch_or_fraction,
        metavar="EPOCH",
        unsharded="keeps the mean of whole weights; --ema-decay works",
        example="0.75",
    )
    swa_lr: float | None = setting(
        "constant learning rate from the beginning of --swa-start-epoch on [that of --lr-policy]",
        check=positive,
        effect=Needs("--swa-start-epoch"),
        example="0.05",
    )

    def first_averaged_epoch(self, epochs: int) -> int | None:
        """The epoch, from 1, that --swa-start-epoch means in a run of ``epochs``; None without the flag."""
        return first_averaged_epoch(self.swa_start_epoch, epochs)

    @staticmethod
    def contradictions(v: Any) -> Iterator[str]:
        yield from v.only_one("are two averages of the weights", "ema_decay", "swa_start_epoch")
        swa = v.swa_start_epoch
        if v.has(swa and swa > v.epochs):
            yield f"--swa-start-epoch {swa:g} is beyond --epochs {v.epochs}"
        if v.has(v.swa_start_epoch and v.ema_bn_batches == 0 and v.is_explicit("ema_bn_batches")):
            yield (
                "--ema-bn-batches 0 contradicts --swa-start-epoch, whose weights need batch-norm statistics of their "
                "own"
            )
