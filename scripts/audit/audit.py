"""Is a network safe in fp16 and bf16? Measured layer by layer over a few training batches.

Every batch runs in the reference format (float32 or float64), in fp16 without and with loss scaling, and in bf16, from
the same weights with the same random draws. From what the runs show follow findings (``findings.py``, with the
thresholds) and a recommendation, which is tried before it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from scripts.audit import findings as rules
from scripts.audit.findings import LayerFinding, shown
from scripts.audit.measure import FP16_LIMIT, AuditBatch, Compared, Criterion, Format
from scripts.audit.outcome import Audit, Recommendation, layer_reports, outermost
from scripts.audit.runs import (
    SCALED,
    UNSCALED,
    AuditRuns,
    Execution,
    Runner,
    errors_of_outputs,
    execute,
    half_lengths,
    half_statistics,
    measure,
)

NORMALISES = "normalises in half precision"
UNDERFLOWS = "its gradients underflow"
MOST_ATTEMPTS = 8  # trials of an fp16 recommendation, each with one more remedy


def audit(
    model: nn.Module,
    passes: Sequence[AuditBatch],
    criterion: Criterion,
    device: torch.device,
    *,
    scale: float = rules.DEFAULT_SCALE,
    float64: bool = False,
    seed: int = 0,
) -> Audit:
    """Audit ``model`` over ``passes``; it is restored afterwards.

    ``criterion`` takes logits (n, classes) and int64 targets (n,) and returns the loss (), or a dict of named ones.
    ``scale``: the loss scale in use. ``float64``: compare with float64 instead of float32.
    """
    runner = Runner(model, passes, criterion, device, "fp64" if float64 else "fp32", seed)
    measured = measure(runner, scale)
    notes = [f"{name} cannot run here: {why}" for name, why in measured.failures.items()]
    if measured.true.loss_finite and measured.true.gradients_finite:
        findings, attempts = _judge(runner, measured)
        notes += _notes(measured, model, attempts.choice)
    else:
        findings = [_reference_finding(measured)]
        attempts = Attempts(Recommendation("", 1.0, {}, None))
    return Audit(
        layer_reports(measured, model),
        findings,
        notes,
        attempts.choice,
        {name: one.error for name, one in measured.runs.items()},
        {"reference": measured.true.losses} | {name: one.losses for name, one in measured.runs.items()},
        scale,
        measured.true.format,
        attempts.trials,
    )


@dataclass
class Attempts:
    """Recommendations that were tried. ``choice``: the one that is sound, None if none is, for the reason ``why``.

    ``findings``: those that only a trial shows.
    """

    choice: Recommendation | None = None
    trials: list[Execution] = field(default_factory=list)
    findings: list[LayerFinding] = field(default_factory=list)
    why: str = ""


def _judge(runner: Runner, measured: AuditRuns) -> tuple[list[LayerFinding], Attempts]:
    """Findings, and the attempts at a recommendation."""
    model = runner.model
    overflows, keep = rules.overflow_findings(measured, model)
    statistics = half_statistics(model, measured.run(UNSCALED).computed)
    lengths = half_lengths(model, measured.run(UNSCALED).computed)
    errors = errors_of_outputs(runner, [*statistics, *lengths], Format("fp16"))
    statistics |= {name: why for name, why in lengths.items() if name in errors and rules.costs(errors[name])}
    normalisations = [
        rules.normalisation_finding(name, why, errors.get(name), fault=name in statistics)
        for name, why in {**lengths, **statistics}.items()
    ]
    keep |= {name: NORMALISES for name in statistics if name not in keep}
    attempts = _recommend(runner, measured, keep, tuple(statistics))
    for finding in normalisations:
        if any(finding.layer in trial.keep and finding.layer in trial.half_statistics for trial in attempts.trials):
            finding.advice = "its own code goes to half precision, wherever it runs: compute its statistics in float32"
    explained = {finding.layer for finding in [*overflows, *normalisations]}
    extra = [finding for finding in attempts.findings if finding.layer not in explained]
    choice = attempts.choice
    gradients = rules.gradient_overflow_findings(measured, choice.scale if choice.format == "fp16" else None)
    gradients += rules.underflow_findings(measured, _unscaled(runner, measured, choice), attempts.trials)
    return [*overflows, *normalisations, *extra, *gradients], attempts


def _unscaled(runner: Runner, measured: AuditRuns, recommendation: Recommendation) -> dict[str, Compared]:
    """Gradients of fp16 at scale 1, with what overflows kept in float32; none if fp16 does not get that far."""
    if recommendation.format == "fp16":
        keep = [name for name, why in recommendation.keep.items() if why != UNDERFLOWS]
        if keep:
            trial = execute(runner, Format("fp16"), keep)
            return trial.gradients if trial.finite else {}
    unscaled = measured.run(UNSCALED)
    return unscaled.gradients if unscaled.origin is None else {}


# -------------------------------------------------------------------------------------- recommendation


def _recommend(runner: Runner, measured: AuditRuns, keep: dict[str, str], statistics: Sequence[str]) -> Attempts:
    """fp16 with what it takes; otherwise bf16; otherwise float32."""
    attempts = Attempts(why=measured.failures.get("fp16", ""))
    if not attempts.why:
        attempts = _try_fp16(runner, measured, keep)
    if attempts.choice is not None:
        return attempts
    steps = [f"fp16 was given up: {attempts.why}"]
    trials = attempts.trials
    if "bf16" in measured.failures:
        steps.append(f"bf16 was left out: {measured.failures['bf16']}")
    else:
        kept = outermost([name for name in statistics if name])
        trials = [*trials, execute(runner, Format("bf16"), kept)]
        if not (why := refusal(trials[-1], measured)):
            choice = Recommendation("bf16", 1.0, {name: keep[name] for name in kept}, trials[-1], steps)
            return Attempts(choice, trials, attempts.findings)
        steps.append(f"bf16 was given up: {why}")
    trials = [*trials, execute(runner, Format("fp32"), [])]
    return Attempts(Recommendation("fp32", 1.0, {}, trials[-1], steps), trials, attempts.findings)


def _try_fp16(runner: Runner, measured: AuditRuns, keep: dict[str, str]) -> Attempts:
    """fp16 with remedies added one at a time until it is sound."""
    attempts = Attempts(why=f"not sound after {MOST_ATTEMPTS} trials")
    keep = dict(keep)
    highest = rules.highest_scale(measured)
    scale = min(rules.DEFAULT_SCALE, highest)
    for _ in range(MOST_ATTEMPTS):
        if "" in keep:
            attempts.why = f"the network's own computation {keep['']}, and it cannot be kept in float32 as a layer"
            return attempts
        kept = outermost(keep)
        trial = execute(runner, Format("fp16", scale), kept)
        attempts.trials.append(trial)
        if useless := [name for name in trial.half_statistics if keep.get(name) == NORMALISES]:
            keep = {name: why for name, why in keep.items() if name not in useless}  # its code itself goes to half
            continue
        losing = rules.losing_layers(trial.gradients, measured) if trial.finite else {}
        wanted = min(highest, rules.needed_scale(losing, measured))
        new = [name for name in losing if name and name not in keep]
        if trial.origin is not None and not rules.is_within(trial.origin, keep):
            keep[trial.origin] = "is not finite in fp16"
            attempts.findings.append(rules.not_finite_finding(trial.origin, measured))
        elif trial.origin is None and not trial.failure and not trial.gradients_finite and scale > 2.0**-20:
            scale = highest = scale / 16
        elif losing and wanted > scale:
            scale = wanted
        elif new:
            keep |= dict.fromkeys(new, UNDERFLOWS)
        else:
            attempts.why = refusal(trial, measured, losing)
            if not attempts.why:
                attempts.choice = Recommendation("fp16", scale, {name: keep[name] for name in kept}, trial)
            return attempts
    return attempts


def refusal(trial: Execution, measured: AuditRuns, losing: Sequence[str] | dict[str, Compared] = ()) -> str:
    """Why a trial refutes its recommendation; '' if it confirms it."""
    if trial.failure:
        return f"it does not run ({trial.failure})"
    if trial.origin is not None:
        return f"the output of {shown(trial.origin)} is not finite"
    if not trial.loss_finite:
        return "the loss is not finite"
    if not trial.gradients_finite:
        return f"gradients are not finite at a loss scale of {trial.scale:g}"
    error = rules.error_of_signal(trial.gradients, measured)
    if error > rules.TOLERATED_ERROR:
        return f"the gradient's relative error is {error:.2g}, more than {rules.TOLERATED_ERROR:g}"
    return f"gradients of {', '.join(map(shown, losing))} underflow" if losing else ""


# ---------------------------------------------------------------------------------------------- report


def _reference_finding(measured: AuditRuns) -> LayerFinding:
    origin = measured.true.origin
    where = f"the output of {shown(origin)}" if origin is not None else "the loss or a gradient"
    return LayerFinding(
        "reference",
        origin or "",
        f"{where} is not finite in {measured.true.format} either",
        "there is nothing to compare with: fix the weights or the data first",
    )


def _notes(measured: AuditRuns, model: nn.Module, recommendation: Recommendation) -> list[str]:
    """What is worth knowing but is not a finding."""
    notes = []
    computed = measured.run(UNSCALED).computed
    runs = measured.run(UNSCALED).seen
    tight = [
        f"{shown(name)} ({measured.reference[name].largest:.3g})"
        for name, seen in runs.items()
        if "float16" in seen.dtypes and FP16_LIMIT / 2 < measured.reference[name].largest <= FP16_LIMIT
    ]
    if tight:
        notes.append(f"less than 2x headroom to fp16's limit of {FP16_LIMIT:g}: {', '.join(tight)}")
    reported = half_statistics(model, computed) | half_lengths(model, computed)
    lengths = [shown(name) for name, here in computed.items() if here.lengths and name not in reported]
    if lengths:
        notes.append(f"vector norms are rounded to half precision, each once: {', '.join(lengths)}")
    scaled = measured.run(SCALED)
    if scaled.origin is None and any(compared.non_finite for compared in scaled.gradients.values()):
        lower = f"; {recommendation.scale:g} fits" if recommendation.format == "fp16" else ""
        notes.append(f"a loss scale of {measured.scale:g} overflows gradients, so training would skip steps{lower}")
    silent = [name for name, noise in measured.noise.items() if noise > rules.NOISE]
    if silent:
        more = f" and {len(silent) - 3} more" if len(silent) > 3 else ""
        hint = "; a larger batch says more" if 2 * len(silent) > len(measured.noise) else ""
        notes.append(f"gradients that are rounding noise in the reference too: {', '.join(silent[:3])}{more}{hint}")
    if reported and measured.device == "cpu":
        notes.append(
            "on a GPU autocast also keeps layer and group norms, pow, rsqrt and vector norms in float32, on a CPU it "
            "does not: audit where you train"
        )
    return notes
