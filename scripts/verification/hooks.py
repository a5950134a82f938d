"""Hooks that are wrapped around the training from outside, for ``scripts/verification/hooked_main.py``."""

from __future__ import annotations

import io
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from scripts.verification.faults import IN_A_SAVE, Fault
from scripts.verification.records import IDLE, Marks
from utils.checkpoint.checkpoint import MANIFEST, Checkpointer
from utils.data.loaders import Batch, ValidationLoader
from utils.optim.clipping import GradientClipper
from utils.train_validation import TraVal


class Hooks:
    """What happens at the points of this process: a fault strikes, marks and lines are written."""

    def __init__(self, rank: int, fault: Fault | None, folder: Path | None) -> None:
        self.fault = fault if fault is not None and fault.concerns(rank) else None
        self.marks = self._lines = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.marks = Marks(folder / f"rank{rank}.now")
            self._lines = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(self._lines, b"\n")  # ends a line that a kill may have cut

    def reach(self, point: str, step: int, **details: int | str) -> bool:
        """Every point calls this; True asks for a loss that is NaN."""
        if self.marks is not None and point != "copy":  # a thread may have marked a later point before copy's end
            (self.marks.save if point in IN_A_SAVE else self.marks.loop)(point, step)
        return self.fault is not None and self.fault.reached(point, step, details)

    def end_save(self) -> None:
        if self.marks is not None:
            self.marks.save(IDLE, 0)

    def recorded(self, step: int, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; their line is written when the last has been used."""
        if self._lines is None:
            yield from batches
            return
        crc, passes = 0, []
        for batch in batches:
            for tensor in (batch.images, batch.targets):
                crc = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), crc)
            passes.append(",".join(map(str, batch.indices.tolist())))
            yield batch
        os.write(self._lines, f"{step} {time.time():.6f} {crc:08x} {';'.join(passes)} end\n".encode())


def plant(hooks: Hooks) -> None:
    """Wrap the training's methods for the rest of this process."""
    _plant_in_training(hooks)
    _plant_in_validation(hooks)
    _plant_in_saves(hooks)


def _wrap(owner: Any, name: str, hooked: Callable[[Callable], Callable]) -> None:
    """Put ``hooked(original)`` in the place of ``owner``'s own ``name``."""
    if name not in vars(owner):
        raise AttributeError(f"{owner.__name__} has no {name} any more to hang a hook on; mend {__name__}")
    original = vars(owner)[name]
    setattr(owner, name, wraps(original)(hooked(original)))


def _plant_in_training(hooks: Hooks) -> None:
    now = {"step": 0, "epoch": 0}
    passes = 0

    def training_step(original: Callable) -> Callable:
        def hooked(traval: TraVal, batches: Iterable[Batch]) -> None:
            now.update(step=traval.progress.step + 1, epoch=traval.progress.epoch + 1)
            hooks.reach("step", **now)
            original(traval, hooks.recorded(now["step"], batches))
            hooks.reach("after_step", **now)

        return hooked

    def forward(original: Callable) -> Callable:
        def hooked(traval: TraVal, network: torch.nn.Module, batch: Batch) -> tuple[Any, ...]:
            nonlocal passes
            output, loss, named = original(traval, network, batch)
            passes += 1
            if hooks.reach("forward", **now, **{"pass": passes}):
                loss = loss * math.nan
            passes = 0 if batch.ends_step else passes  # a step that is examined begins with its first pass again
            return output, loss, named

        return hooked

    def clip(original: Callable) -> Callable:
        def hooked(clipper: GradientClipper) -> torch.Tensor:
            norm = original(clipper)
            hooks.reach("update", **now)
            return norm

        return hooked

    _wrap(TraVal, "training_step", training_step)
    _wrap(TraVal, "_forward", forward)
    _wrap(GradientClipper, "__call__", clip)


def _plant_in_validation(hooks: Hooks) -> None:
    now = {"step": 0, "epoch": 0, "batch": 0}

    def validation(original: Callable) -> Callable:
        def hooked(traval: TraVal, epoch: int, report: bool = True) -> Any:
            now.update(step=traval.progress.step, epoch=epoch + 1, batch=0)
            return original(traval, epoch, report)

        return hooked

    def batches(original: Callable) -> Callable:
        def hooked(loader: ValidationLoader) -> Iterator[Batch]:
            for batch in original(loader):
                now["batch"] += 1
                hooks.reach("validation", **now)
                yield batch

        return hooked

    def end_epoch(original: Callable) -> Callable:
        def hooked(traval: TraVal, epoch: int, *results: Any) -> None:
            hooks.reach("epoch_end", traval.progress.step, epoch=epoch + 1)
            original(traval, epoch, *results)

        return hooked

    _wrap(TraVal, "validation", validation)
    _wrap(ValidationLoader, "batches", batches)
    _wrap(TraVal, "_end_epoch", end_epoch)


class _Save(threading.local):
    """The save that a thread is writing: the step it is of, what was written, how often the manifest was."""

    step = 0
    unflushed = False
    manifests = 0


def _plant_in_saves(hooks: Hooks) -> None:
    """Around the few system calls that a save is made of, in whichever thread it makes them."""
    now = _Save()

    def save(original: Callable) -> Callable:
        def hooked(checkpointer: Checkpointer, state: dict[str, Any], *names: str) -> None:
            if not checkpointer.is_main:
                return original(checkpointer, state, *names)
            hooks.reach("copy", state["progress"]["step"], when="before")
            original(checkpointer, state, *names)
            return hooks.reach("copy", state["progress"]["step"], when="after")

        return hooked

    def fsync(original: Callable) -> Callable:
        def hooked(descriptor: int) -> None:
            if now.unflushed:
                now.unflushed = False
                hooks.reach("flush", now.step)
            original(descriptor)

        return hooked

    _wrap(Checkpointer, "save", save)
    _wrap(torch, "save", lambda original: _written_in_two_halves(original, hooks, now))
    _wrap(os, "fsync", fsync)
    _wrap(os, "replace", lambda original: _renamed(original, hooks, now))


def _written_in_two_halves(original: Callable, hooks: Hooks, now: _Save) -> Callable:
    """``torch.save``, with a point amid a checkpoint's bytes."""

    def hooked(state: Any, file: Any, *args: Any, **options: Any) -> None:
        if not (isinstance(state, dict) and "progress" in state):  # not a checkpoint
            return original(state, file, *args, **options)
        now.step, now.unflushed, now.manifests = state["progress"]["step"], True, 0
        memory = io.BytesIO()
        original(state, memory, *args, **options)
        content = memory.getvalue()
        file.write(content[: len(content) // 2])
        file.flush()
        hooks.reach("write", now.step)
        return file.write(content[len(content) // 2 :])

    return hooked


def _renamed(original: Callable, hooks: Hooks, now: _Save) -> Callable:
    """``os.replace``, with points before and after a checkpoint or the manifest gets its name."""

    def hooked(source: Any, target: Any, **options: Any) -> None:
        path = Path(os.fspath(target))
        if path.parent.name != "checkpoints":
            return original(source, target, **options)
        now.manifests += path.name == MANIFEST
        point, details = "rename", {"name": path.stem}
        if path.name == MANIFEST:
            point, details = "manifest", {"nth": now.manifests}
        elif path.name == "previous.pt":
            point, details = "prune", {}
        hooks.reach(point, now.step, when="before", **details)
        original(source, target, **options)
        hooks.reach(point, now.step, when="after", **details)
        if now.manifests == 2:
            hooks.end_save()
        return None

    return hooked
