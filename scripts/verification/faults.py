"""Faults to plant into a training process, and the points where they can strike.

    ACTION POINT [step=N] [epoch=N] [pass=N] [batch=N] [nth=N] [when=WHEN] [name=NAME] [rank=N] [times=N]

``kill forward step=7 rank=1`` kills rank 1 after a forward pass of step 7. Steps and epochs count from 1; at the points
of validation and of a save, ``step`` is the number of steps done. Without ``step`` the first time counts. ``times=3``:
at that step and at the next two (without ``step``: at the first three).
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass, field

from scripts.verification.processes import kill_tree
from utils.config.settings import UserError

# At each point, what else can be said about it besides its step.
IN_TRAINING = {
    "step": ("epoch",),  # before the step
    "forward": ("epoch", "pass"),  # after a forward pass
    "update": ("epoch",),  # before the optimizer's step
    "after_step": ("epoch",),  # after the step, before what is due then: a log line, a checkpoint
    "validation": ("epoch", "batch"),  # before a batch; a moving average's batches follow the raw weights'
    "epoch_end": ("epoch",),  # after validation, before the epoch's row and checkpoints
}
IN_A_SAVE = {
    "copy": ("when",),  # before and after the state is handed over
    "write": (),  # half of the file is written
    "flush": (),  # all of it is, but it may not be on the disk
    "manifest": ("when", "nth"),  # before and after the digests are entered, the first and the second time
    "prune": ("when",),  # before and after last.pt becomes previous.pt
    "rename": ("when", "name"),  # before and after a checkpoint (name=last) gets its name
}
POINTS = IN_TRAINING | IN_A_SAVE
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "usr1": signal.SIGUSR1,
}
OWN = ("step", "rank", "times")
ACTIONS = (*SIGNALS, "killall", "exit", "nan", "enospc")


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
        """See the module. Raises ``UserError``."""
        words = text.split()
        if len(words) < 2 or words[0] not in ACTIONS or words[1] not in POINTS:
            raise _mistake(text, f"write ACTION POINT first: one of {', '.join(ACTIONS)}, and of {', '.join(POINTS)}")
        action, point, *conditions = words
        if action == "nan" and point != "forward":
            raise _mistake(text, "nan makes a loss NaN, which is there at the point forward")
        if action == "enospc" and point not in IN_A_SAVE:
            raise _mistake(text, f"enospc is an error of a save, at {', '.join(IN_A_SAVE)}")
        given: dict[str, int | str] = {}
        for condition in conditions:
            name, _, value = condition.partition("=")
            if name in given or name not in (*OWN, *POINTS[point]):
                known = ("step", *POINTS[point])
                raise _mistake(text, f"{condition!r} cannot stand here; {point} takes {', '.join(known)}")
            if name == "when" and value not in ("before", "after"):
                raise _mistake(text, f"{name}={value}: must be before or after")
            is_text = name in ("when", "name")
            if not is_text and not value.isdecimal():
                raise _mistake(text, f"{name}={value}: must be a whole number")
            given[name] = value if is_text else int(value)
        if point in IN_A_SAVE:
            given.setdefault("rank", 0)  # the one that saves
        own = {name: given.pop(name) for name in OWN if name in given}
        return cls(action, point, **own, details=given)

    def concerns(self, rank: int) -> bool:
        """Whether it can strike on ``rank``."""
        return self.rank is None or self.rank == rank

    def reached(self, point: str, step: int, details: dict[str, int | str]) -> bool:
        """Called at every point of a rank that it concerns. Strikes if its conditions hold.

        Returns True if the caller has to make the loss NaN.
        """
        if point != self.point or any(details[name] != value for name, value in self.details.items()):
            return False
        if self.step is not None and not self.step <= step < self.step + self.times:
            return False
        if step in self.struck:  # a step that is examined runs again, and its loss must be the same
            return self.action == "nan"
        if len(self.struck) >= self.times:
            return False
        self.struck.add(step)
        return self._strike()

    def _strike(self) -> bool:
        if self.action == "exit":
            os._exit(1)
        if self.action == "killall":  # the launcher, if there is one, and all that it has started, this process last
            kill_tree(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid(), sparing=[os.getpid()])
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.action in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.action])
        return self.action == "nan"


def _mistake(text: str, problem: str) -> UserError:
    return UserError(f"HOOK_FAULT={text!r}: {problem}")
