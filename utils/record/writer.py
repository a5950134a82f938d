"""Output of a run for people to read: TensorBoard, console, log file and metrics files.

All ranks call the same methods; the writers of all ranks except the main one are silent.
"""

from __future__ import annotations

import csv
import errno
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from utils.config.settings import UserError, as_text, as_user_error
from utils.data.transforms import for_people
from utils.record import board, curves
from utils.record.event_files import EventFile, forget, rewind
from utils.record.pictures import projector
from utils.record.pictures.collector import Gathered
from utils.record.run_folder import read_table
from utils.runtime import console
from utils.runtime.files import whole_file
from utils.runtime.heartbeat import Heartbeat
from utils.runtime.sharding import is_sharded

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

    from utils.record.tracking import Tracking

T = TypeVar("T")
OF_A_CLASS = {"val_accuracy": "Class_Accuracy/Test", "val_average_precision": "Class_Average_Precision/Test"}
PERCENT_EDGES = [*range(0, 101, 5)]
CONFUSION = "Confusion_Matrix/Test"
MISTAKES = "Worst_Mistakes/Test"
CURVE = "Precision_Recall"
ALL_CLASSES = "of all"
LOCK_SECONDS = 120  # NFS frees the locks of a machine that is gone after about 90
GRID_IMAGES = 64
GRID_SIDE = 32  # smaller images are enlarged to about this many pixels
_POSITIVE_EDGES = 1e-12 * 1.1 ** np.arange(774)
HISTOGRAM_EDGES = [*-_POSITIVE_EDGES[::-1], 0, *_POSITIVE_EDGES]  # those of torch's SummaryWriter


class _Bar(tqdm):
    """A progress bar that counts even where it is not shown."""

    def update(self, n: float | None = 1) -> bool | None:
        if self.disable:
            self.n += n
        return super().update(n)


class Writer:
    """Writes into ``folder``, or only to the console if None (``--evaluate``); a ``silent`` writer writes nothing.

    ``rows``: those of metrics.csv. ``resumed``: (epochs, steps) completed by the checkpoint that the run continues
    from; later records are dropped from the files, so that every epoch, step and tag is there once. ``once_locked`` is
    called before that, as soon as no other process can write to the run any more.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        silent: bool = False,
        progress: bool = False,
        resumed: tuple[int, int] | None = None,
        once_locked: Callable[[], None] | None = None,
    ) -> None:
        self.folder = folder
        self.silent = silent
        self.show_bars = progress and sys.stderr.isatty()
        self.rows: list[dict[str, Any]] = []
        self._log = self._events = None
        self._tracking: Tracking | None = None
        if folder is None:
            return
        with as_user_error(f"{folder}: cannot be written", advice="; give it write permission"):
            self._log = open(folder / "log.txt", "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - closed in close()
        _lock(self._log, folder)
        if once_locked is not None:
            once_locked()
        epochs, steps = resumed or (0, 0)
        recorded = rewind(folder, steps) if resumed else set()
        # What a resumed run may write again: the points of its step, and those of step 0, which come only once.
        self._there = {(step, tag) for step, tag in recorded if step in (0, steps)}
        self._descriptions: dict[str, str] = {}
        self._events = EventFile(folder)
        earlier = self._read("metrics.csv", lambda path: sorted(read_table(path)[0], key=_place_of)) or []
        self.rows = [row for row in earlier if _place_of(row)[0] <= epochs]
        there = [row for row in earlier if _place_of(row)[1] <= steps]
        if len(there) < len(earlier):  # at once: trackers and reports read the file
            self._write_csv("metrics.csv", there)
        self._curves = curves.Curves(folder)
        restored = self._curves.restore(self._read(curves.WHOLE, curves.read), steps) if resumed else 0
        last_row = _place_of(self.rows[-1])[0] if self.rows else 0  # an override within an epoch leaves its row out
        if last_row != epochs or restored != steps:
            self.log(f"warning: {folder}: metrics.csv or metrics.npz lacks what was recorded before; it stays lost")
        if resumed:
            self._warn_of_lost_points({step for step, _ in recorded}, steps)

    def _warn_of_lost_points(self, recorded: set[int], steps: int) -> None:
        """Warn if event files were deleted or cut: a row of metrics.csv has no points among the steps ``recorded``."""
        there = {str(step) for step in recorded}
        lost = [row["epoch"] for row in self.rows if row.get("step", "0") not in there]
        if lost or (steps and not recorded):
            which = f"epochs {', '.join(lost)}" if lost else f"the first {steps} steps"
            self.log(f"warning: {self.folder}: TensorBoard's event files lack the points of {which}; they stay lost")

    def _own_folder(self) -> Path:
        assert self.folder is not None
        return self.folder

    def _read(self, name: str, read: Callable[[Path], T]) -> T | None:
        """Read the file ``name`` with ``read``; None if it is missing. A damaged file is set aside."""
        folder = self._own_folder()
        path = folder / name
        if not path.is_file():
            return None
        try:
            return read(path)
        except Exception:  # csv, zipfile and NumPy raise many kinds of errors for damaged files
            os.replace(path, folder / f"{name}.damaged")
            self.log(f"warning: {path} cannot be read; it is kept as {name}.damaged, and begun anew")
            return None

    # -------------------------------------------------------------------------------- text

    def log(self, text: str, to_console: bool = True) -> None:
        """Write a line to log.txt and the console."""
        if self.silent:
            return
        if to_console:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
        console.note_line()
        if self._log:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            self._log.write("".join(f"{stamp} {line}\n" for line in text.splitlines()))
            self._log.flush()

    @contextmanager
    def bar(
        self, total: int, initial: int, description: str, unit: str, words: Callable[[], str] | None = None
    ) -> Iterator[tqdm]:
        """Context with a progress bar on a terminal, and a line whenever nothing was logged for long (``Heartbeat``).

        The line is ``words()``; by default it tells how many of ``total`` are done and how long the rest will take.
        """
        if self.silent:
            yield tqdm(disable=True)
            return
        bar = _Bar(
            total=total,
            initial=initial,
            desc=description,
            unit=unit,
            leave=False,
            dynamic_ncols=True,
            disable=not self.show_bars,
        )
        began = time.perf_counter()

        def done_so_far() -> str:
            seconds = (time.perf_counter() - began) * (total - bar.n) / max(1, bar.n - initial)
            left = f"  left {tqdm.format_interval(round(seconds))}" if bar.n > initial else ""
            return f"{description}  {unit} {bar.n}/{total}{left}"

        with bar, Heartbeat(words or done_so_far, partial(self.log, to_console=bar.disable)):
            yield bar

    # ------------------------------------------------------------------------- TensorBoard

    def text(self, tag: str, text: str, step: int = 0) -> None:
        """Write preformatted text to TensorBoard."""
        if self._events:
            indented = "\n".join(f"    {line}" for line in text.splitlines())
            self._events.add(self._events.summary.text(tag, indented), step)

    def images(self, tag: str, images: torch.Tensor) -> None:
        """Write a grid of float images (n, c, h, w) between 0 and 1 to TensorBoard, unless the run has it already."""
        if self._events and self._new([tag], 0):
            images = for_people(images[:GRID_IMAGES].float().cpu())
            scale = max(1, round(GRID_SIDE / images.shape[-1]))
            images = images.repeat_interleave(scale, dim=-1).repeat_interleave(scale, dim=-2)
            framed = torch.nn.functional.pad(images, (1, 1, 1, 1), value=0.5)
            self._events.add(self._events.summary.image(tag, framed), 0)

    def weights(self, model: torch.nn.Module) -> None:
        """Write histograms of all weights to TensorBoard, unless the network is sharded."""
        if self._events and not is_sharded(model):  # then each process has only a part of the weights
            for name, parameter in model.named_parameters():
                values = parameter.detach().float().cpu()
                self._events.add(self._events.summary.histogram(f"Initial_Weights/{name}", values, HISTOGRAM_EDGES), 0)

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write a point for each tag to TensorBoard."""
        if self._events:
            # One event for all: add_scalar for each of them would take ten times as long.
            from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

            points = []
            for tag in self._new(values, step):
                point = Summary.Value(tag=tag, simple_value=values[tag])
                if tag in self._descriptions:  # TensorBoard reads the first point's description
                    scalars = SummaryMetadata.PluginData(plugin_name="scalars")
                    text = self._descriptions.pop(tag)
                    point.metadata.CopyFrom(SummaryMetadata(plugin_data=scalars, summary_description=text))
                points.append(point)
            if points:
                self._events.add(Summary(value=points), step)

    def describe(self, descriptions: dict[str, str]) -> None:
        """Set descriptions of tags in TensorBoard, before their first points."""
        if self._events:
            self._descriptions |= descriptions

    def table_row(self, settings: Mapping[str, Any]) -> None:
        """Write the run's row of TensorBoard's HPARAMS table. ``settings``: text, numbers, booleans.

        The row is part of the run itself; ``SummaryWriter.add_hparams`` would add a second run inside it. TensorBoard
        takes columns and metrics from the runs that it shows, and puts settings in which these differ first.
        """
        if self._events:
            words = {name: as_text(value) if isinstance(value, bool) else value for name, value in settings.items()}
            _, row, _ = self._events.summary.hparams(words, {})
            self._renew(self._events, row)

    def charts(self, charts: Mapping[str, Mapping[str, Any]]) -> None:
        """Write charts of several tags to TensorBoard, as torch's ``custom_scalars`` takes them."""
        if self._events:
            self._renew(self._events, self._events.summary.custom_scalars(charts))

    def _renew(self, events: EventFile, summary: Summary) -> None:
        """Write a ``summary`` of which a run has only one, in place of the one that the run began with."""
        events.add(summary, 0)
        forget(self._own_folder(), {value.tag for value in summary.value}, events.path)

    def pictures(self, gathered: Gathered, classes: Sequence[str], step: int) -> None:
        """Write confusion matrix, worst mistakes, precision-recall curves and the projector's files for TensorBoard."""
        if not self._events:
            return
        from utils.record.pictures import drawing

        made = {}
        if gathered.confusion is not None:
            made[CONFUSION] = drawing.confusion_matrix(gathered.confusion, classes)
        if gathered.mistakes:
            made[MISTAKES] = drawing.worst_mistakes(gathered.mistakes, classes)
        for tag in self._new(made, step):
            self._events.add(board.picture(tag, made[tag]), step)
        names = [ALL_CLASSES, *(name.encode(errors="backslashreplace").decode() for name in classes)]
        curves_of = {f"{CURVE}/{name}": counts for name, counts in zip(names, gathered.curves, strict=False)}
        for tag in self._new(curves_of, step):
            self._events.add(board.precision_recall(tag, curves_of[tag]), step)
        if gathered.points:
            projector.write(self._own_folder(), gathered.points, classes)

    def _new(self, tags: Iterable[str], step: int) -> list[str]:
        """List the ``tags`` that have no point at ``step`` yet: a run may have stopped between two points."""
        return [tag for tag in tags if (step, tag) not in self._there]

    # ------------------------------------------------------------------------------- files

    def curves(self, rows: Sequence[Sequence[float]]) -> None:
        """Add per-step rows, in the order of ``curves.CURVES``, to metrics.npz."""
        if self.folder:
            self._curves.add(rows)

    def epoch(self, row: dict[str, Any]) -> None:
        """Write a row of metrics.csv, or complete the latest epoch's; bring metrics.npz up to date."""
        if self.folder:
            if self.rows and int(self.rows[-1]["epoch"]) == row["epoch"]:
                row = _joined(self.rows.pop(), row)
            self.rows.append(_six_digits_each(row))
            self._write_csv("metrics.csv", self.rows)
            self.flush()

    def classes(self, rows: Sequence[dict[str, Any]], step: int) -> None:
        """Write class_metrics.csv, a row per class, and a histogram of the classes' accuracies to TensorBoard.

        For multi-label data, the histogram is of average precisions.
        """
        if self._events and rows:
            name = next(name for name in OF_A_CLASS if name in rows[0])
            values = np.array([row[name] for row in rows if row["val_count"]])
            values = values[np.isfinite(values)]  # outputs that are no numbers have no average precision
            for tag in self._new([OF_A_CLASS[name]], step) if len(values) else ():
                self._events.add(self._events.summary.histogram(tag, values, PERCENT_EDGES), step)
            self._write_csv("class_metrics.csv", [_six_digits_each(row) for row in rows])

    def bad_images(self, paths: Sequence[str]) -> None:
        """Write bad_images.txt: the unreadable images that were skipped, one path per line."""
        if self.folder:
            with whole_file(self.folder / "bad_images.txt", "w", encoding="utf-8", errors="surrogateescape") as file:
                file.writelines(f"{path}\n" for path in paths)

    def _write_csv(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        if not rows:
            (self._own_folder() / name).unlink(missing_ok=True)
            return
        with whole_file(self._own_folder() / name, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            out = csv.DictWriter(file, fieldnames=_columns(rows))
            out.writeheader()
            out.writerows(rows)

    def flush(self) -> None:
        """Save everything so far to disk, before a checkpoint that relies on it."""
        if self.folder:
            self._curves.write()

    def attach(self, tracking: Tracking) -> None:
        """Keep ``tracking``, whose trackers follow what is written, until the run ends."""
        self._tracking = tracking

    def end_tracking(self, finished: bool) -> None:
        """End the trackers, for good if the run is ``finished``, within a limited time."""
        if self._tracking:
            tracking, self._tracking = self._tracking, None
            tracking.end(finished)

    def close(self) -> None:
        with ExitStack() as whatever_fails:
            if self._log:
                whatever_fails.callback(self._log.close)
            whatever_fails.callback(self.end_tracking, finished=False)
            if self._events:
                whatever_fails.callback(self._curves.write)
                whatever_fails.callback(self._events.close)


def build_writer(
    is_main: bool,
    folder: Path | None,
    *,
    progress: bool,
    resumed: tuple[int, int] | None = None,
    once_locked: Callable[[], None] | None = None,
) -> Writer:
    """Build the ``Writer``, which is silent on all processes except the main one. Raises ``UserError``."""
    if not is_main:
        return Writer(silent=True)
    try:
        return Writer(folder, progress=progress, resumed=resumed, once_locked=once_locked)
    except OSError as error:  # a folder in place of one of the run's files, no permission, or a full disk
        raise UserError(
            f"{error.filename or folder}: cannot be read or written ({error.strerror}); move it away, give permission "
            "or free some space"
        ) from error


def _lock(log: TextIO, folder: Path) -> None:
    """Keep other processes out of the run until ``log`` is closed in any way, even by kill -9.

    Unlike flock's, a record lock (``lockf``) is not inherited by data workers, which may outlive the process by
    seconds; the package filelock uses flock. If torchrun has restarted this process, wait for the previous one: a
    network file system keeps a lost machine's locks for a while.
    """
    import fcntl

    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    deadline = time.monotonic() + (LOCK_SECONDS if restarted else 0)
    while True:
        try:
            return fcntl.lockf(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return None  # a file system without locks
            if time.monotonic() >= deadline:
                raise UserError(f"{folder}: another process is writing this run; wait for it or stop it") from error
        time.sleep(1)


def _six_digits_each(row: dict[str, Any]) -> dict[str, Any]:
    """A row as metrics.csv shows it: floats to six significant digits; counts stay whole."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in row.items()}


def _place_of(row: Mapping[str, Any]) -> tuple[int, int]:
    """Epoch and step of a row of metrics.csv; step 0 in those of older versions."""
    return int(row["epoch"]), int(row.get("step") or 0)


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """All columns of ``rows``: those of the longest row (of several, the last), then those that it lacks.

    An epoch without validation lacks columns; --resume-override may drop or add some.
    """
    longest = max(reversed(rows), key=len)
    return [*dict.fromkeys(chain(longest, *rows))]


def _joined(begun: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """An epoch's row ``begun``, completed or replaced by ``row``; the seconds of both add up."""
    return begun | row | {"seconds": float(begun.get("seconds") or 0) + row["seconds"]}
