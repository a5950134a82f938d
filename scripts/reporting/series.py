"""Curves for the page: at most a few hundred points each, whatever the run's length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from scripts.common.output import numbers
from scripts.reporting.run_record import RunRecord

POINTS = 160  # per curve: one for about every three pixels
ALL_POINTS = 60_000  # in all curves together: about 1.5 MB


class Curve(NamedTuple):
    """A run's curve in a chart: ``source`` says where its points come from, ``name`` is for the legend."""

    name: str
    source: str
    reduce: str = "mean"


class Chart(NamedTuple):
    """A chart of all runs. ``note``: what one must know to read it; ``zero``: the axis starts at 0."""

    title: str
    curves: tuple[Curve, ...]
    unit: str = ""
    log: bool = False
    zero: bool = False
    note: str = ""


TRAINING = "training"
VALIDATION = "validation"
CHARTS = (
    Chart(
        "Loss",
        (Curve(TRAINING, "steps:loss"), Curve(VALIDATION, "epochs:val_loss")),
        note="Training: what is minimised, with smoothing, mixing and other terms if any. Validation: cross entropy, "
        "the binary one if images have several labels.",
    ),
    Chart(
        "Top-1",
        (Curve(TRAINING, "steps:top1"), Curve(VALIDATION, "epochs:val_top1")),
        "%",
        note="Training: of augmented and, with mixup or CutMix, mixed images.",
    ),
    Chart("Top-5", (Curve(TRAINING, "steps:top5"), Curve(VALIDATION, "epochs:val_top5")), "%"),
    Chart("Mean average precision", (Curve(VALIDATION, "epochs:val_map"),), "%"),
    Chart("mAP of the raw weights", (Curve(VALIDATION, "epochs:raw_val_map"),), "%"),
    Chart(
        "Micro F1",
        (Curve(TRAINING, "steps:micro_f1"), Curve(VALIDATION, "epochs:val_micro_f1")),
        "%",
        note="Over all labels of all images together, at a threshold of 0.5. Training: of augmented images.",
    ),
    Chart("AUROC", (Curve(VALIDATION, "epochs:val_auroc"),), "%", note="The mean of the labels' AUROC."),
    Chart("Top-1 of the raw weights", (Curve(VALIDATION, "epochs:raw_val_top1"),), "%"),
    Chart("Macro F1", (Curve(VALIDATION, "epochs:val_macro_f1"),), "%", note="The mean of the classes' F1."),
    Chart(
        "Calibration error",
        (Curve(VALIDATION, "epochs:val_ece"),),
        "%",
        note="Expected calibration error, 15 bins: how far confidence and accuracy are apart.",
    ),
    Chart("Learning rate", (Curve("learning rate", "steps:lr", reduce="last"),)),
    Chart(
        "Gradient norm",
        (Curve("gradient norm", "steps:gradient_norm"),),
        log=True,
        note="Of unscaled gradients, before clipping. Steps whose gradient is not finite are left out.",
    ),
    Chart("Loss scale", (Curve("loss scale", "steps:loss_scale", reduce="last"),), log=True),
    Chart(
        "Skipped steps",
        (Curve("skipped so far", "epochs:skipped_steps"),),
        zero=True,
        note="Steps without an update, because the scaled gradient was not finite.",
    ),
    Chart("Speed", (Curve("training", "scalars:Speed/images_per_second"),), "images/s", zero=True),
    Chart(
        "Waiting for data",
        (Curve("waiting", "scalars:Speed/data_wait_percent"),),
        "%",
        zero=True,
        note="The share of the time in which training waits for its next batch.",
    ),
    Chart(
        "Time of an epoch",
        (Curve("epoch", "epochs:seconds"),),
        "s",
        zero=True,
        note="Training and validation, with checkpoints within the epoch.",
    ),
)


def charts(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Charts that have something to show, for the page's JSON. x is the optimizer step."""
    most = max(20, min(POINTS, ALL_POINTS // (16 * len(runs))))
    made = []
    for chart in CHARTS:
        found = list(_curves(chart, runs, most))
        if found:
            made.append({**chart._asdict(), "curves": found})
    return made


def _curves(chart: Chart, runs: Sequence[RunRecord], most: int) -> Iterator[dict[str, Any]]:
    for number, run in enumerate(runs):
        for curve in chart.curves:
            x, y = points_of(run, curve.source)
            if not np.isfinite(y).any() or _says_nothing(run, curve.source, y):
                continue
            style = "points" if curve.source.startswith("epochs:") else "line"
            reduce = "last" if style == "points" else curve.reduce  # a point is a validation, not a mean of some
            yield {"run": number, "name": curve.name, "style": style} | summarised(x, y, most, reduce)


def _says_nothing(run: RunRecord, source: str, y: np.ndarray) -> bool:
    """True if a curve is constant because what it counts does not occur in the run."""
    if source.endswith("top5"):
        return bool((y[np.isfinite(y)] == 100).all())  # there are few classes
    if any(tag.startswith("AMP/scale") for tag in run.scalars) or np.any(run.steps.get("loss_scale", 1) != 1):
        return False
    return source == "steps:loss_scale" or (source == "epochs:skipped_steps" and not y.any())


def points_of(run: RunRecord, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a curve (``source``: 'KIND:NAME'), float64 (n,) each; empty if the run lacks it."""
    kind, _, name = source.partition(":")
    nothing = np.empty(0)
    if kind == "scalars":
        rows = run.scalars.get(name, np.empty((0, 2)))
        return rows[:, 0], rows[:, 1]
    columns = run.steps if kind == "steps" else run.epochs
    return (columns["step"], columns[name]) if name in columns and "step" in columns else (nothing, nothing)


def summarised(x: np.ndarray, y: np.ndarray, most: int, reduce: str) -> dict[str, Any]:
    """At most ``most`` points of a curve: x and y, and if a point stands for several values, their lowest and highest.

    A point is the mean of equally many consecutive values (``reduce`` 'mean'), at their last x, or the last of them
    ('last'), at its own. Values that are not finite are left out; a point without any finite value is None.
    """
    if len(x) <= most:
        return {"x": numbers(x), "y": numbers(y)}
    edges = np.linspace(0, len(x), most + 1).round().astype(int)
    finite = [start + np.flatnonzero(np.isfinite(y[start:end])) for start, end in pairwise(edges)]
    parts = [y[places] if len(places) else np.array([math.nan]) for places in finite]
    middle = [part.mean() if reduce == "mean" else part[-1] for part in parts]
    low, high = ([limit(part) for part in parts] for limit in (np.min, np.max))
    at = edges[1:] - 1
    if reduce == "last":
        at = np.array([places[-1] if len(places) else end for places, end in zip(finite, at, strict=True)])
    return {"x": numbers(x[at]), "y": numbers(middle), "low": numbers(low), "high": numbers(high)}


def time_axis(run: RunRecord) -> dict[str, Any]:
    """A run's steps at the ends of its epochs, and the epochs and hours there; in between, these grow evenly.

    The number of steps of an epoch may change, as where --resume-override sets another batch size. An epoch that
    --max-steps has cut ends at the part of it that the steps of the epoch before suggest.
    """
    ends = run.epochs.get("step", np.empty(0))
    epochs = run.epochs.get("epoch", 1.0 + np.arange(len(ends))).copy()
    if len(ends) > run.whole_epochs:
        steps_per_epoch = np.diff(ends, prepend=0) / np.diff(epochs, prepend=0)
        epochs[-1] = epochs[-2] + (ends[-1] - ends[-2]) / steps_per_epoch[-2]
    seconds = np.nancumsum(run.epochs.get("seconds", np.zeros(len(ends))))
    columns = {"ends": ends, "epoch": epochs, "hours": seconds / 3600}
    return {name: numbers(np.concatenate([[0], values])) for name, values in columns.items()}
