"""A training run in its folder: what main.py or a user's program (``open_run``) sets up around ``TraVal``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from components import Components, built, extras_of
from utils.checkpoint.checkpoint import IF_GONE, Checkpointer
from utils.checkpoint.override import carry_over, refuse_other_groups, settings_to_go_on
from utils.config import arguments, hub_networks
from utils.config.settings import Settings, UserError
from utils.data.loaders import TrainLoader, ValidationLoader
from utils.loop.exit_codes import report
from utils.loop.extras import Extras
from utils.loop.hooks import Hooks
from utils.loop.stop_signals import Stopped, StoppedAtOnce, StopSignals
from utils.optim.groups import parameter_groups
from utils.optim.optimizers import Optimizers
from utils.record.multilabel import report_of
from utils.record.run_folder import folder_of_runs
from utils.record.writer import Writer
from utils.run import Run
from utils.runtime.cpu import let_threads_wait_briefly
from utils.runtime.distributed import Distributed
from utils.runtime.process import RankInfo, told_by_each_machine
from utils.train_validation import TraVal

__all__ = ["Parts", "Training", "open_run"]


def find_run(command_line: arguments.CommandLine, args: Settings, distributed: Distributed) -> Run:
    """Return the run that the command line asks for; if it resumes or evaluates a checkpoint, with that checkpoint.

    The checkpoint's settings then replace the defaults.
    """
    run = Run(args, distributed, command_line.argv)

    point = distributed.run_on_rank0(
        lambda: run.images.find(args, folder_of_runs(args), run.warn), long_work="Finding the run"
    )
    if point is None:
        return run
    hub_networks.remember(point.state.get(hub_networks.KEY))  # on the ranks that have not read it
    if not args.run.resume_override:
        point.refuse_other_plugins(args.run.evaluate)
    args = command_line.resolve(distributed.world_size, point.settings)
    distributed.apply_tf32(args.precision.tf32)
    if args.run.evaluate or not args.run.resume:
        return dataclasses.replace(run, args=args, resume_point=point)
    distributed.run_on_rank0(point.refuse_strange_files)
    args = settings_to_go_on(point, args)
    if point.state["settings"].get("deterministic") and not args.run.deterministic:
        run.warn("the run was begun with --deterministic; without it the bits may differ from here on")
    position = (point.state["progress"]["epoch"], point.state["progress"]["step"])
    return dataclasses.replace(run, args=args, resume_point=point, position=position, found_at=point.path)


class Parts(NamedTuple):
    """Parts of a ``TraVal`` as the settings name them, in the order of its arguments, all on the run's device."""

    model: torch.nn.Module
    train_loader: TrainLoader
    optimizer: torch.optim.Optimizer | Optimizers
    criterion: torch.nn.Module
    scaler: torch.amp.GradScaler
    validation_loader: ValidationLoader


@dataclass
class Training:
    """A training run and its folder. ``extras``: its optional parts, as ``TraVal`` takes them.

    ``changed``: --resume-override continues with other settings or data, which the folder has to record.
    """

    run: Run
    components: Components
    extras: Extras
    changed: bool
    traval: TraVal | None = None

    @property
    def args(self) -> Settings:
        return self.run.args

    @property
    def writer(self) -> Writer:
        return self.run.writer

    @property
    def parts(self) -> Parts:
        own = self.components
        assert own.train_loader is not None
        optimizer = own.optimizers if len(own.optimizers) > 1 else own.optimizers[0]
        return Parts(own.model, own.train_loader, optimizer, own.criterion, own.scaler, own.validation_loader)

    def begin(self, traval: TraVal) -> None:
        """Begin the run with ``traval``, or load into it the state of the run to continue.

        Raises ``UserError`` if the network or loaders of ``traval`` are not those of ``parts``, on which checkpoints
        and tools rely, or if an optimizer has parameters that no checkpoint would hold.
        """
        parts = self.parts
        given = (traval.model, traval.train_loader, traval.validation_loader)
        if given != (parts.model, parts.train_loader, parts.validation_loader):
            raise UserError(
                "TraVal: its network or loaders are not those of run.parts, by which checkpoints and tools go; enter "
                "yours with @network and @dataset (docs/plugins.md), and name them by --arch and --dataname",
                on_all_ranks=True,
            )
        held = {*parts.model.parameters()}
        if any(p not in held for own in traval.optimizers for group in own.param_groups for p in group["params"]):
            raise UserError(
                "TraVal: an optimizer has parameters that are not the network's, such as a loss's; they would be "
                "neither saved nor summed over processes: make them part of the network, which you enter with @network",
                on_all_ranks=True,
            )
        self.traval = traval
        self.run.log_begin(self.components.describe(self.run) | self._made_otherwise(traval))
        if self.run.resume_point is None:
            self._begin_anew(traval)
        else:
            self._go_on(traval)

    def epochs(self, traval: TraVal) -> Iterator[int]:
        """Begin or continue the run; then yield the epochs left, for ``traval.train`` and ``traval.validation``."""
        self.begin(traval)
        yield from traval.epochs()

    def _made_otherwise(self, traval: TraVal) -> dict[str, str]:
        """Rows of the plan about parts that the user's program has made, in place of those that the settings name."""
        made = {
            "Loss": (traval.criterion, self.parts.criterion),
            "Optimizer": (traval.optimizers, self.components.optimizers),
        }
        own = {title: _name(own) for title, (own, named) in made.items() if own != named}
        return {title: f"{name}, which the program made, not what the settings name" for title, name in own.items()}

    def _begin_anew(self, traval: TraVal) -> None:
        """Save settings and initial state, and show settings and weights in TensorBoard."""
        run = self.run
        run.distributed.run_on_rank0(run.save_settings)
        run.show_settings(traval.reporter.charts())
        run.writer.weights(traval.model)
        traval.save_now("initial")
        run.distributed.run_on_rank0(run.warn_of_little_space)

    def _go_on(self, traval: TraVal) -> None:
        """Load the checkpoint; if the folder has to record changed settings or data, save the state as last.pt."""
        run = self.run
        point = run.begun
        # Each rank reads. Nothing is saved before all have, and nothing keeps what was read.
        with run.distributed.raise_on_all_ranks(), point.fitting():
            traval.load_state(point.read(traval.places()))
        run.writer.log("Continuing {} after epoch {}, step {}".format(run.found_at, *(run.position or ())))
        traval.keep_best()
        if self.changed or not run.distributed.run_on_rank0(lambda: point.is_recorded(run.args)):
            traval.save_now("last")
            run.distributed.run_on_rank0(run.save_settings)
            run.show_settings(traval.reporter.charts())

    def end(self) -> None:
        """Write the last lines of the log; if the loop was left before its end, save its state first."""
        traval = self.traval
        if traval is None:
            return
        traval.wait_for_checkpoint()
        if traval.progress.is_finished(self.args):
            self.run.log_end(traval.progress, report_of(traval.progress.last_validation))
            return
        traval.save_now("last")
        step = traval.progress.step
        self.writer.log(f"Run {self.run.own_folder} was left after step {step}; --resume auto continues")


def _name(made: Any) -> str:
    if isinstance(made, tuple):
        return ", ".join(map(_name, made))
    return getattr(made, "__name__", type(made).__name__)


@contextmanager
def opened(run: Run, stop_signals: StopSignals, hooks: Hooks | None = None) -> Iterator[Training]:
    """Context with the training of ``run``, from the beginning or the resume point; closes its folder at the end."""
    components = built(run)
    changed = _override(run, components)
    run.open_folder()
    checkpointer = Checkpointer(run.own_folder / "checkpoints", lambda line: run.writer.log(f"warning: {line}"))
    try:
        with stop_signals.held():
            extras = extras_of(run, components, checkpointer, stop_signals, hooks)
            training = Training(run, components, extras, changed)
            yield training
            training.end()
    except Stopped as stop:
        run.writer.log(f"Run {run.own_folder} {stop}")
        raise
    except (UserError, RuntimeError, KeyboardInterrupt) as error:
        with suppress(OSError):
            run.writer.log(f"Stopped: {str(error) or type(error).__name__}", to_console=False)
        raise
    except OSError as error:  # of the log, TensorBoard or the metrics files
        folder = run.own_folder
        advice = "--resume auto continues" if folder.is_dir() else f"it was removed or renamed; {IF_GONE}"
        raise UserError(f"--output: cannot write {folder} ({error}); {advice}") from error
    finally:
        with suppress(OSError):  # what matters was flushed before
            run.writer.close()
        with suppress(UserError):  # another error is under way; otherwise this one would have been raised
            checkpointer.wait()


def _override(run: Run, components: Components) -> bool:
    """Apply --resume-override to the resume point; warn of each difference. Return True if there are any."""
    point = run.resume_point
    data = components.data
    if point is None or not run.args.run.resume_override:
        return False
    with point.fitting():
        refuse_other_groups(point, run.args, lambda own: parameter_groups(own, components.model))
        state, differences = carry_over(
            point, run.args, data.classes, data.fingerprint, components.steps_per_epoch, components.optimizers
        )
    run.resume_point = dataclasses.replace(point, state=state)
    for line in differences:
        run.warn(line)
    return bool(differences)


# ------------------------------------------------------------------------------------- users' programs


@contextmanager
def open_run(words: Sequence[str]) -> Iterator[Training]:
    """Context with a training run for a program's own loop: with the folder, exact resume and exit codes of main.py.

    ``words``: a list of main.py's command-line arguments. If they have ``--plugin`` with the program's own path, flags
    and tools can name what its decorators of ``utils.plugin`` add, and a resume refuses a program that has changed.

    Ends the program as main.py does: with one line and exit code 2 for a user's mistake, with 75 after a stop signal
    (130 after Ctrl-C), and with 0 if ``--resume`` finds a finished run.
    """
    let_threads_wait_briefly()
    ranks = RankInfo()
    signals = StopSignals()
    try:
        ranks = RankInfo.from_environment()
        with told_by_each_machine(ranks):
            command_line = arguments.read(words)
            args = command_line.resolve(ranks.world_size)
        if args.run.evaluate or args.run.dry_run:
            raise UserError("--evaluate, --dry-run: this program trains; main.py has both", on_all_ranks=True)
        with signals, Distributed(ranks, args.run, args.precision.tf32) as distributed:
            run = find_run(command_line, args, distributed)
            if not run.is_finished:
                with opened(run, signals) as training:
                    yield training
                return
            run.report_finished()
        sys.exit(0)  # only now: an error or exit inside would leave NCCL's groups standing
    except (Exception, KeyboardInterrupt, StoppedAtOnce) as error:
        sys.exit(report(error, ranks, signals.received))
