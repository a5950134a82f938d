"""What the page shows of one run's predictions, as plain lists for its JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.reporting.analysis import Analysis, Pair, turns
from scripts.reporting.run_record import RunRecord
from scripts.reporting.series import number, numbers
from scripts.reporting.thumbnails import Thumbnails

if TYPE_CHECKING:
    from PIL import Image


from typing import TYPE_CHECKING

import torch

from models.load import Loaded
from scripts.common.heat_map import heat_map, overlay

if TYPE_CHECKING:
    from PIL import Image

SHOWN_SAMPLES = 24  # of the worst mistakes, and of the least certain hits
SHOWN_IN_CELL = 12
LISTED_CELLS = 20  # of the most frequent confusions, which the page lists: these keep all of theirs
MOST_CELLS = 60_000  # of the matrices of all runs
MOST_PICTURES = 1_500  # of all runs: reading them takes seconds
LIKELIEST = 3  # classes named with a picture
AS_RECORDED = 5e-5  # percentage points: half of what the figures have digits for


@dataclass
class Predicted:
    """A run's predictions. ``picture(place)``: the image of the sample there, as it was before preprocessing.

    ``heat_map(image, class)``: a picture of what speaks for the class, or None without. ``source``: two runs with the
    same one have the same images. ``ids``: their paths or numbers. ``run``: its number among the runs.
    """

    run: int
    analysis: Analysis
    classes: tuple[str, ...]
    ids: Sequence[str]
    picture: Callable[[int], Image.Image]
    source: str
    notes: list[str] = field(default_factory=list)
    heat_map: Callable[[Image.Image, int], Image.Image] | None = None


@dataclass
class ShownSamples:
    """The samples of a run that the page shows, and the cells that they are in."""

    mistakes: list[int]
    unsure: list[int]
    cells: list[tuple[Pair, list[int]]]

    @property
    def samples(self) -> list[int]:
        """All, in the order in which they get room: both galleries, then the cells in turns."""
        listed = [row for _, rows in self.cells[:LISTED_CELLS] for row in rows]
        return list(dict.fromkeys([*self.mistakes, *self.unsure, *listed, *turns([rows for _, rows in self.cells])]))


def choose(predicted: Predicted, runs: int) -> ShownSamples:
    """The samples to show of one of ``runs`` runs: fewer of each the more there are."""
    analysis = predicted.analysis
    each = max(8, SHOWN_SAMPLES // runs)
    budget = MOST_PICTURES // runs
    cells = [
        (pair, analysis.samples_of(pair)[:SHOWN_IN_CELL].tolist())
        for pair in analysis.cells[: budget + analysis.classes]
    ]
    listed = [row for _, rows in cells[:LISTED_CELLS] for row in rows]
    kept = set([*listed, *turns([rows for _, rows in cells])][:budget])
    cells = [(pair, [row for row in rows if row in kept]) for pair, rows in cells]
    return ShownSamples(
        analysis.worst_mistakes(each).tolist(),
        analysis.least_certain_hits(each).tolist(),
        [(pair, rows) for pair, rows in cells if rows],
    )


def add_pictures(
    predicted: Predicted, chosen: ShownSamples, thumbnails: Thumbnails, advance: Callable[[], None]
) -> dict[int, int]:
    """Put the chosen samples' pictures into ``thumbnails`` while there is room; gives the longer side of each.

    An image that cannot be read any more has no picture.
    """
    sides = {}
    gone = []
    explained = {*chosen.mistakes, *chosen.unsure}
    for sample in chosen.samples:
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
            thumbnails.add(
                ("heat", predicted.run, sample), predicted.heat_map(image, int(predicted.analysis.predicted[sample]))
            )
    if gone:
        predicted.notes.append(f"{len(gone):,} pictures cannot be shown, the first of them {gone[0]}")
    return sides


def detail(
    predicted: Predicted, chosen: ShownSamples, thumbnails: Thumbnails, sides: dict[int, int], runs: int
) -> dict:
    """The run's part of the page's JSON; ``classes`` is left to the caller, since runs may share them."""
    analysis = predicted.analysis
    rows = chosen.samples
    places = {sample: place for place, sample in enumerate(rows)}
    cells, dropped = _cells(analysis, MOST_CELLS // runs)
    order = analysis.order_by_confusion()
    with_pictures = [(pair, [places[row] for row in found if row in sides]) for pair, found in chosen.cells]
    return {
        "run": predicted.run,
        "rows": [_row(predicted, thumbnails, sample, sides) for sample in rows],
        "mistakes": [places[sample] for sample in chosen.mistakes],
        "unsure": [places[sample] for sample in chosen.unsure],
        "matrix": [list(column) for column in zip(*cells, strict=True)],
        "matrixNote": f"{dropped:,} further cells with the fewest images are not shown." if dropped else "",
        "shownCells": [[pair.truth, pair.predicted, found] for pair, found in with_pictures if found],
        "order": order if order != sorted(order) else None,
        "support": analysis.support.tolist(),
        "taken": analysis.taken.tolist(),
        "hits": analysis.hits.tolist(),
        "bins": [[one.count, number(one.confidence), number(one.accuracy)] for one in analysis.bins],
        "confidences": list(analysis.confidence_counts()),
        "calibration": calibration_words(analysis),
    }


def _cells(analysis: Analysis, most: int) -> tuple[list[Pair], int]:
    """All cells, or the whole diagonal and the fullest others; and how many are left out."""
    diagonal = [pair for pair in analysis.cells if pair.truth == pair.predicted]
    others = [pair for pair in analysis.cells if pair.truth != pair.predicted]
    kept = others[: max(0, most - len(diagonal))]
    return kept + diagonal, len(others) - len(kept)


def _row(predicted: Predicted, thumbnails: Thumbnails, sample: int, sides: dict[int, int]) -> list[Any]:
    """Id, picture, truth, likeliest classes, probability of the truth, longer side in pixels, heat map."""
    analysis = predicted.analysis
    truth = int(predicted.analysis.labels[sample])
    likely = [[one, number(share, 5)] for one, share in analysis.most_likely(sample, LIKELIEST)]
    own = analysis.probability(np.array([sample]), np.array([truth]))
    name = predicted.ids[sample]
    picture = thumbnails.place((predicted.source, name)) if sample in sides else None
    heat = thumbnails.place(("heat", predicted.run, sample))
    return [name, picture, truth, likely, *numbers(own, 5), sides.get(sample, 0), heat]


def calibration_words(analysis: Analysis) -> str:
    """What the reliability diagram says, in a sentence."""
    sure = 100 * float(analysis.confidence.mean())
    right = analysis.top1
    gap = sure - right
    words = (
        "as sure as it is right" if abs(gap) < 0.5 else "surer than it is right" if gap > 0 else "less sure than right"
    )
    return (
        f"Expected calibration error {analysis.calibration_error:.2f} %. On average the network is {sure:.2f} % sure "
        f"and right on {right:.2f} % of the images: {words}."
    )


def short_ids(ids: Sequence[str]) -> list[str]:
    """Paths without the folder that all share; other ids as they are."""
    if not ids or not all(os.path.isabs(one) for one in ids):
        return list(ids)
    shared = os.path.commonpath(ids)
    return [os.path.relpath(one, shared) for one in ids] if len(ids) > 1 else [os.path.basename(ids[0])]


def against_record(
    analysis: Analysis, record: RunRecord, checkpoint: str, raw: bool = False
) -> tuple[str, bool | None]:
    """How the top-1 of this validation compares with what the run recorded, in a sentence; and whether it agrees.

    None: the run recorded nothing. ``raw``: of the raw weights, whose figures have columns of their own.
    """
    column = "raw_val_top1" if raw and "raw_val_top1" in record.epochs else "val_top1"
    recorded = record.epochs.get(column, np.empty(0))
    top1 = float(f"{analysis.top1:.6g}")  # as metrics.csv rounds it
    if not np.isfinite(recorded).any():
        return f"Validated {checkpoint} for this report; the run has no figure to compare it with.", None
    same = np.flatnonzero(np.abs(recorded - top1) <= AS_RECORDED)
    if len(same):
        epoch = int(record.epochs["epoch"][same[-1]])
        return f"Validated {checkpoint} again for this report: the top-1 that the run recorded for epoch {epoch}.", True
    return (
        f"Validated {checkpoint} for this report: top-1 {analysis.top1:.4f} %, which no epoch of the run recorded "
        f"(last {recorded[-1]:.4f} %, best {np.nanmax(recorded):.4f} %). Other images, another precision or device, "
        "the raw weights or a checkpoint between two epochs explain it.",
        False,
    )


def explainer(loaded: Loaded) -> Callable[[Image.Image, int], Image.Image]:
    """A function of an image and a class: what the network sees of it, and over it what speaks for that class."""
    device = next(loaded.network.parameters()).device

    def explain(image: Image.Image, target: int) -> Image.Image:
        seen = loaded.preprocessing(image)[None].to(device)
        heat = heat_map(loaded, seen, [target])[0]
        with torch.no_grad():
            return overlay(loaded.preprocessing.evaluation_transform.to_pixels(seen)[0], heat)

    return explain
