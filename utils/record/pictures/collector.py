"""Data for the pictures of a validation, gathered while it runs: counts, the worst mistakes, features.

Whole numbers are summed on the device and images are chosen by fixed rules, so the pictures are the same on any number
of ranks. The host reads nothing before the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from utils.data.loaders import Batch
from utils.data.sample_plan import evenly_spaced
from utils.data.transforms import for_people
from utils.optim.head import SeenFeatures
from utils.runtime.distributed import Distributed

MOST_CLASSES = 1000  # of a confusion matrix
MOST_CURVES = 20  # classes with a precision-recall curve of their own
THRESHOLDS = 127  # of a curve, the most that TensorBoard takes
MOST_MISTAKES = 24
MOST_POINTS = 1000  # images in the projector
THUMBNAIL = 32  # pixels a side, of the images in the projector
NO_CLASS = -1
LONGEST_SIDE = 128  # pixels a side, of the mistakes


class Mistake(NamedTuple):
    """A wrong answer: the sample's number, its class, the answer and its probability, and uint8 pixels (c, h, w)."""

    index: int  # type: ignore[assignment]  # in place of tuple.index, which a record of numbers does not need
    target: int
    predicted: int
    share: float
    pixels: np.ndarray


class Point(NamedTuple):
    """A sample's number, class and answer, its float32 features (d,), and uint8 pixels (c, 32, 32)."""

    index: int  # type: ignore[assignment]  # in place of tuple.index, which a record of numbers does not need
    target: int
    predicted: int
    features: np.ndarray
    pixels: np.ndarray


class Gathered(NamedTuple):
    """Counts, mistakes and points of all n samples of a validation, over all ranks.

    ``confusion``: int64 (classes, classes), a row for each true class, without samples whose logits are NaN; None for
    too many classes. ``curves``: int64 (1 + k, 2, THRESHOLDS), the number of samples by their probability of a class,
    in bins of equal width: of other classes (0), and of this class (1); first summed over all classes, then for each of
    the first k. ``mistakes``: the most confident first. ``points``: at most ``MOST_POINTS``, spread evenly over the
    set; empty if the network's features could not be recorded.
    """

    confusion: np.ndarray | None
    curves: np.ndarray
    mistakes: list[Mistake]
    points: list[Point]


class Answers(NamedTuple):
    """Answers to n images.

    ``shares``: probabilities, float (n, classes). ``is_target``: int64 (n, classes) of 1, 0, and -1 where the label is
    missing. ``sure``: float (n,), the probability of the mistake, -1 without one. ``mistake`` and ``point``: the class
    and the answer that ``Mistake`` and ``Point`` hold, int64 (n,) each.
    """

    shares: torch.Tensor
    is_target: torch.Tensor
    sure: torch.Tensor
    mistake: tuple[torch.Tensor, torch.Tensor]
    point: tuple[torch.Tensor, torch.Tensor]


class Collector(nn.Module):
    """Wrapper of ``network`` in validation that gathers data for pictures. Call ``before_batch`` for each batch.

    ``of``: the module whose output layer has the features as its input; the features of several views of a batch, in
    one call or several, are averaged. ``classes``: their number. ``samples``: the size of the validation set.
    ``to_pixels`` undoes the normalisation of images, into floats between 0 and 1. ``device``: the network's.
    """

    draws_matrix = True

    def __init__(
        self,
        network: nn.Module,
        of: nn.Module,
        classes: int,
        samples: int,
        to_pixels: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.network = network
        self.classes = classes
        self._to_pixels = to_pixels
        self._shown = set(evenly_spaced(samples, MOST_POINTS).tolist())
        self._with_matrix = self.draws_matrix and classes <= MOST_CLASSES
        self._own_curves = classes if classes <= MOST_CURVES else 0
        self._of_curves = (1 + self._own_curves) * 2 * THRESHOLDS
        of_matrix = classes**2 if self._with_matrix else 0
        # the curves, then the matrix, flat
        self._counts = torch.zeros(self._of_curves + of_matrix, dtype=torch.int64, device=device)
        self._worst: tuple[torch.Tensor, ...] = ()  # in the order of a ``Mistake``
        self._points: list[tuple[torch.Tensor, ...]] = []
        self._batch: Batch
        self._features = SeenFeatures(of)

    def close(self) -> None:
        """Stop looking at the network's features."""
        self._features.close()

    def before_batch(self, batch: Batch) -> None:
        """Take note of ``batch``, whose images come next."""
        self._batch = batch

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The network's logits (m, classes), unchanged."""
        self._features.forget()
        logits = self.network(images)
        targets = self._batch.targets
        answers = self._answers(logits[: len(targets)].detach().float(), targets)
        self._count(answers)
        self._keep_worst(answers, images)
        self._keep_points(answers, images)
        return logits

    def _answers(self, logits: torch.Tensor, targets: torch.Tensor) -> Answers:
        shares = logits.softmax(1)
        # As top-1 counts: different logits may have equal probabilities, and NaN, as a logit, answers nothing.
        predicted = logits.argmax(1).masked_fill_(logits.isnan().any(1), NO_CLASS)
        sure = shares.amax(1).nan_to_num(0).masked_fill((predicted == targets) | (predicted == NO_CLASS), -1)
        pair = (targets, predicted)
        return Answers(shares, functional.one_hot(targets, self.classes), sure, pair, pair)

    # ------------------------------------------------------------------------------------- a batch

    def _count(self, answers: Answers) -> None:
        shares, is_target, _, (targets, predicted), _ = answers
        bins = (shares.nan_to_num(0) * (THRESHOLDS - 1)).long()
        known = (is_target >= 0).long().flatten()
        is_target = is_target.clamp(min=0)  # missing labels are counted 0 times
        counts = [known]
        places = [(is_target * THRESHOLDS + bins).flatten()]
        if self._own_curves:
            curve = 1 + torch.arange(self.classes, device=shares.device)
            places.append(((2 * curve + is_target) * THRESHOLDS + bins).flatten())
            counts.append(known)
        if self._with_matrix:
            places.append(self._of_curves + targets * self.classes + predicted.clamp(min=0))
            counts.append((predicted != NO_CLASS).long())
        self._counts.index_add_(0, torch.cat(places), torch.cat(counts))

    def _keep_worst(self, answers: Answers, images: torch.Tensor) -> None:
        """Keep the most confident mistakes; of equally confident ones, the first in the set."""
        targets, predicted = answers.mistake
        numbers = torch.as_tensor(self._batch.indices).to(targets.device)
        pixels = self._pixels(images[: len(targets)], LONGEST_SIDE)
        found: tuple[torch.Tensor, ...] = (numbers, targets, predicted, answers.sure, pixels)
        if self._worst:
            found = tuple(torch.cat(pair) for pair in zip(self._worst, found, strict=True))
        best = found[Mistake._fields.index("share")].argsort(descending=True, stable=True)[:MOST_MISTAKES]
        self._worst = tuple(one[best] for one in found)

    def _keep_points(self, answers: Answers, images: torch.Tensor) -> None:
        targets, predicted = answers.point
        chosen = [place for place, number in enumerate(self._batch.indices.tolist()) if number in self._shown]
        features = self._features.of(len(images)) if chosen else None
        if features is None:
            return
        numbers = torch.as_tensor(self._batch.indices)[chosen]
        pixels = self._pixels(images[chosen], THUMBNAIL)
        self._points.append((numbers, targets[chosen], predicted[chosen], features[chosen], pixels))

    def _pixels(self, images: torch.Tensor, side: int) -> torch.Tensor:
        """Images as uint8, with at most ``side`` pixels a side, or exactly as many if that is ``THUMBNAIL``."""
        pixels = for_people(self._to_pixels(images))
        longer = max(images.shape[-2:])
        if side == THUMBNAIL or longer > side:
            shape = [side if side == THUMBNAIL else max(1, length * side // longer) for length in images.shape[-2:]]
            pixels = functional.interpolate(pixels.float(), shape, mode="bilinear", antialias=True)
        return pixels.mul(255).round().clamp(0, 255).byte()

    # ----------------------------------------------------------------------------------------- the end

    def gather(self, distributed: Distributed) -> Gathered:
        """Gather what all ranks have seen, on every rank. A synchronisation point."""
        counts = distributed.all_reduce_sum(self._counts).cpu().numpy()
        mine = [_on_host(Mistake, self._worst)], [_on_host(Point, part) for part in self._points]
        mistakes = []
        points = []
        for its_mistakes, its_points in distributed.gather(mine):
            mistakes += [one for part in its_mistakes for one in part if one.share >= 0]
            points += [one for part in its_points for one in part]
        matrix = counts[self._of_curves :].reshape(self.classes, self.classes) if self._with_matrix else None
        return Gathered(
            confusion=matrix,
            curves=counts[: self._of_curves].reshape(-1, 2, THRESHOLDS),
            mistakes=sorted(mistakes, key=lambda one: (-one.share, one.index))[:MOST_MISTAKES],
            points=sorted(points, key=lambda one: one.index),
        )


class MultilabelCollector(Collector):
    """A ``Collector`` for multi-label data, without a confusion matrix.

    The mistake of an image is its most confident wrong label: a class that was answered but that it does not show, with
    the target NO_CLASS, or a class that it shows but that was not answered, with this class as target. A point's class
    is the likeliest of those that the image shows, its answer the likeliest of those answered; NO_CLASS if none.
    """

    draws_matrix = False

    def _answers(self, logits: torch.Tensor, targets: torch.Tensor) -> Answers:
        shares = logits.sigmoid()
        labels = targets.nan_to_num(-1).long()
        answered = (shares >= 0.5).long()
        wrong = torch.where(labels == 1, 1 - shares, shares).masked_fill((labels < 0) | (answered == labels), -1)
        sure, predicted = wrong.nan_to_num(0).max(1)
        missed = labels.gather(1, predicted[:, None])[:, 0] == 1
        target = torch.where(missed, predicted, NO_CLASS)
        point = (_likeliest(shares, labels == 1), _likeliest(shares, answered == 1))
        return Answers(shares, labels, sure, (target, predicted), point)


def _likeliest(shares: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """The class with the largest share where ``among``, bool (n, classes), is True: int64 (n,), or NO_CLASS."""
    return torch.where(among.any(1), shares.masked_fill(~among, -1).argmax(1), NO_CLASS)


def _on_host(kind: type, columns: Sequence[torch.Tensor]) -> list[Any]:
    """Rows of ``columns``, each as a ``kind`` that holds Python numbers and NumPy arrays."""
    numbers = [column.tolist() if column.ndim == 1 else list(column.cpu().numpy()) for column in columns]
    return [kind(*row) for row in zip(*numbers, strict=True)]
