"""Sums of the steps since the host last read them, still on the device."""

from __future__ import annotations

import itertools
import math

import torch

from utils.checkpoint.progress import Progress
from utils.data.loaders import Batch
from utils.loop.forward import Outputs
from utils.record.curves import StepRecord
from utils.record.metrics import COUNT, ClassificationMeter
from utils.record.multilabel import MultilabelMeter, MultilabelReport
from utils.runtime.distributed import Distributed

MOST_PENDING = 1000  # steps; each takes memory, and one synchronisation for so many costs nothing


class StepSums:
    """Sums of at most ``steps`` or ``MOST_PENDING`` optimizer steps, collected over all ranks when ``TraVal`` asks."""

    def __init__(self, steps: int, distributed: Distributed, multilabel: bool) -> None:
        self.steps = min(steps, MOST_PENDING)
        self.distributed = distributed
        self.multilabel = multilabel
        kind = MultilabelMeter if multilabel else ClassificationMeter
        self.meter = kind(self.steps, distributed.device)
        self.pending: list[tuple[float, torch.Tensor, torch.Tensor]] = []  # each step's lr, gradient norm, loss scale
        self._loss_names: list[str] | None = None

    @property
    def full(self) -> bool:
        return len(self.pending) == self.steps

    def add_pass(self, batch: Batch, outputs: Outputs) -> None:
        """Add a forward pass of the current step, if ``batch.counted``."""
        if batch.counted:
            self.meter.update(len(self.pending), outputs.loss, outputs.logits, batch.targets, outputs.losses)

    def end_step(self, lr: float, norm: torch.Tensor, scale: torch.Tensor) -> None:
        """End the step; note its learning rate, gradient norm and loss scale."""
        self.pending.append((lr, norm, scale))

    def take_back_step(self) -> None:
        """Forget the step that ended last."""
        self.pending.pop()

    def collect(self, progress: Progress) -> list[StepRecord]:
        """Move the sums to the host and into ``progress``; return a record per step. A synchronisation point."""
        steps = len(self.pending)
        if not steps:
            return []
        if self._loss_names is None:  # a rank whose first micro-batches are empty does not know them
            named = self.distributed.gather(list(self.meter.named))
            self._loss_names = progress.loss_names = list(dict.fromkeys(itertools.chain(*named)))
        lrs, norms, scales = zip(*self.pending, strict=True)
        columns = [self.meter.sums, *(self.meter.column(name)[:, None] for name in self._loss_names)]
        sums = self.distributed.all_reduce_sum(torch.cat(columns, dim=1)[:steps])
        rows = torch.cat([torch.stack([torch.stack(norms), torch.stack(scales)], dim=1).to(sums), sums], dim=1).tolist()
        self.pending.clear()
        self.meter.reset()
        first = progress.step - steps + 1
        pairs = enumerate(zip(lrs, rows, strict=True))
        records = [_enter(progress, first + n, lr, row, self.multilabel) for n, (lr, row) in pairs]
        progress.last_step = list(records[-1])
        return records


def _enter(progress: Progress, step: int, lr: float, row: list[float], multilabel: bool) -> StepRecord:
    """Add one step's sums to the epoch's and the window's; return the step's record."""
    norm, scale, *sums = row
    loss, top1, top5, count = sums[: COUNT + 1]
    progress.samples_seen += round(count)
    if math.isfinite(loss):  # a skipped step's loss must not spoil the means
        progress.add(sums)
    first, second = 100 * top1 / count, 100 * top5 / count
    if multilabel:
        first, second = MultilabelReport.from_sums(sums).micro_f1, math.nan
    return StepRecord(step, progress.epoch + 1, loss / count, first, second, lr, norm, scale)
