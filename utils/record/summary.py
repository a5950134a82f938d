"""Lines about a run for scripts to read, and the description of the run in its checkpoints."""

from __future__ import annotations

import math
import platform
import shlex
import shutil
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from utils.checkpoint.checkpoint import FORMAT, average_moved_since_validation, dict_in
from utils.checkpoint.progress import Progress
from utils.checkpoint.resume import ResumePoint
from utils.config import hub_networks, plugins
from utils.config.groups.data import DataSettings
from utils.config.settings import Settings, as_text
from utils.data.data_set import Data
from utils.data.images.decoding import decoder
from utils.optim.batch_norm_statistics import layers_with_statistics
from utils.optim.distillation import Distillation
from utils.record.doubts import doubts_of
from utils.record.epoch_scalars import best_metric, without_improvement
from utils.record.metrics import cut_words
from utils.record.multilabel import AnyReport, report_of


def evaluation_header(point: ResumePoint | None, model: torch.nn.Module) -> list[str]:
    """A line or two about the checkpoint that ``--evaluate`` evaluates; none if ``point`` is None."""
    if point is None:
        return []
    progress = dict_in(point.state, "progress")
    progress = progress if "step" in progress else {}  # bare weights have none
    reached = f", after epoch {progress.get('epoch')}, step {progress['step']}" if progress else ""
    its_best = progress.get("best_epoch") if point.folder is not None else None
    is_within = bool(progress.get("step_in_epoch"))
    is_other = its_best and (its_best != progress["epoch"] or is_within) and point.path.name != "best.pt"
    better = f"; the best epoch is {its_best}, of {point.path.with_name('best.pt')}" if is_other else ""
    lines = [f"Evaluating {point.path}{reached}{better}"]
    if average_moved_since_validation(point.state) and layers_with_statistics(model):
        lines.append(
            "warning: it was saved between two validations: the batch-norm statistics of its average are not "
            "computed for these weights, and it may do much worse than with those computed before a validation"
        )
    return lines


def evaluation_lines(report: AnyReport, settings: DataSettings, point: ResumePoint | None) -> list[str]:
    """The last lines of ``--evaluate``: figures, doubts, and the result for scripts."""
    cut = cut_words(settings.max_val_batches)
    lines = [] if report.by_class is None else [f"validation{cut}  {report.by_class}"]
    lines += [f"validation{cut}  {name} {value:.4f}" for name, value in report.own.items()]
    step = None if point is None else dict_in(point.state, "progress").get("step")
    lines += [] if cut else [f"warning: {doubt}" for doubt in doubts_of(report, step, settings.dataname)]
    return [*lines, figures(report, settings.max_val_batches)]


def stopped_early(args: Settings, progress: Progress) -> str:
    """The reason why early stopping ended the run, its best value and the planned epochs; '' if it did not."""
    planned = args.optimisation.epochs
    if progress.epoch >= planned or not progress.stops_early(args):
        return ""
    best = "it never was finite"
    if progress.stopping_value is not None:
        best = f"the best, {progress.stopping_value:.4f}, is that of epoch {progress.stopping_epoch}"
    rule = without_improvement(args.run, args.run.early_stopping)
    return f"{rule}; {best}; the learning-rate schedule was planned for {planned} epochs"


def tensorboard() -> str:
    """Command that starts this Python's TensorBoard: its path, or its name if that suffices or it is missing."""
    own = Path(sys.executable).with_name("tensorboard")
    if not own.is_file() or shutil.which("tensorboard") == str(own):
        return "tensorboard"
    return shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))


def final_line(progress: Progress, folder: Path | None, args: Settings) -> str:
    """The last line of a run on stdout, for scripts: ``val_*`` are of the last validation, ``best_*`` of best.pt.

    If a metric other than top-1 chose best.pt, its value follows: ``best_macro_f1``. For multi-label data, mean average
    precision and F1 replace top-1 and top-5.

    ``val_epoch``: the epoch of the last validation, even if --max-steps cut that epoch short. A first epoch that was
    cut short counts as the best one while there is no whole one. If no validation had a finite loss and a finite metric
    to choose by, there is no best.pt: 'nan', epoch 0.
    """
    report = report_of(progress.last_validation)
    headline = report.HEADLINE
    epoch = progress.epoch + (progress.step_in_epoch > 0)
    best = (progress.best_headline, progress.best_epoch)
    if not progress.best_epoch:
        best = (math.nan, 0) if progress.best_value is None else (report.headline, epoch)
    name = best_metric(args.run).name
    value = math.nan if progress.best_value is None else progress.best_value
    other = f" best_{name}={value:.4f}" if name != headline else ""
    run = f" run={folder}" if folder else ""
    last = figures(report, args.data.max_val_batches)
    return f"{last} val_epoch={epoch} best_{headline}={best[0]:.4f} best_epoch={best[1]}{other}{run}"


def figures(report: AnyReport, max_val_batches: int | None = None) -> str:
    """A validation's result for scripts, which is the whole last line of ``--evaluate``."""
    cut = f" max_val_batches={max_val_batches}" if max_val_batches else ""
    means = " ".join(f"val_{name}={getattr(report, name):.4f}" for name in (*report.FIGURES, "loss"))
    return f"{means} val_count={report.count}{cut}"


def checkpoint_description(args: Settings, data: Data, criterion: torch.nn.Module | None = None) -> dict[str, Any]:
    """The parts of a checkpoint that do not change during a run."""
    teacher = {"teacher": criterion.teacher.origin._asdict()} if isinstance(criterion, Distillation) else {}
    loss: Any = criterion.criterion if isinstance(criterion, Distillation) else criterion
    weights = {"class_weights": loss.weights.tolist(), "weighs_images": True} if args.loss.class_weights else {}
    return {
        **teacher,
        **weights,
        **({"seen": data.seen} if data.seen else {}),
        **({} if data.rows is None else {"rows": data.rows}),
        **({"folds": data.folds.state()} if data.folds else {}),
        "format": FORMAT,
        "arch": args.model.arch,
        "classes": list(data.classes),
        **({"multilabel": True} if data.multilabel else {}),
        "preprocessing": data.preprocessing.state(),
        "max_shift": data.max_shift,
        "settings": args.values(),
        "versions": versions(),
        "fingerprint": data.fingerprint,
        **({"plugins": plugins.digests()} if plugins.digests() else {}),
        **hub_networks.in_checkpoint(args.model.arch, args.loss.teacher),
    }


version = cache(metadata.version)  # reads files


def versions() -> dict[str, str]:
    """Versions of the software, and the machine type: what must agree for a run to be repeated bit for bit."""
    # Asked of the installation: a run imports only what it uses.
    libraries = {name: version(name) for name in ("torch", "torchvision", "timm", "numpy")}
    return {"python": platform.python_version(), **libraries, "jpeg": decoder(), "machine": platform.machine()}


def table_row(args: Settings) -> dict[str, Any]:
    """Settings that affect the result, for the HPARAMS table: numbers and booleans as they are, others as text."""
    values = args.result_values()
    return {name: value if isinstance(value, int | float) else as_text(value) for name, value in values.items()}
