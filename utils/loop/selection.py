"""Selection of the best epoch, by a column of the epoch's row."""

from __future__ import annotations

import math

from utils.checkpoint.progress import Progress
from utils.config.settings import Settings
from utils.record.epoch_scalars import best_metric, stopping_metric


def update_best(progress: Progress, row: dict[str, float], args: Settings, whole: bool) -> bool:
    """True if the validation in ``row`` makes best.pt; enters a whole epoch's figures into ``progress``.

    A cut epoch makes best.pt only until there is a whole one, which always replaces it, and does not count for early
    stopping. A validation whose loss is not finite is never the best, nor an improvement. Call it before
    ``Progress.finish_epoch``.
    """
    epoch = int(row["epoch"])
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
        headline = row["val_map" if "val_map" in row else "val_top1"]
        progress.best_top1 = headline if math.isfinite(headline) else -1.0  # of images without a positive label
        progress.best_epoch = epoch
    current = row[watched.column]
    if whole and sound and watched.improves(current, progress.stopping_value, run.early_stopping_delta):
        progress.stopping_value = current
        progress.stopping_epoch = epoch
    return best
