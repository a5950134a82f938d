"""``Run``: one execution of the program, from its command line to the last line of its log."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.checkpoint.progress import Progress
from utils.checkpoint.resume import DEFAULTS, ResumePoint, is_at, last_of, take_as_last
from utils.checkpoint.sharded import bytes_of
from utils.config import arguments
from utils.config.field import FLAG
from utils.config.settings import Settings, as_flag, shaping
from utils.config.spelling import counted
from utils.data.datasets import DataReader
from utils.data.progress_log import ProgressLog
from utils.record import tracking
from utils.record.doubts import doubts
from utils.record.epoch_scalars import best_metric, selection_line
from utils.record.metrics import cut_words
from utils.record.multilabel import AnyReport
from utils.record.provenance import COMMIT, MACHINE, PLAN, commit, machine
from utils.record.run_folder import make_folder
from utils.record.summary import final_line, stopped_early, table_row, tensorboard, versions
from utils.record.writer import Writer, build_writer
from utils.runtime import console
from utils.runtime.distributed import Distributed
from utils.runtime.files import whole_file

FIRST_SEEN = "http://localhost:6006/?tagFilter=%5ELoss%7C%5E"  # and the headline's, instead of the alphabet's first
TAGS = {"top1": "Top1", "map": "MAP"}
CHECKPOINTS_KEPT = 5  # last, previous, best and final, and the one being written
STATES_PER_WEIGHT = 3  # a weight itself, and what most optimizers and a moving average add to it
# Rows of the plan that a run shows on the console as well; its log has all of them.
ON_CONSOLE = (
    *("Data", "Labels", "Preprocessing", "Validation", "Sampling", "Training size", "Loader", "Network", "Stem"),
    *("Parameters", "Processes", "Batch", "Exchange", "Steps", "Teacher", "Weight average", "Selection", "Plug-ins"),
    "Precision",
)


@dataclass
class Run:
    """A run: its settings and processes, what it resumes, and, once it trains, its folder and writer.

    ``args`` never change once they are ``settled``. ``argv``: the command line, without the program's name.
    ``resume_point``: the checkpoint to resume or to evaluate. ``position``: the epoch and step after which the
    checkpoint to resume was saved. ``found_at``: the file in which it was found. ``warnings``: those issued so far, for
    the log. ``reader`` reads the run's data, and is made when first needed. ``plan``: the plan's rows, once the log has
    begun.
    """

    args: Settings
    distributed: Distributed
    argv: Sequence[str] = ()
    resume_point: ResumePoint | None = None
    position: tuple[int, int] | None = None
    found_at: Path | None = None
    folder: Path | None = None
    writer: Writer = field(default_factory=Writer)
    warnings: list[str] = field(default_factory=list)
    reader: DataReader | None = None
    settled: bool = False
    plan: Mapping[str, str] = field(default_factory=dict)

    def settle(self, args: Settings) -> Settings:
        """Take and return the final settings, with nothing left to measure. Call it once data and network are built."""
        assert not self.settled
        self.settled = True
        self.args = args
        return args

    @property
    def is_main(self) -> bool:
        return self.distributed.is_main

    @property
    def images(self) -> DataReader:
        self.reader = self.reader or DataReader.of(self.args, self.distributed.device, self.progress_log, self.is_main)
        return self.reader

    @property
    def progress_log(self) -> ProgressLog:
        """The log for the progress of long work before the run's own log is open."""
        return ProgressLog(console.log, self.args.logging.progress)

    @property
    def folder_to_resume(self) -> Path | None:
        """The folder in which the run continues; None if it gets a new one."""
        return None if self.resume_point is None else self.resume_point.folder

    @property
    def begun(self) -> ResumePoint:
        """The checkpoint from which this run continues; only for a run that does."""
        assert self.resume_point is not None
        return self.resume_point

    @property
    def own_folder(self) -> Path:
        """The run's folder, once ``open_folder`` has opened it."""
        assert self.folder is not None
        return self.folder

    @property
    def is_finished(self) -> bool:
        """True if the run to resume has nothing left to do."""
        if self.position is None:
            return False
        progress = Progress.from_state(self.begun.state["progress"])
        waits_anew = self.args.run.resume_override and {*shaping("stopping")} & self.begun.differences(self.args).keys()
        if waits_anew and not progress.stops_early(self._args_of_figures):
            progress.wait_anew()  # as ``carry_over`` makes it
        return progress.is_finished(self.args)

    @property
    def _args_of_figures(self) -> Settings:
        """The settings that gave the figures of the run to resume; --resume-override may have others."""
        begun = DEFAULTS | self.begun.state["settings"]
        stopping = ("early_stopping", "early_stopping_metric", "early_stopping_delta")
        names = ("best_metric", "max_val_batches", "epochs", *stopping)
        return self.args.with_values(**{name: begun[name] for name in names})

    def warn(self, line: str) -> None:
        """Print a warning and keep it for the log, on the main process."""
        if not self.is_main:
            return
        print(f"main.py: warning: {line}", file=sys.stderr)
        self.warnings.append(line)

    def describe(self) -> dict[str, str]:
        """The rows of the plan about the run as a whole."""
        deterministic = ", deterministic" if self.args.run.deterministic else ""
        return {
            "Seed": f"{self.args.run.seed}{deterministic}",
            "Selection": selection_line(self.args.run),
            "Trackers": tracking.describe(self.args.logging.track),
        }

    # ----------------------------------------------------------------------------------------- its folder

    def open_folder(self) -> None:
        """Make or take the run's folder; open its log and metrics files on the main process. All ranks must call it."""
        folder = self.folder_to_resume
        self.folder = folder or self.distributed.run_on_rank0(lambda: make_folder(self.args))
        with self.distributed.raise_on_all_ranks():
            self.writer = build_writer(
                self.is_main,
                self.own_folder,
                progress=self.args.logging.progress,
                resumed=self.position,
                once_locked=(lambda: take_as_last(self.begun, self.warn)) if folder else None,
            )
        if folder:
            self.resume_point = dataclasses.replace(self.begun, path=last_of(folder))
        if self.is_main and self.args.logging.track:
            anew = self.args.run.resume_override
            self.writer.attach(tracking.Tracking(self.args, self.own_folder, anew, self.writer.log))

    def save_settings(self) -> None:
        """Write ``config.yaml``: every setting and where it came from, in a form that --config reads back.

        Above the settings, as comments: command line, versions, machine, commit of this repository, and the plan. An
        existing file is kept as ``config.1.yaml``, the next as ``config.2.yaml``.
        """
        made_by = ", ".join(f"{name} {version}" for name, version in versions().items())
        folder = self.own_folder
        path = folder / "config.yaml"
        if path.is_file():
            kept = (folder / f"config.{number}.yaml" for number in itertools.count(1))
            shutil.copyfile(path, next(copy for copy in kept if not copy.exists()))
        plan = [f"{PLAN}{title}: {text}" for title, text in self.plan.items()]
        header = "\n".join([f"main.py {shlex.join(self.argv)}", made_by, self._provenance(), *plan])
        with whole_file(path, "w", encoding="utf-8") as file:
            file.write(arguments.as_recipe(self.args, header))

    def show_settings(self, charts: dict[str, dict[str, Any]]) -> None:
        """Show in TensorBoard what ``save_settings`` has saved, and set up its ``charts``."""
        text = (self.own_folder / "config.yaml").read_text(encoding="utf-8") if self.is_main else ""
        self.writer.text("Settings", text, step=self.position[1] if self.position else 0)
        self.writer.table_row(table_row(self.args))
        self.writer.charts(charts)

    def warn_of_little_space(self) -> None:
        """Warn if the disk has too little room for the checkpoints to come, judged by the first. Call it on rank 0."""
        folder = self.own_folder
        checkpoints = self.own_folder / "checkpoints"
        first = (checkpoints / "initial.pt").stat().st_size + bytes_of(checkpoints / "initial.pt")
        free = shutil.disk_usage(checkpoints).free
        needed = CHECKPOINTS_KEPT * STATES_PER_WEIGHT * first
        if free < needed:
            self.writer.log(
                f"warning: {folder} has {free / 1e6:,.1f} MB left on its disk, and checkpoints may take "
                f"{needed / 1e6:,.1f} MB; free some space or choose another --output"
            )

    # -------------------------------------------------------------------------------------------- its log

    def log_begin(self, rows: Mapping[str, str]) -> None:
        """Write the first lines of the log: what runs where, by the ``rows`` of the plan."""
        self.plan = {title: text for title, text in rows.items() if text != "none"}
        log = self.writer.log
        log(f"Run {self.own_folder}")
        log(f"Command: main.py {shlex.join(self.argv)}", to_console=False)
        if self.position is not None and self.is_main:  # of a new run, config.yaml tells it
            log(self._provenance(), to_console=False)
        for title, text in self.plan.items():
            log(f"{title}: {text}", to_console=title in ON_CONSOLE)
        for line in self.warnings:
            log(f"warning: {line}", to_console=False)

    def log_end(self, progress: Progress, report: AnyReport) -> None:
        """Write the last lines of a finished run's log."""
        args = self.args
        folder = self.own_folder
        log = self.writer.log
        cut = cut_words(args.data.max_val_batches)
        for doubt in doubts(self.writer.rows, args.data.dataname):
            log(f"warning: {doubt}")
        if early := stopped_early(args, progress):
            log(f"Stopped early{cut}: {early}")
        swa = args.average.first_averaged_epoch(args.optimisation.epochs)
        if swa and not progress.averaged_epochs:
            log(f"warning: no weights were averaged: --swa-start-epoch begins in epoch {swa}, and the run ended before")
        metric = best_metric(args.run)
        headline = report.HEADLINE
        if progress.best_epoch:
            reached = f"{headline}{cut} {progress.best_headline:.2f}"
            if metric.name == headline:
                log(f"Best {reached} in epoch {progress.best_epoch}")
            else:
                reason = f"with the {metric.words}, {progress.best_value:.4f}"
                log(f"Best epoch {progress.best_epoch}, {reason}: {reached}")
        elif progress.best_value is not None:
            reached = f"{report.headline:.2f} after step {progress.step}"
            epoch = progress.epoch + (progress.step_in_epoch > 0)
            log(f"Best {headline}{cut} {reached}, within epoch {epoch}; no whole epoch was validated")
        inside = folder.absolute().is_relative_to(Path(args.run.output).absolute())
        logs = args.run.output if inside else str(folder)
        log(f"TensorBoard ({FIRST_SEEN}{TAGS[headline]}): {tensorboard()} --logdir {shlex.quote(logs)}")
        self.writer.end_tracking(finished=True)
        log(final_line(progress, folder, args))

    def report_finished(self) -> None:
        """Print that nothing is left to do, so that a command with --resume auto can be repeated blindly.

        Warn of other settings that --resume-override brings too late, and send trackers what they lack.
        """
        if not self.is_main:
            return
        point = self.begun
        values = self.args.result_values()
        progress = Progress.from_state(point.state["progress"])
        args = self._args_of_figures
        early = stopped_early(args, progress)
        end = f"; it stopped early {early}" if early else ""
        done = f"{counted(progress.epoch, 'epoch')}, {counted(progress.step, 'step')}"
        print(f"{point.folder or point.path} is finished: {done}{end}")
        if self.args.run.resume_override and (late := point.differences(self.args)):
            flags = ", ".join(as_flag(name, values[name]) for name in late)
            self.warn(
                f"--resume-override: nothing remains to be trained with {flags}; what the run has is left as it is"
            )
        given = self.args.run.resume != "auto" and self.args.origins["datapath"] == FLAG
        if given and not is_at(point.state, self.args.data):
            self.warn(
                f"--datapath {self.args.data.datapath}: nothing was read there, for nothing remains to be trained"
            )
        if point.folder is not None:
            tracking.send_the_rest(self.args, point.folder, console.log)
        print(final_line(progress, point.folder, args))

    def _provenance(self) -> str:
        return f"{MACHINE}{machine(self.distributed)}\n{COMMIT}{commit()}"
