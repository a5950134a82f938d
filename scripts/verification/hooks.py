"""Hooks of ``scripts/verification/hooked_main.py`` into the training, and around the system calls of a save."""

from __future__ import annotations

import io
import math
import os
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from scripts.verification.records import IDLE, Marks
from utils.checkpoint.checkpoint import MANIFEST
from utils.loop.hooks import Hooks

if TYPE_CHECKING:
    from utils.data.loaders import Batch
    from utils.loop.forward import Outputs
    from utils.record.metrics import Report
    from utils.train_validation import TraVal


class RunRecorder:
    """Writes marks and lines into ``folder`` at the points of this process, and around the system calls of a save.

    ``reached`` is called at each with its name, step and details; True asks for a loss that is NaN.
    """

    def __init__(self, rank: int, folder: Path, reached: Callable[..., bool] = lambda *_: False) -> None:
        self._reached = reached
        self._step = self._pass = self._validation_batch = self._crc = 0
        self._samples: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.marks = Marks(folder / f"rank{rank}.now")
        self._lines = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._lines, b"\n")  # ends a line that a kill may have cut
        wrap_saves(self)

    def hooks(self) -> Hooks:
        """The hooks for ``main.main``."""
        return Hooks(
            before_forward=[self._before_forward],
            after_forward=[self._after_forward],
            before_update=[self._before_update],
            after_update=[lambda traval: self.reach("after_step", traval.progress.step, epoch=_epoch(traval))],
            before_validation_batch=[self._before_validation_batch],
            after_validation=[self._after_validation],
            before_save=[lambda traval, names: self.reach("copy", traval.progress.step, when="before")],
            after_save=[lambda traval, names: self.reach("copy", traval.progress.step, when="after")],
        )

    def reach(self, point: str, step: int, **details: int | str) -> bool:
        """Every point calls this; True asks for a loss that is NaN."""
        if point != "copy":  # a thread may have marked a later point before copy's end
            self.marks.set(point, step)
        return self._reached(point, step, details)

    def _before_forward(self, traval: TraVal, batch: Batch) -> None:
        step = traval.progress.step + 1
        if step != self._step:
            self._step = step
            self._pass = 0
            self._crc = 0
            self._samples = []
            self.reach("step", step, epoch=_epoch(traval))
        for tensor in (batch.images, batch.targets):
            self._crc = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), self._crc)
        self._samples.append(",".join(map(str, batch.indices.tolist())))

    def _after_forward(self, traval: TraVal, batch: Batch, outputs: Outputs) -> None:
        self._pass += 1
        if self.reach("forward", self._step, epoch=_epoch(traval), **{"pass": self._pass}):
            outputs.loss.mul_(math.nan)
        self._pass = 0 if batch.ends_step else self._pass  # repeating a step begins with its first pass again

    def _before_update(self, traval: TraVal, norm: torch.Tensor) -> None:
        line = f"{self._step} {time.time():.6f} {self._crc:08x} {';'.join(self._samples)} end\n"
        os.write(self._lines, line.encode())
        self.reach("update", self._step, epoch=_epoch(traval))

    def _before_validation_batch(self, traval: TraVal, batch: Batch) -> None:
        self._validation_batch += 1
        self.reach("validation", traval.progress.step, epoch=_epoch(traval), batch=self._validation_batch)

    def _after_validation(self, traval: TraVal, report: Report) -> None:
        self._validation_batch = 0
        self.reach("epoch_end", traval.progress.step, epoch=_epoch(traval))


def _epoch(traval: TraVal) -> int:
    return traval.progress.epoch + 1


# ------------------------------------------------------------------------------------ within a save


def wrap(owner: Any, name: str, hooked: Callable[..., Any]) -> None:
    """Put ``hooked``, which takes what it replaces first, in the place of ``owner``'s own ``name``."""
    if name not in vars(owner):
        raise AttributeError(f"{owner.__name__} has no {name} any more to wrap; correct {__name__}")
    original = vars(owner)[name]
    setattr(owner, name, wraps(original)(partial(hooked, original)))


class _Save(threading.local):
    """The save that a thread is writing: the step it is of, what was written, how often the manifest was."""

    step = 0
    unflushed = False
    manifests = 0


def wrap_saves(recorder: RunRecorder) -> None:
    """Put points around the few system calls of a save, in whichever thread makes them, until this process ends."""
    now = _Save()

    def save(original: Callable, state: Any, file: Any, *args: Any, **options: Any) -> None:
        if not (isinstance(state, dict) and "progress" in state):  # not a checkpoint
            return original(state, file, *args, **options)
        now.step = state["progress"]["step"]
        now.unflushed = True
        now.manifests = 0
        memory = io.BytesIO()
        original(state, memory, *args, **options)
        content = memory.getvalue()
        file.write(content[: len(content) // 2])
        file.flush()
        recorder.reach("write", now.step)
        return file.write(content[len(content) // 2 :])

    def fsync(original: Callable, descriptor: int) -> None:
        if now.unflushed:
            now.unflushed = False
            recorder.reach("flush", now.step)
        original(descriptor)

    def replace(original: Callable, source: Any, target: Any, **options: Any) -> None:
        path = Path(os.fspath(target))
        if path.parent.name != "checkpoints":
            return original(source, target, **options)
        point, details = "rename", {"name": path.stem}
        if path.name == MANIFEST:
            now.manifests += 1
            point, details = "manifest", {"nth": now.manifests}
        elif path.name == "previous.pt":
            point, details = "prune", {}
        recorder.reach(point, now.step, when="before", **details)
        original(source, target, **options)
        recorder.reach(point, now.step, when="after", **details)
        if now.manifests == 2:
            recorder.marks.set(IDLE, 0)
        return None

    wrap(torch, "save", save)
    wrap(os, "fsync", fsync)
    wrap(os, "replace", replace)
