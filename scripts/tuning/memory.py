"""Memory of a training step, and the largest batch that fits, found by real training steps on random images."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from scripts.common.timing import load_libraries, peak_resident_bytes, settled_bytes, timed
from scripts.tuning.advice import StopSearch
from utils.data.loaders import Batch
from utils.runtime.memory import lacks_memory
from utils.train_validation import TraVal

STEPS = 2  # the optimizer creates its state in the first step
CPU_MEMORY_SHARE = 0.5  # share of the available memory that the search may use on a CPU


def train_on_random(traval: TraVal, size: int, classes: int, channels_last: bool) -> float:
    """Train for ``STEPS`` steps on ``size`` random images; return the seconds of the last step.

    ``traval`` has the stand-in of ``no_loader`` as its training loader.
    """
    shape = traval.train_loader.image_shape
    images = torch.randn(max(size, 2), *shape, device=traval.device)  # batch norm cannot train on one image
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    targets = torch.randint(classes, (size,), device=traval.device)
    if traval.multilabel:
        targets = torch.nn.functional.one_hot(targets, classes).float()
    batch = Batch(images, targets, np.arange(size), 0)
    batches = [batch]
    if traval.args.optimisation.accumulate > 1:  # the gradients of one pass take memory beside the next
        batches.insert(0, replace(batch, ends_step=False))
    traval.train_loader.replay_step = lambda *_: batches  # for a step that the scaler skips
    *_, seconds = [timed(lambda: traval.training_step(batches), traval.device)[0] for _ in range(STEPS)]
    return seconds


def no_loader(image_shape: tuple[int, ...]) -> SimpleNamespace:
    """Stand-in for a training loader, enough for ``TraVal`` to take single steps."""
    plan = SimpleNamespace(step_indices=lambda *_: np.zeros(1, np.int64))
    return SimpleNamespace(image_shape=image_shape, plan=plan, steps_per_epoch=1)


class Fits:
    """Test whether a batch fits into memory, by training. ``train``: takes a batch size, returns seconds per step.

    Raises ``StopSearch`` if a larger batch than the one before is expected to take longer than ``longest_step_seconds``
    per step. Smaller batches, tried because a larger one did not fit, are never refused.
    """

    def __init__(self, train: Callable[[int], float], longest_step_seconds: float) -> None:
        self.train = train
        self.longest = longest_step_seconds
        self.last = (0, 0.0)  # size and seconds of the previous step

    def __call__(self, size: int) -> bool:
        before, seconds = self.last
        if size > before > 0 and seconds * size / before > self.longest:
            raise StopSearch(f"a step of {size:,} images would take more than {self.longest:g} s")
        return self.tries(size)

    def tries(self, size: int) -> bool:
        self.last = size, self.train(size)
        return True


class FitsOnGpu(Fits):
    def tries(self, size: int) -> bool:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            return super().tries(size)
        except RuntimeError as error:  # torch.OutOfMemoryError is a RuntimeError
            if not lacks_memory(error):
                raise
            return False


class FitsOnCpu(Fits):
    """Test whether a batch fits into ``room`` bytes, in a fresh process, whose peak size shows a step's memory.

    A batch is tried only if smaller ones suggest that it fits, since the machine must not start to swap.
    """

    def __init__(self, train: Callable[[int], float], room: int, longest_step_seconds: float) -> None:
        super().__init__(train, longest_step_seconds)
        self.room = room
        self.grown: dict[int, int] = {}  # bytes by batch size
        load_libraries()
        self.before = settled_bytes()

    def __call__(self, size: int) -> bool:
        return self.grown[size] <= self.room if size in self.grown else super().__call__(size)

    def tries(self, size: int) -> bool:
        if self.grown and self._expected(size) > self.room:
            return False
        settled_bytes()
        super().tries(size)
        self.grown[size] = peak_resident_bytes() - self.before
        return self.grown[size] <= self.room

    def _expected(self, size: int) -> float:
        """Expected bytes, extrapolated linearly from the two largest batches so far."""
        *_, (smaller, fewer_bytes), (largest, its_bytes) = [(0, 0), *sorted(self.grown.items())]
        return its_bytes + (size - largest) * (its_bytes - fewer_bytes) / (largest - smaller)


def available_bytes() -> int:
    """Memory available without swapping, on the machine or in this process's control group."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]  # if the system does not report it
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")] or found
        group = Path("/sys/fs/cgroup")
        most, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        if most != "max":
            parts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            cached = int(parts["active_file"]) + int(parts["inactive_file"])  # of files: freed when memory is needed
            found.append(int(most) - int(used) + cached)
    return min(found)
