"""Record of a run folder: settings, metrics of epochs and steps, speeds, first batch, environment.

Any file may be missing or damaged, for example if the run was killed, copied in part or made elsewhere: what cannot be
read is named in ``missing``, and the rest is shown.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from scripts.common.output import number
from scripts.common.runs import header, of_all_starts
from utils.checkpoint.resume import BEGINS_ANEW
from utils.config.arguments import OPTIONS, in_yaml
from utils.config.field import CHECKPOINT
from utils.config.settings import GROUPS, all_settings
from utils.config.spelling import reason_of
from utils.record import curves
from utils.record.doubts import doubts
from utils.record.event_files import NAMES, events_in
from utils.record.provenance import COMMIT, MACHINE
from utils.record.run_folder import read_table

T = TypeVar("T")
SETTING = re.compile(r"^(#? ?)([a-z0-9-]+): (.*)  # (.+)$")
EPOCH = re.compile(r"^epoch (\d+)/\d+  training(, cut at step)?", re.MULTILINE)
BEGUN = re.compile(r"^(Continuing |epoch \d+/\d+  )", re.MULTILINE)
END = re.compile(r"^val_\w+=.* val_count=", re.MULTILINE)  # a run's last line
STOPPED_EARLY = re.compile(r"^Stopped early", re.MULTILINE)
FIRST_BATCH = "First_Training_Batch"
LARGEST_BYTES = 2**31  # size of a file, or of its uncompressed content: larger ones are not read


class Setting(NamedTuple):
    """A resolved setting as text, its group, and its origin: 'default', 'flag' or a recipe."""

    value: str
    origin: str
    group: str


@dataclass
class RunRecord:
    """One run, read from its folder. Accuracies and errors are in percent.

    ``epochs``: the columns of metrics.csv, float64 (epochs,), NaN where empty. ``steps``: the columns of metrics.npz by
    name, float64 (steps,). ``scalars``: points (step, value) of the event files by tag. ``classes``: from
    ``read_classes``. ``cut_epoch``: the latest epoch, if --max-steps has cut it. ``first_batch``: an encoded picture.
    ``header``: the comments above the settings, by 'command', 'versions', 'machine' and 'commit'; the last two with
    those of later starts that differ. ``missing``: a sentence for each thing that could not be read.
    ``predicted_doubts``: doubts from predictions of the run's own validation images.
    """

    name: str
    folder: Path | None
    settings: dict[str, Setting] = field(default_factory=dict)
    header: dict[str, str] = field(default_factory=dict)
    epochs: dict[str, np.ndarray] = field(default_factory=dict)
    steps: dict[str, np.ndarray] = field(default_factory=dict)
    scalars: dict[str, np.ndarray] = field(default_factory=dict)
    classes: list[dict[str, Any]] = field(default_factory=list)
    cut_epoch: int | None = None
    first_batch: bytes | None = None
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    predicted_doubts: list[str] = field(default_factory=list)

    @property
    def whole_epochs(self) -> int:
        """Number of epochs, without a last one that --max-steps has cut: it is the run's best only if it is alone."""
        count = len(self.epochs.get("epoch", ()))
        return count - 1 if count > 1 and self.last("epoch") == self.cut_epoch else count

    def of_best(self, column: str) -> np.ndarray:
        """Values of ``column`` of the epochs that may be the best: the whole ones, or all if none of these has any."""
        values = self.epochs.get(column, np.empty(0))
        whole = values[: self.whole_epochs]
        return whole if np.isfinite(whole).any() else values

    def last(self, column: str) -> float:
        """Value of ``column`` in the last epoch, NaN if there is none."""
        values = self.epochs.get(column, np.empty(0))
        return float(values[-1]) if len(values) else math.nan

    @property
    def doubts(self) -> list[str]:
        """Signs that the network has learned nothing, from the record or, for an older run, from its predictions."""
        if not {"guessing_loss", "val_map"} & {*self.epochs}:  # with several labels, the loss alone tells
            return self.predicted_doubts
        rows = [dict(zip(self.epochs, values, strict=True)) for values in zip(*self.epochs.values(), strict=True)]
        return [doubt.sign for doubt in doubts(rows, self.value("dataname"))]

    def value(self, name: str) -> str:
        """A setting as text, '' if unknown."""
        return self.settings[name].value if name in self.settings else ""


def read(folder: Path, name: str) -> RunRecord:
    """Read the record of the run in ``folder``."""
    record = RunRecord(name, folder)
    text = _attempt(record, "config.yaml", "settings and environment", _read_text)
    if text is not None:
        record.header = header(text)
        record.settings = parse_settings(text)
    record.epochs, cut = _attempt(record, "metrics.csv", "figures of each epoch", read_epochs) or ({}, False)
    if cut:
        record.missing.append("Figures of an epoch: its row in metrics.csv is cut off, so it is left out")
    batches = record.value("max-val-batches")
    if batches not in ("", "null"):
        record.missing.append(
            f"Validation images: the run validated on some of them only (--max-val-batches {batches}), so its curves, "
            "its best epoch and its other recorded figures are of these"
        )
    record.steps = _attempt(record, curves.WHOLE, "curves of the steps", read_steps) or {}
    record.classes = _attempt(record, "class_metrics.csv", "figures of each class", read_classes) or []
    log = _attempt(record, "log.txt", "warnings", read_log) or ""
    first = record.header
    if (folder / "config.1.yaml").exists():  # --resume-override has replaced it; the log has the later starts
        first = first | header(_attempt(record, "config.1.yaml", "where the run began", _read_text) or "")
    starts = (("machine", MACHINE), ("commit", COMMIT))
    record.header |= {name: of_all_starts(what, first[name], log) for name, what in starts if name in first}
    record.warnings = warnings_in(log)
    trained = [*EPOCH.finditer(log)]
    if trained and trained[-1][2]:
        record.cut_epoch = int(trained[-1][1])
        if record.last("epoch") == record.cut_epoch:
            figures = [column for column in ("val_top1", "val_map") if column in record.epochs]
            earlier = any(len(record.of_best(column)) < len(record.epochs["epoch"]) for column in figures)
            rest = "; the best epoch is an earlier one" if earlier else ""
            record.missing.append(
                f"The end of epoch {record.cut_epoch}: --max-steps cut it, so the last figures are of its part{rest}"
            )
    last_start = max((begin.end() for begin in BEGUN.finditer(log)), default=0)
    ended = END.search(log, last_start) is not None
    done, planned = len(record.epochs.get("epoch", ())), record.value("epochs")
    too_few = bool(trained) and planned.isdigit() and int(trained[-1][1]) < int(planned)
    by_steps = ended and too_few and STOPPED_EARLY.search(log, last_start) is None
    if log and (by_steps or not ended):
        epochs = f"{done}{f' of {planned}' * bool(planned)} epochs"
        why = "--max-steps ended it" if by_steps else "the run was stopped, or is under way"
        record.missing.append(f"The end of the training: {epochs} are there; {why}")
    read_events(record)
    return record


def from_settings(name: str, values: dict[str, Any]) -> RunRecord:
    """Record of a checkpoint outside a run folder: settings, no curves."""
    record = RunRecord(name, None, missing=["Curves: the checkpoint does not lie in its run's folder"])
    of_group = {option.name: group for group, option in all_settings()}
    record.settings = {
        name.replace("_", "-"): Setting(in_yaml(value), CHECKPOINT, of_group.get(name, "other"))
        for name, value in values.items()
        if name not in OPTIONS or OPTIONS[name].metadata["in_recipe"]  # those that config.yaml has
    }
    return record


def _attempt(record: RunRecord, name: str, what: str, reader: Callable[[Path], T]) -> T | None:
    """Result of ``reader`` for the file ``name``; None after an error, which adds a sentence to ``record.missing``."""
    path = record.folder / name
    try:
        if path.is_file() and path.stat().st_size > LARGEST_BYTES:
            raise ValueError("larger than 2 GB")
        return reader(path)
    except FileNotFoundError:
        record.missing.append(f"{what.capitalize()}: {name} does not exist")
    except Exception as error:  # csv, zipfile, zlib and NumPy raise many kinds of errors for damaged files
        record.missing.append(f"{what.capitalize()}: {name} cannot be read ({' '.join(str(error).split())[:150]})")
    return None


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def parse_settings(text: str) -> dict[str, Setting]:
    """All settings in config.yaml, including those in comments because they follow from others."""
    settings = {}
    group = ""
    for line in text.splitlines():
        if found := SETTING.match(line):
            settings[found[2]] = Setting(found[3], found[4], group)
        elif line.removeprefix("# ") in GROUPS:
            group = line.removeprefix("# ")
    return settings


def read_epochs(path: Path) -> tuple[dict[str, np.ndarray], bool]:
    """Columns of metrics.csv, float64 (epochs,), and whether a row was left out because it is cut off."""
    rows, cut = read_table(path, errors="replace")
    if not rows:
        raise ValueError("it has no row")
    names = [name for name in rows[0] if name]
    columns = {name: np.array([_number(row.get(name)) for row in rows]) for name in names}
    if "epoch" not in columns or not np.isfinite(columns["epoch"]).all():
        raise ValueError("the number of an epoch is missing")
    return columns, cut


def read_steps(path: Path) -> dict[str, np.ndarray]:
    """Columns of metrics.npz, float64 (steps,), in the order of the steps."""
    with zipfile.ZipFile(path) as file:
        if sum(entry.file_size for entry in file.infolist()) > LARGEST_BYTES:
            raise ValueError("it holds more than 2 GB")
    rows = curves.read(path)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return curves.named(rows)


def read_classes(path: Path) -> list[dict[str, Any]]:
    """Rows of the page's table of classes, from class_metrics.csv; shares between 0 and 1.

    Raises an error for a file of another kind.
    """
    rows, cut = read_table(path, errors="surrogateescape")
    if cut:
        raise ValueError("a row is cut off")
    return [
        {
            "name": row["class"],
            "number": place,
            "support": int(row["val_count"]),
            **(_of_label(row) if "val_average_precision" in row else _of_class(row)),
        }
        for place, row in enumerate(rows)
    ]


def _of_class(row: dict[str, str]) -> dict[str, Any]:
    return {
        "accuracy": _share(row["val_accuracy"]),
        "precision": _share(row.get("val_precision") or "nan") or 0,
        "f1": _share(row.get("val_f1") or "nan") or 0,
    }


def _of_label(row: dict[str, str]) -> dict[str, Any]:
    """Metrics of a class in multi-label data."""
    return {
        "several": True,
        "known": int(row["val_known"]),
        "ap": _share(row["val_average_precision"]),
        "auroc": _share(row["val_auroc"]),
        "f1": _share(row["val_f1"]),
        "threshold": number(float(row["threshold"]), 5),
    }


def _share(percent: str) -> float | None:
    return number(float(percent) / 100, 5)


def read_log(path: Path) -> str:
    """The log without timestamps."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return "".join(line[20:] for line in file)  # after '2026-01-31 23:59:59 '


def warnings_in(log: str) -> list[str]:
    """Distinct warnings in a log, without mere notes."""
    warnings = dict.fromkeys(line.removeprefix("warning: ") for line in log.split("\n") if line.startswith("warning: "))
    return [line for line in warnings if not line.startswith(BEGINS_ANEW)]  # a note, nothing to worry about


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def read_events(record: RunRecord) -> None:
    """Read speeds, waits and the first batch from TensorBoard's event files, which alone hold them."""
    points: dict[str, dict[int, float]] = {}
    paths = sorted(record.folder.glob(NAMES))
    if not paths:
        record.missing.append("Waiting for data, speed within epochs and the first batch: there is no event file")
    for path in paths:
        try:
            if path.stat().st_size > LARGEST_BYTES:
                raise ValueError("larger than 2 GB")
            for _, event in events_in(path):
                for value in event.summary.value:
                    if value.HasField("simple_value"):
                        points.setdefault(value.tag, {})[event.step] = value.simple_value
                    elif value.tag == FIRST_BATCH and value.HasField("image"):
                        record.first_batch = record.first_batch or value.image.encoded_image_string
        except Exception as error:  # TensorBoard and protobuf raise many kinds of errors for damaged files
            record.missing.append(
                f"Speeds and the first batch: {path.name} cannot be read to its end ({reason_of(error)})"
            )
    record.scalars = {tag: np.array(sorted(values.items()), dtype=float) for tag, values in points.items()}
