"""Train and validate an image classifier: ``torchrun main.py [flag ...]`` (see README.md and --help).

Reads the settings, builds data, network, optimizer and scaler, hands them to ``TraVal`` and tears down. --help and
mistakes on the command line must not wait for torch, timm and torchvision: the functions here import them.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before the other imports, which Ctrl-C would break off with a traceback
    try:
        from utils.runtime import console

        console.begin("main.py")
    except KeyboardInterrupt:
        os._exit(130)

import dataclasses
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from utils.config import arguments
from utils.config.field import CHECKPOINT
from utils.config.settings import Settings, UserError
from utils.loop.stop_signals import Stopped, StoppedAtOnce, StopSignals
from utils.runtime.console import INTERRUPTED, lacks_package, log, log_at_once
from utils.runtime.cpu import let_threads_wait_briefly
from utils.runtime.distributed import Distributed, RankInfo, end_process, lost_contact
from utils.runtime.garbage import garbage_collection

if TYPE_CHECKING:
    import torch

    from models.prepare import Prepared
    from utils.checkpoint.checkpoint import Checkpointer
    from utils.checkpoint.resume import ResumePoint
    from utils.data.datasets import Data
    from utils.data.loaders import TrainLoader, ValidationLoader
    from utils.loop.hooks import Hooks
    from utils.optim.ema import WeightAverage
    from utils.optim.lr_policy import LRPolicy
    from utils.optim.optimizers import Optimizers
    from utils.run import Run
    from utils.train_validation import TraVal


class Components(NamedTuple):
    """What training is made of."""

    data: Data
    train_loader: TrainLoader | None  # None, as the policy, with --evaluate
    validation_loader: ValidationLoader
    loader_choice: str
    network: Prepared
    optimizer: Optimizers
    ema: WeightAverage | None
    scaler: torch.amp.GradScaler
    lr_policy: LRPolicy | None
    criterion: torch.nn.Module

    @property
    def model(self) -> torch.nn.Module:
        return self.network.model


def main(argv: list[str], ends_process: bool = False, hooks: Hooks | None = None) -> int:
    """The program. Returns the exit code: 0 done, 1 failed, 2 an error the user can fix, 75 stopped by a signal.

    ``ends_process``: the process exits with this code right away, so a late signal must not change it. ``hooks`` are
    called at the points of training and validation that they name.
    """
    let_threads_wait_briefly()
    ranks = RankInfo()

    def end_at_once(stop: BaseException) -> None:
        if ranks.is_main:
            log_at_once(stop_line(stop))
        os._exit(exit_code_of(stop))

    signals = StopSignals(end_at_once if ends_process else None)
    try:
        ranks = RankInfo.from_environment()
        command_line = arguments.read(argv)
        args = command_line.resolve(ranks.world_size)
        with signals, Distributed(ranks, args.run, args.precision.tf32) as distributed:
            return execute(command_line, args, distributed, signals, hooks)
    except UserError as error:
        if ranks.is_main or not error.on_all_ranks:
            print("\n".join(f"main.py: {' '.join(line.split())}" for line in error.mistakes), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        return lacks_package("main.py", error)
    except (KeyboardInterrupt, StoppedAtOnce) as stop:
        if ranks.is_main:
            print(stop_line(stop), file=sys.stderr)
        return exit_code_of(stop)
    except RuntimeError as error:
        reason = lost_contact(error) if ranks.world_size > 1 else None
        if reason is None:
            raise
        if signals.received:  # the other ranks received one, too, and ended first
            stop = StoppedAtOnce(signals.received, "as the others were ending")
            print(stop_line(stop), file=sys.stderr)
            return exit_code_of(stop)
        print(
            f"main.py: rank {ranks.rank} has lost the other processes ({reason}); the reason stands in their output; "
            "the same command with --resume auto continues",
            file=sys.stderr,
        )
        return 1


def stop_line(stop: BaseException) -> str:
    """The line about a signal outside of training."""
    return f"main.py: {str(stop) or 'interrupted; the same command with --resume auto continues'}"


def exit_code_of(stop: BaseException) -> int:
    """The exit code after a signal outside of training."""
    return stop.exit_code if isinstance(stop, StoppedAtOnce) else INTERRUPTED


def execute(
    command_line: arguments.CommandLine,
    args: Settings,
    distributed: Distributed,
    stop_signals: StopSignals,
    hooks: Hooks | None,
) -> int:
    """Find what to resume, build everything, then train, evaluate or print the plan. Returns the exit code."""
    from utils.record.summary import report_finished
    from utils.run import Run

    run = Run(args, distributed, command_line.argv)
    find_resume_point(run, command_line)
    if is_finished(run):
        return report_finished(run)
    components = build(run)
    garbage_collection.freeze_imports()
    run.distributed.run_on_rank0(lambda: warn_of_doubts(run, components), long_work="Looking at the data")
    if run.args.run.dry_run:
        return print_plan(run, components)
    if run.args.run.evaluate:
        return evaluate(run, components, hooks)
    return train(run, components, stop_signals, hooks)


# --------------------------------------------------------------------------------------------- find


def find_resume_point(run: Run, command_line: arguments.CommandLine) -> None:
    """Find the checkpoint to resume or to evaluate, if any; its settings replace the defaults."""
    from utils.checkpoint.override import refuse_impossible
    from utils.checkpoint.resume import find
    from utils.record.run_folder import RunFolder

    parent = RunFolder.parent(run.args)
    point = run.resume_point = run.distributed.run_on_rank0(
        lambda: find(run.args, parent, run.warn, lambda: read_data(run).fingerprint), long_work="Finding the run"
    )
    if point is None:
        return
    run.args = args = command_line.resolve(run.distributed.world_size, point.settings)
    run.distributed.apply_tf32(args.precision.tf32)
    if args.run.evaluate or not args.run.resume:
        return
    run.position = (point.state["progress"]["epoch"], point.state["progress"]["step"])
    run.found_at = point.path
    run.distributed.run_on_rank0(point.refuse_strange_files)
    if args.run.resume_override:
        refuse_impossible(point, args)
    else:
        point.refuse_differences(args)
    measured_then = {name: point.state["settings"].get(name) for name in args.unmeasured()}
    run.args = args = args.with_values(**measured_then)
    if point.state["settings"].get("deterministic") and not args.run.deterministic and run.is_main:
        run.warn("the run was begun with --deterministic; without it the bits may differ from here on")


def is_finished(run: Run) -> bool:
    """Whether the run to resume has nothing left to do."""
    from utils.checkpoint.progress import Progress

    if run.resume_point is None or not run.args.run.resume or run.args.run.evaluate or run.args.run.dry_run:
        return False
    return Progress.from_state(run.resume_point.state["progress"]).is_finished(run.args)


# -------------------------------------------------------------------------------------------- build


def build(run: Run) -> Components:
    """Build all components. Whatever can be wrong with them shows here, before anything is created."""
    from models.prepare import known_preprocessing, prepare_network, read_weights, start_from_images
    from utils.data.datasets import prepare
    from utils.data.loaders import ProgressLog, loaders
    from utils.optim.build import build_optimizer_parts
    from utils.optim.lr_policy import build_lr_policy

    garbage_collection.freeze_imports()
    args = run.args
    distributed = run.distributed
    evaluating = run.args.run.evaluate
    with distributed.raise_on_all_ranks():
        refuse_unknown_names(args)
    if not args.run.dry_run:
        distributed.run_on_rank0(lambda: prepare(args.data, log, evaluating), long_work="Preparing the data")
    with distributed.raise_on_all_ranks(), distributed.without_timeout("Reading the data"):
        weights = read_weights(args, run.resume_point)
        data = read_data(run, run.resume_point or (weights and weights.point))
        data = data.shown_to(known_preprocessing(args, run.resume_point, weights), args.data)
        refuse_other_data(run, data)
    data.refuse_differences(distributed)
    with distributed.raise_on_all_ranks(), distributed.without_timeout("Reading the images"):
        distributed.seed(args.run.seed)
        network = prepare_network(args, data, distributed.device, run.resume_point, weights)
        begins = run.resume_point is None and weights is None and not (evaluating or args.run.dry_run)
        if not evaluating:
            run.args = args = resolve_auto(args, network.model, data, distributed)
        del weights  # a checkpoint holds several times as much as the network
        train_loader, validation_loader, loader_choice = loaders(
            data,
            args,
            distributed,
            channels_last=network.channels_last,
            only_plan=args.run.dry_run,
            progress=ProgressLog(log, args.logging.progress),
        )
        if begins:
            start_from_images(network.model, train_loader)
    # Apart from what reads: a process that has failed there would not take part in spreading.
    with distributed.raise_on_all_ranks(), distributed.without_timeout("Preparing the training"):
        return Components(
            **build_optimizer_parts(args, network.model, network.freezing, distributed)._asdict(),
            network=network,
            data=data,
            train_loader=train_loader,
            validation_loader=validation_loader,
            loader_choice=loader_choice,
            lr_policy=None
            if evaluating
            else build_lr_policy(args.optimisation, train_loader.steps_per_epoch, args.average),
            criterion=build_loss(run, data),
        )


def resolve_auto(args: Settings, model: torch.nn.Module, data: Data, distributed: Distributed) -> Settings:
    """The settings with what a measurement finds in place of ``auto``. A dry run measures nothing."""
    from utils.precision.choice import with_chosen_amp

    if args.run.dry_run:
        return args
    shape = (data.spec.channels, data.image_size, data.image_size)
    args, line = with_chosen_amp(args, model, shape, distributed)
    if line and distributed.is_main:
        log(line)
    return args


def refuse_unknown_names(args: Settings) -> None:
    """Raise ``UserError`` for a network, optimizer or metric that does not exist."""
    from models import unknown_arch
    from utils.optim.optimizers import unknown_optimizer
    from utils.record.epoch_scalars import unknown_metrics

    mistakes = [unknown_arch(args.model.arch), unknown_optimizer(args.optimisation.optimizer)]
    mistakes += unknown_metrics(args.run)
    if any(mistakes):
        raise UserError(*filter(None, mistakes))


def read_data(run: Run, trained: ResumePoint | None = None) -> Data:
    """The images to train on and to validate on; with ``--evaluate`` only these, in the classes of ``trained``."""
    from utils.data.datasets import get_data, get_test_data
    from utils.data.formats.listing import Lister
    from utils.data.progress_log import ProgressLog

    args = run.args
    device = run.distributed.device
    progress = ProgressLog(log, args.logging.progress)
    lister = Lister(keeps=not args.run.dry_run, progress=progress, is_main=run.is_main)
    if not args.run.evaluate:
        return get_data(args.data, device, lister, trained)
    explicit = args.origins["val_split"] != CHECKPOINT
    return get_test_data(args.data, device, trained, val_split_is_explicit=explicit, lister=lister)


def weights_of_classes(run: Run, data: Data) -> torch.Tensor | None:
    """The weight of each class in the loss, for the images that are trained on; None without ``--class-weights``."""
    from utils.data.sampling import first_samples
    from utils.optim.class_weights import class_weights, refuse_other_weights

    if data.train is None or run.args.loss.class_weights is None:
        return None
    labels = data.train.labels.cpu()[first_samples(len(data.train), run.args)]
    weights = class_weights(labels, data.classes, run.args.loss.class_weights)
    if (point := run.resume_point) is not None:
        warn = run.warn if run.args.run.resume_override else None
        refuse_other_weights(weights, run.args.loss, point.state, point.path, warn)
    return weights.to(run.distributed.device)


def refuse_other_data(run: Run, data: Data) -> None:
    """Raise ``UserError`` when ``data`` is not what the run to resume or to evaluate was trained on."""
    from utils.checkpoint.override import refuse_other_head

    if run.resume_point is None:
        return
    if run.args.run.resume_override:
        refuse_other_head(run.resume_point, data.classes)
    else:
        fingerprint = None if run.args.run.evaluate else data.fingerprint
        run.resume_point.refuse_other_data(data.classes, fingerprint, data.seen)


def build_loss(run: Run, data: Data) -> torch.nn.Module:
    """The training loss; with a teacher, its own as well."""
    from models.teacher import build_teacher, other_teacher
    from utils.optim.criterion import build_criterion
    from utils.optim.distillation import Distillation

    settings = run.args.loss
    criterion = build_criterion(settings, weights_of_classes(run, data))
    if run.args.run.evaluate or settings.teacher is None:
        return criterion
    teacher = build_teacher(settings.teacher, data, run.distributed.device)
    difference = run.resume_point is not None and other_teacher(teacher, run.resume_point)
    if difference and not run.args.run.resume_override:
        raise UserError(f"{difference}; give that one, or go on like this with --resume PATH --resume-override")
    if difference and run.is_main:
        run.warn(f"{difference}; going on with this one")
    return Distillation(criterion, teacher, settings)


def build_traval(
    run: Run,
    components: Components,
    checkpointer: Checkpointer | None = None,
    stop_signals: StopSignals | None = None,
    hooks: Hooks | None = None,
) -> TraVal:
    """The training loop around the components; of a run without a folder, nothing is described for checkpoints."""
    from utils.record.summary import describe
    from utils.train_validation import TraVal

    folder = run.run_folder
    return TraVal(
        components.model,
        components.train_loader,
        components.optimizer,
        components.criterion,
        components.scaler,
        run.args,
        components.validation_loader,
        distributed=run.distributed,
        lr_policy=components.lr_policy,
        ema=components.ema,
        writer=run.writer,
        checkpointer=checkpointer,
        description=describe(run.args, components.data, components.criterion) if folder else None,
        stop_signals=stop_signals,
        curr_scen_name=folder.name if folder else "",
        hooks=hooks,
        freezing=components.network.freezing,
    )


# ------------------------------------------------------------------------------------- train, evaluate


def train(run: Run, components: Components, stop_signals: StopSignals, hooks: Hooks | None) -> int:
    """Train, from the beginning or from the resume point, into the run's folder."""
    from utils.checkpoint.checkpoint import Checkpointer
    from utils.record.summary import log_end
    from utils.train_validation import TrainingFailure

    run.args = run.args.with_absolute_paths()
    changed = override(run, components)
    run.open_folder()
    checkpointer = Checkpointer(
        run.run_folder.checkpoints, run.is_main, lambda line: run.writer.log(f"warning: {line}")
    )
    try:
        with stop_signals.held():
            traval = build_traval(run, components, checkpointer, stop_signals, hooks)
            start(run, components, traval, changed)
            report = traval.fit()
        log_end(run, traval.progress, report)
        return 0
    except Stopped as stop:
        run.writer.log(f"Run {run.run_folder.folder} {stop}")
        return stop.exit_code
    except TrainingFailure as error:
        run.writer.log(f"Stopped: {error}", to_console=False)
        if run.is_main:
            print(f"main.py: {error}", file=sys.stderr)
        return 1
    except (UserError, RuntimeError, KeyboardInterrupt) as error:
        with suppress(OSError):
            run.writer.log(f"Stopped: {str(error) or type(error).__name__}", to_console=False)
        raise
    except OSError as error:  # of the log, TensorBoard or the metrics files
        folder = run.run_folder.folder
        advice = "--resume auto continues" if folder.is_dir() else "it was removed; begin the run anew"
        raise UserError(f"--output: cannot write {folder} ({error}); {advice}") from error
    finally:
        with suppress(OSError):  # what matters was flushed before
            run.writer.close()
        with suppress(UserError):  # another error is under way; otherwise this one would have been raised
            checkpointer.wait()


def override(run: Run, components: Components) -> bool:
    """Apply --resume-override to the resume point; warn of each difference. Returns whether there are any."""
    from utils.checkpoint.override import carry_over, refuse_other_groups
    from utils.optim.groups import parameter_groups

    point = run.resume_point
    data = components.data
    steps = components.train_loader.steps_per_epoch
    if point is None or not run.args.run.resume_override:
        return False
    with point.fitting():
        refuse_other_groups(point, run.args, lambda own: parameter_groups(own, components.model))
        state, differences = carry_over(point, run.args, data.classes, data.fingerprint, steps, components.optimizer)
    run.resume_point = dataclasses.replace(point, state=state)
    for line in differences if run.is_main else ():
        run.warn(line)
    return bool(differences)


def start(run: Run, components: Components, traval: TraVal, changed: bool) -> None:
    """Log what runs where, and begin or resume: load the checkpoint, or save the initial one.

    ``changed``: the run goes on with other settings or data, which its folder has to record.
    """
    from utils.record.summary import announce, save_settings, show_settings, warn_of_little_space

    point = run.resume_point
    distributed = run.distributed
    announce(run, components)
    for line in run.warnings:
        run.writer.log(f"warning: {line}", to_console=False)
    if point is None:
        distributed.run_on_rank0(lambda: save_settings(run))
        show_settings(run, traval.reporter.charts())
        run.writer.weights(components.model)
        traval.save_now("initial")
        distributed.run_on_rank0(lambda: warn_of_little_space(run))
        return
    # Each rank reads. Nothing is saved before all have, and nothing keeps what was read.
    with distributed.raise_on_all_ranks(), point.fitting():
        traval.load_state(point.read(traval.places()))
    run.writer.log("Continuing {} after epoch {}, step {}".format(run.found_at, *run.position))
    traval.keep_best()
    if changed or not distributed.run_on_rank0(lambda: point.is_recorded(run.args)):
        traval.save_now("last")
        distributed.run_on_rank0(lambda: save_settings(run))
        show_settings(run, traval.reporter.charts())


def evaluate(run: Run, components: Components, hooks: Hooks | None) -> int:
    """Validate once and leave nothing behind."""
    from utils.record.summary import announce_evaluation, log_evaluation
    from utils.record.writer import build_writer
    from utils.train_validation import TraVal

    writer = build_writer(run.is_main, None, progress=run.args.logging.progress)
    traval = TraVal(
        components.model,
        None,
        None,
        components.criterion,
        components.scaler,
        run.args,
        components.validation_loader,
        distributed=run.distributed,
        writer=writer,
        hooks=hooks,
    )
    announce_evaluation(run, components, writer)
    report = traval.validation(0, report=False)
    log_evaluation(run, writer, report)
    return 0


# ------------------------------------------------------------------------------------------- output


def warn_of_doubts(run: Run, components: Components) -> None:
    """Warn of what a user should know before training: doubtful data or network, and settings without effect."""
    from models.oversized import oversized_layer
    from utils.config.effects import without_effect
    from utils.loop.facts import facts_of

    lines = [components.data.seen, *components.data.warnings, *components.data.doubts(run.args)]
    if run.resume_point is None and not run.args.run.evaluate:
        lines.append(oversized_layer(run.args.model.arch, components.model, components.data.image_size))
    facts = facts_of(run.args, components, run.distributed, continues=run.folder_to_resume is not None)
    for line in filter(None, (*lines, *without_effect(run.args, facts))):
        run.warn(line)


def print_plan(run: Run, components: Components) -> int:
    """Print what the run would do."""
    from utils.record.dry_run import evaluation_plan, plan

    if run.is_main:
        print((evaluation_plan if run.args.run.evaluate else plan)(run, components))
    return 0


if __name__ == "__main__":
    garbage_collection.put_off()
    end_process(main(sys.argv[1:], ends_process=True))
