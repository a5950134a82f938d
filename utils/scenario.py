"""The run's name and folder: ``OUTPUT/DATANAME/ARCH/TIME_SPECIFICNAME/``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from utils.settings import Settings, UserError


@dataclass(frozen=True)
class Scenario:
    """Where a run's files go. ``name`` is the folder's own name, used as the run's title."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @classmethod
    def create(cls, args: Settings, world_size: int) -> Scenario:
        """Make a folder that no other run has, also not one started in the same second."""
        planned = cls.planned(args, world_size)
        for folder in (planned.parent.parent, planned.parent):
            if os.path.islink(folder):
                raise UserError(
                    f"--output {args.run.output}: {folder} is a link, and runs stay inside the output folder; remove "
                    "it, or give the --output that it leads to"
                )
        attempt = 1
        while True:
            folder = planned if attempt == 1 else planned.with_name(f"{planned.name}_{attempt}")
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.mkdir()  # fails when another run made it first: the file system is the referee
                (folder / "checkpoints").mkdir()
                return cls(folder)
            except FileExistsError as error:
                if not folder.is_dir():
                    raise UserError(f"--output {args.run.output}: {error.filename} is not a folder") from error
                attempt += 1
            except OSError as error:
                raise UserError(f"--output {args.run.output}: cannot make {folder}: {error.strerror}") from error

    @staticmethod
    def parent(args: Settings) -> Path:
        """The folder that holds all runs of this data set and network."""
        return Path(args.run.output) / args.data.dataname / _as_name(args.model.arch)

    @classmethod
    def planned(cls, args: Settings, world_size: int) -> Path:
        """The folder that a run started now would get if it is free."""
        time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        return cls.parent(args) / f"{time}_{specific_name(args, world_size)}"


def specific_name(args: Settings, world_size: int) -> str:
    """The settings that tell runs apart, in one folder name of at most 200 characters."""
    optimisation = args.optimisation
    parts = [
        args.data.dataname,
        args.model.arch,
        args.model.init,
        f"procs{world_size}",
        f"batch{args.data.global_batch_size}",
        optimisation.optimizer,
        f"lr{optimisation.lr:g}",
        optimisation.lr_policy,
        f"epochs{optimisation.epochs}",
        *([args.run.name] if args.run.name else []),
    ]
    return "_".join(_as_name(part) for part in parts)[:200]


def _as_name(text: str) -> str:
    """Text as one harmless path component."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).lstrip(".-")[:80] or "unnamed"
