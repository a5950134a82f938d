"""One forward and backward pass of the audit in one dtype, and what is measured in it.

Statistics are reduced on the device to a few numbers a layer right away; no activation is kept. A ``Meter`` sums them
over all calls of a module and over all passes, and reads them once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from scripts.audit.trace import HALF, SameDraws, WideOnly, largest
from scripts.audit.walkthrough import true_float32
from utils.loop.forward import forward
from utils.precision.amp import DTYPES

FP16_LIMIT = 65504.0  # the largest float16
FP16_NORMAL = 2.0**-14  # the smallest normal float16; below it precision is lost bit by bit
# exponents in the histogram of gradients
LOWEST = -80
HIGHEST = 47

Criterion = Callable[[torch.Tensor, torch.Tensor], "torch.Tensor | dict[str, torch.Tensor]"]


@dataclass(frozen=True)
class AuditBatch:
    """One forward pass of training.

    ``images``: float32 (m, c, h, w), normalised. ``targets``: int64 (n,), n <= m; images beyond n are padding.
    ``weight``: what the loss is multiplied by, as with gradient accumulation.
    """

    images: torch.Tensor
    targets: torch.Tensor
    weight: float = 1.0


@dataclass(frozen=True)
class Format:
    """The dtype to run in, by name: 'fp16', 'bf16', 'fp32' (of the reference 'fp64' too); ``scale`` of the loss."""

    name: str
    scale: float = 1.0

    @property
    def half(self) -> torch.dtype | None:
        """The dtype that autocast rounds to; None without autocast."""
        return DTYPES.get(self.name)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """A context in which ``model`` is in training mode without gradients; buffers, gradients and modes are restored."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    model.zero_grad(set_to_none=True)
    model.train()
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        for name, module in model.named_modules():
            module.training = modes[name]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A context in which the network's code makes floating-point tensors of ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def run_pass(
    model: nn.Module,
    batch: AuditBatch,
    criterion: Criterion,
    device: torch.device,
    form: Format,
    seed: int,
    around_forward: Sequence[Any] = (),
) -> torch.Tensor:
    """Forward and backward pass as training does it; gradients are left in ``model``; returns the loss ().

    With ``form`` fp32 or fp64 nothing is computed in a narrower format, whatever the network's code says.
    ``around_forward``: context managers for the network's forward pass alone.
    """
    wide = {"fp32": torch.float32, "fp64": torch.float64}.get(form.name)

    def watched(images: torch.Tensor) -> torch.Tensor:
        with ExitStack() as watchers:
            for context in around_forward:
                watchers.enter_context(context)
            return model(images.to(wide) if wide else images)

    torch.manual_seed(seed)
    with ExitStack() as around, SameDraws():
        if wide is not None:
            around.enter_context(true_float32())
            around.enter_context(default_dtype(wide))
            around.enter_context(WideOnly(wide))
        autocast = torch.autocast(device.type, dtype=form.half, enabled=form.half is not None)
        loss = forward(watched, batch, criterion, autocast).loss
    scale = torch.tensor(form.scale, device=device)  # float32, as GradScaler's
    with true_float32() if wide else nullcontext():
        (loss * batch.weight * scale).backward()
    return loss.detach()


# ------------------------------------------------------------------------------------------- layers


@dataclass
class Seen:
    """What one format's runs showed of one module, over all its calls and all passes.

    Counts of values; magnitudes are of finite values. ``histogram``: how many gradient values have which exponent,
    ``LOWEST`` to ``HIGHEST``. Gradients are those of the scaled loss with respect to the module's output.
    """

    values: float = 0
    non_finite: float = 0
    largest: float = 0.0
    gradients: float = 0
    zeros: float = 0
    subnormal: float = 0
    gradients_non_finite: float = 0
    largest_gradient: float = 0.0
    dtypes: list[str] = field(default_factory=list)
    gradient_dtypes: list[str] = field(default_factory=list)
    histogram: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Event:
    """A tensor that went into a module (``kind`` 'input') or came out of it ('output')."""

    kind: str
    module: str
    non_finite: float


def first_non_finite(trail: Sequence[Event], reference: Sequence[Event] = ()) -> str | None:
    """The module in which values that are not finite begin, in the order of computation; None without any.

    Those that the reference has in the same place do not count: a mask may contain -inf on purpose.
    """
    true_counts = [event.non_finite for event in reference] if len(reference) == len(trail) else [0.0] * len(trail)
    for event, true_count in zip(trail, true_counts, strict=True):
        if event.non_finite > true_count:
            # No module gave this input, or its output would have come first: the module around has computed it.
            return event.module if event.kind == "output" else event.module.rpartition(".")[0]
    return None


class Meter:
    """Collects ``Seen`` of every module while passes run inside ``watching(model, **meter.callbacks())``.

    ``of_reference``: magnitudes and the histogram are taken too. ``order`` holds the modules as they first ended,
    ``trail``, once ``read``, every tensor that went into or came out of one, and how many of its values are not finite.
    """

    PEAKS = ("largest", "largest_gradient")

    def __init__(self, *, of_reference: bool) -> None:
        self.of_reference = of_reference
        self.order: list[str] = []
        self.trail: list[Event] = []
        self._events: list[tuple[str, str, torch.Tensor]] = []
        self._numbers: dict[tuple[str, str], torch.Tensor | float] = {}
        self._dtypes: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._histograms: dict[str, torch.Tensor] = {}

    def callbacks(self) -> dict[str, Callable[[str, nn.Module, torch.Tensor], None]]:
        """The callbacks of ``watching``."""
        return {"inputs": self._input, "outputs": self._output, "gradients": self._gradient}

    def _add(self, name: str, what: str, number: torch.Tensor | float) -> None:
        before = self._numbers.get((name, what))
        if before is None:
            self._numbers[name, what] = number
        elif what in self.PEAKS:
            self._numbers[name, what] = torch.maximum(before, number)
        else:
            self._numbers[name, what] = before + number

    def _input(self, name: str, module: nn.Module, tensor: torch.Tensor) -> None:
        self._events.append(("input", name, (~torch.isfinite(tensor)).sum()))

    def _output(self, name: str, module: nn.Module, tensor: torch.Tensor) -> None:
        if name not in self.order:
            self.order.append(name)
        self._note(name, "dtypes", tensor)
        self._add(name, "values", tensor.numel())
        self._events.append(("output", name, (~torch.isfinite(tensor)).sum()))
        if self.of_reference:
            self._add(name, "largest", largest(tensor))

    def _gradient(self, name: str, module: nn.Module, gradient: torch.Tensor) -> None:
        self._note(name, "gradient_dtypes", gradient)
        self._add(name, "gradients", gradient.numel())
        self._add(name, "zeros", (gradient == 0).sum())
        self._add(name, "gradients_non_finite", (~torch.isfinite(gradient)).sum())
        if gradient.dtype == torch.float16:
            self._add(name, "subnormal", ((gradient != 0) & (gradient.abs() < FP16_NORMAL)).sum())
        if self.of_reference:
            self._add(name, "largest_gradient", largest(gradient))
            counts = exponents(gradient)
            self._histograms[name] = self._histograms[name] + counts if name in self._histograms else counts

    def _note(self, name: str, what: str, tensor: torch.Tensor) -> None:
        seen = self._dtypes[name, what]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in seen:
            seen.append(dtype)

    def read(self) -> dict[str, Seen]:
        """What was seen, by module, in the order of computation. Waits for the device."""
        keys = list(self._numbers)
        numbers = read_all([self._numbers[key] for key in keys])
        counts = read_all([count for *_, count in self._events])
        self.trail = [Event(kind, name, count) for (kind, name, _), count in zip(self._events, counts, strict=True)]
        seen: dict[str, Seen] = {name: Seen() for name in self.order}
        for (name, what), number in zip(keys, numbers, strict=True):
            if name in seen:  # a module that failed to end has no output
                setattr(seen[name], what, number)
        for event in self.trail:
            if event.kind == "output":
                seen[event.module].non_finite += event.non_finite
        for name, found in seen.items():
            found.dtypes = self._dtypes[name, "dtypes"]
            found.gradient_dtypes = self._dtypes[name, "gradient_dtypes"]
            found.histogram = self._histograms[name].tolist() if name in self._histograms else []
        return seen


def exponents(values: torch.Tensor) -> torch.Tensor:
    """How many finite values other than zero have which exponent, floor(log2 |value|): int64, LOWEST to HIGHEST."""
    _, exponent = torch.frexp(values.detach().float() if values.dtype in HALF else values.detach())
    bins = (exponent.to(torch.int64) - 1).clamp(LOWEST, HIGHEST) - LOWEST  # frexp's mantissa is in [0.5, 1)
    size = HIGHEST - LOWEST + 1
    bins = torch.where(torch.isfinite(values) & (values != 0), bins, size)  # one more bin, for the others
    return torch.bincount(bins.flatten(), minlength=size + 1)[:size]


def read_all(numbers: Sequence[torch.Tensor | float]) -> list[float]:
    """The numbers on the host, with one wait for the device."""
    tensors = [number.double() for number in numbers if isinstance(number, torch.Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(values) if isinstance(number, torch.Tensor) else float(number) for number in numbers]


def percentile(histogram: Sequence[float], share: float) -> float | None:
    """The log2 below which ``share`` of the values lie, linear within an exponent; None for no values."""
    wanted = share * sum(histogram)
    if not wanted:
        return None
    for exponent, count in enumerate(histogram, LOWEST):
        if count and wanted <= count:
            return exponent + wanted / count
        wanted -= count
    return float(HIGHEST + 1)


# ---------------------------------------------------------------------------------------- gradients


@dataclass
class Compared:
    """Sums over the values of one parameter's gradient (or several) and over all passes.

    ``lost``: zero although the reference is not. Squared norms: ``difference`` of the unscaled gradient from the
    reference, ``reference``, and ``lost_norm`` of the reference at the lost values. ``in_half``: how many passes'
    gradients float16 can hold. ``largest``: magnitude of the reference.
    """

    values: float = 0
    present: float = 0  # values of the reference that are not zero
    lost: float = 0
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
    def lost_norm_share(self) -> float:
        """The share of the reference's norm that the lost values carry."""
        return math.sqrt(self.lost_norm / self.reference) if self.reference else 0.0


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that ``model`` holds, taken out of it."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


class GradientComparison:
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
    """The fields of ``Compared`` in their order, float64 (9,) on the device."""
    wide = gradient.double()
    truth = truth.double()
    present = truth != 0
    lost = (wide == 0) & present
    in_half = (gradient == gradient.half().to(gradient.dtype)).all()  # then it came through float16
    norms = [(wide / scale - truth).square().sum(), truth.square().sum(), truth.masked_fill(~lost, 0.0).square().sum()]
    counts = [present, lost, ~torch.isfinite(wide)]
    values = torch.full((), float(truth.numel()), dtype=torch.float64, device=truth.device)
    sums = [count.sum().double() for count in counts]
    return torch.stack([values, *sums, *norms, in_half.double(), truth.abs().max()])


def together(compared: Iterable[Compared]) -> Compared:
    """The sums of several gradients, as of one."""
    return sum(compared, Compared())
