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
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from utils.config import arguments, hub_networks
from utils.config.settings import Settings, UserError
from utils.loop.exit_codes import NAME, report, stop_code, stop_line
from utils.loop.stop_signals import Stopped, StoppedAtOnce, StopSignals
from utils.record.run_folder import RunFolder
from utils.runtime.console import log_at_once
from utils.runtime.cpu import let_threads_wait_briefly
from utils.runtime.garbage import garbage_collection
from utils.runtime.process import RankInfo, end_process

if TYPE_CHECKING:
    from components import Components
    from utils.checkpoint.resume import ResumePoint
    from utils.loop.hooks import Hooks
    from utils.run import Run
    from utils.runtime.distributed import Distributed
    from utils.train_validation import TraVal


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
        os._exit(stop_code(stop))

    signals = StopSignals(end_at_once if ends_process else None)
    try:
        ranks = RankInfo.from_environment()
        command_line = arguments.read(argv)
        args = command_line.resolve(ranks.world_size)
        with signals:
            from utils.runtime.distributed import Distributed

            with Distributed(ranks, args.run, args.precision.tf32) as distributed:
                run = find_run(command_line, args, distributed)
                if run.args.run.evaluate:
                    return evaluate(run, hooks)
                return plan(run) if run.args.run.dry_run else train(run, signals, hooks)
    except (Exception, KeyboardInterrupt, StoppedAtOnce) as error:
        return report(error, ranks, signals.received)


# ----------------------------------------------------------------------------------------- three programs


def train(run: Run, stop_signals: StopSignals, hooks: Hooks | None) -> int:
    """Train, from the beginning or from the resume point, into the run's folder."""
    if run.is_finished:
        run.report_finished()
        return 0
    from components import build, build_traval
    from utils.checkpoint.checkpoint import Checkpointer
    from utils.train_validation import TrainingFailure

    garbage_collection.freeze_imports()
    components = build(run)
    garbage_collection.freeze_imports()
    run.distributed.run_on_rank0(lambda: components.warn_of_doubts(run), long_work="Looking at the data")
    changed = override(run, components)
    run.open_folder()
    checkpointer = Checkpointer(
        run.own_folder.checkpoints, run.is_main, lambda line: run.writer.log(f"warning: {line}")
    )
    try:
        with stop_signals.held():
            traval = build_traval(run, components, checkpointer, stop_signals, hooks)
            run.log_begin(components.describe(run))
            if run.resume_point is None:
                begin(run, traval)
            else:
                go_on(run, traval, changed)
            result = traval.fit()
        run.log_end(traval.progress, result)
        return 0
    except Stopped as stop:
        run.writer.log(f"Run {run.own_folder.folder} {stop}")
        return stop.exit_code
    except TrainingFailure as error:
        run.writer.log(f"Stopped: {error}", to_console=False)
        if run.is_main:
            print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    except (UserError, RuntimeError, KeyboardInterrupt) as error:
        with suppress(OSError):
            run.writer.log(f"Stopped: {str(error) or type(error).__name__}", to_console=False)
        raise
    except OSError as error:  # of the log, TensorBoard or the metrics files
        folder = run.own_folder.folder
        advice = "--resume auto continues" if folder.is_dir() else "it was removed; begin the run anew"
        raise UserError(f"--output: cannot write {folder} ({error}); {advice}") from error
    finally:
        with suppress(OSError):  # what matters was flushed before
            run.writer.close()
        with suppress(UserError):  # another error is under way; otherwise this one would have been raised
            checkpointer.wait()


def evaluate(run: Run, hooks: Hooks | None) -> int:
    """Validate once and leave nothing behind; with --dry-run, print what that would be."""
    from components import build_to_evaluate, build_traval
    from utils.record.summary import evaluation_header, evaluation_lines
    from utils.record.writer import build_writer

    garbage_collection.freeze_imports()
    components = build_to_evaluate(run)
    garbage_collection.freeze_imports()
    run.distributed.run_on_rank0(lambda: components.warn_of_doubts(run), long_work="Looking at the data")
    if run.args.run.dry_run:
        return show_plan(run, components)
    run.writer = build_writer(run.is_main, None, progress=run.args.logging.progress)
    rows = components.describe(run)
    lines = [f"{title}: {rows[title]}" for title in ("Preprocessing", "Validation", "Stem") if title in rows]
    for line in (*lines, *evaluation_header(run.resume_point, components.model)):
        run.writer.log(line)
    result = build_traval(run, components, hooks=hooks).validation(0, report=False)
    for line in evaluation_lines(result, run.args.data, run.resume_point):
        run.writer.log(line)
    return 0


def plan(run: Run) -> int:
    """Build everything to train, and print what that would be."""
    from components import build

    components = build(run)
    run.distributed.run_on_rank0(lambda: components.warn_of_doubts(run), long_work="Looking at the data")
    folder = run.folder_to_resume
    place = f"{folder} (continues there)" if folder else f"{RunFolder.planned(run.args)} (not created)"
    return show_plan(run, components, {"Run folder": place})


def show_plan(run: Run, components: Components, more: Mapping[str, str] = MappingProxyType({})) -> int:
    """Print a line for each part, and ``more``."""
    if run.is_main:
        rows = components.describe(run) | components.multiply_adds(run.distributed.device) | {**more}
        print("\n".join(f"{title:<14} {text}" for title, text in rows.items()))
    return 0


# ------------------------------------------------------------------------------------------------- find


def find_run(command_line: arguments.CommandLine, args: Settings, distributed: Distributed) -> Run:
    """The run with the checkpoint to resume or to evaluate, if any, whose settings replace the defaults of ``args``."""
    from utils.checkpoint.override import settings_to_go_on
    from utils.checkpoint.resume import find
    from utils.run import Run

    run = Run(args, distributed, command_line.argv)

    def find_point() -> ResumePoint | None:
        wanted = args.of_several_labels() if args.run.resume == "auto" and run.images.multilabel(args.data) else args
        return find(wanted, RunFolder.parent(args), run.warn, lambda: run.images.fingerprint(args.data))

    point = distributed.run_on_rank0(find_point, long_work="Finding the run")
    if point is None:
        return run
    hub_networks.remember(point.state.get(hub_networks.KEY))  # on the ranks that have not read it
    if not args.run.resume_override:
        point.refuse_other_plugins()
    args = command_line.resolve(distributed.world_size, point.settings)
    distributed.apply_tf32(args.precision.tf32)
    if args.run.evaluate or not args.run.resume:
        return dataclasses.replace(run, args=args, resume_point=point)
    distributed.run_on_rank0(point.refuse_strange_files)
    args = settings_to_go_on(point, args)
    if point.state["settings"].get("deterministic") and not args.run.deterministic and run.is_main:
        run.warn("the run was begun with --deterministic; without it the bits may differ from here on")
    position = (point.state["progress"]["epoch"], point.state["progress"]["step"])
    return dataclasses.replace(run, args=args, resume_point=point, position=position, found_at=point.path)


# -------------------------------------------------------------------------------------- begin or go on


def begin(run: Run, traval: TraVal) -> None:
    """Save the initial state and show TensorBoard what begins."""
    distributed = run.distributed
    distributed.run_on_rank0(run.save_settings)
    run.show_settings(traval.reporter.charts())
    run.writer.weights(traval.model)
    traval.save_now("initial")
    distributed.run_on_rank0(run.warn_of_little_space)


def go_on(run: Run, traval: TraVal, changed: bool) -> None:
    """Load the checkpoint; with ``changed`` settings or data, which the folder has to record, save it as the last."""
    point = run.begun
    distributed = run.distributed
    # Each rank reads. Nothing is saved before all have, and nothing keeps what was read.
    with distributed.raise_on_all_ranks(), point.fitting():
        traval.load_state(point.read(traval.places()))
    run.writer.log("Continuing {} after epoch {}, step {}".format(run.found_at, *(run.position or ())))
    traval.keep_best()
    if changed or not distributed.run_on_rank0(lambda: point.is_recorded(run.args)):
        traval.save_now("last")
        distributed.run_on_rank0(run.save_settings)
        run.show_settings(traval.reporter.charts())


def override(run: Run, components: Components) -> bool:
    """Apply --resume-override to the resume point; warn of each difference. Returns whether there are any."""
    from utils.checkpoint.override import carry_over, refuse_other_groups
    from utils.optim.groups import parameter_groups

    point = run.resume_point
    data = components.data
    steps = components.steps_per_epoch
    if point is None or not run.args.run.resume_override:
        return False
    with point.fitting():
        refuse_other_groups(point, run.args, lambda own: parameter_groups(own, components.model))
        state, differences = carry_over(point, run.args, data.classes, data.fingerprint, steps, components.optimizer)
    run.resume_point = dataclasses.replace(point, state=state)
    for line in differences if run.is_main else ():
        run.warn(line)
    return bool(differences)


if __name__ == "__main__":
    garbage_collection.put_off()
    end_process(main(sys.argv[1:], ends_process=True))
