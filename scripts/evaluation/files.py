"""Files of an evaluation (JSON, CSV and pictures), of which all or none are written."""

from __future__ import annotations

import csv
import errno
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.common.answers import NO_CLASS
from scripts.common.output import plain
from scripts.common.predictions import Predictions
from scripts.evaluation import picture, several_labels, summary
from scripts.evaluation.as_text import doubts
from scripts.evaluation.result import Evaluation
from scripts.evaluation.summary import reliability
from utils.config.settings import UserError, as_user_error
from utils.config.spelling import some
from utils.record.metrics import Bin

JSON_FILE = "evaluation.json"
LARGEST_MATRIX = 2000  # classes: 4 million cells
PREDICTION = ("image", "class", "predicted", "right", "probability", "class_probability", "class_rank")
ANSWERS = (f"{which}_{what}" for which in ("first", "second") for what in ("predicted", "probability"))
COMPARED = ("image", "class", "right", *ANSWERS)
KNOWN = (  # files that an earlier evaluation may have left
    *(f"{name}.csv" for name in ("classes", "predictions", "reliability", "confusions", "confusion_matrix")),
    *(f"{name}.csv" for name in ("scores", "targets", "cooccurrence", "comparison")),
    *(f"{name}.png" for name in ("comparison", "coverage", "other_images")),
)


def refuse_others(folder: Path) -> None:
    """Raise ``UserError`` if ``folder`` has files of an evaluation's names, such as predict.py's, without being one."""
    there = [name for name in KNOWN if (folder / name).exists()]
    if there and not (folder / JSON_FILE).exists():
        raise UserError(
            f"--output {folder}: holds {some(there)} but no {JSON_FILE}, so they are another program's, or of "
            "an evaluation that was cut; give another folder, or remove them"
        )


def save(folder: Path, write: Callable[[Path], None]) -> list[str]:
    """Put the files made by ``write`` into ``folder``, replacing an earlier evaluation's; return their names.

    If ``JSON_FILE`` exists, all files belong to the evaluation it describes: the old one is removed first and the new
    one comes last. Raises ``UserError``.
    """
    options = {"prefix": ".evaluation.", "ignore_cleanup_errors": True}
    with as_user_error(f"--output {folder}: cannot be written"), TemporaryDirectory(dir=folder, **options) as work:
        write(Path(work))
        names = sorted(os.listdir(work))
        for name in names:  # before any earlier file is touched
            if (folder / name).is_dir():
                raise OSError(errno.EISDIR, f"{name} is a folder there")
        (folder / JSON_FILE).unlink(missing_ok=True)
        for name in set(KNOWN) - set(names):
            (folder / name).unlink(missing_ok=True)
        for name in sorted(names, key=JSON_FILE.__eq__):
            os.replace(Path(work, name), folder / name)
    return names


def write_all(work: Path, description: dict[str, Any], found: Evaluation) -> None:
    """Write the files of an evaluation into the folder ``work``."""
    predictions = found.predictions
    several = predictions.reading.several
    kind = several_labels if several else summary
    bins = reliability(predictions)
    rows_of_classes = kind.class_rows(predictions)
    content = {
        **description,
        "figures": kind.summary(predictions),
        "classes": rows_of_classes,
        "reliability": [one._asdict() for one in bins],
        "temperature": found.temperature and found.temperature._asdict(),
        **({} if several else {"rejection": found.rejection and found.rejection.figures()}),
        "other_images": found.others and found.others.figures(),
        "comparison": found.comparison and found.comparison.as_dict(),
        "notes": list(predictions.notes),
        "doubts": doubts(predictions, description),
    }
    (work / JSON_FILE).write_text(json.dumps(plain(content), indent=1) + "\n", encoding="utf-8")
    write_csv(work / "classes.csv", list(rows_of_classes[0]), map(dict.values, rows_of_classes))
    write_csv(work / "reliability.csv", Bin._fields, bins)
    (_write_labels if several else _write_classes)(work, found)
    if found.others is not None:
        picture.draw_others(work / "other_images.png", found.others)


def _write_classes(work: Path, found: Evaluation) -> None:
    """Write the files that only an evaluation with one label per image has."""
    predictions = found.predictions
    names = predictions.classes
    write_csv(work / "predictions.csv", PREDICTION, _prediction_rows(predictions))
    write_csv(
        work / "confusions.csv",
        ["class", "predicted", "images", "percent_of_class"],
        (
            (names[one.label], names[one.predicted], one.count, summary.share_of_class(predictions, one))
            for one in predictions.confusions
        ),
    )
    if len(names) <= LARGEST_MATRIX:
        rows = ([name, *row] for name, row in zip(names, predictions.matrix().tolist(), strict=True))
        write_csv(work / "confusion_matrix.csv", ["class", *names], rows)
    if found.comparison is not None:
        rows = found.comparison.rows()
        write_csv(work / "comparison.csv", COMPARED, map(dict.values, rows))
        if rows:
            picture.draw(work / "comparison.png", found.comparison)
    if found.rejection is not None:
        picture.draw_curve(work / "coverage.png", found.rejection)


def _write_labels(work: Path, found: Evaluation) -> None:
    """Write the files that only a multi-label evaluation has."""
    predictions = found.predictions
    names = predictions.classes
    pairs = ((names[one.first], names[one.second], one.true, one.given) for one in predictions.pairs)
    write_csv(work / "cooccurrence.csv", ["class", "other_class", "images", "given"], pairs)
    tables = {
        "scores": (map("{:.6f}".format, row) for row in predictions.scores.tolist()),
        "targets": (("" if one < 0 else one for one in row) for row in predictions.targets.tolist()),
    }
    for file, cells in tables.items():
        columns = zip(predictions.ids, cells, strict=True)
        write_csv(work / f"{file}.csv", ["image", *names], ((image, *row) for image, row in columns))
    if found.comparison is not None:
        write_csv(work / "comparison.csv", several_labels.LabelChange._fields, found.comparison.classes)


def _prediction_rows(predictions: Predictions) -> Iterable[tuple[Any, ...]]:
    names = predictions.classes
    of = predictions
    columns = (of.truth, of.predicted, of.right, of.confidence, of.label_probability, of.rank)
    for image, label, predicted, right, probability, own, rank in zip(
        of.ids, *(column.tolist() for column in columns), strict=True
    ):
        named = "" if predicted == NO_CLASS else names[predicted]
        yield image, names[label], named, int(right), f"{probability:.6f}", f"{own:.6f}", rank + 1


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    # File names may be any bytes, and class names are folder names.
    with open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        out = csv.writer(file)
        out.writerow(header)
        out.writerows(rows)
