"""What holds for all tests of faults: nothing that they started is left running."""

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

import pytest

from tests.end_to_end import forked

MARK = "STARTED_BY_TEST"
SECONDS = 20  # a data worker looks every five seconds whether its training process still lives


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch):
    """Every process that inherits the test's environment, however deep, has ended when the test has.

    With the processes their ports are free. A process left is killed, and the test fails. Of processes forked from the
    tests' server, whose environment shows nothing, only those are found whose parents still run.
    """
    forked.server()  # begun here, it is none of the test's processes
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield
    deadline = time.monotonic() + SECONDS
    while (left := marked(mark) | dict.fromkeys(forked.running(), "forked")) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"left running: {left}"


def marked(mark):
    """The processes {pid: command line} whose environment holds ``mark``; zombies, which hold nothing, left out."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if f"{MARK}={mark}".encode() in (place / "environ").read_bytes():
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found
