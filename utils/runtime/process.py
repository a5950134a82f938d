"""The process: its place among the others, and how it ends. Imports nothing heavy."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from utils.config.settings import UserError

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: a forked process must not load any
_PR_SET_PDEATHSIG = 1
_PROCESSES_OF = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE"}  # how many a launcher has started


@dataclass(frozen=True)
class RankInfo:
    """A process's place: its rank among all processes and among those of its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> RankInfo:
        """The place set by torchrun, or that of a single process. Raises ``UserError`` for impossible variables.

        torchrun and the operators of clusters set both RANK and WORLD_SIZE. A script for srun often sets WORLD_SIZE
        alone, for programs that take their rank from SLURM_PROCID: here each process would train all by itself.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if "RANK" not in os.environ and (size := os.environ.get("WORLD_SIZE", "")).strip() not in ("", "1"):
            raise UserError(
                f"environment: WORLD_SIZE is {size} and RANK is not set; start with torchrun, or unset WORLD_SIZE for "
                "a single process"
            )
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")  # such as 8(x2) for two machines
        if "LOCAL_RANK" not in os.environ and not re.fullmatch(r"1(\(x\d+\))?", tasks):
            raise UserError(
                f"environment: RANK is set and LOCAL_RANK is not, but srun has started {tasks} processes a machine, "
                "which would share one device; start with torchrun, or set LOCAL_WORLD_SIZE and LOCAL_RANK, too: "
                "SLURM_LOCALID, or 0 if each process sees only a GPU of its own"
            )
        try:
            ranks = cls(*(int(os.environ.get(name, "0" if name == "LOCAL_RANK" else "1")) for name in names))
        except ValueError as error:
            raise UserError(f"environment: {', '.join(names)} must be whole numbers; start with torchrun") from error
        if not 0 <= ranks.rank < ranks.world_size or ranks.local_rank < 0 or ranks.local_world_size < 1:
            raise UserError(
                f"environment: RANK {ranks.rank} of WORLD_SIZE {ranks.world_size}, LOCAL_RANK {ranks.local_rank} of "
                f"LOCAL_WORLD_SIZE {ranks.local_world_size} cannot be; start with torchrun"
            )
        return ranks

    @property
    def is_main(self) -> bool:
        """True on the one process that writes files and prints."""
        return self.rank == 0


@contextmanager
def told_by_each_machine(ranks: RankInfo) -> Iterator[None]:
    """Context of what depends on a machine's own files or devices: one process of each machine reports a mistake."""
    try:
        yield
    except UserError as error:
        error.on_all_ranks = ranks.local_rank > 0
        raise


def trains_by_itself() -> str | None:
    """Line for one of several processes that a launcher other than torchrun has started: each is a training of its own.

    That may be meant, as where one srun starts a training on each GPU of a machine.
    """
    if "RANK" in os.environ:
        return None
    for launcher, variable in _PROCESSES_OF.items():
        if (count := os.environ.get(variable, "1")) != "1":
            return (
                f"environment: {launcher} has started {count} processes, and each trains by itself, as RANK is not "
                "set; to train together, start with torchrun (docs/distributed.md)"
            )
    return None


def port_in_use(port: str) -> str:
    """Message about a used ``port``, at which these processes should have met."""
    return f"port {port} is in use on this machine, by another training perhaps"


def end_with_parent() -> None:
    """Make the system send SIGTERM when the parent dies, even by kill -9: nothing else would end this process."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_process(code: int) -> NoReturn:
    """End with exit code ``code`` as ``sys.exit`` does, without the interpreter's teardown after the exit functions.

    DDP keeps gloo's process group alive after it is destroyed, and if one of its threads releases a tensor during the
    teardown, the process aborts (exit code 134 after a finished run, about one in twenty on busy cores). In the
    teardown, extension modules would also report as leaked what ``garbage_collection`` has left out, and it takes a
    third of a second.
    """
    atexit.register(_skip_teardown, code)
    sys.exit(code)  # profilers and debuggers that run the program go on from here


def _skip_teardown(code: int) -> None:
    """Call all other exit functions, then end the process; registered last, this one is called first."""
    atexit.unregister(_skip_teardown)
    atexit._run_exitfuncs()  # data workers and logging end as usual
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
