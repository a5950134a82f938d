"""Parameters' gradients of a half-precision run against those of the reference, value by value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import nn

from scripts.audit.measure import FP16_NORMAL


@dataclass
class Compared:
    """Sums over the values of one parameter's gradient (or several) and over all passes.

    ``lost``: zero although the reference is not. ``subnormal``: of the scaled gradient below float16's normal range,
    if it was computed in float16. Squared norms: ``difference`` of the unscaled gradient from the reference,
    ``reference``, and ``lost_norm`` of the reference at the lost values. ``in_half``: how many passes' gradients
    float16 can hold. ``largest``: magnitude of the reference.
    """

    values: float = 0
    present: float = 0  # values of the reference that are not zero
    lost: float = 0
    subnormal: float = 0
    non_finite: float = 0
    difference: float = 0.0
    reference: float = 0.0
    lost_norm: float = 0.0
    in_half: float = 0
    largest: float = 0.0

    def __add__(self, other: Compared) -> Compared:
        sums = {part.name: getattr(self, part.name) + getattr(other, part.name) for part in fields(self)}
        return Compared(**{**sums, "largest": max(self.largest, other.largest)})

    @property
    def error(self) -> float:
        """||g / scale - reference|| / ||reference||; nan where there is no reference, inf or nan for an overflow."""
        return math.sqrt(self.difference / self.reference) if self.reference else math.nan

    @property
    def lost_share(self) -> float:
        """The share of the reference's values that were lost."""
        return self.lost / self.present if self.present else 0.0

    @property
    def subnormal_share(self) -> float:
        return self.subnormal / self.present if self.present else 0.0

    @property
    def lost_norm_share(self) -> float:
        """The share of the reference's norm that the lost values carry."""
        return math.sqrt(self.lost_norm / self.reference) if self.reference else 0.0


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that ``model`` holds, taken out of it."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


class Comparison:
    """Adds up ``Compared`` of every parameter over passes, on the device."""

    def __init__(self) -> None:
        self._rows: dict[str, list[torch.Tensor]] = {}

    def add(self, gradients: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], scale: float) -> None:
        """``gradients`` are of the loss times ``scale``, ``reference`` of the loss itself."""
        for name, truth in reference.items():
            gradient = gradients[name] if name in gradients else torch.zeros_like(truth)
            self._rows.setdefault(name, []).append(_compare(gradient, truth, scale))

    def read(self) -> dict[str, Compared]:
        """By parameter. Waits for the device."""
        if not self._rows:
            return {}
        table = torch.stack([torch.stack(rows) for rows in self._rows.values()]).tolist()
        return {name: together(Compared(*row) for row in rows) for name, rows in zip(self._rows, table, strict=True)}


def _compare(gradient: torch.Tensor, truth: torch.Tensor, scale: float) -> torch.Tensor:
    """The fields of ``Compared`` in their order, float64 (10,) on the device."""
    wide, truth = gradient.double(), truth.double()
    present = truth != 0
    lost = (wide == 0) & present
    in_half = (gradient == gradient.half().to(gradient.dtype)).all()  # then it came through float16
    small = (wide != 0) & (wide.abs() < FP16_NORMAL)
    norms = [(wide / scale - truth).square().sum(), truth.square().sum(), truth.masked_fill(~lost, 0.0).square().sum()]
    counts = [present, lost, small & in_half, ~torch.isfinite(wide)]
    values = torch.full((), float(truth.numel()), dtype=torch.float64, device=truth.device)
    sums = [count.sum().double() for count in counts]
    return torch.stack([values, *sums, *norms, in_half.double(), truth.abs().max()])


def together(compared: Iterable[Compared]) -> Compared:
    """All of them as one gradient."""
    return sum(compared, Compared())
