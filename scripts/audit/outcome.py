"""An audit's result: reports of layers, the recommendation, and both as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from scripts.audit import findings as rules
from scripts.audit.findings import LayerFinding, shown
from scripts.audit.measure import FP16_LIMIT, Seen, together
from scripts.audit.runs import BF16, SCALED, UNSCALED, AuditRuns, Execution

FORMAT = 2  # of the JSON file
GROUPED = 3  # more findings than this of one kind, for information only, share a line
LONGEST_NAME = 32

HEADERS = ("layer", "type", "dtype", "largest", "room", "lost", "subnormal", "fp16 error", "bf16 error")
LEGEND = """
dtype          of the output under fp16 autocast; and in brackets, where it is another, the one it computes in
largest, room  largest true activation, and powers of two from there to fp16's limit of 65504
lost           % of the output's gradient values that fp16 makes zero: without loss scaling, with a scale of {scale}
subnormal      % of them that fp16 stores with fewer bits, the same two
error          of its parameters' gradient: ||half precision / scale - reference|| / ||reference||"""


@dataclass
class LayerReport:
    """One module, over all its calls and all batches. Keys of the dicts are runs: 'fp16 unscaled', 'fp16', 'bf16'.

    ``dtype`` of its output, ``computes_in`` (modules with weights) as autocast chose. ``largest``: magnitude of its
    true output; ``headroom``: powers of two from there to fp16's limit. Shares of its true output gradient: ``lost`` to
    zero, ``subnormal``. ``error``: of its parameters' gradient, relative to the reference, without parameters whose
    gradient is rounding noise; None without any.
    """

    name: str
    kind: str
    leaf: bool
    parameters: int
    dtype: dict[str, str]
    computes_in: dict[str, str]
    largest: float
    headroom: float
    non_finite: dict[str, int]
    largest_gradient: float
    lost: dict[str, float]
    subnormal: dict[str, float]
    error: dict[str, float | None]


@dataclass
class Recommendation:
    """``format``: 'fp16', 'bf16', 'fp32', or '' when not even float32 is finite. ``keep``: by layer, why in float32."""

    format: str
    scale: float
    keep: dict[str, str]
    verification: Execution | None
    steps: list[str] = field(default_factory=list)  # what was tried before and why it was given up

    def flags(self, already_kept: Sequence[str] = ()) -> str:
        """The training flags for it; '' if nothing can be recommended."""
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
    findings: list[LayerFinding]
    notes: list[str]
    recommendation: Recommendation
    error: dict[str, float]
    losses: dict[str, list[float]]
    scale: float
    reference: str
    tried: list[Execution]

    @property
    def faults(self) -> list[LayerFinding]:
        """The findings that ordinary loss scaling does not fix."""
        return [finding for finding in self.findings if finding.severity == "fault"]


def layer_reports(measured: AuditRuns, model: nn.Module) -> list[LayerReport]:
    """A report of every module that ran, in the order of computation."""
    modules = dict(model.named_modules())
    return [_layer(name, modules[name], measured) for name in measured.reference]


def _layer(name: str, module: nn.Module, measured: AuditRuns) -> LayerReport:
    true = measured.reference[name]
    runs = {run: one.seen for run, one in measured.runs.items()}
    seen = {run: found.get(name, Seen()) for run, found in runs.items()}
    own = [f"{name}.{key}" if name else key for key, _ in module.named_parameters(recurse=False)]
    pooled = {}
    for run, one in measured.runs.items():
        here = {key: one.gradients[key] for key in own if key in one.gradients}
        pooled[run] = together(rules.with_signal(here, measured).get(name, []))
    fp16 = [run for run in (UNSCALED, SCALED) if run in runs]
    present = true.gradients - true.zeros
    operations = {run: measured.run(run).computed.get(name) for run in (UNSCALED, BF16)}
    dtypes = {run: here.dtype() for run, here in operations.items() if here}
    return LayerReport(
        name=name,
        kind=type(module).__name__,
        leaf=next(module.children(), None) is None,
        parameters=sum(parameter.numel() for parameter in module.parameters(recurse=False)),
        dtype={run: "/".join(seen[run].dtypes) for run in runs if run != SCALED},
        computes_in={run: str(dtype).removeprefix("torch.") for run, dtype in dtypes.items() if dtype and own},
        largest=true.largest,
        headroom=math.log2(FP16_LIMIT / true.largest) if true.largest else math.inf,
        non_finite={run: int(seen[run].non_finite) for run in runs if run != SCALED},
        largest_gradient=true.largest_gradient,
        lost={run: rules.lost_share(name, run, measured) for run in fp16},
        subnormal={run: seen[run].subnormal / present if present else 0.0 for run in fp16},
        error={run: compared.error if compared.reference else None for run, compared in pooled.items()},
    )


# --------------------------------------------------------------------------------------- worst layers


def severity(layer: LayerReport, findings: Sequence[LayerFinding]) -> tuple[float, ...]:
    """The sort key of layers, worst last: faults, other findings, overflow, gradient error, headroom."""
    own = [finding.severity for finding in findings if finding.layer == layer.name]
    error = fp16_error(layer)
    error = 0.0 if error is None else error if math.isfinite(error) else math.inf
    return (own.count("fault"), len(own), sum(layer.non_finite.values()) > 0, error, -layer.headroom)


def fp16_error(layer: LayerReport) -> float | None:
    """The gradient error in fp16 with the scale in use, or where that overflows at scale 1; None without weights."""
    errors = [error for run in (SCALED, UNSCALED) if (error := layer.error.get(run)) is not None]
    return next(filter(math.isfinite, errors), errors[0] if errors else None)


def computing(audit: Audit) -> list[LayerReport]:
    """The modules that compute something themselves, and those with a finding, in the order of computation."""
    named = {finding.layer for finding in audit.findings}

    def counts(layer: LayerReport) -> bool:
        return layer.name in named or (layer.kind != "Identity" and (layer.leaf or layer.parameters > 0))

    return [layer for layer in audit.layers if counts(layer)]


def worst(audit: Audit, count: int) -> list[LayerReport]:
    """The ``count`` worst layers, worst first."""
    return sorted(computing(audit), key=lambda layer: severity(layer, audit.findings), reverse=True)[:count]


def rows(audit: Audit, count: int) -> list[list[str]]:
    """The worst layers as cells below ``HEADERS``."""
    return [_row(layer) for layer in worst(audit, count)]


def _row(layer: LayerReport) -> list[str]:
    def pair(shares: dict[str, float]) -> str:
        return ", ".join(percent(share) for share in shares.values()) if shares else "-"

    output, inner = (short(dtypes.get(UNSCALED, "-")) for dtypes in (layer.dtype, layer.computes_in))
    return [
        shorten(shown(layer.name)),
        layer.kind,
        output if inner in ("-", output) else f"{output} ({inner})",
        f"{layer.largest:.3g}",
        f"{layer.headroom:.1f}" if math.isfinite(layer.headroom) else "-",
        pair(layer.lost),
        pair(layer.subnormal),
        number(fp16_error(layer)),
        number(layer.error.get(BF16)),
    ]


def percent(share: float) -> str:
    """A share in percent, at most four characters."""
    if 0 < share < 0.0005:
        return "<0.1"
    return f"{100 * share:.1f}" if 0 < share < 0.0995 else f"{100 * share:.0f}"


def number(value: float | None) -> str:
    """An error, '-' if there is nothing to compare."""
    return "-" if value is None else f"{value:.1e}"


def short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "fp")


def shorten(name: str, longest: int = LONGEST_NAME) -> str:
    """The name with its middle left out where it is too long."""
    return name if len(name) <= longest else f"{name[: longest // 3]}...{name[-(2 * longest // 3 - 3) :]}"


# --------------------------------------------------------------------------------------------- lines


def finding_lines(audit: Audit) -> Iterator[str]:
    """A line a finding, faults first; many of one kind for information share one."""
    groups: dict[tuple[str, str, str], list[LayerFinding]] = {}
    for finding in sorted(audit.findings, key=lambda finding: finding.severity != "fault"):
        key = (finding.severity, finding.kind, finding.advice)
        if finding.severity == "fault":
            yield f"{finding.kind}: {shown(finding.layer)}: {finding.what}; {finding.advice}"
        else:
            groups.setdefault(key, []).append(finding)
    for (_, kind, advice), group in groups.items():
        if len(group) > GROUPED:
            names = ", ".join(shown(finding.layer) for finding in group[:GROUPED])
            first = group[0]
            yield (
                f"{kind}, for information: {len(group)} layers: {names} and {len(group) - GROUPED} more; "
                f"{shown(first.layer)}: {first.what}; {advice}"
            )
        else:
            yield from (f"{kind}, for information: {shown(f.layer)}: {f.what}; {advice}" for f in group)


def recommendation_lines(audit: Audit, already_kept: Sequence[str]) -> Iterator[str]:
    """What to do, as flags, why, and the result of trying it."""
    choice = audit.recommendation
    yield from choice.steps
    if not choice.format:
        yield "Recommendation: none; not even the reference is finite"
        return
    yield f"Recommendation: {choice.flags(already_kept)}"
    for name, why in choice.keep.items():
        yield f"  {name} ({why})"
    yield verified(choice, audit)


def verified(choice: Recommendation, audit: Audit) -> str:
    """The line on the trial of the recommendation."""
    trial = choice.verification
    setting = choice.format + (f", loss scale {choice.scale:.12g}" if choice.format == "fp16" else "")
    kept = f", {len(trial.keep)} layer(s) in float32" if trial.keep else ""
    if not trial.finite:
        return f"Verified ({setting}{kept}): NOT finite; {trial.failure or 'see the findings'}"
    before = number(audit.error.get(SCALED)) if SCALED in audit.error else "-"
    return (
        f"Verified ({setting}{kept}): outputs, loss and gradients are finite over all batches; gradient error "
        f"{trial.error:.2g} of the {audit.reference} reference (before: {before} in fp16, "
        f"{number(audit.error.get(BF16))} in bf16)"
    )


def summary_lines(audit: Audit) -> Iterator[str]:
    """Loss and gradient error of each run, over all batches."""
    names = {"reference": audit.reference, UNSCALED: "fp16 at scale 1", SCALED: f"fp16 at scale {audit.scale:.12g}"}
    for run, losses in audit.losses.items():
        error = f"  gradient error {number(audit.error[run])}" if run in audit.error else ""
        yield f"{names.get(run, run):<24} loss {sum(losses) / len(losses):.6g}{error}"


# ---------------------------------------------------------------------------------------------- JSON


def as_json(audit: Audit, about: dict[str, Any], already_kept: Sequence[str]) -> dict[str, Any]:
    """The audit, ready for ``json.dump``; a number that is not finite becomes None. ``about``: what was audited."""
    choice = audit.recommendation
    content = {
        "format": FORMAT,
        **about,
        "reference": audit.reference,
        "scale": audit.scale,
        "losses": audit.losses,
        "error": audit.error,
        "findings": [dataclasses.asdict(finding) for finding in audit.findings],
        "notes": audit.notes,
        "recommendation": {
            "format": choice.format,
            "scale": choice.scale,
            "keep": choice.keep,
            "flags": choice.flags(already_kept),
            "given_up": choice.steps,
            "verification": choice.verification and _trial(choice.verification),
        },
        "trials": [_trial(trial) for trial in audit.tried],
        "layers": [dataclasses.asdict(layer) for layer in audit.layers],
    }
    return _finite(content)


def _trial(trial: Execution) -> dict[str, Any]:
    names = ("format", "scale", "keep", "origin", "gradients_finite", "loss_finite", "error", "half_statistics")
    return {name: getattr(trial, name) for name in (*names, "failure", "finite")}


def _finite(value: Any) -> Any:
    """JSON has no nan and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
