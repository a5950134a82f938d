"""The CPU: what it computes with, and its use by a process: threads, how they wait, and the memory that it keeps."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
from contextlib import suppress
from pathlib import Path

SPINS = "5000"
BF16_UNITS = ("amx_bf16", "avx512_bf16", "bf16", "svebf16")  # names in /proc/cpuinfo, on x86-64 and Arm
CPU_FACTS = Path("/proc/cpuinfo")
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of all its cores together, and their period
# of glibc's mallopt
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def facts() -> list[str]:
    """What the system tells about the CPU, a line each; nothing where it is not Linux."""
    try:
        return CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


@functools.cache
def has_bf16_units() -> bool:
    """True if the CPU multiplies bfloat16 in hardware, as far as the system tells; emulation is far slower."""
    flags = next((line for line in facts() if line.lower().startswith(("flags", "features"))), "")
    return not set(BF16_UNITS).isdisjoint(flags.split())


def let_threads_wait_briefly() -> None:
    """Limit how long a waiting thread spins. Call this before torch is imported: OpenMP reads the limit once.

    A thread that waits for others spins before it sleeps. Sleeping at once doubles a small network's step time, because
    waking takes longer than its operations; GNU OpenMP's default of 300,000 turns makes a step up to forty times slower
    if other programs need the cores. A few thousand turns avoid both. Measured on 2 cores, LeNet-300-100 at batch 128:
    1.4 ms a step alone and 6 ms beside two busy programs; without spinning 2.7 and 2.5, with the default 1.4 and 64.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next allocation, for training on a CPU.

    glibc returns blocks above 32 MB to the system at once, and activations are that large: each step then maps and
    zeroes all its pages anew. Keeping them made steps of ResNet-18 (32 pixels, batch 128) 1.14 to 1.3 times as fast on
    2 cores, for 10 % more memory. Other C libraries are not changed.
    """
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_MAX, 0)
            mallopt(_M_TRIM_THRESHOLD, -1)


def give_back_freed_memory() -> None:
    """Return to the system what ``keep_freed_memory`` keeps, in a process that was forked from a training.

    The two share these pages only until the training writes on them, which leaves the old ones to this process: each
    worker would come to occupy as much memory as a training step does.
    """
    with suppress(OSError, AttributeError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def threads_per_process(local_world_size: int) -> int:
    """Number of CPU threads per process: an equal share of the cores that this machine lets us use.

    ``OMP_NUM_THREADS`` takes precedence if a person set it; torchrun itself sets it to 1 for several processes.
    """
    wished = os.environ.get("OMP_NUM_THREADS", "")
    if wished.isdigit() and int(wished) > 0 and (wished != "1" or local_world_size == 1):
        return int(wished)
    return cores_per_process(local_world_size)


def cores_per_process(local_world_size: int) -> int:
    """Number of cores for each of this machine's processes: an equal share of ``cores``, at least one."""
    return max(1, cores() // local_world_size)


def cores() -> int:
    """Number of cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, _quota())))


def _quota() -> float:
    """Cores whose time a container may use, as by ``docker run --cpus`` or a limit of Kubernetes; inf without one."""
    try:
        quota, period = CPU_MAX.read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or 'max'
        return math.inf
