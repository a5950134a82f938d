"""An evaluation as files: JSON, CSV and a picture, all or none of them."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.common.answers import NO_CLASS
from scripts.common.predictions import Predictions
from scripts.evaluation import picture
from scripts.evaluation.as_text import doubts
from scripts.evaluation.result import Evaluation
from scripts.evaluation.summary import class_rows, confusion_matrix, reliability, share_of_class, summary
from utils.config.settings import UserError
from utils.record.metrics import Bin

JSON_FILE = "evaluation.json"
PREDICTION = ("image", "class", "predicted", "right", "probability", "class_probability", "class_rank")
ANSWERS = (f"{which}_{what}" for which in ("first", "second") for what in ("predicted", "probability"))
COMPARED = ("image", "class", "right", *ANSWERS)
KNOWN = (  # what an earlier evaluation may have left
    *(f"{name}.csv" for name in ("classes", "predictions", "reliability", "confusions", "confusion_matrix")),
    *(f"{name}.csv" for name in ("scores", "targets", "cooccurrence", "comparison")),
    *(f"{name}.png" for name in ("comparison", "coverage", "other_images")),
)


def save(folder: Path, write: Callable[[Path], None]) -> list[str]:
    """Put the files that ``write`` writes into ``folder``, in place of an earlier evaluation's; gives their names.

    Where ``JSON_FILE`` is, all files are of the evaluation that it tells of: the earlier one goes first and the new one
    comes last. Raises ``UserError``.
    """
    try:
        work = Path(tempfile.mkdtemp(prefix=".evaluation.", dir=folder))
        try:
            write(work)
            names = sorted(path.name for path in work.iterdir())
            for name in names:  # before any earlier file has been touched
                if (folder / name).is_dir():
                    raise OSError(errno.EISDIR, f"{name} is a folder there")
            (folder / JSON_FILE).unlink(missing_ok=True)
            for name in set(KNOWN) - set(names):
                (folder / name).unlink(missing_ok=True)
            for name in sorted(names, key=JSON_FILE.__eq__):
                os.replace(work / name, folder / name)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be written ({error.strerror or error})") from error
    return names


def write_all(work: Path, description: dict[str, Any], found: Evaluation) -> None:
    """Write the files of an evaluation of one label an image into ``work``."""
    predictions = found.predictions
    comparison = found.comparison
    bins = reliability(predictions)
    rows_of_classes = class_rows(predictions)
    content = {
        **description,
        "figures": summary(predictions),
        "classes": rows_of_classes,
        "reliability": [one._asdict() for one in bins],
        "temperature": found.temperature and found.temperature._asdict(),
        "rejection": found.rejection and found.rejection.figures(),
        "other_images": found.others and found.others.figures(),
        "comparison": comparison and comparison.as_dict(),
        "notes": list(predictions.notes),
        "doubts": doubts(predictions, description),
    }
    (work / JSON_FILE).write_text(json.dumps(plain(content), indent=1) + "\n", encoding="utf-8")
    names = predictions.classes
    write_csv(work / "classes.csv", list(rows_of_classes[0]), map(dict.values, rows_of_classes))
    write_csv(work / "reliability.csv", Bin._fields, bins)
    write_csv(work / "predictions.csv", PREDICTION, _prediction_rows(predictions))
    write_csv(
        work / "confusions.csv",
        ["class", "predicted", "images", "percent_of_class"],
        (
            (names[one.label], names[one.predicted], one.count, share_of_class(predictions, one))
            for one in predictions.confusions
        ),
    )
    matrix = confusion_matrix(predictions)
    if matrix is not None:
        rows = ([name, *row] for name, row in zip(names, matrix.tolist(), strict=True))
        write_csv(work / "confusion_matrix.csv", ["class", *names], rows)
    if comparison is not None:
        rows = comparison.rows()
        write_csv(work / "comparison.csv", COMPARED, map(dict.values, rows))
        if rows:
            picture.draw(work / "comparison.png", comparison)
    if found.rejection is not None:
        picture.draw_curve(work / "coverage.png", found.rejection)
    if found.others is not None:
        picture.draw_others(work / "other_images.png", found.others)


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
    # A file's name may be any bytes, and a class's is a folder's.
    with open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        out = csv.writer(file)
        out.writerow(header)
        out.writerows(rows)


def plain(value: Any) -> Any:
    """``value`` with None for numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
