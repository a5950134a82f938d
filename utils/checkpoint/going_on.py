"""Makes the checkpoint that a run goes on from the newest of its folder, before anything else there changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from utils.checkpoint.checkpoint import Checkpointer, read_quickly
from utils.checkpoint.override import refuse_impossible
from utils.checkpoint.resume import ResumePoint
from utils.config.settings import Settings, UserError
from utils.runtime.files import sha256

OF_ONE_STATE = ("best", "final")
ABANDONED = "abandoned_"


def settings_to_go_on(point: ResumePoint, args: Settings) -> Settings:
    """The settings ``args`` with what the run of ``point`` has measured when it began.

    Raises ``UserError`` for what its state does not fit or, without --resume-override, for any other experiment.
    """
    if args.run.resume_override:
        refuse_impossible(point, args)
    else:
        point.refuse_differences(args)
    return args.with_values(**{name: point.state["settings"].get(name) for name in args.unmeasured()})


def take_as_last(point: ResumePoint) -> list[str]:
    """Make ``point`` the last checkpoint of its run; gives lines about those of later steps, which are set aside.

    Otherwise a kill before the next save would leave a folder whose checkpoints know more than its curves, and best.pt
    would be of an epoch that the run no longer has. For the one process that holds the folder's lock. Raises
    ``UserError`` if another process has written the run since ``point`` was found.
    """
    if not point.path.is_file() or sha256(point.path) != point.digest:
        raise UserError(f"{point.path}: another process has continued the run; the same command goes on from there")
    checkpoints = point.folder / "checkpoints"
    if point.path.absolute() != last_of(point.folder).absolute():
        Checkpointer(checkpoints, is_main=True).take_as_last(point.path)
    step = point.state["progress"]["step"]
    return [line for name in OF_ONE_STATE if (line := _set_aside(checkpoints / f"{name}.pt", step))]


def last_of(folder: Path) -> Path:
    """Where the run in ``folder`` keeps its last checkpoint."""
    return folder / "checkpoints" / "last.pt"


def _set_aside(path: Path, step: int) -> str | None:
    """Rename the checkpoint ``path`` if it is of a later step, and say so."""
    its_step = _step_of(path)
    if its_step is None or its_step <= step:
        return None
    kept = path.with_name(f"{ABANDONED}{path.name}")
    os.replace(path, kept)
    return f"{path} is of step {its_step}, from which the run goes back to step {step}; it is kept as {kept.name}"


def _step_of(path: Path) -> int | None:
    """The step of a checkpoint; None if there is none, or a damaged one, which stays where it is."""
    try:
        state: Any = read_quickly(path)
        return int(state["progress"]["step"])
    except Exception:  # a damaged file makes torch raise almost anything
        return None
