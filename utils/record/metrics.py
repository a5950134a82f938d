"""Metrics: sums and counts on the device, divided once on the host. Each metric is defined here, once.

Loss, top-1 and top-5 are sums over samples. Precision, recall and F1 need three counts per class instead of a confusion
matrix: 24 bytes per class, where the matrix of ImageNet-21k would take 3.8 GB. The calibration error needs three sums
per bin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from utils.runtime.devices import exact_device, to_device

LOSS, TOP1, TOP5, COUNT = range(4)
BINS = 15  # of the calibration error, as in Guo et al.
NOT_A_NUMBER = BINS  # the bin of confidences that are NaN
CHUNK = 4096  # samples counted at a time if all logits are at hand
UNIT = 2**36  # of a confidence of 1: sums of whole numbers are exact in any order, for up to 2**27 images


class Figures:
    """Base class of reports: the figures ``FIGURES`` of ``count`` samples besides their loss; ``HEADLINE`` is chief."""

    loss: float
    count: int

    HEADLINE: ClassVar[str]
    FIGURES: ClassVar[tuple[str, ...]]  # shown in a run's last line

    @property
    def headline(self) -> float:
        """The figure that ``HEADLINE`` names."""
        return getattr(self, self.HEADLINE)

    @property
    def numbers(self) -> list[float]:
        """The numbers that a checkpoint stores, in the order of the fields."""
        return [self.loss, *(getattr(self, name) for name in self.FIGURES), self.count]

    def text(self, with_top5: bool = True, mixed: bool = False) -> str:
        """Figures for the log. ``mixed``: True if they are those of mixed images."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True)
class Report(Figures):
    """Means over ``count`` samples; accuracies in percent.

    ``by_class``: a validation's figures by class; ``own``: the metrics of users' files, by name.
    """

    loss: float
    top1: float
    top5: float
    count: int
    by_class: ClassReport | None = field(default=None, compare=False, repr=False)
    own: dict[str, float] = field(default_factory=dict)

    HEADLINE = "top1"
    FIGURES = ("top1", "top5")

    @classmethod
    def from_sums(cls, sums: list[float]) -> Report:
        """Report from the sums of loss, top-1 hits, top-5 hits and count; NaN without samples."""
        loss, top1, top5, count = sums[: COUNT + 1]
        if not count:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(loss / count, 100 * top1 / count, 100 * top5 / count, round(count))

    def text(self, with_top5: bool = True, mixed: bool = False) -> str:
        of = " (mixed)" if mixed else ""
        top5 = f"top5{of} {self.top5:.2f}  " if with_top5 else ""
        return f"top1{of} {self.top1:.2f}  {top5}loss {self.loss:.4f}"


def shows_top5(classes: int) -> bool:
    """True if top-5 says anything: with at most five classes it is always 100 %."""
    return classes > 5


def cut_words(batches: int | None) -> str:
    """Note, for log lines, that a validation was cut short after ``batches`` batches; '' for None, a whole one."""
    return "" if batches is None else f" (cut: --max-val-batches {batches})"


def target_rank(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Number of classes that rank before the target, int64 (n,): 0 if the prediction is right.

    ``logits``: (n, classes); ``targets``: int64 (n,). Among equal logits the lower class ranks first, as with argmax,
    so a network with the same output for every class is right for class 0 only. NaN ranks before the target, so a
    single NaN makes the prediction wrong.
    """
    own = logits.gather(1, targets[:, None])
    classes = torch.arange(logits.shape[1], device=logits.device)
    after = torch.where(classes < targets[:, None], logits < own, logits <= own)  # or the target itself
    return logits.shape[1] - after.sum(1)


WAITING_NUMBERS = 2**20  # logits that may wait to be counted


class ClassificationMeter:
    """Rows of sums, one per step or batch, float64 on the device; reading them is the only synchronisation.

    ``named`` holds further losses by name, float64 (rows,) each. Logits wait until there are ``WAITING_NUMBERS`` of
    them: many small operations in every step would cost a small network more than its layers. Exactly one rank computes
    a validation batch, so summing over ranks only adds zeros to its row, and the rows are then summed in one order: the
    result has the same bits on any number of ranks.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._sums = torch.zeros(rows, 4, dtype=torch.float64, device=exact_device(device))
        self._first = torch.tensor([1, 5], device=self._sums.device)
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
        """Add a forward pass to ``row``: mean ``loss`` over n, ``logits`` (n, classes), ``targets`` int64 (n,).

        ``targets`` may also be the shares (n, classes) of mixed images: then the class with the largest share is right.
        Do not write to the tensors afterwards.
        """
        targets = self._labels(targets)
        self._waiting.append((row, loss.detach(), logits.detach(), targets))
        self._waiting_numbers += logits.numel()
        for name, value in (named or {}).items():
            self.column(name)[row] += value.detach().to(self._sums) * len(targets)
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
        rows, losses, all_logits, all_targets = zip(*self._waiting, strict=True)
        self._waiting = []
        self._waiting_numbers = 0
        device = self._sums.device
        counts = [len(part) for part in all_targets]
        logits = torch.cat(all_logits).to(device)
        targets = torch.cat(all_targets).to(device)
        hits = self._hits(logits, targets)
        passes = to_device(torch.tensor([rows, counts]), device)
        sample_rows = passes[0].repeat_interleave(passes[1], output_size=sum(counts))
        self._sums[:, TOP1:COUNT].index_add_(0, sample_rows, hits.double())
        weighted = torch.stack(losses).to(self._sums) * passes[1]
        self._sums[:, LOSS].index_add_(0, passes[0], weighted)
        self._sums[:, COUNT].index_add_(0, passes[0], passes[1].double())
        self._count(logits, targets, hits[:, 0])

    def _labels(self, targets: torch.Tensor) -> torch.Tensor:
        """The label of each image, int64 (n,)."""
        return targets.argmax(1) if targets.is_floating_point() else targets

    def _hits(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Whether each sample's label is the top prediction, and whether it is among the top five: bool (n, 2)."""
        rank = target_rank(logits, targets)  # the number of classes when the target's is NaN
        return rank[:, None] < self._first.clamp(max=logits.shape[1])

    def _count(self, logits: torch.Tensor, targets: torch.Tensor, hits: torch.Tensor) -> None:
        """Count n more samples. ``hits``: bool (n,), whether the prediction is right."""

    def column(self, name: str) -> torch.Tensor:
        """Sums of the loss ``name``, float64 (rows,)."""
        if name not in self.named:
            self.named[name] = torch.zeros_like(self._sums[:, 0])
        return self.named[name]

    def reset(self) -> None:
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
        self._class_sums = torch.zeros(0, dtype=torch.int64, device=self._sums.device)
        self._edges = bin_edges(self._sums.device)[1:]  # upper ends

    def class_sums(self, classes: int) -> torch.Tensor:
        """Sums by class and by confidence, int64 (3 * classes + 3 * (BINS + 1),).

        They are samples, predictions and hits of each class, then samples, hits and summed confidence of each bin.
        ``classes``: the number on all ranks, as this rank may have met no batch.
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


# ------------------------------------------------------------------------------ classes and confidence


class Bin(NamedTuple):
    """Samples whose confidence is above ``low`` and at most ``high``: their number, and their means in percent."""

    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


def bin_edges(device: torch.device) -> torch.Tensor:
    """Borders of the confidence bins, float32 (BINS + 1,)."""
    return torch.linspace(0, 1, BINS + 1, device=device)


@dataclass(frozen=True)
class ClassReport:
    """Counts of n samples in ``classes`` classes, int64 (classes,) each, and figures from them, in percent.

    ``support``: samples of the class. ``predicted``: samples that the network assigns to it. ``right``: samples that
    are both. The macro averages are scikit-learn's with ``zero_division=0``: they leave out a class that has neither
    samples nor predictions; a class that is only predicted counts with 0. Balanced accuracy leaves out all classes
    without samples. ``bins``: int64 (3, BINS + 1), samples, hits and summed confidence, in units of 1 / ``UNIT``, of 15
    bins of equal width, which include their upper but not their lower ends; the last column holds confidences that are
    NaN.
    """

    support: np.ndarray
    predicted: np.ndarray
    right: np.ndarray
    bins: np.ndarray

    @classmethod
    def from_sums(cls, sums: torch.Tensor) -> ClassReport | None:
        """Report from ``ValidationMeter.class_sums``, added up over ranks; None without samples."""
        numbers = sums.cpu().numpy()
        classes, bins = np.split(numbers, [len(numbers) - 3 * (BINS + 1)])
        support, predicted, right = classes.reshape(3, -1)
        return cls(support, predicted, right, bins.reshape(3, -1)) if classes.any() else None

    @classmethod
    def of(cls, logits: torch.Tensor, labels: torch.Tensor) -> ClassReport | None:
        """Report on ``logits`` (n, classes) and ``labels`` int64 (n,) that are all at hand; None without samples."""
        meter = ValidationMeter(1, logits.device)
        for part in zip(logits.split(CHUNK), labels.split(CHUNK), strict=True):
            meter.update(0, torch.zeros((), device=logits.device), *part)
        return cls.from_sums(meter.class_sums(logits.shape[1]))

    @cached_property
    def accuracy(self) -> np.ndarray:
        """Accuracy of each class (its recall), in percent: float64 (classes,), NaN where it has no samples."""
        return 100 * _ratio(self.right, self.support, math.nan)

    @cached_property
    def precision(self) -> np.ndarray:
        """Precision of each class, in percent: float64 (classes,), 0 where it is never predicted."""
        return 100 * _ratio(self.right, self.predicted)

    @cached_property
    def f1(self) -> np.ndarray:
        """F1 of each class, in percent: float64 (classes,), 0 where it has neither samples nor predictions."""
        return 100 * _ratio(2 * self.right, self.support + self.predicted)

    @property
    def macro_precision(self) -> float:
        return self._macro(self.precision)

    @property
    def macro_recall(self) -> float:
        return self._macro(np.nan_to_num(self.accuracy))

    @property
    def macro_f1(self) -> float:
        return self._macro(self.f1)

    @property
    def balanced_accuracy(self) -> float:
        return float(self.accuracy[self.support > 0].mean())

    @cached_property
    def ece(self) -> float:
        """Expected calibration error in percent (Guo et al., On calibration of modern neural networks, 2017).

        The mean over samples of the difference between confidence and accuracy of their bin; NaN if any confidence is
        NaN.
        """
        counts, right, confidence = self.bins
        if counts[NOT_A_NUMBER]:
            return math.nan
        return float(100 * np.abs(confidence / UNIT - right).sum() / counts.sum())

    @cached_property
    def reliability(self) -> list[Bin]:
        """The 15 confidence bins in order, including empty ones."""
        edges = bin_edges(torch.device("cpu")).tolist()
        counts, right, confidence = self.bins[:, :BINS]
        sure = 100 * _ratio(confidence / UNIT, counts, math.nan)
        accuracy = 100 * _ratio(right, counts, math.nan)
        columns = (edges[:-1], edges[1:], counts.tolist(), sure.tolist(), accuracy.tolist())
        return list(map(Bin, *columns))

    @cached_property
    def guessing_loss(self) -> float:
        """Cross entropy of a guess that knows only the classes' shares of the samples: their entropy, in nats."""
        shares = self.support[self.support > 0] / self.support.sum()
        return float(-(shares * np.log(shares)).sum()) + 0.0  # never -0

    @cached_property
    def answers_nats(self) -> float:
        """Information that the answers give about the class, in nats per sample (see ``nats_of``)."""
        return nats_of(self.support, self.right, int(self.predicted[self.support == 0].sum()))

    @property
    def commonest_answer(self) -> float:
        """Percentage of the samples that get the most frequent answer."""
        return float(100 * self.predicted.max() / self.support.sum())

    def _macro(self, values: np.ndarray) -> float:
        return float(values[self.support + self.predicted > 0].mean())

    def rows(self, names: Sequence[str]) -> Iterator[dict[str, str | int | float]]:
        """A row per class, in order: the content of ``class_metrics.csv``."""
        for number, name in enumerate(names):
            yield {
                "class": name,
                "val_count": int(self.support[number]),
                "val_predicted": int(self.predicted[number]),
                "val_accuracy": float(self.accuracy[number]),
                "val_precision": float(self.precision[number]),
                "val_f1": float(self.f1[number]),
            }

    def __str__(self) -> str:
        return (
            f"macro precision {self.macro_precision:.2f}  macro recall {self.macro_recall:.2f}  "
            f"macro F1 {self.macro_f1:.2f}  balanced accuracy {self.balanced_accuracy:.2f}  "
            f"calibration error {self.ece:.2f}"
        )


def nats_of(support: np.ndarray, right: np.ndarray, elsewhere: int = 0) -> float:
    """Information that answers give about the class, in nats per image, beyond guessing by the classes' shares.

    The counts, int64 (classes,), are those of ``ClassReport``. Given an answer, the class that it names is assumed to
    have a probability of s + (1 - s) times its share, any other class (1 - s) times its own share; s, between 0 and 1,
    is chosen to make the labels likeliest. The result is 0 if s is 0: the answers are right no more often than by
    chance. ``elsewhere``: number of answers that name a class without samples, after which the shares hold: a network
    that tells cats from dogs does so, too, where it takes some of both for deer, and there are none.
    """
    count = support.sum()
    known = right > 0
    hits = right[known].astype(float)
    gain = count / support[known] - 1.0
    wrong = float(count - right.sum() - elsewhere)

    def slope(s: float) -> float:
        return float((hits * gain / (1 + s * gain)).sum()) - wrong / (1 - s)

    low = 0.0
    high = 1.0
    if slope(low) <= 0:
        return 0.0
    for _ in range(60):  # concave, so the slope falls; at 1 it is infinite where an answer is wrong
        middle = (low + high) / 2
        low, high = (middle, high) if middle < 1 and slope(middle) > 0 else (low, middle)
    lost = wrong * math.log1p(-low) if wrong else 0.0
    return (float((hits * np.log1p(low * gain)).sum()) + lost) / float(count)


def _ratio(part: np.ndarray, whole: np.ndarray, without: float = 0.0) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(whole), without), where=whole > 0)
