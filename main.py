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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.config import arguments
from utils.config.rules import CHECKPOINT
from utils.config.settings import Settings, UserError
from utils.loop.stop_signals import Stopped, StoppedAtOnce, StopSignals
from utils.record.run_folder import RunFolder
from utils.runtime.console import INTERRUPTED, say
from utils.runtime.cpu import let_threads_wait_briefly
from utils.runtime.distributed import Distributed, RankInfo, end_process, lost_contact

if TYPE_CHECKING:
    import torch

    from utils.checkpoint.checkpoint import Checkpointer
    from utils.checkpoint.resume import ResumePoint
    from utils.data.loaders import TrainLoader, ValidationLoader
    from utils.data.preprocessing import Known
    from utils.data.sets.datasets import Data
    from utils.optim.ema import MovingAverage
    from utils.optim.lr_policy import LRPolicy
    from utils.record.writer import NullWriter
    from utils.train_validation import TraVal

    Weights = tuple[dict[str, Any], Path]  # what a checkpoint holds, and where it lies


class Parts(NamedTuple):
    """What a run is made of. ``untrained``: the parts of a pretrained network that begin anew, in words."""

    data: Data
    train_loader: TrainLoader | None  # None, as the policy, with --evaluate
    validation_loader: ValidationLoader
    loader_choice: str
    model: torch.nn.Module
    untrained: str
    ema: MovingAverage | None
    optimizer: torch.optim.Optimizer | tuple[torch.optim.Optimizer, ...]
    lr_policy: LRPolicy | None
    criterion: torch.nn.Module
    scaler: torch.amp.GradScaler


def main(argv: list[str], ends_process: bool = False) -> int:
    """The program; gives the exit code: 0 done, 2 a mistake of the user's, 1 training cannot go on, 75 told to stop.

    ``ends_process``: nothing comes after it, so that no signal shall change that code any more.
    """
    let_threads_wait_briefly()
    ranks = RankInfo()

    def end_at_once(stop: BaseException) -> None:
        if ranks.is_main:
            say(stop_line(stop))
        os._exit(exit_code_of(stop))

    signals = StopSignals(end_at_once if ends_process else None)
    try:
        ranks = RankInfo.from_environment()
        args = arguments.parse(argv, ranks.world_size)
        with signals, Distributed(ranks, args.run, args.precision.tf32) as distributed:
            return run(argv, args, distributed, signals)
    except UserError as error:
        if ranks.is_main or not error.on_all_ranks:
            print("\n".join(f"main.py: {' '.join(line.split())}" for line in error.mistakes), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, StoppedAtOnce) as stop:
        if ranks.is_main:
            print(stop_line(stop), file=sys.stderr)
        return exit_code_of(stop)
    except RuntimeError as error:
        reason = lost_contact(error) if ranks.world_size > 1 else None
        if reason is None:
            raise
        if signals.received:  # the others were told to stop as well, and have ended earlier
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
    """What is told of a stop outside of training."""
    return f"main.py: {str(stop) or 'interrupted; the same command with --resume auto continues'}"


def exit_code_of(stop: BaseException) -> int:
    """What a stop outside of training ends with."""
    return stop.exit_code if isinstance(stop, StoppedAtOnce) else INTERRUPTED


def run(argv: list[str], args: Settings, distributed: Distributed, stop_signals: StopSignals) -> int:
    """Everything after the command line is known to be good."""
    from utils.checkpoint.override import refuse_impossible
    from utils.checkpoint.progress import Progress
    from utils.checkpoint.resume import find
    from utils.record.summary import tell_finished

    warnings: list[str] = []  # for the run's log, once there is one

    def hear(line: str) -> None:
        warn(line)
        warnings.append(line)

    found = distributed.run_on_rank0(lambda: find(args, RunFolder.parent(args), hear))
    if found is not None:  # its settings stand in for the defaults
        args = arguments.parse(argv, distributed.world_size, found.settings)
    if args.run.resume and not args.run.evaluate and found is not None:
        distributed.run_on_rank0(found.refuse_strange_files)
        if args.run.resume_override:
            refuse_impossible(found, args)
        else:
            found.refuse_differences(args)
        if found.state["settings"].get("deterministic") and not args.run.deterministic and distributed.is_main:
            warn("the run was begun with --deterministic; without it the bits may differ from here on")
        if Progress.from_state(found.state["progress"]).is_finished(args) and not args.run.dry_run:
            return tell_finished(found, distributed)

    parts = build(args, distributed, found)
    tell_doubts(args, parts, distributed, found, hear)
    tell_idle_settings(args, parts, distributed, found, hear)
    if args.run.dry_run:
        return tell_plan(args, parts, distributed, found)
    if args.run.evaluate:
        return evaluate(args, parts, distributed, found)
    return train(argv, args.with_absolute_paths(), parts, distributed, found, warnings, stop_signals)


def build(args: Settings, distributed: Distributed, found: ResumePoint | None) -> Parts:
    """All parts; whatever can be wrong with them shows here, before anything is created."""
    from models import unknown_arch
    from utils.checkpoint.override import refuse_other_head
    from utils.data.loaders import ProgressLog, loaders
    from utils.data.sets.datasets import prepare
    from utils.optim.criterion import build_criterion
    from utils.optim.ema import build_ema
    from utils.optim.lr_policy import build_lr_policy
    from utils.optim.optimizers import build_optimizer, unknown_optimizer
    from utils.precision.amp import build_scaler

    evaluating = args.run.evaluate
    with distributed.raise_on_all_ranks():
        mistakes = [unknown_arch(args.model.arch), unknown_optimizer(args.optimisation.optimizer)]
        if any(mistakes):
            raise UserError(*filter(None, mistakes))
    if not args.run.dry_run:
        distributed.run_on_rank0(lambda: prepare(args.data, tell, evaluating), long_work="Preparing the data")
    with distributed.raise_on_all_ranks(), distributed.patiently("Reading the data"):
        weights = read_weights(args, found)
        data = read_data(args, distributed.device, found)
        data = data.shown_to(known_preprocessing(args, found, weights), args.data)
        if found is not None:
            if args.run.resume_override:
                refuse_other_head(found, data.classes)
            else:
                found.refuse_other_data(data.classes, None if evaluating else data.fingerprint)
        distributed.seed(args.run.seed)
        model, untrained, channels_last = build_network(args, data, distributed.device, found, weights)
        del weights  # what a checkpoint holds besides may be several times as much
        train_loader, validation_loader, loader_choice = loaders(
            data, args.data, distributed, seed=args.run.seed, channels_last=channels_last,
            compile_augment=args.model.compile_augment, only_plan=args.run.dry_run,
            progress=ProgressLog(tell, args.logging.progress),
        )  # fmt: skip
        return Parts(
            data=data,
            train_loader=train_loader,
            validation_loader=validation_loader,
            loader_choice=loader_choice,
            model=model,
            untrained=untrained,
            ema=build_ema(model, None if evaluating else args.optimisation.ema_decay),
            optimizer=build_optimizer(args.optimisation, model),
            lr_policy=None if evaluating else build_lr_policy(args.optimisation, train_loader.steps_per_epoch),
            criterion=build_criterion(args.optimisation),
            scaler=build_scaler(args.precision, distributed.device),
        )


def read_data(args: Settings, device: torch.device, found: ResumePoint | None) -> Data:
    """The images to train on and to validate on; with ``--evaluate`` only these, in the classes of the checkpoint."""
    from utils.data.sets.datasets import Trained, get_data, get_test_data

    if not args.run.evaluate:
        return get_data(args.data, device)
    trained = None
    if found is not None:
        settings, fingerprint = found.settings, found.state.get("fingerprint")
        trained = Trained(found.path, found.classes, settings.get("datapath"), fingerprint)
    return get_test_data(args.data, device, trained, val_split_told=args.origins["val_split"] != CHECKPOINT)


def build_network(
    args: Settings, data: Data, device: torch.device, found: ResumePoint | None, weights: Weights | None
) -> tuple[torch.nn.Module, str, bool]:
    """The network on ``device``, which of its pretrained parts begin anew, and whether it is in channels-last."""
    from models import build_model, check_forward
    from models.pretrained import begins_anew
    from utils.precision.amp import keep_in_fp32

    # A checkpoint's weights replace whatever the network would begin with.
    start = {"pretrained": False, "weights": None, "init": "default"} if found is not None else {}
    settings = dataclasses.replace(args.model, **start)
    shape = {"classes": len(data.classes), "channels": data.spec.channels}
    model = build_model(settings, **shape, image_size=data.image_size)
    size = data.preprocessing.val_image_size
    if size != data.image_size:
        check_forward(settings.arch, model, **shape, image_size=size, flag="--val-image-size")
    untrained = begins_anew(model, settings, len(data.classes), data.image_size)
    if args.run.evaluate and untrained:
        raise UserError(f"--evaluate --pretrained: {untrained} would begin anew, untrained; train it first")
    model.to(device)
    channels_last = place_channels(args, model, device)
    if weights is not None:
        load_weights(model, *weights)
    keep_in_fp32(model, args.precision.fp32_layers or (), device)
    refuse_what_would_fail(args, model, (data.spec.channels, data.image_size, data.image_size), channels_last, device)
    return model, untrained, channels_last


def place_channels(args: Settings, model: torch.nn.Module, device: torch.device) -> bool:
    """Bring ``model`` into the memory format that ``--channels-last`` asks for; whether that is channels-last."""
    import torch

    from models.memory_format import channels_last_is_faster
    from utils.precision.amp import resolve_amp

    wish = args.model.channels_last
    faster = wish == "auto" and channels_last_is_faster(model, device, resolve_amp(args.precision, device))
    if wish == "on" or faster:
        model.to(memory_format=torch.channels_last)  # in place
    return wish == "on" or faster


def refuse_what_would_fail(
    args: Settings, model: torch.nn.Module, image_shape: tuple[int, int, int], channels_last: bool, device: torch.device
) -> None:
    """Raise ``UserError`` when a flag asks of ``model`` what torch cannot compute, before it does so in a step."""
    import torch

    from utils.optim.gradient_penalty import refuse_without_second_derivative
    from utils.precision.amp import autocast
    from utils.runtime.determinism import refuse_without_determinism

    training = not args.run.evaluate
    if args.run.deterministic:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        images = torch.zeros(2, *image_shape, device=device).contiguous(memory_format=layout)
        refuse_without_determinism(model, images, autocast(args.precision, device), training)
    if args.optimisation.grad_penalty and training:
        refuse_without_second_derivative(model, image_shape, device)


def read_weights(args: Settings, found: ResumePoint | None) -> Weights | None:
    """What ``--weights``, or the checkpoint to evaluate, holds, and its path. A resume reads its own later."""
    from utils.checkpoint import checkpoint

    if found is not None:
        return (found.read(), found.path) if args.run.evaluate else None
    path = args.model.weights and Path(args.model.weights)
    return (checkpoint.load(path), path) if path else None


def known_preprocessing(args: Settings, found: ResumePoint | None, weights: Weights | None) -> Known | None:
    """What the weights to begin with, to go on from or to evaluate were trained for, if they say it."""
    from models.pretrained import preprocessing_of
    from utils.data.preprocessing import Known, Preprocessing

    if found is None and weights is None:
        if not args.model.pretrained:
            return None
        testing = args.run.evaluate and not (args.data.image_size or args.data.val_image_size)
        values, source = preprocessing_of(args.model.arch, testing)
        return Known(Preprocessing.from_state(values, source), source)
    state, path = (found.state, found.path) if found is not None else weights
    values = state.get("preprocessing")
    if not isinstance(values, dict) or "crop_pct" not in values:  # another program's, or of before format 4
        return None
    return Known(Preprocessing.from_state(values, path), str(path), of_this_run=found is not None)


def load_weights(model: torch.nn.Module, state: dict[str, Any], path: Path) -> None:
    """Put in the weights of ``--weights``, or those to evaluate."""
    from utils.checkpoint import checkpoint

    checkpoint.load_weights(model, checkpoint.weights_of(state, path), path)


def train(
    argv: list[str], args: Settings, parts: Parts, distributed: Distributed, found: ResumePoint | None,
    warnings: list[str], stop_signals: StopSignals,
) -> int:  # fmt: skip
    """Train, from the beginning or from ``found``, into the run's folder. ``warnings`` go into its log."""
    from utils.checkpoint.checkpoint import Checkpointer
    from utils.record.summary import announce, save_settings, tell_end
    from utils.record.writer import build_writer
    from utils.train_validation import TrainingFailure

    position = found and (found.state["progress"]["epoch"], found.state["progress"]["step"])
    changes: list[str] = []
    if found is not None and args.run.resume_override:
        found, changes = overridden(args, parts, distributed, found)
    if found is not None and found.folder is not None:
        run_folder = RunFolder(found.folder)
    else:
        run_folder = distributed.run_on_rank0(lambda: RunFolder.create(args))
    with distributed.raise_on_all_ranks():
        writer = build_writer(distributed.is_main, run_folder.folder, progress=args.logging.progress, resumed=position)
    checkpointer = Checkpointer(run_folder.checkpoints, distributed.is_main)
    try:
        with stop_signals.held():
            traval = build_traval(args, parts, distributed, run_folder, writer, checkpointer, stop_signals)
            announce(argv, args, parts, distributed, run_folder, writer)
            for line in (*warnings, *changes):
                writer.log(f"warning: {line}", to_console=False)
            if found is not None:
                # Each process reads; nothing is saved before all have, and nothing keeps what was read.
                with distributed.raise_on_all_ranks(), found.fitting():
                    traval.load_state(found.read())
                writer.log(f"Continuing {found.path} after epoch {position[0]}, step {position[1]}")
                if found.folder is None or changes:  # from here on with these settings
                    traval.save_now("last")
                    distributed.run_on_rank0(lambda: save_settings(argv, args, run_folder))
            else:
                begin(argv, args, parts, distributed, run_folder, writer, traval)
            report = traval.fit()
        tell_end(args, parts.data, run_folder, writer, traval.progress, report)
        return 0
    except Stopped as stop:
        writer.log(f"Run {run_folder.folder} {stop}")
        return stop.exit_code
    except TrainingFailure as error:
        writer.log(f"Stopped: {error}", to_console=False)
        if distributed.is_main:
            print(f"main.py: {error}", file=sys.stderr)
        return 1
    except (UserError, RuntimeError, KeyboardInterrupt) as error:
        with suppress(OSError):
            writer.log(f"Stopped: {str(error) or type(error).__name__}", to_console=False)
        raise
    except OSError as error:  # of the log, TensorBoard or the metrics files
        raise UserError(f"--output: cannot write {run_folder.folder} ({error}); --resume auto continues") from error
    finally:
        with suppress(OSError):  # what matters was flushed before
            writer.close()
        with suppress(UserError):  # another error is under way, else it would have been raised
            checkpointer.wait()


def overridden(
    args: Settings, parts: Parts, distributed: Distributed, found: ResumePoint
) -> tuple[ResumePoint, list[str]]:
    """What --resume-override makes of ``found``, and a line, told here, about each thing that is different."""
    from utils.checkpoint.override import carry_over

    with found.fitting():
        state, lines = carry_over(
            found, args, parts.data.classes, parts.data.fingerprint, parts.train_loader.steps_per_epoch, parts.optimizer
        )
    if distributed.is_main:
        for line in lines:
            warn(line)
    return dataclasses.replace(found, state=state), lines


def build_traval(
    args: Settings, parts: Parts, distributed: Distributed, run_folder: RunFolder, writer: NullWriter,
    checkpointer: Checkpointer, stop_signals: StopSignals,
) -> TraVal:  # fmt: skip
    """The training loop with all that it needs."""
    from utils.record.summary import describe
    from utils.train_validation import TraVal

    return TraVal(
        parts.model, parts.train_loader, parts.optimizer, parts.criterion, parts.scaler, args,
        parts.validation_loader, distributed=distributed, lr_policy=parts.lr_policy, ema=parts.ema, writer=writer,
        checkpointer=checkpointer, description=describe(args, parts.data), stop_signals=stop_signals,
        curr_scen_name=run_folder.name,
    )  # fmt: skip


def begin(
    argv: list[str], args: Settings, parts: Parts, distributed: Distributed, run_folder: RunFolder, writer: NullWriter,
    traval: TraVal,
) -> None:  # fmt: skip
    """What a new run leaves before its first step; a disk that is too full shows here."""
    from utils.record.summary import save_settings, warn_of_little_space

    distributed.run_on_rank0(lambda: save_settings(argv, args, run_folder))
    writer.text("Settings", (run_folder.folder / "config.yaml").read_text() if distributed.is_main else "")
    writer.weights(parts.model)
    traval.save_now("initial")
    distributed.run_on_rank0(lambda: warn_of_little_space(run_folder, writer))


def evaluate(args: Settings, parts: Parts, distributed: Distributed, found: ResumePoint | None) -> int:
    """Validate once and leave nothing behind."""
    from utils.checkpoint.checkpoint import average_moved_since_validation
    from utils.optim.batch_norm_statistics import layers_with_statistics
    from utils.record.summary import figures, reached
    from utils.record.writer import build_writer
    from utils.train_validation import TraVal

    writer = build_writer(distributed.is_main, None, progress=args.logging.progress)
    traval = TraVal(
        parts.model, None, None, parts.criterion, parts.scaler, args, parts.validation_loader,
        distributed=distributed, writer=writer,
    )  # fmt: skip
    writer.log(f"Preprocessing: {parts.data.preprocessing_line}")
    if found is not None:
        writer.log(f"Evaluating {found.path}{reached(found.state)}")
        if average_moved_since_validation(found.state) and layers_with_statistics(parts.model):
            writer.log(
                "warning: it was saved between two validations: the batch-norm statistics of its moving average are "
                "averages as well, and it may do much worse than with those that are computed before a validation"
            )
    writer.log(figures(traval.validation(0, report=False)))
    return 0


# ------------------------------------------------------------------------------------------ what is told


def tell_doubts(
    args: Settings, parts: Parts, distributed: Distributed, found: ResumePoint | None, hear: Callable[[str], None]
) -> None:
    """Hand ``hear`` what a user should know of the data and of the network before it is trained."""
    from models.oversized import oversized_layer

    lines = [*parts.data.warnings]
    if found is None and not args.run.evaluate:
        lines.append(oversized_layer(args.model.arch, parts.model, parts.data.image_size))
    for line in filter(None, lines) if distributed.is_main else ():
        hear(line)


def tell_idle_settings(
    args: Settings, parts: Parts, distributed: Distributed, found: ResumePoint | None, hear: Callable[[str], None]
) -> None:
    """Hand ``hear`` a line about each setting that was given and has no effect."""
    from utils.loop.effects import facts_of, without_effect

    if distributed.is_main:
        continues = found is not None and found.folder is not None
        for line in without_effect(args, facts_of(args, parts, distributed, continues)):
            hear(line)


def tell_plan(args: Settings, parts: Parts, distributed: Distributed, found: ResumePoint | None) -> int:
    """Print what the run would do."""
    from utils.record.dry_run import evaluation_plan, plan

    if args.run.evaluate and distributed.is_main:
        print(evaluation_plan(args, parts, distributed, found))
    elif distributed.is_main:
        folder = found.folder if found is not None and found.folder else None
        print(plan(args, parts, distributed, folder or RunFolder.planned(args), found))
    return 0


def tell(line: str) -> None:
    """A line on stdout before there is a log, from any process."""
    print(line, flush=True)


def warn(line: str) -> None:
    """A line about something that the program can go on without."""
    print(f"main.py: warning: {line}", file=sys.stderr)


if __name__ == "__main__":
    end_process(main(sys.argv[1:], ends_process=True))
