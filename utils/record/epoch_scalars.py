"""The scalars of an epoch: columns of metrics.csv and points in TensorBoard, each declared once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from utils.config import plugins
from utils.config.settings import RunSettings, UserError, flag_of
from utils.config.spelling import or_nearest
from utils.record.multilabel import AnyReport

ONE, SEVERAL, EITHER = "one", "several", "either"
PREFIX = "val_"
COUNTS = ("val_count", "val_counted_classes")  # neither good nor bad


class EpochScalar(NamedTuple):
    """A column of metrics.csv, and a TensorBoard point if it has a ``tag``; neither in an epoch without such a value.

    The column's name says whose value it is: ``train_loss`` is the loss of training, ``val_macro_f1`` a validation's.
    --best-metric and --early-stopping-metric offer every column that begins with ``val_``, except ``COUNTS``, and
    ``lower_is_better`` says in which direction it improves. ``labels``: the data that have the column: single-label
    (``ONE``), multi-label (``SEVERAL``), or ``EITHER``.
    """

    column: str
    tag: str | None = None
    lower_is_better: bool = False
    labels: str = EITHER

    def improves(self, value: float, on: float | None, by: float = 0.0) -> bool:
        """True if ``value`` is finite and, unless ``on`` is None, better than ``on`` by more than ``by``."""
        if not math.isfinite(value):
            return False
        return on is None or (on - value if self.lower_is_better else value - on) > by

    @property
    def name(self) -> str:
        """Name of a validation's figure, as a flag takes it: ``top1``."""
        return self.column.removeprefix(PREFIX)

    @property
    def words(self) -> str:
        """Text for people: ``highest val_top1``."""
        return f"{'lowest' if self.lower_is_better else 'highest'} {self.column}"


EPOCH_SCALARS = (
    EpochScalar("epoch"),
    EpochScalar("step"),
    EpochScalar("lr"),
    EpochScalar("train_loss"),
    EpochScalar("train_top1", labels=ONE),
    EpochScalar("train_top5", labels=ONE),
    EpochScalar("train_micro_f1", labels=SEVERAL),
    EpochScalar("val_loss", "Loss/Test", lower_is_better=True),
    EpochScalar("val_top1", "Top1/Test", labels=ONE),
    EpochScalar("val_top5", "Top5/Test", labels=ONE),
    EpochScalar("val_map", "MAP/Test", labels=SEVERAL),
    EpochScalar("val_count"),
    EpochScalar("max_val_batches"),
    EpochScalar("images_per_second"),
    EpochScalar("seconds"),
    EpochScalar("skipped_steps"),
    EpochScalar("partly_skipped_steps"),
    EpochScalar("unreadable_images"),
    EpochScalar("val_macro_precision", "Macro_Precision/Test", labels=ONE),
    EpochScalar("val_macro_recall", "Macro_Recall/Test", labels=ONE),
    EpochScalar("val_macro_f1", "Macro_F1/Test"),
    EpochScalar("val_micro_f1", "Micro_F1/Test", labels=SEVERAL),
    EpochScalar("val_tuned_macro_f1", "Tuned_Macro_F1/Test", labels=SEVERAL),
    EpochScalar("val_tuned_micro_f1", "Tuned_Micro_F1/Test", labels=SEVERAL),
    EpochScalar("val_auroc", "AUROC/Test", labels=SEVERAL),
    EpochScalar("val_counted_classes", labels=SEVERAL),
    EpochScalar("val_balanced_accuracy", "Balanced_Accuracy/Test", labels=ONE),
    EpochScalar("val_ece", "Calibration_Error/Test", lower_is_better=True, labels=ONE),
    # What ``doubts.py`` judges by, besides the loss; without 'val_', so that --best-metric does not offer them.
    EpochScalar("guessing_loss", labels=ONE),
    EpochScalar("answers_nats", labels=ONE),
    EpochScalar("commonest_answer", labels=ONE),
)
RAW_SCALARS = (
    EpochScalar("raw_val_loss", "Loss/Test_raw"),
    EpochScalar("raw_val_top1", "Top1/Test_raw", labels=ONE),
    EpochScalar("raw_val_top5", "Top5/Test_raw", labels=ONE),
    EpochScalar("raw_val_map", "MAP/Test_raw", labels=SEVERAL),
)


def validation_tags(multilabel: bool) -> list[str]:
    """Tags of an epoch's TensorBoard points, for multi-label or single-label data."""
    labels = {EITHER, SEVERAL if multilabel else ONE}
    return [scalar.tag for scalar in _all_scalars() if scalar.tag and scalar.labels in labels]


def _all_scalars() -> tuple[EpochScalar, ...]:
    return (*EPOCH_SCALARS, *RAW_SCALARS, *_of_plugins())


def _of_plugins() -> Iterator[EpochScalar]:
    """Scalars for the metrics that users' files add."""
    for name, metric in plugins.added("metric").items():
        yield EpochScalar(f"{PREFIX}{name}", f"{name}/Test", metric.options["lower_is_better"])


def row_of(
    facts: Mapping[str, float | None],
    training: AnyReport | None,
    validation: AnyReport | None,
    raw: AnyReport | None,
    losses: Mapping[str, float],
) -> dict[str, float]:
    """An epoch's row: its scalars, the named training ``losses``, then the scalars of the ``raw`` weights.

    A loss that is named like a figure of training, such as 'loss', has no column: that column is the figure's.
    ``facts``: by column, what no report holds. ``training`` is None if the epoch has its row already and is only
    validated late; ``validation``, if it is not validated; ``raw``, unless ``validation`` is that of an average.
    """
    reports = {"raw_val_": raw, PREFIX: validation, "train_": training, "": validation}

    def value(column: str) -> float | None:
        prefix = next(prefix for prefix in reports if column.startswith(prefix))
        return facts[column] if column in facts else _figure(reports[prefix], column.removeprefix(prefix))

    scalars = {scalar.column: value(scalar.column) for scalar in EPOCH_SCALARS}
    scalars |= {f"{PREFIX}{name}": figure for name, figure in ({} if validation is None else validation.own).items()}
    scalars |= {f"train_{name}": loss for name, loss in losses.items() if f"train_{name}" not in scalars}
    scalars |= {scalar.column: value(scalar.column) for scalar in RAW_SCALARS}
    return {column: value for column, value in scalars.items() if value is not None}


def _figure(report: AnyReport | None, name: str) -> float | None:
    """The figure ``name`` of a report: one over all images, or one by class; None if missing."""
    return None if report is None else getattr(report, name, getattr(report.by_class, name, None))


def points_of(row: dict[str, float]) -> dict[str, float]:
    """TensorBoard points of ``row``, by tag."""
    tagged = (scalar for scalar in _all_scalars() if scalar.column in row)
    return {scalar.tag: row[scalar.column] for scalar in tagged if scalar.tag}


def tagged_columns() -> list[str]:
    """Columns of metrics.csv that are TensorBoard points as well."""
    return [scalar.column for scalar in _all_scalars() if scalar.tag]


# ---------------------------------------------------------------------------------- the columns that decide


def metrics(labels: str = EITHER) -> dict[str, EpochScalar]:
    """The metrics to choose from, by name: every validation column except the counts.

    ``labels``: metrics of single-label data (``ONE``), of multi-label data (``SEVERAL``), or of both (``EITHER``).
    """
    scalars = (*EPOCH_SCALARS, *_of_plugins())
    found = [scalar for scalar in scalars if scalar.column.startswith(PREFIX) and scalar.column not in COUNTS]
    return {scalar.name: scalar for scalar in found if EITHER in (labels, scalar.labels) or scalar.labels == labels}


def best_metric(settings: RunSettings) -> EpochScalar:
    """The metric that chooses best.pt; raises ``UserError`` if it does not exist."""
    return _metric("best_metric", settings.best_metric)


def stopping_metric(settings: RunSettings) -> EpochScalar:
    """The metric that early stopping watches; raises ``UserError`` if it does not exist."""
    own = settings.early_stopping_metric
    return best_metric(settings) if own is None else _metric("early_stopping_metric", own)


def strange_metrics(settings: RunSettings, labels: str = EITHER) -> list[str]:
    """Error messages for settings that name a metric that data with such ``labels`` do not have."""
    mistakes = []
    for setting in ("best_metric", "early_stopping_metric"):
        if (name := getattr(settings, setting)) is not None:
            try:
                _metric(setting, name, labels)
            except UserError as error:
                mistakes += error.mistakes
    return mistakes


def taken_metrics(labels: str) -> list[str]:
    """Error messages for metrics of users' files that would take the column or tag of a figure of such data."""
    scalars = [scalar for scalar in EPOCH_SCALARS if scalar.labels in (EITHER, labels)]
    taken = {name for scalar in scalars for name in (scalar.column, scalar.tag)} | {"val_map"}  # it says which labels
    return [
        f"--plugin {plugins.added('metric')[own.name].file}: there is a metric {own.name} already; choose another name"
        for own in _of_plugins()
        if own.column in taken or own.tag in taken
    ]


def _metric(setting: str, name: str, labels: str = EITHER) -> EpochScalar:
    """The metric named ``top1`` or ``val_top1``. Raises ``UserError`` if data with such ``labels`` do not have it."""
    known = metrics(labels)
    own = name if name in known else name.removeprefix(PREFIX)
    if own in known:
        return known[own]
    hint = or_nearest(own.lower().replace("-", "_"), known, f"there are {', '.join(known)}")
    words = {ONE: " with one label an image", SEVERAL: " with several labels an image", EITHER: ""}[labels]
    raise UserError(f"{flag_of(setting)} '{name[:60]}': no such figure of a validation{words}; {hint}")


def without_improvement(settings: RunSettings, epochs: int | None) -> str:
    """The rule by which training stops early, or its learning rate drops, after so many ``epochs``, as text."""
    delta = f" by more than {settings.early_stopping_delta:g}" if settings.early_stopping_delta else ""
    column = stopping_metric(settings).column
    return f"after {epochs} epoch(s) in which {column} has not improved{delta}"


def selection_line(settings: RunSettings) -> str:
    """Text for the plan of a run: how best.pt is chosen, and the rule by which training stops early."""
    every = settings.val_every_epochs
    among = f" of every {every} epochs' validation" if every > 1 else ""
    stops = f"; stops {without_improvement(settings, settings.early_stopping)}" if settings.early_stopping else ""
    return f"best.pt has the {best_metric(settings).words}{among}{stops}"
