"""The scalars of an epoch: columns of metrics.csv and points in TensorBoard, each declared once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from utils.checkpoint.progress import Progress
from utils.record.curves import StepRecord
from utils.record.metrics import Report


class Epoch(NamedTuple):
    """What the scalars are made from.

    ``training`` is None, and ``images_per_second`` without meaning, for the late validation of an epoch that has its
    row otherwise. ``validation`` is None without one. ``raw``: the raw weights' result if ``validation`` is that of
    their average.
    """

    progress: Progress
    last: StepRecord
    training: Report | None
    validation: Report | None
    raw: Report | None
    images_per_second: float
    seconds: float
    skips_bad_images: bool
    max_val_batches: int | None


class EpochScalar(NamedTuple):
    """A column, and a point if it has a ``tag``. An epoch for which ``value`` gives None has neither.

    --best-metric and --early-stopping-metric offer every column that begins with ``val_`` (``selection.py``), and
    ``lower_is_better`` says in which direction such a one improves.
    """

    column: str
    value: Callable[[Epoch], float | None]
    tag: str | None = None
    lower_is_better: bool = False


def _by_class(name: str) -> Callable[[Epoch], float | None]:
    """The figure ``name`` of the validation's ``ClassReport``."""
    return lambda epoch: epoch.validation and epoch.validation.by_class and getattr(epoch.validation.by_class, name)


EPOCH_SCALARS = (
    EpochScalar("epoch", lambda epoch: epoch.last.epoch),
    EpochScalar("step", lambda epoch: epoch.progress.step),
    EpochScalar("lr", lambda epoch: epoch.last.lr),
    EpochScalar("train_loss", lambda epoch: epoch.training and epoch.training.loss),
    EpochScalar("train_top1", lambda epoch: epoch.training and epoch.training.top1),
    EpochScalar("train_top5", lambda epoch: epoch.training and epoch.training.top5),
    EpochScalar(
        "val_loss", lambda epoch: epoch.validation and epoch.validation.loss, "Loss/Test", lower_is_better=True
    ),
    EpochScalar("val_top1", lambda epoch: epoch.validation and epoch.validation.top1, "Top1/Test"),
    EpochScalar("val_top5", lambda epoch: epoch.validation and epoch.validation.top5, "Top5/Test"),
    EpochScalar("val_count", lambda epoch: epoch.validation and epoch.validation.count),
    EpochScalar("max_val_batches", lambda epoch: epoch.validation and epoch.max_val_batches),
    EpochScalar("images_per_second", lambda epoch: epoch.training and round(epoch.images_per_second, 1)),
    EpochScalar("seconds", lambda epoch: round(epoch.seconds, 3)),
    EpochScalar("skipped_steps", lambda epoch: epoch.progress.skipped_steps),
    EpochScalar("partly_skipped_steps", lambda epoch: epoch.progress.partly_skipped_steps),
    EpochScalar("unreadable_images", lambda epoch: epoch.progress.replaced_images if epoch.skips_bad_images else None),
    EpochScalar("val_macro_precision", _by_class("macro_precision"), "Macro_Precision/Test"),
    EpochScalar("val_macro_recall", _by_class("macro_recall"), "Macro_Recall/Test"),
    EpochScalar("val_macro_f1", _by_class("macro_f1"), "Macro_F1/Test"),
    EpochScalar("val_balanced_accuracy", _by_class("balanced_accuracy"), "Balanced_Accuracy/Test"),
    EpochScalar("val_ece", _by_class("ece"), "Calibration_Error/Test", lower_is_better=True),
    # What ``doubts.py`` judges by, beside the loss; named so that no --best-metric is among them.
    EpochScalar("guessing_loss", _by_class("guessing_loss")),
    EpochScalar("answers_nats", _by_class("answers_nats")),
    EpochScalar("commonest_answer", _by_class("commonest_answer")),
)
RAW_SCALARS = (
    EpochScalar("raw_val_loss", lambda epoch: epoch.raw and epoch.raw.loss, "Loss/Test_raw"),
    EpochScalar("raw_val_top1", lambda epoch: epoch.raw and epoch.raw.top1, "Top1/Test_raw"),
    EpochScalar("raw_val_top5", lambda epoch: epoch.raw and epoch.raw.top5, "Top5/Test_raw"),
)
VALIDATION_TAGS = tuple(scalar.tag for scalar in (*EPOCH_SCALARS, *RAW_SCALARS) if scalar.tag)


def row_of(epoch: Epoch) -> dict[str, float]:
    """The epoch's row: the scalars, with the named training losses in front of those of the raw weights."""
    named = epoch.progress.named_losses(epoch.progress.epoch_sums)
    losses = {f"train_{name}": loss for name, loss in named.items()}
    return _columns(EPOCH_SCALARS, epoch) | losses | _columns(RAW_SCALARS, epoch)


def points_of(row: dict[str, float]) -> dict[str, float]:
    """The points in TensorBoard that belong to ``row``."""
    tagged = (scalar for scalar in (*EPOCH_SCALARS, *RAW_SCALARS) if scalar.tag and scalar.column in row)
    return {scalar.tag: row[scalar.column] for scalar in tagged}


def _columns(scalars: Iterable[EpochScalar], epoch: Epoch) -> dict[str, float]:
    values = {scalar.column: scalar.value(epoch) for scalar in scalars}
    return {column: value for column, value in values.items() if value is not None}
