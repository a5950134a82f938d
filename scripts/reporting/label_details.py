"""Details of one run's multi-label predictions for the page, as plain lists for its JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from scripts.common.label_answers import LabelAnswers, intervals_of
from scripts.common.output import number, numbers
from scripts.common.predictions import LabelPredictions
from scripts.reporting.details import Predicted, ShownSamples, each_gallery
from scripts.reporting.run_parts import ShownMetric, shown
from scripts.reporting.thumbnails import Thumbnails

MOST_TOGETHER = 30  # labels in the tables of co-occurring labels; the most frequent ones
LISTED_PAIRS = 20
NAMED = 8  # labels named with a picture
RIGHT, MISSING, SUPERFLUOUS, UNKNOWN = range(4)


def choose(predicted: Predicted, runs: int) -> ShownSamples:
    """Choose the samples to show of one of ``runs`` runs: the more runs, the fewer samples each."""
    answers = predicted.answers
    each = each_gallery(runs)
    return ShownSamples(answers.most_mistaken()[:each].tolist(), answers.least_certain()[:each].tolist(), [])


def detail(
    predicted: Predicted, chosen: ShownSamples, thumbnails: Thumbnails, sides: dict[int, int], runs: int
) -> dict[str, Any]:
    """The run's part of the page's JSON, without ``classes``, which the caller adds because runs may share them."""
    answers = predicted.answers
    places = chosen.places
    of = answers.by_class
    shown_labels = np.sort(np.argsort(-of.support, kind="stable")[: max(2, MOST_TOGETHER // runs)])
    true, given = (counts[np.ix_(shown_labels, shown_labels)].tolist() for counts in answers.together)
    return {
        "several": True,
        "run": predicted.run,
        "rows": [_row(predicted, thumbnails, sample, sides) for sample in places],
        "mistakes": [places[sample] for sample in chosen.mistakes],
        "unsure": [places[sample] for sample in chosen.unsure],
        "together": {"labels": shown_labels.tolist(), "true": true, "given": given},
        "pairs": [list(pair) for pair in answers.pairs if pair.true != pair.given][:LISTED_PAIRS],
        "support": of.support.tolist(),
        "known": of.known.tolist(),
        "precision": numbers(of.average_precision / 100),
        "auroc": numbers(of.auroc_by_class / 100),
        "f1": numbers(of.f1 / 100),
        "thresholds": numbers(answers.reading.thresholds),
        "missed": answers.missed.sum(0).tolist(),
        "superfluous": answers.superfluous.sum(0).tolist(),
    }


def _row(predicted: Predicted, thumbnails: Thumbnails, sample: int, sides: dict[int, int]) -> list[Any]:
    """Id, picture, labels with probability and state, number of labels, longer side in pixels, heat map."""
    answers = predicted.answers
    named = states(answers, sample)
    scores = answers.scores[sample]
    order = sorted(named, key=lambda label: (named[label] in (RIGHT, UNKNOWN), -abs(scores[label] - 0.5)))
    labels = [[label, number(scores[label], 5), named[label]] for label in order[:NAMED]]
    name = predicted.ids[sample]
    picture = thumbnails.place((predicted.source, name)) if sample in sides else None
    return [name, picture, labels, len(named), sides.get(sample, 0), thumbnails.place(("heat", predicted.run, sample))]


def states(answers: LabelAnswers, sample: int) -> dict[int, int]:
    """State of each label that an image has or is given: right, missing, superfluous or unknown."""
    found = {}
    for label in np.flatnonzero((answers.targets[sample] == 1) | answers.given[sample]).tolist():
        if answers.targets[sample, label] < 0:
            found[label] = UNKNOWN
        elif answers.missed[sample, label]:
            found[label] = MISSING
        else:
            found[label] = SUPERFLUOUS if answers.superfluous[sample, label] else RIGHT
    return found


def metrics_of(predictions: LabelPredictions) -> list[ShownMetric]:
    """Name, value and small print of the main metrics, which are the validation's, as in main.py --evaluate.

    The small print includes the average precision of guessing, which is a label's frequency.
    """
    report = predictions.report
    of = predictions.by_class
    spans = intervals_of(report, predictions.scores, predictions.targets, predictions.groups)
    words = {
        name: "undefined" if math.isnan(low) else f"95 %: {low:.1f} to {high:.1f}"
        for name, (low, high) in spans.items()
    }
    there = of.support > 0
    guessing = 100 * float(np.mean(of.support[there] / of.known[there])) if there.any() else 0.0
    total = len(predictions.classes)
    counted = f"{total} labels" if of.counted_classes == total else f"{of.counted_classes} of {total} labels are there"
    return [
        ShownMetric("mAP", shown(report.map, "%"), f"{words['map']}; guessing: {guessing:.1f}"),
        ShownMetric("Macro F1 at 0.5", shown(report.macro_f1, "%"), words["macro_f1"]),
        ShownMetric("Micro F1 at 0.5", shown(report.micro_f1, "%"), words["micro_f1"]),
        ShownMetric("Tuned macro F1", shown(of.tuned_macro_f1, "%"), "each label's own threshold"),
        ShownMetric("AUROC", shown(of.auroc, "%"), counted),
        ShownMetric("Loss", shown(report.loss), f"{report.count:,} images"),
    ]
