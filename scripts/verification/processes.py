"""Find and kill a process and all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

SECONDS_TO_END = 60  # of processes after SIGKILL; a write to a slow disk has to finish first


def processes() -> dict[int, int]:
    """Map the id of each running process on this machine to its parent's id."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            # "pid (name) state parent ...", and the name may hold anything, brackets too
            state, parent = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":  # of which only the entry in the system's table is left
                found[int(place.name)] = int(parent)
    if not found:  # no Linux
        lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True)
        rows = map(str.split, lines.stdout.splitlines())
        found = {int(pid): int(parent) for pid, parent, state, *_ in rows if not state.startswith("Z")}
    return found


def descendants(pid: int) -> set[int]:
    """Ids of living processes that ``pid`` or its descendants have started, in any session; without ``pid``."""
    parents = processes()
    found: set[int] = set()
    while new := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= new
    return found


def kill_tree(pid: int) -> None:
    """Kill ``pid`` and its descendants at once; return when they have ended."""
    stopped: set[int] = set()
    while new := {pid, *descendants(pid)} - stopped:  # one that is stopped starts no other
        stopped |= _send(new, signal.SIGSTOP)
    _send(stopped, signal.SIGKILL)
    deadline = time.monotonic() + SECONDS_TO_END
    while time.monotonic() < deadline and stopped & processes().keys():
        time.sleep(0.01)


def _send(pids: set[int], number: int) -> set[int]:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return pids
