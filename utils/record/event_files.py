"""TensorBoard's event files brought back to the step of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path


def rewind(folder: Path, steps: int) -> set[str]:
    """Leave in ``folder`` one event file that holds each tag and step up to ``steps`` once; gives that step's tags.

    What a killed run logged after its last checkpoint will be logged again. TensorBoard's own mark for that
    (``purge_step``) is not heeded by all of its readers, so the points are taken out for good. The new file
    takes the place of the oldest before the others go; a kill in between does no harm, for then the next call
    finds the same points twice and keeps one.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    paths = sorted(folder.glob("events.out.tfevents.*"))
    if not paths:
        return set()
    header: bytes | None = None
    kept: dict[tuple[str, ...], bytes] = {}
    for path in paths:
        for record in RawEventFileLoader(str(path)).Load():  # ends quietly at a record that was cut off
            event = Event.FromString(record)
            if event.HasField("file_version"):
                header = header or record
            elif event.HasField("summary") and event.step <= steps:
                kept[(str(event.step), *(value.tag for value in event.summary.value))] = record
    temporary = folder / ".events.tmp"
    with open(temporary, "wb") as file:
        writer = RecordWriter(file)
        for record in (*([header] if header else []), *kept.values()):
            writer.write(record)
        writer.flush()
    os.replace(temporary, paths[0])
    for path in paths[1:]:
        path.unlink()
    return {tag for step, *tags in kept if step == str(steps) for tag in tags}
