"""A process and all that it has started: found and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

SECONDS_TO_END = 60  # of processes after SIGKILL; a write to a slow disk has to finish first


class Process(NamedTuple):
    """``parent`` is a process id; ``ended``: only its entry in the system's table is left."""

    parent: int
    ended: bool


def processes() -> dict[int, Process]:
    """All processes of this machine by their ids."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            # "pid (name) state parent ...", and the name may hold anything, brackets too
            state, parent = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            found[int(place.name)] = Process(int(parent), state in "ZX")
    if not found:  # no Linux
        lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True)
        for pid, parent, state, *_ in map(str.split, lines.stdout.splitlines()):
            found[int(pid)] = Process(int(parent), state.startswith("Z"))
    return found


def descendants(pid: int) -> set[int]:
    """All processes that ``pid``, or one started by it, has started, in whatever session; without itself."""
    table = processes()
    found: set[int] = set()
    while new := {child for child, process in table.items() if process.parent in {pid, *found}} - found:
        found |= new
    return found


def kill_tree(pid: int, sparing: Iterable[int] = (), look: Callable[[], Any] = lambda: None) -> Any:
    """Kill ``pid`` and its descendants at once and wait until they have ended.

    Returns what ``look`` returns while all of them are stopped and none can start another.
    """
    stopped: set[int] = set()
    while new := {pid, *descendants(pid)} - stopped - {*sparing}:
        stopped |= _send(new, signal.SIGSTOP)
    seen = look()
    _send(stopped, signal.SIGKILL)
    deadline = time.monotonic() + SECONDS_TO_END
    while time.monotonic() < deadline:
        table = processes()
        if all(each not in table or table[each].ended for each in stopped):
            break
        time.sleep(0.01)
    return seen


def _send(pids: set[int], number: int) -> set[int]:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return pids
