"""Which epoch is the best one, and when training stops early: judged by a column of the epoch's row."""

from __future__ import annotations

import difflib
import math
from typing import NamedTuple

from utils.checkpoint.progress import Progress
from utils.config.settings import RunSettings, Settings, UserError, flag_of
from utils.record.epoch_scalars import EPOCH_SCALARS

PREFIX = "val_"
COUNTS = ("val_count",)  # neither good nor bad


class Metric(NamedTuple):
    """A column of ``metrics.csv`` that says how good an epoch is."""

    column: str
    lower_is_better: bool

    def improves(self, value: float, on: float | None, by: float = 0.0) -> bool:
        """Whether ``value`` is better than ``on``, if there is one, by more than ``by``. NaN and infinity never are."""
        if not math.isfinite(value):
            return False
        return on is None or (on - value if self.lower_is_better else value - on) > by

    @property
    def name(self) -> str:
        """As a flag gives it: ``top1``."""
        return self.column.removeprefix(PREFIX)

    @property
    def words(self) -> str:
        """For people: ``highest val_top1``."""
        return f"{'lowest' if self.lower_is_better else 'highest'} {self.column}"


def metrics() -> dict[str, Metric]:
    """The metrics to choose from, by name: every column of validation but the counts."""
    columns = [scalar for scalar in EPOCH_SCALARS if scalar.column.startswith(PREFIX) and scalar.column not in COUNTS]
    found = (Metric(scalar.column, scalar.lower_is_better) for scalar in columns)
    return {metric.name: metric for metric in found}


def best_metric(settings: RunSettings) -> Metric:
    """The metric that chooses best.pt; raises ``UserError`` if it does not exist."""
    return _metric("best_metric", settings.best_metric)


def stopping_metric(settings: RunSettings) -> Metric:
    """The metric that early stopping watches; raises ``UserError`` if it does not exist."""
    own = settings.early_stopping_metric
    return best_metric(settings) if own is None else _metric("early_stopping_metric", own)


def unknown_metrics(settings: RunSettings) -> list[str]:
    """A message for the user for each metric that does not exist."""
    mistakes = []
    for chosen in (best_metric, stopping_metric):
        try:
            chosen(settings)
        except UserError as error:
            mistakes += error.mistakes
    return list(dict.fromkeys(mistakes))


def _metric(setting: str, name: str) -> Metric:
    """The metric ``top1`` or ``val_top1``."""
    known = metrics()
    short = name.removeprefix(PREFIX)
    if short in known:
        return known[short]
    near = difflib.get_close_matches(short.lower().replace("-", "_"), known, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(known)}"
    raise UserError(f"{flag_of(setting)} '{name[:60]}': no such figure of a validation; {hint}")


def judge(progress: Progress, row: dict[str, float], args: Settings, whole: bool) -> bool:
    """Whether the validation in ``row`` makes best.pt; enters a whole epoch's figures into ``progress``.

    A cut epoch makes best.pt only until there is a whole one, which always replaces it, and does not count for early
    stopping. A validation whose loss is not finite is never the best, nor an improvement. Call it before
    ``Progress.finish_epoch``.
    """
    epoch = row["epoch"]
    sound = math.isfinite(row["val_loss"])
    run = args.run
    metric = best_metric(run)
    watched = stopping_metric(run)
    value = row[metric.column]
    on = progress.best_value if progress.best_epoch else None
    best = sound and (whole or not progress.best_epoch) and metric.improves(value, on)
    if best:
        progress.best_value = value
    if best and whole:
        progress.best_top1 = row["val_top1"]
        progress.best_epoch = epoch
    current = row[watched.column]
    if whole and sound and watched.improves(current, progress.stopping_value, run.early_stopping_delta):
        progress.stopping_value = current
        progress.stopping_epoch = epoch
    return best


def selection_line(settings: RunSettings) -> str:
    """Which epoch is saved as best.pt, and when training stops early, for the plan of a run."""
    every = settings.val_every_epochs
    among = f" of every {every} epochs' validation" if every > 1 else ""
    stops = f"; stops {stopping_rule(settings)}" if settings.early_stopping else ""
    return f"best.pt has the {best_metric(settings).words}{among}{stops}"


def stopping_rule(settings: RunSettings) -> str:
    """In words, when training stops early."""
    delta = f" by more than {settings.early_stopping_delta:g}" if settings.early_stopping_delta else ""
    column = stopping_metric(settings).column
    return f"after {settings.early_stopping} epoch(s) in which {column} has not improved{delta}"
