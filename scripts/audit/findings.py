"""Rules of the audit: what in the measurements is a fault, which layers must be kept in float32, which scale fits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from scripts.audit.measure import FP16_LIMIT, FP16_NORMAL, Compared, Seen, percentile, together
from scripts.audit.runs import UNSCALED, AuditRuns, Execution
from scripts.audit.trace import HALF, Computed

# Of a layer's gradient norm, what may be lost to zero. Losing values that carry no norm harms nothing: in fp16 without
# scaling, layers of sound networks lose up to 30 % of their values. Measured by norm, the worst layer's: at the start
# 0.00003 (ResNet-18, ViT-Tiny), 0.0002 (VGG-16), 0.0014 (conv2); trained below 0.001 (conv2 to a loss of 0.01), 0.01
# (ViT-Tiny, 30 steps), 0.13 (ResNet-18, VGG-16, 30 steps); with scaling at most 0.0014. Layers whose gradients
# underflow lose 0.6 (behind a layer scale of 1e-5) to 1.
LOST_NORM = 0.3
# A parameter whose gradient moves by more than this share when the last bits of the pixels move carries rounding
# noise only (a bias before batch norm, the bias of attention's keys). Measured: 0.65 to 1.8 for those; for all others
# below 0.000005 in nine of twelve networks, at most 0.013 (MobileNetV3-Small at the start).
NOISE = 0.1
# The whole network's relative gradient error that a recommendation may have: the rounded gradient still points the
# right way (its cosine is at least 0.87). Measured: fp16 0.0004 to 0.03 (ViT-Tiny, ConvNeXt, ResNet-18 and -50), 0.14
# and 0.17 where batch norm sees few values (VGG-16, EfficientNet-B0 at batch 8); bf16 0.004 to 0.06, 0.43 and 1.2.
TOLERATED_ERROR = 0.5
DEFAULT_SCALE = 65536.0  # GradScaler's own
HIGHEST_SCALE = 2.0**24
MARGIN = 8.0  # the recommended scale leaves at least this factor (at most twice it) to fp16's limit

FP16_ROUNDING = 2.0**-11  # the largest relative error of rounding to a normal float16

ITS_INPUT_EXCEEDS = "its input exceeds"


@dataclass
class LayerFinding:
    """A problem of one layer. ``kind``: 'overflow', 'not finite', 'underflow', 'normalisation', 'gradient overflow' or
    'reference'. ``severity``: 'fault', or 'information' if ordinary loss scaling fixes it or it costs nothing.
    """

    kind: str
    layer: str
    what: str
    advice: str
    severity: str = "fault"
    numbers: dict[str, float] = field(default_factory=dict)


def shown(name: str) -> str:
    """A module's name for display."""
    return name or "the network itself"


# ----------------------------------------------------------------------------------------- activations


def overflow_findings(measured: AuditRuns, model: nn.Module) -> tuple[list[LayerFinding], dict[str, str]]:
    """Layers at which values beyond fp16's limit begin, and by module why it must be kept in float32."""
    findings: dict[str, LayerFinding] = {}
    modules = dict(model.named_modules())
    computed = measured.run(UNSCALED).computed
    runs = measured.run(UNSCALED).seen
    for name, module in modules.items():
        here = computed.get(name)
        own = [parameter.detach().abs().max() for parameter in module.parameters(recurse=False) if parameter.numel()]
        if here and any(dtype in HALF for dtype in here.products) and own:
            weight = float(max(own))
            if FP16_LIMIT < weight < math.inf:
                findings[name] = _overflow(name, f"its weight's largest value is {weight:.3g}", weight)
    for overflow in measured.overflows:
        name = overflow.module
        here = computed.get(name)
        seen = runs.get(name, Seen())
        held = bool(here) and overflow.operation in here.half_operations
        if held or ("float16" in seen.dtypes and measured.reference[name].largest > FP16_LIMIT):
            is_output = next(modules[name].children(), None) is None and measured.reference[name].largest > FP16_LIMIT
            place = "largest activation" if is_output else f"its own {overflow.operation} gives up to"
            what = f"{place} {overflow.largest:.3g}, from inputs of {overflow.largest_input:.3g}"
            if name not in findings or findings[name].numbers["largest"] < overflow.largest:
                findings[name] = _overflow(name, what, overflow.largest)
    keep = dict.fromkeys(findings, "overflows")
    for name, large in measured.product_inputs.items():
        if name in keep or not any(dtype in HALF for dtype in computed.get(name, Computed()).products):
            continue
        if large.source not in keep:  # it came in float32, so that only here it overflows
            what = f"its input's largest value is {large.largest:.3g}"
            findings[name] = _overflow(name, what, large.largest)
        keep[name] = ITS_INPUT_EXCEEDS
    return [findings[name] for name in runs if name in findings], keep


def _overflow(name: str, what: str, largest: float) -> LayerFinding:
    return LayerFinding(
        "overflow",
        name,
        f"{what}; fp16 ends at {FP16_LIMIT:g}, {largest / FP16_LIMIT:.3g} times too small",
        "keep it in float32, or use bf16",
        numbers={"largest": largest, "headroom": math.log2(FP16_LIMIT / largest)},
    )


def not_finite_finding(name: str, measured: AuditRuns) -> LayerFinding:
    """A finding on a module whose half-precision result is not finite though its true values fit into fp16."""
    seen = measured.run(UNSCALED).seen.get(name, Seen())
    return LayerFinding(
        "not finite",
        name,
        f"{seen.non_finite:,.0f} of {seen.values:,.0f} outputs are not finite in fp16, though the "
        f"largest true one is {measured.reference[name].largest:.3g}: an intermediate value overflows, or a small one "
        "becomes zero and divides",
        "keep it in float32",
        numbers={"non_finite": seen.non_finite},
    )


def gradient_overflow_findings(measured: AuditRuns, fitting_scale: float | None) -> list[LayerFinding]:
    """The layer at which gradients exceed fp16 even without scaling, though all activations fit.

    ``fitting_scale``: that of an fp16 recommendation which its trial confirmed.
    """
    found = []
    if measured.run(UNSCALED).origin is None:
        for name, seen in reversed(measured.run(UNSCALED).seen.items()):
            largest = measured.reference[name].largest_gradient
            if "float16" in seen.gradient_dtypes and largest > FP16_LIMIT:
                what = f"largest gradient of its output {largest:.3g}, unscaled; fp16 ends at {FP16_LIMIT:g}"
                advice = "make the loss smaller, or use bf16"
                severity = "fault"
                if fitting_scale:
                    advice, severity = f"needs a loss scale below 1; {fitting_scale:g} fixes it", "information"
                found.append(LayerFinding("gradient overflow", name, what, advice, severity, {"largest": largest}))
                break  # those before it in the network receive what it passes on
    return found


# ------------------------------------------------------------------------------------------- gradients


def with_signal(gradients: dict[str, Compared], measured: AuditRuns) -> dict[str, list[Compared]]:
    """By layer, its own parameters' gradients, without those that are rounding noise in the reference too."""
    layers: dict[str, list[Compared]] = {}
    for name, compared in gradients.items():
        if compared.reference > 0 and not measured.noise.get(name, 0.0) > NOISE:
            layers.setdefault(name.rpartition(".")[0], []).append(compared)
    return layers


def error_of_signal(gradients: dict[str, Compared], measured: AuditRuns) -> float:
    """The relative error of the whole gradient without those parts that are rounding noise in the reference too."""
    return together(part for parts in with_signal(gradients, measured).values() for part in parts).error


def losing_layers(gradients: dict[str, Compared], measured: AuditRuns) -> dict[str, Compared]:
    """The layers that lose more than ``LOST_NORM`` of their gradient's norm, with what they lose."""
    pooled = {name: together(parts) for name, parts in with_signal(gradients, measured).items()}
    return {name: compared for name, compared in pooled.items() if compared.lost_norm_share > LOST_NORM}


def lost_share(name: str, run: str, measured: AuditRuns) -> float:
    """The share of the true output gradient's values other than zero that are zero in ``run``."""
    true = measured.reference[name]
    seen = measured.run(run).seen.get(name, Seen())
    present = true.gradients - true.zeros
    return max(0.0, seen.zeros - true.zeros) / present if present else 0.0


def underflow_findings(
    measured: AuditRuns, unscaled: dict[str, Compared], tried: Iterable[Execution]
) -> list[LayerFinding]:
    """A finding for each layer that loses its gradient in fp16 without scaling: does a loss scale fix it?

    ``unscaled``: gradients of a run at scale 1 whose forward pass is sound. After an overflowed activation, zeros
    would mean nothing. ``tried``: the trials of the recommendation.
    """
    found = []
    for name, lost in losing_layers(unscaled, measured).items():
        scales = [
            trial.scale
            for trial in tried
            if trial.format == "fp16" and trial.finite and trial.scale > 1 and not is_within(name, trial.keep)
            if name not in losing_layers(trial.gradients, measured)
        ]
        what = (
            f"{100 * lost.lost_norm_share:.3g} % of its gradient's norm ({100 * lost.lost_share:.3g} % of its values) "
            "become zero in fp16 without loss scaling"
        )
        numbers = {"lost_norm": lost.lost_norm_share, "lost": lost.lost_share}
        if scales:
            advice = f"needs loss scaling; a scale of {min(scales):g} fixes it"
            found.append(LayerFinding("underflow", name, what, advice, "information", numbers | {"scale": min(scales)}))
        else:
            advice = "no loss scale that fits fixes it: keep it in float32, or use bf16"
            found.append(LayerFinding("underflow", name, what, advice, numbers=numbers))
    return found


def is_within(name: str, others: Iterable[str]) -> bool:
    """Whether a module is one of ``others`` or inside one."""
    return any(name == other or name.startswith(f"{other}.") for other in others)


# -------------------------------------------------------------------------------------- normalisations


def costs(errors: tuple[float, float]) -> bool:
    """Whether a module's output is clearly less exact than its input; ``errors`` are those of input and output."""
    return not errors[1] <= 4 * max(errors[0], FP16_ROUNDING)


def normalisation_finding(name: str, reason: str, errors: tuple[float, float] | None, *, fault: bool) -> LayerFinding:
    """A finding on a module that normalises with statistics in half precision; ``errors``: of its input and output."""
    what = f"normalises in half precision: {reason}"
    numbers = {}
    if errors:
        numbers = dict(zip(("input_error", "output_error"), errors, strict=True))
        what += f"; its output is off by {errors[1]:.2g} of the reference, its input by {errors[0]:.2g}"
    if not fault:
        advice = "nothing: it is rounded once and costs no accuracy here"
        return LayerFinding("normalisation", name, what, advice, "information", numbers)
    advice = "keep it in float32, or compute its statistics from x.float()"
    return LayerFinding("normalisation", name, what, advice, numbers=numbers)


# ------------------------------------------------------------------------------------------- loss scale


def largest_half_gradient(measured: AuditRuns) -> float:
    """The largest true gradient (unscaled) that flows in fp16: of outputs, and of weights computed in fp16."""
    outputs = [
        measured.reference[name].largest_gradient
        for name, seen in measured.run(UNSCALED).seen.items()
        if "float16" in seen.gradient_dtypes
    ]
    weights = [compared.largest for compared in measured.run(UNSCALED).gradients.values() if compared.in_half]
    return max([*outputs, *weights], default=0.0)


def highest_scale(measured: AuditRuns) -> float:
    """The largest power of two that leaves ``MARGIN`` to fp16's limit, at most ``HIGHEST_SCALE``."""
    largest = largest_half_gradient(measured)
    if not 0 < largest < math.inf:
        return DEFAULT_SCALE
    return min(HIGHEST_SCALE, 2.0 ** math.floor(math.log2(FP16_LIMIT / MARGIN / largest)))


def needed_scale(names: Iterable[str], measured: AuditRuns) -> float:
    """The power of two that lifts nine tenths of these layers' true output gradients into fp16's normal range."""
    lows = [percentile(measured.reference[name].histogram, 0.1) for name in names if name in measured.reference]
    known = [low for low in lows if low is not None]
    return 2.0 ** math.ceil(math.log2(FP16_NORMAL) - min(known)) if known else 1.0
