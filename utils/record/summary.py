"""What is logged and kept of a run as a whole: first and last lines, settings, what its checkpoints repeat."""

from __future__ import annotations

import itertools
import math
import os
import platform
import shlex
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from utils.checkpoint.checkpoint import FORMAT, average_moved_since_validation
from utils.checkpoint.progress import Progress
from utils.checkpoint.resume import is_at
from utils.checkpoint.sharded import bytes_of
from utils.config import arguments
from utils.config.rules import FLAG
from utils.config.settings import Settings, as_flag, as_text
from utils.data.datasets import Data
from utils.data.images.decoding import decoder
from utils.optim.batch_norm_statistics import layers_with_statistics
from utils.optim.distillation import Distillation
from utils.precision.amp import resolve_amp
from utils.record.doubts import doubts, doubts_of
from utils.record.dry_run import (
    average_and_end_lines,
    describe_tta,
    split_words,
    technique_lines,
    validation_images,
)
from utils.record.epoch_scalars import Metric, best_metric, stopping_rule
from utils.record.metrics import Report, cut_words
from utils.record.provenance import COMMIT, MACHINE, commit, machine
from utils.record.writer import NullWriter
from utils.run import Run
from utils.runtime.exchange import exchange_words
from utils.runtime.sharding import is_sharded

FIRST_SEEN = "http://localhost:6006/?tagFilter=%5ELoss%7C%5ETop1"  # these, instead of the alphabet's first
CHECKPOINTS_KEPT = 5  # last, previous, best and final, and the one being written
STATES_PER_WEIGHT = 3  # numbers that most optimizers and a moving average add to a weight, with itself


def announce(run: Run, components: Any) -> None:
    """The first lines of the log: what runs where."""
    args = run.args
    data = components.data
    log = run.writer.log
    parameters = sum(parameter.numel() for parameter in components.model.parameters())
    remainder = components.train_loader.plan.remainder
    log(f"Run {run.run_folder.folder}")
    log(f"Command: main.py {shlex.join(run.argv)}", to_console=False)
    if run.position is not None and run.is_main:  # where a run begins, config.yaml says
        log(f"{MACHINE}{machine(run.distributed)}\n{COMMIT}{commit()}", to_console=False)
    log(
        f"{args.data.dataname}: {len(data.train):,} training and {validation_images(components)}"
        f"{split_words(args.data, data)}, {len(data.classes)} classes, "
        f"{data.spec.channels}x{data.image_size}x{data.image_size}; loader {components.loader_choice}"
    )
    log(f"Preprocessing: {data.preprocessing_line}")
    if args.data.tta != "none":
        log(describe_tta(args.data.tta))
    resolution = components.train_loader.resolution
    if resolution is not None:
        log(f"Training size: {resolution.table(args.optimisation.epochs)}")
    sampling = components.train_loader.plan.sampling
    if sampling is not None:
        log(f"Sampling: {sampling}, of {len(sampling.available):,} training images")
    if isinstance(components.criterion, Distillation):
        log(f"Teacher: {components.criterion.teacher}")
    if components.network.untrained:
        log(f"Pretrained but for {components.network.untrained}")
    if components.network.stem:
        log(f"Stem: {components.network.stem}")
    if components.network.freezing:
        log(f"Training: {components.network.freezing}")
    spread = ", parameters spread over them" if is_sharded(components.model) else ""
    log(
        f"{args.model.arch}: {parameters:,} parameters; {run.distributed.world_size} process(es) on "
        f"{run.distributed.describe_device()}{spread}; batch {args.data.global_batch_size}"
        f"{remainder and f' ({remainder})'}; "
        f"{components.train_loader.steps_per_epoch} steps an epoch; "
        f"mixed precision {resolve_amp(args.precision, run.distributed.device)}"
    )
    if words := exchange_words(args.exchange, run.distributed.world_size):
        log(f"Exchange: {words}")
    for line in average_and_end_lines(args, components):
        log(line)
    for line in technique_lines(args, components):
        log(line, to_console=False)


def log_end(run: Run, progress: Progress, report: Report) -> None:
    """The last lines of a finished run."""
    args = run.args
    folder = run.run_folder.folder
    log = run.writer.log
    cut = cut_words(args.data.max_val_batches)
    for doubt in doubts(run.writer.rows, args.data.dataname):
        log(f"warning: {doubt}")
    if early := stopped_early(args, progress):
        log(f"Stopped early{cut}: {early}")
    swa = args.average.first_averaged_epoch(args.optimisation.epochs)
    if swa and not progress.averaged_epochs:
        log(f"warning: no weights were averaged: --swa-start-epoch begins in epoch {swa}, and the run ended before")
    metric = best_metric(args.run)
    if progress.best_epoch:
        other = f", where {metric.column} is {progress.best_value:.4f}" if metric.column != "val_top1" else ""
        log(f"Best top1{cut} {progress.best_top1:.2f} in epoch {progress.best_epoch}{other}")
    elif math.isfinite(report.loss):
        log(f"Best top1{cut} {report.top1:.2f} after step {progress.step}, where --max-steps cut the first epoch")
    inside = folder.absolute().is_relative_to(Path(args.run.output).absolute())
    logs = args.run.output if inside else str(folder)
    log(f"TensorBoard ({FIRST_SEEN}): {tensorboard()} --logdir {shlex.quote(logs)}")
    log(final_line(progress, folder, metric, args.data.max_val_batches))


def announce_evaluation(run: Run, components: Any, writer: NullWriter) -> None:
    """The first lines of ``--evaluate``: what is evaluated, and on what."""
    args = run.args.data
    point = run.resume_point
    writer.log(f"Preprocessing: {components.data.preprocessing_line}")
    if args.tta != "none":
        writer.log(describe_tta(args.tta))
    if components.network.stem:
        writer.log(f"Stem: {components.network.stem}")
    if point is None:
        return
    progress = point.state.get("progress")  # bare weights have none
    made = isinstance(progress, dict) and "step" in progress
    reached = f", after epoch {progress.get('epoch')}, step {progress['step']}" if made else ""
    its_best = progress.get("best_epoch") if made and point.folder is not None else None
    is_other = its_best and its_best != progress["epoch"] and point.path.name != "best.pt"
    better = f"; the best epoch is {its_best}, of {point.path.with_name('best.pt')}" if is_other else ""
    writer.log(f"Evaluating {point.path}{reached}{better}")
    if average_moved_since_validation(point.state) and layers_with_statistics(components.model):
        writer.log(
            "warning: it was saved between two validations: the batch-norm statistics of its average are not "
            "computed for these weights, and it may do much worse than with those computed before a validation"
        )


def log_evaluation(run: Run, writer: NullWriter, report: Report) -> None:
    """The last lines of ``--evaluate``."""
    args = run.args.data
    cut = cut_words(run.args.data.max_val_batches)
    if report.by_class is not None:
        writer.log(f"validation{cut}  {report.by_class}")
    progress = run.resume_point and run.resume_point.state.get("progress")
    step = progress.get("step") if isinstance(progress, dict) else None
    for doubt in () if cut else doubts_of(report, step, args.dataname):
        writer.log(f"warning: {doubt}")
    writer.log(figures(report, args.max_val_batches))


def stopped_early(args: Settings, progress: Progress) -> str:
    """Why early stopping has ended a run, and what it was spared; empty if it has not."""
    planned = args.optimisation.epochs
    if progress.epoch >= planned or not progress.stops_early(args):
        return ""
    best = "it never was finite"
    if progress.stopping_value is not None:
        best = f"the best, {progress.stopping_value:.4f}, is that of epoch {progress.stopping_epoch}"
    return f"{stopping_rule(args.run)}; {best}; the learning-rate schedule was planned for {planned} epochs"


def tensorboard() -> str:
    """How to start it: by its name where that is this python's own, else by its path."""
    own = Path(sys.executable).with_name("tensorboard")
    if not own.is_file() or shutil.which("tensorboard") == str(own):
        return "tensorboard"
    return shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))


def final_line(
    progress: Progress, folder: Path | None, metric: Metric | None = None, max_val_batches: int | None = None
) -> str:
    """The last line on stdout of a run, for scripts: ``val_*`` are of the last validation, ``best_*`` of best.pt.

    If another ``metric`` than top-1 chose it, its figure follows: ``best_macro_f1``.

    ``val_epoch``: the epoch of that validation, also of one that --max-steps cut. Such a first epoch is the best one
    while there is no whole one. Without any finite validation loss there is no best: 'nan', epoch 0.
    """
    report = Report(*progress.last_validation)
    epoch = progress.epoch + (progress.step_in_epoch > 0)
    best = (progress.best_top1, progress.best_epoch)
    if not progress.best_epoch:
        best = (report.top1, epoch) if math.isfinite(report.loss) else (math.nan, 0)
    other = ""
    if metric is not None and metric.name != "top1":
        other = f" best_{metric.name}={math.nan if progress.best_value is None else progress.best_value:.4f}"
    run = f" run={folder}" if folder else ""
    return (
        f"{figures(report, max_val_batches)} val_epoch={epoch} best_top1={best[0]:.4f} best_epoch={best[1]}{other}{run}"
    )


def figures(report: Report, max_val_batches: int | None = None) -> str:
    """A validation's result for scripts; all that the last line of ``--evaluate`` holds."""
    cut = f" max_val_batches={max_val_batches}" if max_val_batches else ""
    return (
        f"val_top1={report.top1:.4f} val_top5={report.top5:.4f} val_loss={report.loss:.4f} val_count={report.count}"
        + cut
    )


def report_finished(run: Run) -> int:
    """Print that nothing is left to do, so that a command with --resume auto can be repeated blindly.

    Where --resume-override has other settings, a warning says that they come too late.
    """
    point = run.resume_point
    values = run.args.result_values()
    progress = Progress.from_state(point.state["progress"])
    if run.is_main:
        early = stopped_early(run.args, progress)
        end = f"; it stopped early {early}" if early else ""
        print(f"{point.folder or point.path} is finished: {progress.epoch} epochs, {progress.step} steps{end}")
        if run.args.run.resume_override and (late := point.differences(run.args)):
            flags = ", ".join(as_flag(name, values[name]) for name in late)
            run.warn(
                f"--resume-override: nothing remains to be trained with {flags}; what the run has is left as it is"
            )
        given = run.args.run.resume != "auto" and run.args.origins["datapath"] == FLAG
        if given and not is_at(point.state, run.args.data.datapath):
            run.warn(f"--datapath {run.args.data.datapath}: nothing was read there, for nothing remains to be trained")
        print(final_line(progress, point.folder, best_metric(run.args.run), run.args.data.max_val_batches))
    return 0


def describe(args: Settings, data: Data, criterion: torch.nn.Module | None = None) -> dict[str, Any]:
    """The parts of a checkpoint that do not change during a run."""
    teacher = {"teacher": criterion.teacher.state_in_checkpoint} if isinstance(criterion, Distillation) else {}
    loss = criterion.criterion if isinstance(criterion, Distillation) else criterion
    weights = {"class_weights": loss.weights.tolist(), "weighs_images": True} if args.loss.class_weights else {}
    return {
        **teacher,
        **weights,
        **({"seen": data.seen} if data.seen else {}),
        "format": FORMAT,
        "arch": args.model.arch,
        "classes": list(data.classes),
        "preprocessing": data.preprocessing.state(),
        "max_shift": data.max_shift,
        "settings": args.values(),
        "versions": versions(),
        "fingerprint": data.fingerprint,
    }


def versions() -> dict[str, str]:
    """What the run's bits depend on besides its settings."""
    # Asked of the installation: a run imports only what it uses.
    libraries = {name: version(name) for name in ("torch", "torchvision", "timm", "numpy")}
    return {"python": platform.python_version(), **libraries, "jpeg": decoder(), "machine": platform.machine()}


def save_settings(run: Run) -> None:
    """``config.yaml``: every setting and where it came from, in a form that --config reads back.

    Above them, as comments: command line, versions, machine, and commit of this repository.
    An existing one is kept as ``config.1.yaml``, the next as ``config.2.yaml``.
    """
    made_by = ", ".join(f"{name} {version}" for name, version in versions().items())
    header = f"main.py {shlex.join(run.argv)}\n{made_by}\n{MACHINE}{machine(run.distributed)}\n{COMMIT}{commit()}"
    folder = run.run_folder.folder
    path = folder / "config.yaml"
    temporary = folder / ".config.yaml.tmp"
    if path.is_file():
        kept = (folder / f"config.{number}.yaml" for number in itertools.count(1))
        shutil.copyfile(path, next(copy for copy in kept if not copy.exists()))
    temporary.write_text(arguments.as_recipe(run.args, header), encoding="utf-8")
    os.replace(temporary, path)


def show_settings(run: Run, charts: dict[str, dict[str, list[str]]]) -> None:
    """Tell TensorBoard what ``save_settings`` has saved, and which ``charts`` to make."""
    text = (run.run_folder.folder / "config.yaml").read_text(encoding="utf-8") if run.is_main else ""
    run.writer.text("Settings", text, step=run.position[1] if run.position else 0)
    run.writer.table_row(table_row(run.args))
    run.writer.charts(charts)


def table_row(args: Settings) -> dict[str, Any]:
    """What shapes the result, for the HPARAMS table: numbers and truth values as they are, all else as text."""
    values = args.result_values()
    return {name: value if isinstance(value, int | float) else as_text(value) for name, value in values.items()}


def warn_of_little_space(run: Run) -> None:
    """Warn when the disk has too little room for the checkpoints to come, judged by the first. For the main process."""
    checkpoints = run.run_folder.checkpoints
    first = (checkpoints / "initial.pt").stat().st_size + bytes_of(checkpoints / "initial.pt")
    free = shutil.disk_usage(checkpoints).free
    needed = CHECKPOINTS_KEPT * STATES_PER_WEIGHT * first
    if free < needed:
        run.writer.log(
            f"warning: {run.run_folder.folder} has {free / 1e6:,.1f} MB left on its disk, and checkpoints may take "
            f"{needed / 1e6:,.1f} MB; free some space or choose another --output"
        )
