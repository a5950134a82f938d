"""Ends of the program by an error: the line on stderr and the exit code for a user's mistake or a signal."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from utils.config import plugins
from utils.config.settings import UserError
from utils.loop.stop_signals import Stopped, StoppedAtOnce, TrainingFailure
from utils.runtime.console import INTERRUPTED, lacks_package
from utils.runtime.process import RankInfo

NAME = "main.py"
FAILED = 1
MISTAKE = 2


def report(error: BaseException, ranks: RankInfo, signal_received: int, trains: bool = True) -> int:
    """Print why the program ends; return its exit code. Raise ``error`` again if only a traceback helps.

    ``signal_received``: a stop signal that this process received, 0 without one. ``trains``: False for an evaluation or
    a plan.
    """
    if isinstance(error, UserError):
        if ranks.is_main or not error.on_all_ranks:
            print("\n".join(f"{NAME}: {' '.join(line.split())}" for line in error.mistakes), file=sys.stderr)
        return MISTAKE
    if isinstance(error, Stopped):  # the log has said it
        return error.exit_code
    if isinstance(error, TrainingFailure):
        if ranks.is_main:
            print(f"{NAME}: {error}", file=sys.stderr)
        return FAILED
    if isinstance(error, ImportError) and plugins.mistake(error) is None:
        return lacks_package(NAME, error)
    if isinstance(error, RuntimeError | MemoryError):
        from utils.runtime.memory import lacks_memory

        if lacks_memory(error):
            rank = f"rank {ranks.rank}: " if ranks.world_size > 1 else ""
            print(f"{NAME}: {rank}{_out_of_memory(error)}", file=sys.stderr)
            return MISTAKE
    if isinstance(error, KeyboardInterrupt | StoppedAtOnce):
        if ranks.is_main:
            print(stop_line(error, trains), file=sys.stderr)
        return stop_code(error)
    reason = None
    if isinstance(error, RuntimeError) and ranks.world_size > 1:
        from utils.runtime.distributed import lost_contact

        reason = lost_contact(error)
    if reason is None:
        own = plugins.mistake(error)
        if own is None:
            raise error
        print(f"{NAME}: {own}", file=sys.stderr)
        return MISTAKE
    if signal_received:  # the other ranks received one, too, and ended first
        stop = StoppedAtOnce(signal_received, "as the others were ending")
        print(stop_line(stop), file=sys.stderr)
        return stop_code(stop)
    print(
        f"{NAME}: rank {ranks.rank} has lost the other processes ({reason}); the reason stands in their output; "
        "the same command with --resume auto continues",
        file=sys.stderr,
    )
    return FAILED


def _out_of_memory(error: BaseException) -> str:
    """A line about lack of memory: where, and what needs less."""
    from utils.runtime.memory import out_of_memory

    frames = traceback.extract_tb(error.__traceback__)
    if any(Path(frame.filename).parts[-2:] == ("loop", "validation.py") for frame in frames):
        return f"{out_of_memory(error)} in validation: lower --val-batch-size"
    return (
        f"{out_of_memory(error)}: a smaller --batch-size needs less; with --global-batch-size and a larger "
        "--accumulate, a step takes the same images in more passes (the same except for batch norm); "
        "--grad-checkpointing and a smaller --image-size help, too, and --loader stream where images are kept in "
        "memory; scripts/doctor.py names the largest batch"
    )


def stop_line(stop: BaseException, trains: bool = True) -> str:
    """The line to print about a signal outside of training; not ``trains``: there was nothing to continue."""
    if not trains:
        return f"{NAME}: stopped by a signal; nothing was saved, and the same command begins again"
    return f"{NAME}: {str(stop) or 'interrupted; the same command with --resume auto continues'}"


def stop_code(stop: BaseException) -> int:
    """The exit code after a signal outside of training."""
    return stop.exit_code if isinstance(stop, StoppedAtOnce) else INTERRUPTED
