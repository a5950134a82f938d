"""What an audit gives: reports of layers and tensors, the recommendation, and all of it together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from scripts.audit import findings as rules
from scripts.audit.findings import Finding
from scripts.audit.gradients import together
from scripts.audit.measure import FP16_LIMIT, Seen, percentile
from scripts.audit.runs import BF16, SCALED, UNSCALED, Measured, Verification


@dataclass
class TensorReport:
    """One parameter's gradient. ``noise``: see ``Measured``; errors and shares are relative to the reference."""

    name: str
    values: int
    norm: float
    noise: float
    error: dict[str, float]
    lost: dict[str, float]
    lost_norm: dict[str, float]
    subnormal: dict[str, float]


@dataclass
class LayerReport:
    """One module, over all its calls and all batches. Keys of the dicts are runs: 'fp16 unscaled', 'fp16', 'bf16'.

    ``dtype`` of its output, ``computes_in`` (modules with weights) as autocast chose. ``largest``: magnitude of its
    true output; ``headroom``: powers of two from there to fp16's limit. ``gradient_low`` and ``gradient_high``: log2 of
    the 1st and 99th percentile of its true output gradient, unscaled. Shares (``lost`` to zero, ``subnormal``, as parts
    of the values that are not zero in truth) and ``error`` (relative norm) are None where there is nothing to compare.
    """

    name: str
    kind: str
    leaf: bool
    calls: int
    parameters: int
    dtype: dict[str, str]
    computes_in: dict[str, str]
    largest: float
    headroom: float
    values: int
    non_finite: dict[str, int]
    gradient_dtype: str
    gradient_low: float | None
    gradient_high: float | None
    largest_gradient: float
    output_gradient_lost: dict[str, float]
    output_gradient_subnormal: dict[str, float]
    parameter_gradient_lost: dict[str, float]
    parameter_gradient_lost_norm: dict[str, float]
    parameter_gradient_subnormal: dict[str, float]
    error: dict[str, float | None]
    tensors: list[TensorReport] = field(default_factory=list)


@dataclass
class Recommendation:
    """``format``: 'fp16', 'bf16', 'fp32', or '' when not even float32 is finite. ``keep``: by layer, why in float32."""

    format: str
    scale: float
    keep: dict[str, str]
    verification: Verification | None
    steps: list[str] = field(default_factory=list)  # what was tried before and why it was given up

    def flags(self, already_kept: Sequence[str] = ()) -> str:
        """The training flags that say this; '' when nothing can be recommended."""
        if self.format in ("", "fp32"):
            return "--amp off" if self.format else ""
        scale = f" --init-scale {self.scale:.12g}" if self.format == "fp16" else ""
        names = outermost([*already_kept, *self.keep])
        return f"--amp {self.format}{scale}" + (f" --fp32-layers {' '.join(names)}" if names else "")


def outermost(names: Iterable[str]) -> list[str]:
    """The names, each once, without those inside another one."""
    known = list(dict.fromkeys(names))
    return [name for name in known if not rules.is_within(name, [other for other in known if other != name])]


@dataclass
class Audit:
    """The result. ``error``: relative gradient error of the whole network by run; ``losses``: by run, a batch each."""

    layers: list[LayerReport]
    findings: list[Finding]
    notes: list[str]
    recommendation: Recommendation
    error: dict[str, float]
    losses: dict[str, list[float]]
    scale: float
    reference: str
    tried: list[Verification]

    @property
    def faults(self) -> list[Finding]:
        """The findings that ordinary loss scaling does not mend."""
        return [finding for finding in self.findings if finding.severity == "fault"]


def layer_reports(measured: Measured, model: nn.Module) -> list[LayerReport]:
    """A report of every module that ran, in the order of computation."""
    modules = dict(model.named_modules())
    return [_layer(name, modules[name], measured) for name in measured.reference]


def _layer(name: str, module: nn.Module, measured: Measured) -> LayerReport:
    true, runs = measured.reference[name], measured.runs
    seen = {run: found.get(name, Seen()) for run, found in runs.items()}
    own = [f"{name}.{key}" if name else key for key, _ in module.named_parameters(recurse=False)]
    pooled = {}
    for run, gradients in measured.gradients.items():
        here = {key: gradients[key] for key in own if key in gradients}
        pooled[run] = together(rules.with_signal(here, measured).get(name, []))
    fp16 = [run for run in (UNSCALED, SCALED) if run in runs]
    present = true.gradients - true.zeros
    operations = {run: measured.operations(run).get(name) for run in (UNSCALED, BF16)}
    dtypes = {run: here.dtype() for run, here in operations.items() if here}
    return LayerReport(
        name=name, kind=type(module).__name__, leaf=next(module.children(), None) is None, calls=true.calls,
        parameters=sum(parameter.numel() for parameter in module.parameters(recurse=False)),
        dtype={run: "/".join(seen[run].dtypes) for run in runs if run != SCALED},
        computes_in={run: str(dtype).removeprefix("torch.") for run, dtype in dtypes.items() if dtype and own},
        largest=true.largest, headroom=math.log2(FP16_LIMIT / true.largest) if true.largest else math.inf,
        values=int(true.values), non_finite={run: int(seen[run].non_finite) for run in runs if run != SCALED},
        gradient_dtype="/".join(seen[UNSCALED].gradient_dtypes if UNSCALED in seen else []),
        gradient_low=percentile(true.histogram, 0.01), gradient_high=percentile(true.histogram, 0.99),
        largest_gradient=true.largest_gradient,
        output_gradient_lost={run: rules.lost_share(name, run, measured) for run in fp16},
        output_gradient_subnormal={run: seen[run].subnormal / present if present else 0.0 for run in fp16},
        parameter_gradient_lost={run: pooled[run].lost_share for run in fp16},
        parameter_gradient_lost_norm={run: pooled[run].lost_norm_share for run in fp16},
        parameter_gradient_subnormal={run: pooled[run].subnormal_share for run in fp16},
        error={run: compared.error if compared.reference else None for run, compared in pooled.items()},
        tensors=[_tensor(key, measured, fp16) for key in own if key in measured.noise and runs],
    )  # fmt: skip


def _tensor(name: str, measured: Measured, fp16: Sequence[str]) -> TensorReport:
    compared = {run: gradients[name] for run, gradients in measured.gradients.items()}
    first = next(iter(compared.values()))
    return TensorReport(
        name, int(first.values), math.sqrt(first.reference), measured.noise.get(name, math.nan),
        error={run: one.error for run, one in compared.items()},
        lost={run: compared[run].lost_share for run in fp16},
        lost_norm={run: compared[run].lost_norm_share for run in fp16},
        subnormal={run: compared[run].subnormal_share for run in fp16},
    )  # fmt: skip
