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
class Execution:
    """All passes in ``format`` with the loss ``scale`` and the layers ``keep`` in float32.

    ``seen``: by module, in the order of computation. ``gradients``: by parameter. ``computed``: operations by module,
    of the first pass. ``origin``: the module at which values that are not finite begin in the forward pass ('' is the
    network itself), None when its values are finite. ``half_statistics``: modules that normalise with statistics in
    half precision. ``failure``: why it did not run at all.
    """

    format: str
    scale: float
    keep: list[str]
    seen: dict[str, Seen] = field(default_factory=dict)
    gradients: dict[str, Compared] = field(default_factory=dict)
    computed: dict[str, Computed] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    origin: str | None = None
    half_statistics: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def error(self) -> float:
        """The relative error of the whole network's gradient."""
        return together(self.gradients.values()).error

    @property
    def gradients_finite(self) -> bool:
        of_parameters = any(one.non_finite for one in self.gradients.values())
        return not self.failure and not of_parameters and not any(s.gradients_non_finite for s in self.seen.values())

    @property
    def loss_finite(self) -> bool:
        return not self.failure and all(map(math.isfinite, self.losses))

    @property
    def finite(self) -> bool:
        return self.origin is None and self.gradients_finite and self.loss_finite


@dataclass
class AuditRuns:
    """Everything the runs showed, before it is judged. ``scale`` is the loss scale of the run SCALED.

    ``runs``: by name; those whose format cannot run are in ``failures`` instead, by format, with the reason. ``noise``:
    by parameter, how much the reference's gradient changes, as a share of its norm, when each pixel changes by one unit
    in its last place; near 1 the gradient is rounding noise. ``overflows`` and ``product_inputs`` (by module): the
    reference's magnitudes beyond float16.
    """

    scale: float
    device: str
    true: Execution
    runs: dict[str, Execution] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    overflows: list[OverflowingOperation] = field(default_factory=list)
    product_inputs: dict[str, LargeInput] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> dict[str, Seen]:
        """What the reference showed, by module."""
        return self.true.seen

    def run(self, name: str) -> Execution:
        """One that holds nothing for a run that failed."""
        return self.runs.get(name) or Execution("", 1.0, [])


class Runner:
    """Runs the passes of one audit in any format. ``reference_format`` is 'fp32' or 'fp64'.

    ``reference_trail`` and ``truths``: what went into and out of the reference's modules, and its gradients of each
    pass, once ``measure`` has run it.
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
        self.truths: list[dict[str, torch.Tensor]] = []
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


def missing_format(device: torch.device) -> dict[str, str]:
    """By format, why ``device`` cannot compute in it."""
    try:
        resolve_amp(PrecisionSettings(amp="bf16"), device)
    except UserError as error:
        return {"bf16": str(error)}
    return {}


def measure(runner: Runner, scale: float) -> AuditRuns:
    """Run every pass in every format. ``scale``: the loss scale in use."""
    true = Execution(runner.reference_format, 1.0, [])
    measured = AuditRuns(scale, runner.device.type, true, failures=missing_format(runner.device))
    meter = Meter(of_reference=True)
    losses = []
    for number in range(len(runner.passes)):
        magnitudes = Magnitudes(runner.reference)
        loss, gradients = runner.run(number, Format(runner.reference_format), meter, magnitudes)
        losses.append(loss)
        runner.truths.append(gradients)
        _add_magnitudes(measured, magnitudes)
    true.seen = meter.read()
    true.losses = read_all(losses)
    true.origin = first_non_finite(meter.trail)
    runner.reference_trail = meter.trail
    measured.noise = _noise(runner)
    for name, form in {UNSCALED: Format("fp16"), SCALED: Format("fp16", scale), BF16: Format("bf16")}.items():
        if form.name not in measured.failures:
            measured.runs[name] = execute(runner, form)
            if measured.runs[name].failure:
                measured.failures[form.name] = measured.runs[name].failure
    measured.runs = {name: one for name, one in measured.runs.items() if one.format not in measured.failures}
    return measured


def execute(runner: Runner, form: Format, keep: Sequence[str] = ()) -> Execution:
    """Run all passes in one format, with the layers ``keep`` in float32, and compare with the reference."""
    model = runner.model
    if keep or form.half is None:
        model = copy.deepcopy(model)
        if form.half is None:
            model.float()
        modules = dict(model.named_modules())
        for name in keep:
            modules[name].float()  # where the network's code had put it to half precision
        keep_in_fp32(model, keep, runner.device)
    made = Execution(form.name, form.scale, list(keep))
    meter = Meter(of_reference=False)
    comparison = GradientComparison()
    losses = []
    trace = HalfOperations(model)
    try:
        for number, truth in enumerate(runner.truths):
            traced = trace if number == 0 and form.half else None  # always the same ones
            loss, gradients = runner.run(number, form, meter, traced, model)
            losses.append(loss)
            comparison.add(gradients, truth, form.scale)
    except RuntimeError as error:
        made.failure = reason_of(error)
        return made
    made.seen = meter.read()
    made.gradients = comparison.read()
    made.computed = dict(trace.modules)
    made.losses = read_all(losses)
    made.origin = first_non_finite(meter.trail, runner.reference_trail)
    made.half_statistics = list(half_statistics(model, trace.modules))
    return made


def reason_of(error: RuntimeError) -> str:
    """Torch's reason why an operation lacks a dtype. Raises ``error`` again if memory ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    return " ".join(str(error).split())[:160]


def _add_magnitudes(measured: AuditRuns, magnitudes: Magnitudes) -> None:
    overflows, products = magnitudes.read(FP16_LIMIT)
    measured.overflows += overflows
    for name, found in products.items():
        if name not in measured.product_inputs or found.largest > measured.product_inputs[name].largest:
            measured.product_inputs[name] = found


def _noise(runner: Runner) -> dict[str, float]:
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
    comparison.add(gradients, runner.truths[0], 1.0)
    return {name: compared.error for name, compared in comparison.read().items()}


# --------------------------------------------------------------------------------------- normalisations


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
