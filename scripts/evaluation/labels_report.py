"""Text report of a multi-label evaluation."""

from __future__ import annotations

import math
from typing import Any

from scripts.common.answers import FIGURES
from scripts.common.command_line import table
from scripts.common.label_answers import Resampled
from scripts.common.predictions import LabelPredictions
from scripts.common.uncertainty import of_groups
from scripts.evaluation.as_text import MOST_CLASSES, ROWS, changed_classes, metric_lines, short
from scripts.evaluation.several_labels import LabelComparison, class_rows, summary
from utils.record.multilabel import THRESHOLD

NONE = "-"


def overall(predictions: LabelPredictions, description: dict[str, Any]) -> str:
    """Text of the metrics over all images."""
    found = summary(predictions)
    total = len(predictions.classes)
    counted = found["classes_with_positives"]
    means = "" if counted == total else f"; the mean of the {counted} of {total} classes with positive labels here"
    grouped = of_groups(predictions.groups)
    spans = {name: _span(*found[f"{name}_interval_bootstrap"], grouped) for name in Resampled._fields}
    rows = [
        ("mAP", _percent(found["map"]), f"{spans['map']}{means}"),
        ("macro F1", _percent(found["macro_f1"]), f"{spans['macro_f1']}, threshold {THRESHOLD}"),
        ("micro F1", _percent(found["micro_f1"]), f"{spans['micro_f1']}, threshold {THRESHOLD}"),
        ("AUROC", _percent(found["auroc"]), "mean of the classes"),
        ("loss", f"{found['loss']:.4f}", "binary cross entropy, mean over all known labels"),
    ]
    if found["exact_match"] is not None:
        span = "{:.2f} to {:.2f}".format(*found["exact_match_interval_wilson"])
        note = f"95 % interval {span} (Wilson{grouped}); images whose known labels are all right, threshold {THRESHOLD}"
        rows.append(("exact match", _percent(found["exact_match"]), note))
    chosen = "each half of the images scored with thresholds chosen on the other half"
    if math.isnan(found["tuned_micro_f1"]):
        chosen = "too few images, or groups, to choose thresholds on one half and score the other"
    rows += [
        ("macro F1, tuned", _percent(found["tuned_macro_f1"]), chosen),
        ("micro F1, tuned", _percent(found["tuned_micro_f1"]), ""),
    ]
    if set(predictions.reading.thresholds) != {THRESHOLD}:
        favours = ", which favours them: chosen on these images" if description["thresholds_of_these_images"] else ""
        rows += [
            ("macro F1, own", _percent(found["given_macro_f1"]), f"the checkpoint's own thresholds{favours}"),
            ("micro F1, own", _percent(found["given_micro_f1"]), ""),
        ]
    lines = metric_lines(rows)
    known = found["known_labels"]
    missing = found["images"] * total - known
    share = f", {100 * missing / (missing + known):.1f} % are missing and in no figure" if missing else ""
    lines.append(f"{known:,} known labels, {found['positive_labels']:,} of them positive{share}")
    if wrong := found["not_a_number"] + found["infinite"]:
        lines.append(f"warning: for {wrong:,} images the network's output is not finite; try --amp off")
    return "\n".join(lines)


def _span(low: float, high: float, grouped: str) -> str:
    if math.isnan(low):
        return "undefined"
    return f"95 % interval {low:.2f} to {high:.2f} (basic bootstrap{grouped})"


def _percent(value: float | None) -> str:
    return NONE if value is None or value != value else f"{value:.2f} %"


def _cell(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def classes(predictions: LabelPredictions, rest_is_in: str) -> str:
    """Table of all classes, or of the worst by average precision. ``rest_is_in``: text saying where the others are."""
    shown = rows = class_rows(predictions)
    title = "Classes"
    if len(rows) > MOST_CLASSES:
        ranked = sorted(rows, key=lambda row: (row["average_precision"] is None, row["average_precision"]))
        shown = ranked[:ROWS]
        left_out = f"{len(rows) - ROWS:,} more{rest_is_in}"
        title = f"The {ROWS} classes with the lowest average precision (not shown: {left_out})"
    metrics = ["AP", "AUROC", "F1 at 0.5", "F1 tuned"]
    heads = ["class", "positives", "known", *metrics, "threshold", "missed", "superfluous"]
    cells = [
        [
            short(row["class"]),
            f"{row['positives']:,}",
            f"{row['known']:,}",
            *(_cell(row[name]) for name in ("average_precision", "auroc", "f1", "tuned_f1")),
            _cell(row["threshold"], 3),
            f"{row['missed']:,}",
            f"{row['superfluous']:,}",
        ]
        for row in shown
    ]
    return f"{title}\n{table(heads, cells)}"


def pairs(predictions: LabelPredictions, rest_is_in: str) -> str:
    """Table of the label pairs whose numbers of images in truth and in the answers differ most."""
    found = [pair for pair in predictions.pairs if pair.true != pair.given]
    if not found:
        return "Labels are given together as often as they are together"
    names = predictions.classes
    rows = [
        [short(names[one.first]), short(names[one.second]), f"{one.true:,}", f"{one.given:,}"] for one in found[:ROWS]
    ]
    more = f" (not shown: {len(found) - ROWS:,} more pairs{rest_is_in})" if len(found) > ROWS else ""
    return f"Labels together: in truth and as given{more}\n{table(['label', 'with', 'images', 'given'], rows)}"


def compared(comparison: LabelComparison, checkpoints: tuple[str, str]) -> str:
    """Text of the comparison of two networks, named ``checkpoints``."""
    lines = [f"A  {checkpoints[0]}", f"B  {checkpoints[1]}", f"On {len(comparison.places[0]):,} images, B less A:"]
    for name, (difference, (low, high)) in comparison.differences.items():
        if not math.isfinite(difference):
            lines.append(f"{FIGURES[name]:<9} undefined, because one of the figures is")
            continue
        chance = "chance alone can explain it" if low <= 0 <= high else "more than chance explains"
        span = f"95 % interval {low:+.2f} to {high:+.2f} (basic bootstrap{of_groups(comparison.groups)})"
        at = "" if name == "map" else f", threshold {THRESHOLD}"  # even if a checkpoint keeps others
        lines.append(f"{FIGURES[name]:<9} {difference:+.2f} points, {span}{at}; {chance}")
    lines += changed_classes(comparison.classes, ["class", "positives", "A's AP", "B's AP"])
    return "\n".join(lines)
