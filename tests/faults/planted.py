"""Faults to plant into a training process, and the points where they can strike.

    ACTION POINT [step=N] [epoch=N] [pass=N] [batch=N] [when=WHEN] [name=NAME] [rank=N] [times=N]

``kill forward step=7 rank=1`` kills rank 1, and without ``rank`` every one, after a forward pass of step 7. Steps and
epochs count from 1; at the points of validation and of a save, ``step`` is the number of steps done. Without ``step``
the first time counts. ``times=3``: at that step and at the next two (without ``step``: at the first three). ``nan``
makes the loss NaN at ``forward``.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
IN_TRAINING = {  # and what is said about them besides their step
    "step": ("epoch",),  # at its beginning
    "forward": ("epoch", "pass"),
    "after_step": ("epoch",),  # before what is due then: a log line, a checkpoint
    "validation": ("epoch", "batch"),  # a moving average's batches follow the raw weights'
    "epoch_end": ("epoch",),  # after validation, before the epoch's row and checkpoints
}
IN_A_SAVE = (
    "write",  # half of the file is written
    "rename",  # when=before and after a new checkpoint (name=last) gets its name
)


@dataclass
class Fault:
    """What happens where. ``details``: what else must hold at the point; ``rank`` None: on every rank."""

    action: str
    point: str
    step: int | None = None
    rank: int | None = None
    times: int = 1
    details: dict[str, int | str] = field(default_factory=dict)
    struck: set[int] = field(default_factory=set)  # the steps at which it has

    @classmethod
    def from_text(cls, text: str) -> Fault:
        """See the module. A condition that no point meets never strikes, which ``faulty_main`` reports."""
        action, point, *conditions = text.split()
        assert action in (*SIGNALS, "nan") and point in (*IN_TRAINING, *IN_A_SAVE), text
        pairs = [condition.split("=") for condition in conditions]
        given = {name: int(value) if value.isdecimal() else value for name, value in pairs}
        if point in IN_A_SAVE:
            given.setdefault("rank", 0)  # the one that saves
        own = {name: given.pop(name) for name in ("step", "rank", "times") if name in given}
        return cls(action, point, **own, details=given)

    def concerns(self, rank: int) -> bool:
        """Whether it can strike on ``rank``."""
        return self.rank is None or self.rank == rank

    def reached(self, point: str, step: int, details: dict[str, int | str]) -> bool:
        """Called at every point of a rank that it concerns. Strikes if its conditions hold.

        Returns True if the caller has to make the loss NaN.
        """
        if point != self.point or any(details.get(name) != value for name, value in self.details.items()):
            return False
        if self.step is not None and not self.step <= step < self.step + self.times:
            return False
        if step in self.struck:  # a step that is examined runs again, and its loss must be the same
            return self.action == "nan"
        if len(self.struck) >= self.times:
            return False
        self.struck.add(step)
        if self.action in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.action])
        return self.action == "nan"
