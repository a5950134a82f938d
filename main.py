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

import sys
from typing import TYPE_CHECKING

from utils.config import arguments
from utils.loop.exit_codes import report, stop_code, stop_line
from utils.loop.stop_signals import StoppedAtOnce, StopSignals
from utils.record.run_folder import planned_folder
from utils.runtime.console import log_at_once
from utils.runtime.cpu import let_threads_wait_briefly
from utils.runtime.garbage import garbage_collection
from utils.runtime.process import RankInfo, end_process, told_by_each_machine

if TYPE_CHECKING:
    from utils.loop.hooks import Hooks
    from utils.run import Run

__all__ = ["main"]


def main(argv: list[str], ends_process: bool = False, hooks: Hooks | None = None) -> int:
    """Run the program; return its exit code: 0 done, 1 failed, 2 an error the user can fix, 75 or 130 (Ctrl-C) stopped.

    ``ends_process``: the process exits with this code right away, so a late signal must not change it. ``hooks`` are
    called at the points of training and validation that they name.
    """
    let_threads_wait_briefly()
    ranks = RankInfo()
    trains = {"-e", "--evaluate", "--dry-run"}.isdisjoint(argv)

    def end_at_once(stop: BaseException) -> None:
        if ranks.is_main:
            log_at_once(stop_line(stop, trains))
        os._exit(stop_code(stop))

    signals = StopSignals(end_at_once if ends_process else None)
    try:
        ranks = RankInfo.from_environment()
        with told_by_each_machine(ranks):
            command_line = arguments.read(argv)
            args = command_line.resolve(ranks.world_size)
        with signals:
            from training import find_run
            from utils.runtime.distributed import Distributed

            with Distributed(ranks, args.run, args.precision.tf32) as distributed:
                run = find_run(command_line, args, distributed)
                if run.args.run.dry_run:
                    return plan(run)
                return evaluate(run, hooks) if run.args.run.evaluate else train(run, signals, hooks)
    except (Exception, KeyboardInterrupt, StoppedAtOnce) as error:
        return report(error, ranks, signals.received, trains)


# ----------------------------------------------------------------------------------------- three programs


def train(run: Run, stop_signals: StopSignals, hooks: Hooks | None) -> int:
    """Train, from the beginning or from the resume point, into the run's folder."""
    if run.is_finished:
        run.report_finished()
        return 0
    from components import build_traval
    from training import opened

    with opened(run, stop_signals, hooks) as training:
        traval = build_traval(run, training.components, training.extras)
        training.begin(traval)
        traval.fit()
    return 0


def evaluate(run: Run, hooks: Hooks | None) -> int:
    """Validate once and leave nothing behind."""
    from components import build_traval, built, extras_of
    from utils.record.summary import evaluation_header, evaluation_lines
    from utils.record.writer import build_writer

    components = built(run)
    run.writer = build_writer(run.is_main, None, progress=run.args.logging.progress)
    rows = components.describe(run)
    lines = [f"{title}: {rows[title]}" for title in ("Preprocessing", "Validation", "Stem") if title in rows]
    for line in (*lines, *evaluation_header(run.resume_point, components.model)):
        run.writer.log(line)
    result = build_traval(run, components, extras_of(run, components, hooks=hooks)).validation(0, report=False)
    for line in evaluation_lines(result, run.args.data, run.resume_point):
        run.writer.log(line)
    return 0


def plan(run: Run) -> int:
    """Build everything for training or evaluation, and print the plan, a line for each part."""
    from components import built

    components = built(run)
    if run.is_main:
        rows = components.describe(run)
        count = components.network.multiply_adds(components.data.image_shape, run.distributed.device)
        rows["Multiply-adds"] = f"{count:,} an image"
        if not run.args.run.evaluate:
            folder = run.folder_to_resume
            planned = f"{folder} (continues there)" if folder else f"{planned_folder(run.args)} (not created)"
            rows["Run folder"] = planned
        print("\n".join(f"{title:<14} {text}" for title, text in rows.items()))
    return 0


if __name__ == "__main__":
    garbage_collection.put_off()
    end_process(main(sys.argv[1:], ends_process=True))
