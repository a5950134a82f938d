"""An evaluation of several labels an image, as text and as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.common.command_line import table
from scripts.common.predictions import LabelPredictions
from scripts.evaluation import as_text, picture
from scripts.evaluation.as_text import MOST_CLASSES, ROWS, checkpoints, doubtful, doubts, short
from scripts.evaluation.files import JSON_FILE, plain, write_csv
from scripts.evaluation.result import Evaluation
from scripts.evaluation.several_labels import LabelChange, LabelComparison, class_rows, summary
from scripts.evaluation.summary import reliability
from utils.record.metrics import Bin
from utils.record.multilabel import THRESHOLD

NONE = "-"


def parts(output: str | None, description: dict[str, Any], found: Evaluation) -> list[str]:
    """The report on several labels an image, in parts. ``output``: the folder of its files."""
    predictions = found.predictions
    rest = ["", ""] if output is None else [f"; see {output}/{name}.csv" for name in ("classes", "cooccurrence")]
    found_parts = [
        overall(summary(predictions), predictions, description),
        *doubtful(predictions, description),
        classes(class_rows(predictions), rest[0]),
        together(predictions, rest[1]),
        as_text.calibration(reliability(predictions), found.temperature),
    ]
    if found.others is not None:
        found_parts.append(as_text.others(found.others))
    if found.comparison is not None:
        found_parts.append(compared(found.comparison, checkpoints(description)))
    return found_parts


def overall(found: dict[str, Any], predictions: LabelPredictions, description: dict[str, Any]) -> str:
    """Metrics of all images."""
    total = len(predictions.classes)
    counted = found["classes_with_positives"]
    means = "" if counted == total else f"; {counted} of {total} classes have positive labels here, of which it is"
    spans = {
        name: "95 % interval {:.2f} to {:.2f} (basic bootstrap)".format(*found[f"{name}_interval_bootstrap"])
        for name in ("map", "macro_f1", "micro_f1")
    }
    rows = [
        ("mAP", _percent(found["map"]), f"{spans['map']}{means}"),
        ("macro F1", _percent(found["macro_f1"]), f"{spans['macro_f1']}, threshold {THRESHOLD}"),
        ("micro F1", _percent(found["micro_f1"]), f"{spans['micro_f1']}, threshold {THRESHOLD}"),
        ("AUROC", _percent(found["auroc"]), "mean of the classes"),
        ("loss", f"{found['loss']:.4f}", "binary cross entropy, mean over all known labels"),
    ]
    if found["exact_match"] is not None:
        span = "{:.2f} to {:.2f}".format(*found["exact_match_interval_wilson"])
        note = f"95 % interval {span} (Wilson); images whose known labels are all right, threshold {THRESHOLD}"
        rows.append(("exact match", _percent(found["exact_match"]), note))
    chosen = "thresholds chosen on the half of the images that an image is not in"
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
    lines = [f"{name:<18} {value:>9}  {note}".rstrip() for name, value, note in rows]
    known = found["known_labels"]
    missing = found["images"] * total - known
    share = f", {100 * missing / (missing + known):.1f} % are missing and in no figure" if missing else ""
    lines.append(f"{known:,} known labels, {found['positive_labels']:,} of them positive{share}")
    if wrong := found["not_a_number"] + found["infinite"]:
        lines.append(f"warning: for {wrong:,} images the network's output is not finite; try --amp off")
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return NONE if value is None or value != value else f"{value:.2f} %"


def _cell(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def classes(rows: list[dict[str, Any]], rest_is_in: str) -> str:
    """Table of all classes, or of the worst by average precision. ``rest_is_in``: where the others are found."""
    shown = rows
    title = "Classes"
    if len(rows) > MOST_CLASSES:
        ranked = sorted(rows, key=lambda row: (row["average_precision"] is None, row["average_precision"]))
        shown = ranked[:ROWS]
        left_out = f"{len(rows) - ROWS:,} more{rest_is_in}"
        title = f"The {ROWS} classes with the lowest average precision (not shown: {left_out})"
    heads = ["class", "positives", "known", "AP", "AUROC", "F1", "F1 tuned", "threshold", "missed", "superfluous"]
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


def together(predictions: LabelPredictions, rest_is_in: str) -> str:
    """The pairs of labels that are together in truth and in the answers on the most different numbers of images."""
    pairs = [pair for pair in predictions.pairs if pair.true != pair.given]
    if not pairs:
        return "Labels are given together as often as they are together"
    names = predictions.classes
    rows = [
        [short(names[one.first]), short(names[one.second]), f"{one.true:,}", f"{one.given:,}"] for one in pairs[:ROWS]
    ]
    more = f" (not shown: {len(pairs) - ROWS:,} more pairs{rest_is_in})" if len(pairs) > ROWS else ""
    return f"Labels together: in truth and as given{more}\n{table(['label', 'with', 'images', 'given'], rows)}"


def compared(comparison: LabelComparison, checkpoints: tuple[str, str]) -> str:
    """The comparison of two networks, which ``checkpoints`` name."""
    lines = [f"A  {checkpoints[0]}", f"B  {checkpoints[1]}", f"On {len(comparison.places[0]):,} images, B less A:"]
    words = {"map": "mAP", "macro_f1": "macro F1", "micro_f1": "micro F1"}
    for name, (difference, (low, high)) in comparison.differences.items():
        chance = "chance alone can explain it" if low <= 0 <= high else "more than chance explains"
        lines.append(f"{words[name]:<9} {difference:+.2f} points, 95 % interval {low:+.2f} to {high:+.2f}; {chance}")
    changed = [one for one in comparison.classes if one.first != one.second]
    rows = [
        [
            short(one.name),
            f"{one.positives:,}",
            f"{one.first:.2f}",
            f"{one.second:.2f}",
            f"{one.second - one.first:+.2f}",
        ]
        for one in changed[:ROWS]
    ]
    if rows:
        more = f" (not shown: {len(changed) - ROWS:,} more that differ)" if len(changed) > ROWS else ""
        head = ["class", "positives", "A's AP", "B's AP", "B - A"]
        lines += ["", f"Classes that differ most{more}", table(head, rows)]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------- files


def write_all(work: Path, description: dict[str, Any], found: Evaluation) -> None:
    """Write the files of an evaluation of several labels an image into ``work``."""
    predictions = found.predictions
    comparison = found.comparison
    rows = class_rows(predictions)
    bins = reliability(predictions)
    names = predictions.classes
    content = {
        **description,
        "figures": summary(predictions),
        "classes": rows,
        "reliability": [one._asdict() for one in bins],
        "temperature": found.temperature and found.temperature._asdict(),
        "other_images": found.others and found.others.figures(),
        "comparison": comparison and comparison.as_dict(),
        "notes": list(predictions.notes),
        "doubts": doubts(predictions, description),
    }
    (work / JSON_FILE).write_text(json.dumps(plain(content), indent=1) + "\n", encoding="utf-8")
    write_csv(work / "classes.csv", list(rows[0]), map(dict.values, rows))
    pairs = ((names[one.first], names[one.second], one.true, one.given) for one in predictions.pairs)
    write_csv(work / "cooccurrence.csv", ["class", "other_class", "images", "given"], pairs)
    tables = {
        "scores": (map("{:.6f}".format, row) for row in predictions.scores.tolist()),
        "targets": (("" if one < 0 else one for one in row) for row in predictions.targets.tolist()),
    }
    for file, cells in tables.items():
        columns = zip(predictions.ids, cells, strict=True)
        write_csv(work / f"{file}.csv", ["image", *names], ((image, *row) for image, row in columns))
    write_csv(work / "reliability.csv", Bin._fields, bins)
    if found.others is not None:
        picture.draw_others(work / "other_images.png", found.others)
    if comparison is not None:
        write_csv(work / "comparison.csv", LabelChange._fields, comparison.classes)
