"""The optional parts of a run: processes, schedule, average of weights, freezing, checkpoints, stop signals, hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from utils.checkpoint.checkpoint import Checkpointer
from utils.loop.hooks import Hooks
from utils.loop.stop_signals import StopSignals
from utils.optim.ema import WeightAverage
from utils.optim.freezing import Freezing
from utils.optim.lr_policy import LRPolicy
from utils.runtime.distributed import Distributed


@dataclass(frozen=True)
class Extras:
    """Parts of a run that ``TraVal`` can do without; by default there are none.

    Without ``distributed``, this is the only process, on the device of the settings. Without ``lr_policy``, each group
    of the optimizer keeps its learning rate. Without ``checkpointer``, nothing is saved; ``description`` holds the
    parts of a checkpoint that do not change. After one of ``stop_signals``, all ranks save the state and raise
    ``Stopped``, between two steps or within validation. ``multilabel``: True for multi-label data.
    """

    distributed: Distributed | None = None
    lr_policy: LRPolicy | None = None
    ema: WeightAverage | None = None
    freezing: Freezing | None = None
    checkpointer: Checkpointer | None = None
    description: dict[str, Any] | None = None
    stop_signals: StopSignals | None = None
    hooks: Hooks = field(default_factory=Hooks)
    multilabel: bool = False
