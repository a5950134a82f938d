"""Tools that all measurements share: synchronised, interleaved timing judged by medians, and memory use."""

from __future__ import annotations

import gc
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from utils.record.provenance import processor
from utils.runtime import devices
from utils.runtime.cpu import give_back_freed_memory
from utils.runtime.memory import lacks_memory

K = TypeVar("K")
T = TypeVar("T")
WARM_UP_STEPS = 3  # these steps compile, choose convolution algorithms and fill the allocator's cache
GPU_WARM_UP_SECONDS = 0.5  # further warm-up on a GPU: an idle one takes a while to raise its clock
PEAK_RESET = Path("/proc/self/clear_refs")  # writing to this file resets the process's peak size


class Spread(NamedTuple):
    """Median, smallest and largest of the rounds' values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Ratio of each round, summarised: whatever slows a whole round down cancels out."""
    return Spread.of([a / b for a, b in zip(numerators, denominators, strict=True)])


# ------------------------------------------------------------------------------------------------ time


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work; for a CPU, return at once."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Seconds that ``work`` takes, including all its work on the device, and its result."""
    synchronise(device)
    began = time.perf_counter()
    result = work()
    synchronise(device)
    return time.perf_counter() - began, result


def busy_seconds(work: Callable[[], object]) -> float:
    """Seconds of ``work`` during which the GPU computes or copies; 0 if the profiler shows no GPU events."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    spans = [(e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type == DeviceType.CUDA]
    return covered(spans) / 1e6


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end) spans."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def warm_up(run: Callable[[int], None], device: torch.device) -> None:
    """Run ``run``, which takes a number of steps, until the device has warmed up for timing."""
    timed(lambda: run(WARM_UP_STEPS), device)
    began = time.perf_counter()
    while device.type == "cuda" and time.perf_counter() - began < GPU_WARM_UP_SECONDS:
        timed(lambda: run(WARM_UP_STEPS), device)


def interleaved(
    sides: Mapping[K, Callable[[], T]],
    rounds: int,
    ended: Callable[[int], object] = lambda number: None,
    failure_of: Callable[[K, Exception], str] = lambda side, error: "",
) -> tuple[dict[K, list[T]], dict[K, str]]:
    """Measure all sides in each round, in the order a b c, c b a, a b c ...

    Returns each side's values, one per round, and why some sides failed. The alternating order keeps what one side
    leaves behind (caches, clock rates) from always favouring the same side, and a busy machine affects all alike.
    ``ended`` is called after each round with its number, from 1. A side for whose error ``failure_of`` returns text is
    left out from then on; other errors are raised.
    """
    values: dict[K, list[T]] = {side: [] for side in sides}
    failures: dict[K, str] = {}
    for number in range(1, rounds + 1):
        for side in list(sides)[:: 1 if number % 2 else -1]:
            if side not in failures:
                try:
                    values[side].append(sides[side]())
                except Exception as error:
                    if not (words := failure_of(side, error)):
                        raise
                    failures[side] = words
        ended(number)
    return values, failures


def failure_of(error: Exception, compiled: bool) -> str:
    """Reason why a step failed with ``error``, as text; '' if neither memory nor torch.compile is the cause."""
    if lacks_memory(error):
        return "out of memory"
    if compiled and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return "does not compile"
    return ""


# ---------------------------------------------------------------------------------------------- device


def device_name(device: torch.device) -> str:
    """Product name of the device; for a CPU, also the number of threads in use."""
    if device.type != "cpu":
        return devices.name(device) or device.type
    return f"{processor()} CPU, {torch.get_num_threads()} thread(s)"


def unsupported(dtype: str, device: torch.device) -> str | None:
    """Reason why ``device`` cannot compute in 'tf32' or 'bf16'; None if it can. CPUs may emulate half precision."""
    if dtype == "tf32":
        if device.type != "cuda":
            return "needs a GPU"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return f"{torch.cuda.get_device_name(device)} has no TF32 arithmetic (compute capability 8.0 and higher)"
    if dtype == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic"
    return None


# ---------------------------------------------------------------------------------------------- memory


def load_libraries() -> None:
    """Take a step of a tiny network: the first step loads over 100 MB of libraries, which are not to be measured."""
    layer = torch.nn.Linear(8, 8)
    torch.nn.functional.mse_loss(layer(torch.ones(8, 8)), torch.ones(8, 8)).backward()
    torch.optim.SGD(layer.parameters()).step()


def settled_bytes() -> int:
    """Physical memory in use, without freed memory; on Linux, also resets ``peak_resident_bytes``.

    The C library keeps freed memory, and a step that reuses it would not make the process grow.
    """
    gc.collect()
    give_back_freed_memory()
    with suppress(OSError):
        PEAK_RESET.write_text("5", encoding="ascii")
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Peak physical memory of this process: on Linux since ``settled_bytes``, otherwise since the process began."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if platform.system() == "Darwin" else size * 1024  # macOS counts bytes, Linux kibibytes
