"""TensorBoard's event files: writing them, and rewinding them to the step of a checkpoint."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.runtime.files import whole_file

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

NAMES = "events.out.tfevents.*"
TIME = re.compile(r"events\.out\.tfevents\.(\d+)")


class EventFile:
    """A new event file at ``path`` in ``folder``, whose name sorts after those of all event files there.

    ``SummaryWriter`` writes in a thread, which reports a full disk with a traceback besides raising ``OSError`` later;
    ``add`` raises it at once. ``summary``: torch's module with functions that make summaries for ``add``.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self.summary = summary
        self._event = Event
        self.path = folder / f"events.out.tfevents.{_next_time(folder)}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(open(self.path, "wb"))  # noqa: SIM115 - closed in close()
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, summary: Summary, step: int) -> None:
        """Write a ``summary``, such as points, to the file."""
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()


def _next_time(folder: Path) -> int:
    """Now, in nanoseconds, or just after the latest time in a file name: clocks are set back and differ among machines.

    TensorBoard reads the files in the order of their names, and never goes back to an earlier one.
    """
    times = [match[1] for path in folder.glob(NAMES) if (match := TIME.match(path.name))]
    digits = len(str(now := time.time_ns()))  # torch's SummaryWriter writes seconds, which are fewer
    return max([now, *(int(text[:digits].ljust(digits, "0")) + 1 for text in times)])


def rewind(folder: Path, steps: int) -> set[tuple[int, str]]:
    """Leave one event file in ``folder`` with each tag and step up to ``steps`` once; return its (step, tag) pairs.

    Whatever a killed run logged after its last checkpoint will be logged again. Not all of TensorBoard's readers honour
    TensorBoard's mark for that (``purge_step``), so the points are removed. The new file replaces the oldest before the
    others are deleted; after a kill in between, the next call finds the same points twice and keeps one of each.
    """
    paths = sorted(folder.glob(NAMES))
    if not paths:
        return set()
    header: bytes | None = None
    kept: dict[tuple[str, ...], bytes] = {}
    for path in paths:
        for record, event in events_in(path):
            if event.HasField("file_version"):
                header = header or record
            elif event.HasField("summary") and event.step <= steps:
                key = (str(event.step), *(value.tag for value in event.summary.value))
                kept[key] = record
    _replace(paths[0], [*([header] if header else []), *kept.values()])
    for path in paths[1:]:
        path.unlink()
    return {(int(step), tag) for step, *tags in kept for tag in tags}


def forget(folder: Path, tags: Container[str], in_use: Path) -> None:
    """Remove events with no tags but ``tags`` from the files in ``folder``, except from the file ``in_use``.

    Of summaries about a run as a whole, TensorBoard shows the oldest.
    """
    for path in sorted({*folder.glob(NAMES)} - {in_use}):
        found = [
            (record, event.HasField("summary") and all(value.tag in tags for value in event.summary.value))
            for record, event in events_in(path)
        ]
        if any(forgotten for _, forgotten in found):
            _replace(path, [record for record, forgotten in found if not forgotten])


def events_in(path: Path) -> Iterator[tuple[bytes, Any]]:
    """Yield each whole record of a file, as bytes and as the event that they encode."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for record in RawEventFileLoader(str(path)).Load():  # ends without an error at a truncated record
        yield record, Event.FromString(record)


def _replace(path: Path, records: Iterable[bytes]) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    with whole_file(path) as file:
        writer = RecordWriter(file)
        for record in records:
            writer.write(record)
        writer.flush()
