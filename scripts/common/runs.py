"""Results of run folders: settings, accuracies, time, machine and command."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from scripts.common.command_line import say
from utils.config import arguments
from utils.config.datasets import SPECS
from utils.config.field import CHECKPOINT, RECIPE
from utils.config.settings import Settings, UserError
from utils.record.doubts import doubts
from utils.record.provenance import COMMIT, MACHINE, PLAN, UNKNOWN
from utils.record.run_folder import read_table

SEVERAL_LABELS = "map"  # MultilabelReport.HEADLINE, whose import would load torch
FREE = {"seed"}  # runs that differ only in this are repetitions
LAST_LINE = re.compile(r"^\S+ \S+ val_(top1|map)=\S+ .* val_epoch=(\d+) best_\1=(\S+) ", re.MULTILINE)
RUN_LINE = re.compile(r"^val_(?:top1|map)=.* run=(.+)$", re.MULTILINE)  # on stdout
STOPPED_EARLY = re.compile(r"^\S+ \S+ Stopped early", re.MULTILINE)
OVERRIDDEN = re.compile(r"^\S+ \S+ warning: .*; going on with ", re.MULTILINE)
START = re.compile(r"^\S+ \S+ Run ", re.MULTILINE)
CONTINUING = re.compile(r"^\S+ \S+ Continuing ", re.MULTILINE)
WHERE = re.compile(rf"^(?:\S+ \S+ )?({MACHINE}|{COMMIT})(.*)$", re.MULTILINE)  # of a start that continued the run
TRAINING_IMAGES = re.compile(r"([\d,]+) training, ")  # in a plan's row about the data
STEPS_AN_EPOCH = re.compile(r"(?: Steps: |; )(\d+) (?:steps )?an epoch(?= x |;)")  # older logs have the second


@dataclass(frozen=True)
class RunResult:
    """A finished run. ``headline``: the metric that counts, 'top1', or 'map' for multi-label data.

    ``final`` and ``best``: the metric in percent at the last validation and of best.pt; NaN if no validation loss was
    finite. ``trained`` and ``validated``: number of training images, 0 if the folder does not say, and of those in the
    last validation. ``seconds``: total of all epochs, with validation, without start-up and pauses. ``machine`` and
    ``commit``: those of all starts, each named once. ``doubts``: signs that the network has learned nothing, so that
    its figures say nothing about the settings.
    """

    folder: Path
    args: Settings
    command: str
    machine: str
    epochs: int
    headline: str
    final: float
    best: float
    seconds: float
    doubts: tuple[str, ...] = ()
    versions: str = ""
    commit: str = ""
    trained: int = 0
    validated: int = 0

    @property
    def seed(self) -> int:
        return self.args.run.seed


def identity(args: Settings) -> dict[str, Any]:
    """Settings that runs of one experiment share: all that affect the result, except the seed."""
    return {name: value for name, value in args.result_values().items() if name not in FREE}


def matches(args: Settings, wanted: Settings) -> bool:
    """True if a run with ``args`` belongs to experiment ``wanted``; any value fits what that leaves to be measured."""
    if args.model.arch != wanted.model.arch:  # most differ here, and comparing all takes far longer
        return False
    ours = identity(args)
    theirs = identity(wanted)
    return ours == theirs | {name: ours[name] for name in wanted.unmeasured()}


def counts_for(result: RunResult, wanted: Settings) -> bool:
    """True if a finished run can stand in for ``wanted``: equal settings and the same images.

    If the run's data are multi-label, ``wanted`` is compared with the defaults for such data. A data set's name
    identifies its images; the user's own images (``--dataname folder``) are identified by their path.
    """
    args = result.args
    wanted = wanted.of_several_labels() if result.headline == SEVERAL_LABELS else wanted
    places = {os.path.realpath(one.data.datapath or "") for one in (args, wanted)}
    return matches(args, wanted) and (len(places) == 1 or not SPECS[wanted.data.dataname].is_told_by_place)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample; NaN if a value is not finite, for which ``statistics.stdev`` may raise."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def spread(values: Sequence[float], sign: str = "+-") -> str:
    """Mean and standard deviation of a sample as text; only the mean of a single value."""
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} {sign} {deviation(values):.2f}" if len(values) > 1 else mean


def reach(values: Sequence[float], ratio: float = 0.0) -> float:
    """Half-width of the t interval of a mean, if the mean of n values has the variance (1/n + ``ratio``) s^2.

    ``ratio`` is 0 for independent values; for runs on cross-validation folds, which share most training images, the
    ratio of validation to training images. (Nadeau and Bengio, Inference for the generalization error, Machine Learning
    52, 2003; for repeated cross-validation Bouckaert and Frank, PAKDD 2004.)
    """
    from scipy.stats import t

    from scripts.common.uncertainty import CONFIDENCE

    quantile = t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)
    return float(quantile) * math.sqrt(1 / len(values) + ratio) * deviation(values)


def validated_to_trained(runs: Sequence[RunResult]) -> float:
    """Ratio of validation to training images of runs on cross-validation folds, for ``reach``."""
    if not all(run.trained and run.validated for run in runs):  # as of an older version
        return 1 / (runs[0].args.data.folds - 1)
    return sum(run.validated for run in runs) / sum(run.trained for run in runs)


def doubtful(runs: Sequence[RunResult]) -> str:
    """Remark on a mean over ``runs``: how many of them are doubtful; '' if none is."""
    count = sum(bool(run.doubts) for run in runs)
    return f", {count} doubtful" if count else ""


def run_folders(root: Path) -> Iterator[Path]:
    """Folders of runs at or below ``root``, sorted."""
    yield from sorted(path.parent for path in root.rglob("config.yaml") if (path.parent / "metrics.csv").is_file())


def read_run(folder: Path, tell: Callable[[str], None] = say) -> RunResult | None:
    """The run in ``folder``; None if it is unfinished: cut short by --max-steps, stopped, or still running.

    Also None, after calling ``tell`` with the reason, if a finished run's result does not follow from its settings.
    Raises ``UserError`` if its files are damaged or of another version.
    """
    try:
        text = (folder / "config.yaml").read_text(encoding="utf-8")
        about = header(text)
        images = TRAINING_IMAGES.search(plan_in(text).get("Data", ""))
        line = arguments.read(["--config", str(folder / "config.yaml")])
        # Settings of an earlier version need not agree as a recipe's must: a flag may have replaced some of them.
        layers = [(CHECKPOINT if origin == RECIPE else origin, where, raw) for origin, where, raw in line.layers]
        args = dataclasses.replace(line, layers=tuple(layers)).resolve()
        rows, cut = read_table(folder / "metrics.csv")
        log = (folder / "log.txt").read_text(encoding="utf-8")
        ends = [*LAST_LINE.finditer(log)]
        if cut and ends:  # a run that goes on removes the row
            raise ValueError("a row of metrics.csv is cut off")
        if not rows or not ends or int(ends[-1][2]) != int(rows[-1]["epoch"]):
            return None
        if CONTINUING.search(log, ends[-1].end()):  # --resume-override continued the finished run
            return None
        if not _whole(args, rows, log[ends[-2].end() if ends[1:] else 0 : ends[-1].start()]):
            return None
        if doubt := _doubt(folder, rows, log):
            tell(f"{folder} does not count: {doubt}")
            return None
        headline = ends[-1][1]
        finals = [float(row[f"val_{headline}"]) for row in rows if row[f"val_{headline}"]]  # others: not validated
        return RunResult(
            folder=folder,
            args=args,
            command=about.get("command", UNKNOWN),
            machine=of_all_starts(MACHINE, about.get("machine", UNKNOWN), log),
            epochs=len(rows),
            headline=headline,
            final=finals[-1],
            best=float(ends[-1][3]),
            seconds=sum(float(row["seconds"]) for row in rows),
            doubts=tuple(doubt.sign for doubt in doubts(rows, args.data.dataname)),
            versions=about.get("versions", ""),
            commit=of_all_starts(COMMIT, about.get("commit", UNKNOWN), log),
            trained=args.data.train_samples or (int(images[1].replace(",", "")) if images else 0),
            validated=int(rows[-1].get("val_count") or 0),
        )
    except UserError as error:
        raise UserError(f"{folder}: {error.mistakes[0]}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: config.yaml, metrics.csv or log.txt cannot be read ({error})") from error


def _whole(args: Settings, rows: list[dict[str, str]], log: str) -> bool:
    """True if the run with these ``rows`` trained all epochs, or was ended by early stopping rather than --max-steps.

    ``log``: the log's lines since the run was started or last resumed; for an archived run, only its result.
    """
    if int(rows[-1]["epoch"]) < args.optimisation.epochs:
        return STOPPED_EARLY.search(log) is not None
    planned = STEPS_AN_EPOCH.findall(log)
    before = int(rows[-2]["step"]) if planned and rows[1:] else 0
    return not planned or int(rows[-1]["step"]) - before >= int(planned[-1])


def _doubt(folder: Path, rows: list[dict[str, str]], log: str) -> str:
    """Reason why a finished run's result does not follow from its settings; '' if it does."""
    # The log's warnings also show this if a kill preceded the saving of settings, or if the teacher was changed.
    if any(folder.glob("config.[0-9]*.yaml")) or OVERRIDDEN.search(log):
        return "its settings or data were changed by --resume-override"
    if any(CONTINUING.search(first) for first in START.split(log)[1:2]):
        return "it was begun in another folder"
    if [int(row["epoch"]) for row in rows] != [*range(1, len(rows) + 1)]:
        return "metrics.csv lacks some of its epochs"
    return ""


def of_all_starts(what: str, first: str, log: str) -> str:
    """``MACHINE`` or ``COMMIT`` of the ``first`` start, from config.yaml, and later ones in the log that differ."""
    later = [match[2] for match in WHERE.finditer(log) if match[1] == what]
    return "; then ".join(dict.fromkeys([first, *later]))


def header(text: str) -> dict[str, str]:
    """Comments at the top of config.yaml, by 'command', 'versions', 'machine' and 'commit'."""
    beginnings = {"command": "main.py", "versions": "python ", "machine": MACHINE, "commit": COMMIT}
    found = {}
    for line in _comments(text):
        for what, beginning in beginnings.items():
            if line.startswith(beginning):
                found.setdefault(what, line if what in ("command", "versions") else line.removeprefix(beginning))
    return found


def plan_of(checkpoint: Path) -> dict[str, str]:
    """Rows of a run's plan, by title, for one of its checkpoints; empty if config.yaml does not hold them."""
    path = checkpoint.absolute().parent.parent / "config.yaml"
    return plan_in(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}


def plan_in(text: str) -> dict[str, str]:
    """Rows of the plan, by title, in the comments at the top of config.yaml."""
    rows = (line.removeprefix(PLAN).partition(": ") for line in _comments(text) if line.startswith(PLAN))
    return {title: text for title, _, text in rows}


def _comments(text: str) -> list[str]:
    """Comments at the top of config.yaml, without their signs."""
    return [line[2:] for line in takewhile(lambda line: line.startswith("#"), text.splitlines())]
