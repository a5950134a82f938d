"""Points of a training, and of the system calls of a save, at which a fault may strike."""

import io
import math
import os
import threading
from functools import partial, wraps
from pathlib import Path

import torch

from utils.checkpoint.checkpoint import MANIFEST
from utils.loop.hooks import Hooks


class Points:
    """Calls ``reached`` with name, step and details of each point that this process comes to, until it ends.

    True asks for a loss that is NaN.
    """

    def __init__(self, reached):
        self._reached = reached
        self._step = self._pass = self._batch = 0
        wrap_saves(self.reach)

    def reach(self, point, step, **details):
        return self._reached(point, step, details)

    def hooks(self, after_step):
        """The hooks for ``main.main``. ``after_step``: also of that point, for which the loop waits for each step."""
        return Hooks(
            before_forward=[self._before_forward],
            after_forward=[self._after_forward],
            after_update=[self._after_update] * after_step,
            before_validation_batch=[self._before_validation_batch],
            after_validation=[self._after_validation],
        )

    def _before_forward(self, traval, batch):
        step = traval.progress.step + 1
        if step != self._step:
            self._step = step
            self._pass = 0
            self.reach("step", step, epoch=_epoch(traval))

    def _after_forward(self, traval, batch, outputs):
        self._pass += 1
        if self.reach("forward", self._step, epoch=_epoch(traval), **{"pass": self._pass}):
            outputs.loss.mul_(math.nan)
        self._pass = 0 if batch.ends_step else self._pass  # repeating a step begins with its first pass again

    def _after_update(self, traval):
        self.reach("after_step", traval.progress.step, epoch=_epoch(traval))

    def _before_validation_batch(self, traval, batch):
        self._batch += 1
        self.reach("validation", traval.progress.step, epoch=_epoch(traval), batch=self._batch)

    def _after_validation(self, traval, report):
        self._batch = 0
        self.reach("epoch_end", traval.progress.step, epoch=_epoch(traval))


def _epoch(traval):
    return traval.progress.epoch + 1


# ------------------------------------------------------------------------------------ within a save


def wrap(owner, name, hooked):
    """Put ``hooked``, which takes what it replaces first, in the place of ``owner``'s own ``name``."""
    if name not in vars(owner):
        raise AttributeError(f"{owner.__name__} has no {name} any more to wrap; correct {__name__}")
    original = vars(owner)[name]
    setattr(owner, name, wraps(original)(partial(hooked, original)))


class _Save(threading.local):
    """The save that a thread is writing: the step it is of."""

    step = 0


def wrap_saves(reach):
    """Put points around the few system calls of a save, in whichever thread makes them, until this process ends."""
    now = _Save()

    def save(original, state, file, *args, **options):
        if not (isinstance(state, dict) and "progress" in state):  # not a checkpoint
            return original(state, file, *args, **options)
        now.step = state["progress"]["step"]
        memory = io.BytesIO()
        original(state, memory, *args, **options)
        content = memory.getvalue()
        file.write(content[: len(content) // 2])
        file.flush()
        reach("write", now.step)
        return file.write(content[len(content) // 2 :])

    def replace(original, source, target, **options):
        path = Path(os.fspath(target))
        if path.parent.name != "checkpoints" or path.name in (MANIFEST, "previous.pt"):
            return original(source, target, **options)
        reach("rename", now.step, when="before", name=path.stem)
        original(source, target, **options)
        return reach("rename", now.step, when="after", name=path.stem)

    wrap(torch, "save", save)
    wrap(os, "replace", replace)
