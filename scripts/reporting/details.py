"""Details of one run's predictions for the page, as plain lists for its JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from PIL import Image

from models.load import Loaded
from scripts.common.answers import FIGURES, Answers, Cell
from scripts.common.heat_map import heat_map, overlay
from scripts.common.label_answers import LabelAnswers
from scripts.common.output import number, numbers
from scripts.common.predictions import Predictions
from scripts.common.uncertainty import wilson_interval
from scripts.reporting.run_parts import ShownMetric, shown
from scripts.reporting.run_record import RunRecord
from scripts.reporting.thumbnails import Thumbnails
from utils.record.metrics import shows_top5
from utils.record.reading import OneLabel

SHOWN_SAMPLES = 24  # of the worst mistakes, and as many of the least certain hits
SHOWN_IN_CELL = 12
LISTED_CELLS = 20  # the most frequent confusions, which the page lists: all their samples are kept
MOST_CELLS = 60_000  # in the matrices of all runs
MOST_PICTURES = 1_500  # in all runs: reading more takes seconds
LIKELIEST = 3  # classes named with a picture
AS_RECORDED = 5e-5  # percentage points: half of the last digit shown


@dataclass
class Predicted:
    """A run's predictions. ``picture(sample)``: the sample's image before preprocessing.

    ``heat_map(image, class)``: a picture of the evidence for the class, if heat maps are wanted. ``source``: equal for
    runs with the same images. ``ids``: image paths or numbers. ``run``: the run's index.
    """

    run: int
    answers: Answers | LabelAnswers
    ids: Sequence[str]
    picture: Callable[[int], Image.Image]
    source: str
    notes: list[str] = field(default_factory=list)
    heat_map: Callable[[Image.Image, int], Image.Image] | None = None


@dataclass
class ShownSamples:
    """Indices of the samples of a run that the page shows, in both galleries and by cell of the confusion matrix."""

    mistakes: list[int]
    unsure: list[int]
    cells: list[tuple[Cell, list[int]]]

    @property
    def places(self) -> dict[int, int]:
        """Place of each sample shown, in the order of adding pictures: both galleries, then the matrix's cells.

        The order of the cells is that of ``in_order_of_cells``.
        """
        samples = dict.fromkeys([*self.mistakes, *self.unsure, *in_order_of_cells(self.cells)])
        return {sample: place for place, sample in enumerate(samples)}


def choose(predicted: Predicted, runs: int) -> ShownSamples:
    """Choose the samples to show of one of ``runs`` runs: the more runs, the fewer samples each."""
    answers = predicted.answers
    each = each_gallery(runs)
    budget = MOST_PICTURES // runs
    cells = [
        (cell, answers.images_of(cell)[:SHOWN_IN_CELL].tolist())
        for cell in answers.cells[: budget + answers.logits.shape[1]]
    ]
    kept = set(in_order_of_cells(cells)[:budget])
    return ShownSamples(
        answers.most_confident(np.flatnonzero(~answers.right))[:each].tolist(),
        answers.least_confident(np.flatnonzero(answers.right))[:each].tolist(),
        [(cell, [row for row in rows if row in kept]) for cell, rows in cells],
    )


def each_gallery(runs: int) -> int:
    """Number of samples in each gallery of one of ``runs`` runs."""
    return max(8, SHOWN_SAMPLES // runs)


def add_pictures(
    predicted: Predicted, chosen: ShownSamples, thumbnails: Thumbnails, advance: Callable[[], object]
) -> dict[int, int]:
    """Put the chosen samples' pictures into ``thumbnails`` while there is room; return each image's longer side.

    An image that can no longer be read has no picture. Calls ``advance`` for each sample.
    """
    sides = {}
    gone = []
    explained = {*chosen.mistakes, *chosen.unsure}
    for sample in chosen.places:
        advance()
        key = (predicted.source, predicted.ids[sample])
        if thumbnails.full and thumbnails.place(key) is None:
            continue
        try:
            image = predicted.picture(sample)
        except (OSError, ValueError) as error:
            gone.append(f"{predicted.ids[sample]} ({' '.join(str(error).split())[:100]})")
            continue
        thumbnails.add(key, image)
        sides[sample] = max(image.size)
        if predicted.heat_map is not None and sample in explained:
            heat = predicted.heat_map(image, predicted.answers.explained(sample))
            thumbnails.add(("heat", predicted.run, sample), heat)
    if gone:
        predicted.notes.append(f"{len(gone):,} pictures cannot be shown, the first of them {gone[0]}")
    return sides


def detail(
    predicted: Predicted, chosen: ShownSamples, thumbnails: Thumbnails, sides: dict[int, int], runs: int
) -> dict:
    """The run's part of the page's JSON, without ``classes``, which the caller adds because runs may share them."""
    answers = predicted.answers
    places = chosen.places
    diagonal = [cell for cell in answers.cells if cell.is_right]
    most = MOST_CELLS // runs - len(diagonal)
    worst = {cell.label: cell for cell in reversed(answers.confusions)}  # which the table of classes names
    others = [cell for place, cell in enumerate(answers.confusions) if place < most or cell is worst[cell.label]]
    dropped = len(answers.confusions) - len(others)
    order = answers.order_by_confusion()
    with_pictures = [(cell, [places[row] for row in found if row in sides]) for cell, found in chosen.cells]
    return {
        "run": predicted.run,
        "rows": [_row(predicted, thumbnails, sample, sides) for sample in places],
        "mistakes": [places[sample] for sample in chosen.mistakes],
        "unsure": [places[sample] for sample in chosen.unsure],
        "matrix": [list(column) for column in zip(*others, *diagonal, strict=True)],
        "matrixNote": f"{dropped:,} further cells with the fewest images are not shown." if dropped else "",
        "shownCells": [[cell.label, cell.predicted, found] for cell, found in with_pictures if found],
        "order": order if order != sorted(order) else None,
        "support": answers.by_class.support.tolist(),
        "taken": answers.by_class.predicted.tolist(),
        "hits": answers.by_class.right.tolist(),
        "bins": [
            [one.images, *(numbers([one.confidence / 100, one.accuracy / 100]) if one.images else (0, 0))]
            for one in answers.by_class.reliability
        ],
        "confidences": confidence_counts(answers),
        "calibration": calibration_words(answers),
    }


def _row(predicted: Predicted, thumbnails: Thumbnails, sample: int, sides: dict[int, int]) -> list[Any]:
    """Id, picture, truth, likeliest classes, probability of the truth, longer side in pixels, heat map."""
    answers = predicted.answers
    truth = int(answers.truth[sample])
    (likeliest,) = OneLabel().likeliest(answers.logits[sample : sample + 1].double(), LIKELIEST)
    likely = [[one, number(share, 5)] for one, share in likeliest]
    own = answers.label_probability[sample]
    name = predicted.ids[sample]
    picture = thumbnails.place((predicted.source, name)) if sample in sides else None
    heat = thumbnails.place(("heat", predicted.run, sample))
    return [name, picture, truth, likely, number(own, 5), sides.get(sample, 0), heat]


def metrics_of(predictions: Predictions) -> list[ShownMetric]:
    """Name, value and small print of the main metrics, which are the validation's, as in main.py --evaluate."""
    report = predictions.report
    classes = len(predictions.classes)
    low, high = wilson_interval(predictions.right, predictions.groups)
    rows = [ShownMetric("Top-1", shown(report.top1, "%"), f"95 %: {low:.1f} to {high:.1f}")]
    if shows_top5(classes):
        rows.append(ShownMetric("Top-5", shown(report.top5, "%"), f"{report.count:,} images"))
    by_class = predictions.by_class
    return [
        *rows,
        ShownMetric("Loss", shown(report.loss), f"guessing: {by_class.guessing_loss:.2f}"),
        ShownMetric("Macro F1", shown(by_class.macro_f1, "%"), f"{classes:,} classes"),
        ShownMetric("Calibration error", shown(by_class.ece, "%"), "expected, 15 bins"),
    ]


def confidence_counts(answers: Answers) -> list[list[int]]:
    """Numbers of wrong images, and of right ones, whose confidence is in each twentieth of 0 to 1."""
    edges = np.linspace(0, 1, 21)
    confidence = np.clip(answers.confidence, 0, 1)
    return [np.histogram(confidence[of], edges)[0].tolist() for of in (~answers.right, answers.right)]


def in_order_of_cells(cells: Sequence[tuple[Cell, list[int]]]) -> list[int]:
    """Samples in the order in which they get room: all of the first cells, then one of each cell in turn."""
    queues = [rows for _, rows in cells]
    rounds = chain.from_iterable(zip_longest(*queues))
    return [*chain.from_iterable(queues[:LISTED_CELLS]), *(row for row in rounds if row is not None)]


def calibration_words(answers: Answers) -> str:
    """Sentences that sum up the reliability diagram."""
    sure = 100 * float(answers.confidence.mean())
    words = "surer than it is right" if sure > answers.top1 else "less sure than right"
    if abs(sure - answers.top1) < 0.5:
        words = "as sure as it is right"
    return (
        f"Expected calibration error {answers.by_class.ece:.2f} %. On average the network is {sure:.2f} % sure "
        f"and right on {answers.top1:.2f} % of the images: {words}."
    )


def short_ids(ids: Sequence[str]) -> list[str]:
    """Paths relative to the folder that all share; other ids unchanged."""
    if not ids or not all(os.path.isabs(one) for one in ids):
        return list(ids)
    shared = os.path.commonpath(ids)
    return [os.path.relpath(one, shared) for one in ids] if len(ids) > 1 else [os.path.basename(ids[0])]


def against_record(
    value: float, name: str, record: RunRecord, checkpoint: str, epoch: int | None, raw: bool = False
) -> tuple[str, bool | None]:
    """Compare this validation's metric ``name`` with the run's record: a sentence, and whether the two agree.

    The record is that of the checkpoint's ``epoch``, or of any if the checkpoint does not name it. Whether they agree
    is None if there is no record. ``raw``: compare the raw weights, whose metrics have columns of their own.
    """
    words = FIGURES[name]
    column = f"raw_val_{name}" if raw and f"raw_val_{name}" in record.epochs else f"val_{name}"
    recorded = record.epochs.get(column, np.empty(0))
    epochs = record.epochs.get("epoch", np.empty(0))[: len(recorded)]
    if epoch is not None:
        recorded, epochs = recorded[epochs == epoch], epochs[epochs == epoch]
    value = float(f"{value:.6g}")  # as metrics.csv rounds it
    if not np.isfinite(recorded).any():
        return f"Validated {checkpoint} for this report; the run has no figure to compare it with.", None
    same = np.flatnonzero(np.abs(recorded - value) <= AS_RECORDED)
    if len(same):
        its = int(epochs[same[-1]])
        return f"Validated {checkpoint} again for this report: the {words} that the run recorded for epoch {its}.", True
    recorded = recorded[np.isfinite(recorded)]  # not each epoch is validated
    there = f"the run recorded {recorded[-1]:.4f} % for epoch {epoch}"
    if epoch is None:
        there = f"no epoch of the run recorded that (last {recorded[-1]:.4f} %, best {recorded.max():.4f} %)"
    return (
        f"Validated {checkpoint} for this report: {words} {value:.4f} %; {there}. Other images, another precision "
        "or device, the raw weights or a checkpoint between two epochs explain it.",
        False,
    )


def explainer(loaded: Loaded) -> Callable[[Image.Image, int], Image.Image]:
    """A function of an image and a class, which draws the class's heat map over the image as the network sees it."""
    device = next(loaded.network.parameters()).device

    def explain(image: Image.Image, target: int) -> Image.Image:
        seen = loaded.preprocessing(image)[None].to(device)
        heat = heat_map(loaded, seen, [target])[0]
        with torch.no_grad():
            return overlay(loaded.preprocessing.evaluation_transform.to_pixels(seen)[0], heat)

    return explain
