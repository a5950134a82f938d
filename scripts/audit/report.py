"""The result of an audit as a table of layers, as lines, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from scripts.audit.findings import (
    BF16,
    FP16_LIMIT,
    SCALED,
    UNSCALED,
    Audit,
    computes_in,
    half_statistics,
    shown,
)
from scripts.audit.record import Record
from scripts.common.command_line import table
from scripts.common.output import plain
from utils.config.spelling import some

FORMAT = 3  # of the JSON file
GROUPED = 3  # more findings than this of one kind, for information only, share a line
LONGEST_NAME = 32

HEADERS = ("layer", "type", "dtype", "largest", "room", "lost", "fp16 error", "bf16 error")
LEGEND = """
dtype          of the output under fp16 autocast; and in brackets, where it is another, the one it computes in
largest, room  largest true activation, and powers of two from there to fp16's limit of 65504
lost           % of the norm of its parameters' gradient that becomes 0: without loss scaling, with a scale of {scale}
error          of its parameters' gradient: ||half precision / scale - reference|| / ||reference||"""


def layers(audit: Audit) -> list[dict[str, Any]]:
    """Facts about every module that ran, a dict each, in the order of computation.

    Facts that differ between runs are dicts by run: 'fp16 unscaled', 'fp16', 'bf16'. ``dtype``: that of the output;
    ``computes_in``: the one that autocast chose, for modules with weights. ``largest``: magnitude of the reference
    output; ``headroom``: powers of two from there to fp16's limit. ``lost`` and ``error``: of the gradient of the
    module's own parameters, the share of the norm that became zero, and the relative error; without parameters whose
    gradient is rounding noise, and empty if no others are left.
    """
    operations = {run: record.by_module() for run, record in audit.ran.items() if run != SCALED}
    gradients = {run: audit.by_layer(record) for run, record in audit.ran.items()}
    found = []
    for name, true in audit.reference.places["outputs"].items():
        module = audit.runner.model.get_submodule(name)
        seen = {run: audit.runs[run].seen("outputs", name) for run in operations}
        own = {run: of_layers[name] for run, of_layers in gradients.items() if name in of_layers}
        parameters = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        made = {
            "name": name,
            "kind": type(module).__name__,
            "leaf": next(module.children(), None) is None,
            "parameters": parameters,
            "dtype": {run: "/".join(outputs.dtypes) for run, outputs in seen.items()},
            "computes_in": {r: computes_in(done[name]) for r, done in operations.items() if parameters and done[name]},
            "largest": true.largest,
            "headroom": math.log2(FP16_LIMIT / true.largest) if true.largest else math.inf,
            "non_finite": {run: int(outputs.non_finite) for run, outputs in seen.items()},
            "largest_gradient": audit.reference.seen("gradients", name).largest,
            "lost": {run: compared.lost_share for run, compared in own.items() if run != BF16},
            "error": {run: compared.error for run, compared in own.items()},
        }
        found.append(made)
    return found


def rows(audit: Audit, count: int) -> list[list[str]]:
    """The ``count`` worst layers as cells below ``HEADERS``, worst first.

    Considers modules that compute something themselves, and those with a finding. The order is by faults, then other
    findings, overflow, gradient error and headroom.
    """
    named = [finding.layer for finding in audit.findings]
    faults = [finding.layer for finding in audit.faults]

    def severity(layer: dict[str, Any]) -> tuple[float, ...]:
        name = layer["name"]
        error = fp16_error(layer) or 0.0
        error = error if math.isfinite(error) else math.inf
        return faults.count(name), named.count(name), any(layer["non_finite"].values()), error, -layer["headroom"]

    candidates = [
        layer
        for layer in layers(audit)
        if layer["name"] in named or (layer["kind"] != "Identity" and (layer["leaf"] or layer["parameters"]))
    ]
    return [_row(layer) for layer in sorted(candidates, key=severity, reverse=True)[:count]]


def fp16_error(layer: dict[str, Any]) -> float | None:
    """Gradient error in fp16 with the scale in use or, if that overflows, without scaling; None without weights."""
    errors = [layer["error"][run] for run in (SCALED, UNSCALED) if run in layer["error"]]
    return next(filter(math.isfinite, errors), errors[0] if errors else None)


def _row(layer: dict[str, Any]) -> list[str]:
    output, inner = (
        layer[which].get(UNSCALED, "-").replace("bfloat", "bf").replace("float", "fp")
        for which in ("dtype", "computes_in")
    )
    name = shown(layer["name"])
    return [
        name if len(name) <= LONGEST_NAME else f"{name[:10]}...{name[-18:]}",
        layer["kind"],
        output if inner in ("-", output) else f"{output} ({inner})",
        f"{layer['largest']:.3g}",
        f"{layer['headroom']:.1f}" if math.isfinite(layer["headroom"]) else "-",
        ", ".join(f"{100 * share:.1f}" for share in layer["lost"].values()) or "-",
        number(fp16_error(layer)),
        number(layer["error"].get(BF16)),
    ]


def number(value: float | None) -> str:
    """``value``, an error, as text; '-' if there is nothing to compare."""
    return "-" if value is None else f"{value:.1e}"


# --------------------------------------------------------------------------------------------- lines


def text(audit: Audit, top: int) -> str:
    """All that the tool prints about the result: the ``top`` worst layers, findings, notes and recommendation."""
    found = [f"- {line}" for line in finding_lines(audit)]
    lines = ["", *summary_lines(audit)]
    if top:
        lines += ["\nWorst layers\n", table(HEADERS, rows(audit, top)), LEGEND.format(scale=f"{audit.scale:.12g}")]
    lines += ["\nFindings" if found else "\nFindings: none", *found, *(f"Note: {note}" for note in audit.notes)]
    return "\n".join([*lines, "", *recommendation_lines(audit)])


def summary_lines(audit: Audit) -> Iterator[str]:
    """Yield a line for each run: its mean loss and its gradient error over all batches."""
    names = {UNSCALED: "fp16 at scale 1", SCALED: f"fp16 at scale {audit.scale:.12g}"}
    for run, record in {audit.reference.format: audit.reference, **audit.ran}.items():
        error = "" if record is audit.reference else f"  gradient error {number(record.error)}"
        yield f"{names.get(run, run):<24} loss {sum(record.losses) / len(record.losses):.6g}{error}"


def finding_lines(audit: Audit) -> Iterator[str]:
    """One line per fault, then one per other finding, except that many of one kind and advice share one."""
    for finding in audit.faults:
        yield f"{finding.kind}: {shown(finding.layer)}: {finding.what}; {finding.advice}"
    groups = defaultdict(list)
    for finding in audit.findings:
        if finding not in audit.faults:
            groups[f"{finding.kind}, for information: ", finding.advice].append(finding)
    for (kind, advice), group in groups.items():
        lines = [f"{shown(finding.layer)}: {finding.what}; {advice}" for finding in group]
        if len(group) > GROUPED:
            lines = [f"{len(group)} layers: {some((shown(f.layer) for f in group), GROUPED)}; {lines[0]}"]
        yield from (kind + line for line in lines)


def recommendation_lines(audit: Audit) -> Iterator[str]:
    """Yield lines with what was given up, the recommended flags, the reasons, and the result of trying them."""
    choice = audit.recommendation
    trial = choice.trial
    yield from choice.steps
    if not trial.format:
        yield "Recommendation: none; not even the reference is finite"
        return
    yield f"Recommendation: {audit.flags}"
    for name, why in choice.keep.items():
        yield f"  {name} ({why})"
    setting = trial.format + (f", loss scale {trial.scale:.12g}" if trial.format == "fp16" else "")
    kept = f", {len(trial.keep)} layer(s) in float32" if trial.keep else ""
    result = f"NOT finite; {trial.failure or 'see the findings'}"
    if trial.finite:
        before = [f"{number(audit.ran[run].error) if run in audit.ran else '-'} in {run}" for run in (SCALED, BF16)]
        result = (
            f"outputs, loss and gradients are finite over all batches; gradient error {number(trial.error)} of the "
            f"{audit.reference.format} reference (before: {', '.join(before)})"
        )
    yield f"Verified ({setting}{kept}): {result}"


# ---------------------------------------------------------------------------------------------- JSON


def as_json(audit: Audit, about: dict[str, Any]) -> dict[str, Any]:
    """The audit, ready for ``json.dump``; a number that is not finite becomes None. ``about``: what was audited."""
    choice = audit.recommendation
    content = {
        "format": FORMAT,
        **about,
        "weights": audit.weights,
        "batches": [{"images": list(batch.images.shape), "weight": batch.weight} for batch in audit.runner.passes],
        "saved_step": audit.remarks,
        "reference": audit.reference.format,
        "scale": audit.scale,
        "losses": {"reference": audit.reference.losses} | {name: run.losses for name, run in audit.ran.items()},
        "error": {name: run.error for name, run in audit.ran.items()},
        "findings": [dataclasses.asdict(finding) for finding in audit.findings],
        "notes": audit.notes,
        "recommendation": {
            "format": choice.trial.format,
            "scale": choice.trial.scale,
            "keep": choice.keep,
            "flags": audit.flags,
            "given_up": choice.steps,
            "verification": _trial(choice.trial) if choice.trial.format else None,
        },
        "trials": [_trial(trial) for trial in audit.tried],
        "layers": layers(audit),
    }
    return plain(content)


def _trial(trial: Record) -> dict[str, Any]:
    names = ("format", "scale", "keep", "origin", "gradients_finite", "loss_finite", "error", "failure", "finite")
    return {name: getattr(trial, name) for name in names} | {"half_statistics": list(half_statistics(trial))}
