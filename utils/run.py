"""``Run``: what one execution of the program is, from its command line to its log."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from utils.checkpoint.going_on import last_of, take_as_last
from utils.checkpoint.resume import ResumePoint
from utils.config.settings import Settings
from utils.record.run_folder import RunFolder
from utils.record.writer import NullWriter, build_writer
from utils.runtime.distributed import Distributed


@dataclass
class Run:
    """One run: its settings and processes, what it resumes, and, once it trains, its folder and writer.

    ``argv``: the command line, without the program's name. ``resume_point``: the checkpoint to resume or to evaluate.
    ``position``, ``found_at``: the epoch and step after which it was saved, and where it lay then. ``warnings``: those
    issued so far, for the log.
    """

    args: Settings
    distributed: Distributed
    argv: Sequence[str] = ()
    resume_point: ResumePoint | None = None
    position: tuple[int, int] | None = None
    found_at: Path | None = None
    run_folder: RunFolder | None = None
    writer: NullWriter = field(default_factory=NullWriter)
    warnings: list[str] = field(default_factory=list)

    @property
    def is_main(self) -> bool:
        return self.distributed.is_main

    @property
    def folder_to_resume(self) -> Path | None:
        """The folder in which the run continues; None when it gets a new one."""
        return self.resume_point and self.resume_point.folder

    def warn(self, line: str) -> None:
        """Print a warning, and keep it for the log. For one process, or for all where they differ."""
        print(f"main.py: warning: {line}", file=sys.stderr)
        self.warnings.append(line)

    def open_folder(self) -> None:
        """Make or take the run's folder, and open its log and metrics files on the main process. For all ranks."""
        folder = self.folder_to_resume
        self.run_folder = (
            RunFolder(folder) if folder else self.distributed.run_on_rank0(lambda: RunFolder.create(self.args))
        )
        with self.distributed.raise_on_all_ranks():
            self.writer = build_writer(
                self.is_main,
                self.run_folder.folder,
                progress=self.args.logging.progress,
                resumed=self.position,
                once_locked=self._take_as_last if folder else None,
            )
        if folder:
            self.resume_point = dataclasses.replace(self.resume_point, path=last_of(folder))

    def _take_as_last(self) -> None:
        for line in take_as_last(self.resume_point):
            self.warn(line)
