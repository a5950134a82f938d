"""Readings of logits: one class per image (softmax), or any number of labels (a sigmoid and a threshold for each).

All differences between tools for single-label and for multi-label networks begin here: a checkpoint tells the reading
of its network, and a tool asks the reading for probabilities and answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from utils.config.settings import UserError

THRESHOLD = 0.5  # of a label, until others are chosen
SMALLEST = 1e-30  # probability whose logit is finite
LAST_STEP = 2**-24  # from the largest float32 below 1


@dataclass(frozen=True)
class OneLabel:
    """Reading of logits as one class per image: the classes' probabilities sum to 1, and the largest is the answer."""

    activation: ClassVar[str] = "softmax"
    answer: ClassVar[str] = "class"  # a word for what an answer is
    several: ClassVar[bool] = False

    @property
    def facts(self) -> dict[str, Any]:
        """Plain values from which another program can read logits in this way."""
        return {"activation": self.activation}

    def divided(self, temperature: float) -> Reading:
        """The reading under which logits divided by ``temperature`` give the same answers."""
        return self

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities (n, classes) of ``logits`` (n, classes)."""
        return logits.softmax(1)

    def logits(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Logits that have these ``probabilities`` (n, classes)."""
        return probabilities.clamp_min(SMALLEST).log()

    def same(self, logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Whether ``logits`` and ``others``, (n, classes) each, give the same answer: bool (n,)."""
        return logits.argmax(1) == others.argmax(1)

    def likeliest(self, logits: torch.Tensor, most: int) -> list[list[tuple[int, float]]]:
        """The ``most`` likeliest classes of each image in ``logits`` (n, classes), as (class, probability).

        Among equal logits, which are common in bfloat16, the lower class comes first, as in validation; different
        logits may have equal probabilities.
        """
        places = logits.sort(dim=1, descending=True, stable=True).indices[:, :most]
        shares = self.probabilities(logits).gather(1, places)
        rows = zip(places.tolist(), shares.tolist(), strict=True)
        return [list(zip(*row, strict=True)) for row in rows]

    def labels(self, logits: torch.Tensor) -> list[list[tuple[int, float]]] | None:
        """Labels given to each image, as (class, probability), likeliest first; None for a single label."""
        return None


@dataclass(frozen=True)
class SeveralLabels(OneLabel):
    """Reading of logits as independent labels: a label is given if the sigmoid of its logit reaches its threshold.

    ``thresholds``: a probability for each class.
    """

    thresholds: tuple[float, ...]
    activation: ClassVar[str] = "sigmoid"
    answer: ClassVar[str] = "labels"
    several: ClassVar[bool] = True

    @property
    def facts(self) -> dict[str, Any]:
        return {"activation": self.activation, "thresholds": list(self.thresholds)}

    def divided(self, temperature: float) -> SeveralLabels:
        thresholds = torch.tensor(self.thresholds, dtype=torch.float64).logit() / temperature
        return SeveralLabels(tuple(thresholds.sigmoid().tolist()))

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.sigmoid()

    def logits(self, probabilities: torch.Tensor) -> torch.Tensor:
        exact = probabilities.double()
        below_1 = exact.clamp_max(1 - LAST_STEP / 2)
        return (exact.clamp_min(SMALLEST).log() - (-below_1).log1p()).to(probabilities.dtype)

    def same(self, logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return (self.given(logits) == self.given(others)).all(1)

    def labels(self, logits: torch.Tensor) -> list[list[tuple[int, float]]]:
        given = self.given(logits).tolist()
        ranked = self.likeliest(logits, logits.shape[1])
        return [[one for one in row if has[one[0]]] for row, has in zip(ranked, given, strict=True)]

    def given(self, logits: torch.Tensor) -> torch.Tensor:
        """Whether each label is given, that is, its probability is at least its threshold: bool (n, classes)."""
        thresholds = torch.tensor(self.thresholds, dtype=torch.float64, device=logits.device)
        return self.probabilities(logits.double()) >= thresholds  # as exact as metrics and thresholds are


Reading = OneLabel | SeveralLabels


def reading_of(state: Mapping[str, Any], classes: int, path: Path) -> Reading:
    """The reading for a checkpoint's ``state``, by default ``OneLabel``. Raises ``UserError`` for unfit thresholds."""
    if not state.get("multilabel"):
        return OneLabel()
    thresholds = state.get("thresholds") or [THRESHOLD] * classes
    if len(thresholds) != classes or not all(isinstance(one, float) for one in thresholds):
        raise UserError(f"{path}: has {len(thresholds)} thresholds for {classes} classes; give another checkpoint")
    return SeveralLabels(tuple(thresholds))
