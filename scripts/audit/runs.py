"""The runs that the audit compares: the reference, fp16 without and with loss scaling, bf16, and what it recommends."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from scripts.audit.measure import (
    FP16_LIMIT,
    AuditBatch,
    Compared,
    Criterion,
    Event,
    Format,
    GradientComparison,
    Meter,
    Seen,
    first_non_finite,
    gradients_of,
    read_all,
    run_pass,
    together,
    undisturbed,
)
from scripts.audit.trace import HALF, Computed, HalfOperations, LargeInput, Magnitudes, OverflowingOperation
from utils.config.groups.precision import PrecisionSettings
from utils.config.settings import UserError
from utils.precision.amp import keep_in_fp32, resolve_amp
from utils.precision.probe import watching

# the runs' names
UNSCALED = "fp16 unscaled"
SCALED = "fp16"
BF16 = "bf16"
ULP = {"fp32": 2.0**-23, "fp64": 2.0**-52}


@dataclass
class AuditRuns:
    """Everything the runs showed, before it is judged. ``scale`` is the loss scale of the run SCALED.

    ``reference`` and ``runs[run]``: ``Seen`` by module, in the order of computation. ``gradients[run]``: ``Compared``
    by parameter. ``noise``: by parameter, how much the reference's gradient changes, as a share of its norm, when
    each pixel changes by one unit in its last place; near 1 the gradient is rounding noise. ``computed[run]``:
    operations by module. ``overflows`` and ``product_inputs`` (by module): the reference's magnitudes beyond float16.
    """

    scale: float
    reference_format: str
    device: str
    reference: dict[str, Seen] = field(default_factory=dict)
    runs: dict[str, dict[str, Seen]] = field(default_factory=dict)
    gradients: dict[str, dict[str, Compared]] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    computed: dict[str, dict[str, Computed]] = field(default_factory=dict)
    overflows: list[OverflowingOperation] = field(default_factory=list)
    product_inputs: dict[str, LargeInput] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    origins: dict[str, str | None] = field(default_factory=dict)  # by run, where it stops being finite
    failures: dict[str, str] = field(default_factory=dict)  # by format, why it cannot run

    @property
    def sound_reference(self) -> bool:
        """Whether the reference itself is finite, so that there is something to compare with."""
        finite = all(map(math.isfinite, self.losses["reference"]))
        return finite and not any(seen.gradients_non_finite for seen in self.reference.values())

    def seen(self, run: str) -> dict[str, Seen]:
        """By module; empty for a run that failed, as are the next two."""
        return self.runs.get(run, {})

    def compared(self, run: str) -> dict[str, Compared]:
        return self.gradients.get(run, {})

    def operations(self, run: str) -> dict[str, Computed]:
        return self.computed.get(run, {})


@dataclass
class Verification:
    """The recommendation, tried: ``passes`` run again in ``format`` with ``scale`` and ``keep`` in float32.

    ``origin``: the module at which values that are not finite begin in the forward pass ('' is the network itself),
    None when its values are finite. ``error``: of the whole network's gradient. ``gradients``: by parameter.
    ``half_statistics``: modules that still normalise with statistics in half precision. ``failure``: why it did not
    run at all.
    """

    format: str
    scale: float
    keep: list[str]
    origin: str | None
    gradients_finite: bool
    loss_finite: bool
    error: float
    gradients: dict[str, Compared] = field(default_factory=dict)
    half_statistics: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def finite(self) -> bool:
        return not self.failure and self.origin is None and self.gradients_finite and self.loss_finite


class Runner:
    """Runs the passes of one audit in any format. ``reference_format`` is 'fp32' or 'fp64'.

    ``reference_trail``: what ``measure`` saw go into and out of the reference's modules.
    """

    def __init__(
        self,
        model: nn.Module,
        passes: Sequence[AuditBatch],
        criterion: Criterion,
        device: torch.device,
        reference_format: str,
        seed: int,
    ) -> None:
        self.model = model
        self.passes = passes
        self.criterion = criterion
        self.device = device
        self.reference_format = reference_format
        self.seed = seed
        self.reference_trail: list[Event] = []
        wide = torch.float64 if reference_format == "fp64" else torch.float32
        self.reference = copy.deepcopy(model).to(wide)
        self.reference_criterion = criterion
        if isinstance(criterion, nn.Module):  # it may hold weights of classes
            self.reference_criterion = copy.deepcopy(criterion).to(wide)

    def run(
        self,
        number: int,
        form: Format,
        meter: Meter | None = None,
        trace: Any = None,
        model: nn.Module | None = None,
        batch: AuditBatch | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Pass ``number`` in one format; gives loss and gradients, and leaves the network as it was.

        ``trace``: ``Magnitudes`` or ``HalfOperations`` of the model. ``batch`` replaces the pass's own.
        """
        is_reference = form.name == self.reference_format and model is None
        model = self.reference if is_reference else model or self.model
        criterion = self.reference_criterion if is_reference else self.criterion
        with undisturbed(model), watching(model, **meter.callbacks()) if meter else nullcontext():
            loss = run_pass(
                model,
                batch or self.passes[number],
                criterion,
                self.device,
                form,
                self.seed + number,
                (trace,) if trace else (),
            )
            return loss, gradients_of(model)

    def true_gradients(self, number: int) -> dict[str, torch.Tensor]:
        """The reference's gradients of pass ``number``."""
        return self.run(number, Format(self.reference_format))[1]


def missing_format(device: torch.device) -> dict[str, str]:
    """By format, why ``device`` cannot compute in it."""
    try:
        resolve_amp(PrecisionSettings(amp="bf16"), device)
    except UserError as error:
        return {"bf16": str(error)}
    return {}


def measure(runner: Runner, scale: float) -> AuditRuns:
    """Run every pass in every format. ``scale``: the loss scale in use."""
    measured = AuditRuns(scale, runner.reference_format, runner.device.type, failures=missing_format(runner.device))
    forms = {UNSCALED: Format("fp16"), SCALED: Format("fp16", scale), BF16: Format("bf16")}
    meters = {run: Meter(of_reference=False) for run in forms}
    comparisons = {run: GradientComparison() for run in forms}
    true_meter = Meter(of_reference=True)
    losses = {run: [] for run in ("reference", *forms)}
    for number in range(len(runner.passes)):
        magnitudes = Magnitudes(runner.reference)
        loss, truth = runner.run(number, Format(runner.reference_format), true_meter, magnitudes)
        losses["reference"].append(loss)
        _add_magnitudes(measured, magnitudes)
        if number == 0:
            measured.noise = _noise(runner, truth)
        for run, form in forms.items():
            if form.name in measured.failures:
                continue
            trace = HalfOperations(runner.model) if number == 0 and run != SCALED else None  # always the same ones
            try:
                loss, gradients = runner.run(number, form, meters[run], trace)
            except RuntimeError as error:
                measured.failures[form.name] = reason_of(error)
                continue
            losses[run].append(loss)
            comparisons[run].add(gradients, truth, form.scale)
            if trace:
                measured.computed[run] = dict(trace.modules)
    measured.reference = true_meter.read()
    runner.reference_trail = true_meter.trail
    ran = [run for run, form in forms.items() if form.name not in measured.failures]
    measured.runs = {run: meters[run].read() for run in ran}
    measured.origins = {run: first_non_finite(meters[run].trail, true_meter.trail) for run in ran}
    measured.origins["reference"] = first_non_finite(true_meter.trail)
    measured.gradients = {run: comparisons[run].read() for run in ran}
    measured.losses = {run: read_all(losses[run]) for run in ("reference", *ran)}
    return measured


def reason_of(error: RuntimeError) -> str:
    """Torch's reason why an operation lacks a number format. Raises ``error`` again if memory ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    return " ".join(str(error).split())[:160]


def _add_magnitudes(measured: AuditRuns, magnitudes: Magnitudes) -> None:
    overflows, products = magnitudes.read(FP16_LIMIT)
    measured.overflows += overflows
    for name, found in products.items():
        if name not in measured.product_inputs or found.largest > measured.product_inputs[name].largest:
            measured.product_inputs[name] = found


def _noise(runner: Runner, truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """By parameter, how far the gradient of the first pass moves when each pixel moves by its last bit."""
    batch = runner.passes[0]
    generator = torch.Generator().manual_seed(runner.seed)
    signs = 2.0 * torch.randint(0, 2, batch.images.shape, generator=generator) - 1
    wide = batch.images.double() if runner.reference_format == "fp64" else batch.images
    moved = wide * (1 + ULP[runner.reference_format] * signs.to(wide))
    comparison = GradientComparison()
    _, gradients = runner.run(
        0, Format(runner.reference_format), batch=AuditBatch(moved, batch.targets, batch.weight)
    )  # the same draws of dropout, because the seed is that of pass 0
    comparison.add(gradients, truth, 1.0)
    return {name: compared.error for name, compared in comparison.read().items()}


# ------------------------------------------------------------------------------------- verification


def verify(runner: Runner, form: Format, keep: Sequence[str]) -> Verification:
    """Run all passes again as recommended, on a copy of the network with the layers ``keep`` in float32."""
    model = copy.deepcopy(runner.model)
    if form.half is None:
        model.float()
    modules = dict(model.named_modules())
    for name in keep:
        modules[name].float()  # where the network's code had put it to half precision
    keep_in_fp32(model, keep, runner.device)
    meter = Meter(of_reference=False)
    comparison = GradientComparison()
    losses = []
    trace = HalfOperations(model)
    try:
        for number in range(len(runner.passes)):
            traced = trace if number == 0 and form.half else None
            loss, gradients = runner.run(number, form, meter, traced, model)
            losses.append(loss)
            comparison.add(gradients, runner.true_gradients(number), form.scale)
    except RuntimeError as error:
        return Verification(form.name, form.scale, list(keep), None, False, False, math.nan, failure=reason_of(error))
    seen = meter.read()
    compared = comparison.read()
    all_finite = not any(one.non_finite for one in compared.values())
    return Verification(
        form.name,
        form.scale,
        list(keep),
        first_non_finite(meter.trail, runner.reference_trail),
        gradients_finite=all_finite and not any(one.gradients_non_finite for one in seen.values()),
        loss_finite=all(map(math.isfinite, read_all(losses))),
        error=together(compared.values()).error,
        gradients=compared,
        half_statistics=list(half_statistics(model, trace.modules)),
    )


def half_statistics(model: nn.Module, computed: dict[str, Computed]) -> dict[str, str]:
    """By module: in words, the variances and the like of a normalisation that are held in half precision."""
    found = {}
    for name, module in model.named_modules():
        here = computed.get(name, Computed())
        own = [tensor.dtype for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))]
        half = next((str(dtype).removeprefix("torch.") for dtype in own if dtype in HALF), None)
        if here.faults or (half and here.roots):
            found[name] = ", ".join(here.faults) or f"weights in {half}"
    return found


def half_lengths(model: nn.Module, computed: dict[str, Computed]) -> dict[str, str]:
    """By module that does nothing but normalise: in words, the vector norm it has in half precision.

    In an attention or a classifier by cosine, which also multiply, a norm is one value rounded like any other.
    """
    return {
        name: ", ".join(computed[name].lengths)
        for name, module in model.named_modules()
        if name in computed and computed[name].lengths and not computed[name].products
        if next(module.children(), None) is None
    }


def errors_of_outputs(runner: Runner, names: Iterable[str], form: Format) -> dict[str, tuple[float, float]]:
    """By module: relative errors ||half - reference|| / ||reference|| of its first call's input and output."""
    wanted = set(names)
    if not wanted:
        return {}
    kept: list[dict[tuple[str, str], torch.Tensor]] = []
    for run_form in (Format(runner.reference_format), form):
        seen: dict[tuple[str, str], torch.Tensor] = {}

        def keep(kind: str, seen: dict = seen) -> Any:
            return lambda name, _, tensor: seen.setdefault((name, kind), tensor.clone()) if name in wanted else None

        model = runner.reference if run_form.half is None else runner.model
        with watching(model, inputs=keep("input"), outputs=keep("output")):
            runner.run(0, run_form)
        kept.append(seen)
    truth, half = kept

    def error(name: str, kind: str) -> float:
        true = truth[name, kind].double()
        rounded = half[name, kind].double()
        return (
            0.0 if torch.equal(rounded, true) else float((rounded - true).norm() / true.norm())
        )  # also where all is 0

    return {name: (error(name, "input"), error(name, "output")) for name in wanted if (name, "input") in half}
