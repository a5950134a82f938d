"""A process and all that it has started: found, stopped and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

SECONDS_TO_END = 60  # of processes after SIGKILL; a write to a slow disk has to finish first


class Process(NamedTuple):
    """``parent`` is a process id; ``ended``: only its entry in the system's table is left."""

    parent: int
    ended: bool


def processes() -> dict[int, Process]:
    """All processes of this machine by their ids."""
    return _from_proc() if Path("/proc/self/stat").is_file() else _from_ps()


def _from_proc() -> dict[int, Process]:
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # "pid (name) state parent ...", and the name may hold anything, brackets too
            state, parent = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            found[int(place.name)] = Process(int(parent), state in "ZX")
    return found


def _from_ps() -> dict[int, Process]:
    lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in lines.splitlines()]
    return {int(pid): Process(int(parent), state.startswith("Z")) for pid, parent, state, *_ in rows}


def descendants(pid: int) -> set[int]:
    """All processes that ``pid``, or one started by it, has started, in whatever session; without itself."""
    children: dict[int, set[int]] = {}
    for child, process in processes().items():
        children.setdefault(process.parent, set()).add(child)
    found: set[int] = set()
    new = children.get(pid, set())
    while new:
        found |= new
        new = set().union(*(children.get(each, set()) for each in new)) - found
    return found


def stop_tree(pid: int, sparing: Iterable[int] = ()) -> set[int]:
    """Stop ``pid`` and its descendants, until none can start another; returns all their ids."""
    stopped: set[int] = set()
    spared = set(sparing)
    while new := {pid, *descendants(pid)} - stopped - spared:
        _send(new, signal.SIGSTOP)
        stopped |= new
    return stopped


def kill_tree(pid: int, sparing: Iterable[int] = ()) -> None:
    """Kill ``pid`` and its descendants at once; returns when they have ended."""
    kill_stopped(stop_tree(pid, sparing))


def kill_stopped(pids: set[int]) -> None:
    """Kill what ``stop_tree`` returned; returns when all have ended."""
    _send(pids, signal.SIGKILL)
    deadline = time.monotonic() + SECONDS_TO_END
    while time.monotonic() < deadline:
        table = processes()
        if all(pid not in table or table[pid].ended for pid in pids):
            return
        time.sleep(0.01)


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
