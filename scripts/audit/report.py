"""An audit's result as a table of layers, as lines, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.audit.findings import (
    BF16,
    FP16_LIMIT,
    SCALED,
    UNSCALED,
    Audit,
    LayerFinding,
    computes_in,
    shown,
    still_half,
)
from scripts.audit.record import Record, together
from scripts.common.command_line import table

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

    @property
    def fp16_error(self) -> float | None:
        """With the scale in use, or where that overflows at scale 1; None without weights."""
        errors = [error for run in (SCALED, UNSCALED) if (error := self.error.get(run)) is not None]
        return next(filter(math.isfinite, errors), errors[0] if errors else None)


def layer_reports(audit: Audit) -> list[LayerReport]:
    """A report of every module that ran, in the order of computation."""
    modules = dict(audit.runner.model.named_modules())
    operations = {run: record.by_module() for run, record in audit.runs.items() if run != SCALED}
    errors = {
        run: {name: together(parts).error for name, parts in audit.with_signal(record.gradients).items()}
        for run, record in audit.runs.items()
    }
    found = []
    for name, true in audit.reference.layers.items():
        module = modules[name]
        seen = {run: record.layer(name) for run, record in audit.runs.items()}
        half = {run: layer.gradients for run, layer in seen.items() if run != BF16}
        present = (true.gradients.count - true.gradients.zeros) or math.inf
        parameters = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        made = LayerReport(
            name=name,
            kind=type(module).__name__,
            leaf=next(module.children(), None) is None,
            parameters=parameters,
            dtype={run: "/".join(seen[run].outputs.dtypes) for run in operations},
            computes_in={run: computes_in(done[name]) for run, done in operations.items() if parameters and done[name]},
            largest=true.outputs.largest,
            headroom=math.log2(FP16_LIMIT / true.outputs.largest) if true.outputs.largest else math.inf,
            non_finite={run: int(seen[run].outputs.non_finite) for run in operations},
            largest_gradient=true.gradients.largest,
            lost={run: max(0.0, values.zeros - true.gradients.zeros) / present for run, values in half.items()},
            subnormal={run: values.subnormal / present for run, values in half.items()},
            error={run: of_layers.get(name) for run, of_layers in errors.items()},
        )
        found.append(made)
    return found


def rows(audit: Audit, count: int) -> list[list[str]]:
    """The ``count`` worst layers as cells below ``HEADERS``, worst first.

    Of the modules that compute something themselves, and those with a finding: faults, other findings, overflow,
    gradient error, headroom.
    """
    named: dict[str, list[str]] = {}
    for finding in audit.findings:
        named.setdefault(finding.layer, []).append(finding.severity)

    def severity(layer: LayerReport) -> tuple[float, ...]:
        own = named.get(layer.name, [])
        error = layer.fp16_error or 0.0
        error = error if math.isfinite(error) else math.inf
        return (own.count("fault"), len(own), sum(layer.non_finite.values()) > 0, error, -layer.headroom)

    shown_layers = [
        layer
        for layer in layer_reports(audit)
        if layer.name in named or (layer.kind != "Identity" and (layer.leaf or layer.parameters))
    ]
    return [_row(layer) for layer in sorted(shown_layers, key=severity, reverse=True)[:count]]


def _row(layer: LayerReport) -> list[str]:
    def pair(shares: dict[str, float]) -> str:
        return ", ".join(percent(share) for share in shares.values()) or "-"

    output, inner = (
        dtypes.get(UNSCALED, "-").replace("bfloat", "bf").replace("float", "fp")
        for dtypes in (layer.dtype, layer.computes_in)
    )
    name = shown(layer.name)
    if len(name) > LONGEST_NAME:
        name = f"{name[:10]}...{name[-18:]}"
    return [
        name,
        layer.kind,
        output if inner in ("-", output) else f"{output} ({inner})",
        f"{layer.largest:.3g}",
        f"{layer.headroom:.1f}" if math.isfinite(layer.headroom) else "-",
        pair(layer.lost),
        pair(layer.subnormal),
        number(layer.fp16_error),
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


# --------------------------------------------------------------------------------------------- lines


def text(audit: Audit, top: int, already_kept: Sequence[str]) -> str:
    """All that the tool prints of the result: the ``top`` worst layers, findings, notes and recommendation."""
    found = [f"- {line}" for line in finding_lines(audit)]
    lines = ["", *summary_lines(audit)]
    if top:
        lines += ["\nWorst layers\n", table(HEADERS, rows(audit, top)), LEGEND.format(scale=f"{audit.scale:.12g}")]
    lines += ["\nFindings" if found else "\nFindings: none", *found, *(f"Note: {note}" for note in audit.notes)]
    return "\n".join([*lines, "", *recommendation_lines(audit, already_kept)])


def summary_lines(audit: Audit) -> Iterator[str]:
    """Loss and gradient error of each run, over all batches."""
    names = {UNSCALED: "fp16 at scale 1", SCALED: f"fp16 at scale {audit.scale:.12g}"}
    for run, record in {audit.reference.format: audit.reference, **audit.runs}.items():
        error = "" if record is audit.reference else f"  gradient error {number(record.error)}"
        yield f"{names.get(run, run):<24} loss {sum(record.losses) / len(record.losses):.6g}{error}"


def finding_lines(audit: Audit) -> Iterator[str]:
    """A line a finding, faults first; many of one kind for information share one."""
    for finding in audit.faults:
        yield f"{finding.kind}: {shown(finding.layer)}: {finding.what}; {finding.advice}"
    groups: dict[tuple[str, str], list[LayerFinding]] = {}
    for finding in audit.findings:
        if finding.severity != "fault":
            groups.setdefault((finding.kind, finding.advice), []).append(finding)
    for (kind, advice), group in groups.items():
        lines = [f"{shown(finding.layer)}: {finding.what}; {advice}" for finding in group]
        if len(group) > GROUPED:
            names = ", ".join(shown(finding.layer) for finding in group[:GROUPED])
            lines = [f"{len(group)} layers: {names} and {len(group) - GROUPED} more; {lines[0]}"]
        yield from (f"{kind}, for information: {line}" for line in lines)


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
    trial = choice.verification
    setting = choice.format + (f", loss scale {choice.scale:.12g}" if choice.format == "fp16" else "")
    kept = f", {len(trial.keep)} layer(s) in float32" if trial.keep else ""
    result = f"NOT finite; {trial.failure or 'see the findings'}"
    if trial.finite:
        before = [f"{number(audit.runs[run].error) if run in audit.runs else '-'} in {run}" for run in (SCALED, BF16)]
        result = (
            f"outputs, loss and gradients are finite over all batches; gradient error {trial.error:.2g} of the "
            f"{audit.reference.format} reference (before: {', '.join(before)})"
        )
    yield f"Verified ({setting}{kept}): {result}"


# ---------------------------------------------------------------------------------------------- JSON


def as_json(audit: Audit, about: dict[str, Any], already_kept: Sequence[str]) -> dict[str, Any]:
    """The audit, ready for ``json.dump``; a number that is not finite becomes None. ``about``: what was audited."""
    choice = audit.recommendation
    content = {
        "format": FORMAT,
        **about,
        "reference": audit.reference.format,
        "scale": audit.scale,
        "losses": {"reference": audit.reference.losses} | {name: run.losses for name, run in audit.runs.items()},
        "error": {name: run.error for name, run in audit.runs.items()},
        "findings": [dataclasses.asdict(finding) for finding in audit.findings],
        "notes": audit.notes,
        "recommendation": {
            "format": choice.format,
            "scale": choice.scale,
            "keep": choice.keep,
            "flags": choice.flags(already_kept),
            "given_up": choice.steps,
            "verification": choice.verification and _trial(audit, choice.verification),
        },
        "trials": [_trial(audit, trial) for trial in audit.tried],
        "layers": [dataclasses.asdict(layer) for layer in layer_reports(audit)],
    }
    return _finite(content)


def _trial(audit: Audit, trial: Record) -> dict[str, Any]:
    names = ("format", "scale", "keep", "origin", "gradients_finite", "loss_finite", "error", "failure", "finite")
    return {name: getattr(trial, name) for name in names} | {"half_statistics": list(still_half(audit, trial))}


def _finite(value: Any) -> Any:
    """JSON has no nan and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
