"""Loss, top-1 and top-5 as sums and counts on the device, divided once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LOSS, TOP1, TOP5, COUNT = range(4)


@dataclass(frozen=True)
class Report:
    """Means over ``count`` samples; accuracies in percent."""

    loss: float
    top1: float
    top5: float
    count: int

    @classmethod
    def from_sums(cls, sums: list[float]) -> Report:
        """From summed loss, top-1 and top-5 hits, and count."""
        loss, top1, top5, count = sums[: COUNT + 1]
        if not count:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(loss / count, 100 * top1 / count, 100 * top5 / count, round(count))

    def __str__(self) -> str:
        return f"top1 {self.top1:.2f}  top5 {self.top5:.2f}  loss {self.loss:.4f}"


def target_rank(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How many classes stand before the target: int64 (n,), 0 when the prediction is right.

    ``logits`` (n, classes), ``targets`` int64 (n,). Of equal logits the lower class stands first, as
    with argmax, so that a network that answers the same for every class does not count as right; and a
    NaN anywhere before or at the target counts as wrong.
    """
    own = logits.gather(1, targets[:, None])
    classes = torch.arange(logits.shape[1], device=logits.device)
    before = ~(logits <= own) | ((logits == own) & (classes < targets[:, None]))
    return before.sum(1)


class ClassificationMeter:
    """Rows of sums, one a step or a batch, float64 on the device; reading them is the only synchronisation.

    ``named`` holds further losses by name, a row a step like ``sums``. A validation batch is computed by
    exactly one rank, so adding up ranks only adds zeros to its row, and the rows are then summed in one
    order: the result has the same bits on any number of ranks.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.sums = torch.zeros(rows, 4, dtype=torch.float64, device=device)
        self.named: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def update(
        self,
        row: int,
        loss: torch.Tensor,
        logits: torch.Tensor,
        targets: torch.Tensor,
        named: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Add a forward pass: mean ``loss`` over n, ``logits`` (n, classes), ``targets`` int64 (n,)."""
        count = len(targets)
        rank = target_rank(logits, targets)  # the number of classes when the target's logit is NaN
        hits = torch.stack(
            [loss.double() * count, (rank < 1).sum().double(), (rank < min(5, logits.shape[1])).sum().double()]
        )
        self.sums[row, :COUNT] += hits
        self.sums[row, COUNT] += count
        for name, value in (named or {}).items():
            self.column(name)[row] += value.double() * count

    def column(self, name: str) -> torch.Tensor:
        """The sums of the loss ``name``, a row a step."""
        if name not in self.named:
            self.named[name] = torch.zeros_like(self.sums[:, 0])
        return self.named[name]

    def reset(self) -> None:
        """Back to zero."""
        for sums in (self.sums, *self.named.values()):
            sums.zero_()
