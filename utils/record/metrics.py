"""Loss, top-1 and top-5 as sums and counts on the device, divided once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from utils.record.class_metrics import BINS, NOT_A_NUMBER, UNIT, ClassReport
from utils.runtime.distributed import to_device

LOSS, TOP1, TOP5, COUNT = range(4)


@dataclass(frozen=True)
class Report:
    """Means over ``count`` samples; accuracies in percent. ``by_class``: the classes' figures, of a validation."""

    loss: float
    top1: float
    top5: float
    count: int
    by_class: ClassReport | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_sums(cls, sums: list[float]) -> Report:
        """From summed loss, top-1 and top-5 hits, and count."""
        loss, top1, top5, count = sums[: COUNT + 1]
        if not count:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(loss / count, 100 * top1 / count, 100 * top5 / count, round(count))

    def __str__(self) -> str:
        return self.text()

    def text(self, with_top5: bool = True, mixed: bool = False) -> str:
        """For the log. ``mixed``: the accuracies are those of mixed images."""
        of = " (mixed)" if mixed else ""
        top5 = f"top5{of} {self.top5:.2f}  " if with_top5 else ""
        return f"top1{of} {self.top1:.2f}  {top5}loss {self.loss:.4f}"


def shows_top5(classes: int) -> bool:
    """Whether top-5 says anything: of at most five classes it is always 100 %."""
    return classes > 5


def cut_words(batches: int | None) -> str:
    """What every line about a validation of at most so many batches says; empty for a whole one."""
    return "" if batches is None else f" (cut: --max-val-batches {batches})"


def target_rank(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How many classes rank before the target: int64 (n,), 0 if the prediction is right.

    ``logits`` (n, classes), ``targets`` int64 (n,). Among equal logits the lower class ranks first, as with argmax, so
    a network with the same output for every class is not right; a NaN before or at the target counts as wrong.
    """
    own = logits.gather(1, targets[:, None])
    classes = torch.arange(logits.shape[1], device=logits.device)
    before = ~(logits <= own) | ((logits == own) & (classes < targets[:, None]))
    return before.sum(1)


WAITING_NUMBERS = 2**20  # logits that may wait to be counted


class ClassificationMeter:
    """Rows of sums, one per step or batch, float64 on the device; reading them is the only synchronisation.

    ``named`` holds further losses by name, a row per step like ``sums``. Logits wait until there are
    ``WAITING_NUMBERS`` of them: many small operations at every step would cost a small network more than its layers.
    Exactly one rank computes a validation batch, so summing over ranks only adds zeros to its row, and the rows are
    then summed in one order: the result has the same bits on any number of ranks.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._sums = torch.zeros(rows, 4, dtype=torch.float64, device=device)
        self.named: dict[str, torch.Tensor] = {}
        self._waiting: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._waiting_numbers = 0

    def update(
        self,
        row: int,
        loss: torch.Tensor,
        logits: torch.Tensor,
        targets: torch.Tensor,
        named: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Add a forward pass: mean ``loss`` over n, ``logits`` (n, classes), ``targets`` int64 (n,).

        ``targets`` may also be the shares (n, classes) of mixed images: then the class with the largest is right.
        Do not write to the tensors afterwards.
        """
        if targets.is_floating_point():
            targets = targets.argmax(1)
        self._waiting.append((row, loss.detach(), logits.detach(), targets))
        self._waiting_numbers += logits.numel()
        for name, value in (named or {}).items():
            self.column(name)[row] += value.detach().double() * len(targets)
        if self._waiting_numbers > WAITING_NUMBERS:
            self._add_waiting()

    @property
    def sums(self) -> torch.Tensor:
        """Summed loss, top-1 and top-5 hits, and count: float64 (rows, 4)."""
        self._add_waiting()
        return self._sums

    @torch.no_grad()
    def _add_waiting(self) -> None:
        if not self._waiting:
            return
        rows, losses, logits, targets = zip(*self._waiting, strict=True)
        self._waiting = []
        self._waiting_numbers = 0
        device = self._sums.device
        counts = [len(part) for part in targets]
        logits = torch.cat(logits)
        targets = torch.cat(targets)
        rank = target_rank(logits, targets)  # the number of classes when the target's is NaN
        hits = torch.stack([rank < 1, rank < min(5, logits.shape[1])], dim=1).double()
        passes = to_device(torch.tensor([rows, counts]), device)
        sample_rows = passes[0].repeat_interleave(passes[1], output_size=sum(counts))
        self._sums[:, TOP1:COUNT].index_add_(0, sample_rows, hits)
        weighted = torch.stack(losses).double() * passes[1]
        self._sums[:, LOSS].index_add_(0, passes[0], weighted)
        self._sums[:, COUNT].index_add_(0, passes[0], passes[1].double())
        self._count(logits, targets, rank < 1)

    def _count(self, logits: torch.Tensor, targets: torch.Tensor, hits: torch.Tensor) -> None:
        """Count more of n samples. ``hits``: bool (n,), whether the prediction is right."""

    def column(self, name: str) -> torch.Tensor:
        """The sums of the loss ``name``, a row per step."""
        if name not in self.named:
            self.named[name] = torch.zeros_like(self._sums[:, 0])
        return self.named[name]

    def reset(self) -> None:
        """Back to zero."""
        self._waiting = []
        self._waiting_numbers = 0
        for sums in (self._sums, *self.named.values()):
            sums.zero_()


class ValidationMeter(ClassificationMeter):
    """A ``ClassificationMeter`` that also counts by class and by confidence, in int64 on the device.

    Whole numbers have the same sum in any order, so the result has the same bits on any number of ranks.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__(rows, device)
        self.classes = 0  # not known before the first logits
        self._class_sums = torch.zeros(0, dtype=torch.int64, device=device)
        self._edges = torch.linspace(0, 1, BINS + 1, device=device)[1:]  # upper ends

    def class_sums(self, classes: int) -> torch.Tensor:
        """int64 (3 * classes + 3 * (BINS + 1),): samples, predictions and hits of each class, then samples, hits and
        summed confidence of each bin. ``classes``: those of any rank; this one may have met no batch.
        """
        self._add_waiting()
        if not self.classes:
            self._begin(classes)
        return self._class_sums

    def _begin(self, classes: int) -> None:
        self.classes = classes
        self._class_sums = torch.zeros(3 * (classes + BINS + 1), dtype=torch.int64, device=self._sums.device)

    def _count(self, logits: torch.Tensor, targets: torch.Tensor, hits: torch.Tensor) -> None:
        if not self.classes:
            self._begin(logits.shape[1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest, predicted = logits.max(1)
        confidence = (largest - logits.logsumexp(1)).exp()
        unknown = confidence.isnan()
        bins = torch.bucketize(confidence, self._edges).clamp_(max=BINS - 1).masked_fill_(unknown, NOT_A_NUMBER)
        units = (confidence.double() * UNIT).masked_fill_(unknown, 0).round_().long()
        right = hits.long()
        one = torch.ones_like(targets)
        base = 3 * self.classes
        answered = (~largest.isnan()).long()  # NaN, as a logit, answers nothing
        places = (
            targets,
            predicted + self.classes,
            targets + 2 * self.classes,
            bins + base,
            bins + (base + BINS + 1),
            bins + (base + 2 * (BINS + 1)),
        )
        self._class_sums.index_add_(0, torch.cat(places), torch.cat((one, answered, right, one, right, units)))
