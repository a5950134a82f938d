"""What in the records is a fault, which layers must be kept in float32, which scale fits; tried before it is advised.

The thresholds come from sound networks and from networks with a known fault; the comments give what was measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from scripts.audit.record import (
    HALF,
    AuditBatch,
    Compared,
    Criterion,
    Operation,
    Record,
    Runner,
    dtype_name,
    together,
)

FP16_LIMIT = 65504.0  # the largest float16
FP16_ROUNDING = 2.0**-11  # the largest relative error of rounding to a normal float16
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
MARGIN = 8.0  # the highest scale leaves at least this factor (at most twice it) to fp16's limit
MOST_ATTEMPTS = 8  # trials of an fp16 recommendation, each with one more remedy

# the runs' names
UNSCALED = "fp16 unscaled"
SCALED = "fp16"
BF16 = "bf16"

# why a layer is kept in float32
OVERFLOWS = "overflows"
ITS_INPUT_EXCEEDS = "its input exceeds"
NORMALISES = "normalises in half precision"
UNDERFLOWS = "its gradients underflow"
NOT_FINITE = "is not finite in fp16"

# Operations by name. Autocast rounds the inputs of products, which must fit into half precision.
PRODUCTS = re.compile(r"\w*convolution|(add|b|baddb)?mm|(add)?mv|linear|matmul|_scaled_dot_product\w+")
NORMALISATIONS = re.compile(r"\w*(batch_norm|layer_norm|group_norm|rms_norm)\w*")  # torch's own: (out, mean, 1/std)
MASKS = re.compile(r"masked_fill|where|(new_)?full(_like)?|scalar_tensor|fill")  # large on purpose
DEVIATIONS = re.compile(r"(var|std)(_mean)?")
LENGTHS = re.compile(r"(linalg_vector_)?norm")
REDUCTIONS = re.compile(r"mean|sum")
SHAPES = re.compile(
    r"_to_copy|(_unsafe_)?view|reshape|(un)?squeeze|detach|alias|clone|permute|transpose|t|expand|select|slice"
)
# What leaves a statistic a statistic: arithmetic with numbers or other statistics, other shapes, other dtypes.
CARRIERS = re.compile(rf"add|r?sub|mul|div|neg|clamp(_min)?|maximum|relu|{SHAPES.pattern}")


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


@dataclass
class Recommendation:
    """``format``: 'fp16', 'bf16', 'fp32', or '' when not even float32 is finite. ``keep``: by layer, why in float32.

    ``verification``: the record of its trial. ``steps``: what was tried before and why it was given up.
    """

    format: str = ""
    scale: float = 1.0
    keep: dict[str, str] = field(default_factory=dict)
    verification: Record | None = None
    steps: list[str] = field(default_factory=list)

    def flags(self, already_kept: Sequence[str] = ()) -> str:
        """The training flags for it; '' if nothing can be recommended."""
        if self.format in ("", "fp32"):
            return "--amp off" if self.format else ""
        scale = f" --init-scale {self.scale:.12g}" if self.format == "fp16" else ""
        names = outermost([*already_kept, *self.keep])
        return f"--amp {self.format}{scale}" + (f" --fp32-layers {' '.join(names)}" if names else "")


@dataclass
class Audit:
    """The records of an audit, and what follows from them. ``scale``: the loss scale in use, that of the run SCALED.

    ``runs``: by name, those that could run. ``noise``: see ``Runner.noise``. ``tried``: trials of recommendations.
    """

    runner: Runner
    scale: float
    runs: dict[str, Record] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    tried: list[Record] = field(default_factory=list)
    findings: list[LayerFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    recommendation: Recommendation = field(default_factory=Recommendation)

    @property
    def reference(self) -> Record:
        return self.runner.reference

    @property
    def faults(self) -> list[LayerFinding]:
        """The findings that ordinary loss scaling does not fix."""
        return [finding for finding in self.findings if finding.severity == "fault"]

    def run(self, name: str) -> Record:
        """One that holds nothing for a run that failed."""
        return self.runs.get(name) or Record("")

    def attempt(self, form: str, scale: float = 1.0, keep: Sequence[str] = ()) -> Record:
        """The record of a trial."""
        self.tried.append(self.runner.record(Record(form, scale, list(keep))))
        return self.tried[-1]

    def with_signal(self, gradients: dict[str, Compared]) -> dict[str, list[Compared]]:
        """By layer, its own parameters' gradients, without those that are rounding noise in the reference too."""
        layers: dict[str, list[Compared]] = {}
        for name, compared in gradients.items():
            if compared.reference > 0 and not self.noise.get(name, 0.0) > NOISE:
                layers.setdefault(name.rpartition(".")[0], []).append(compared)
        return layers

    def losing_layers(self, record: Record) -> dict[str, Compared]:
        """The layers that lose more than ``LOST_NORM`` of their gradient's norm, with what they lose."""
        pooled = {name: together(parts) for name, parts in self.with_signal(record.gradients).items()}
        return {name: compared for name, compared in pooled.items() if compared.lost_norm_share > LOST_NORM}


def audit(
    model: nn.Module,
    passes: Sequence[AuditBatch],
    criterion: Criterion,
    device: torch.device,
    *,
    scale: float = DEFAULT_SCALE,
    float64: bool = False,
    seed: int = 0,
) -> Audit:
    """Audit ``model`` over ``passes``.

    ``criterion`` takes logits (n, classes) and int64 targets (n,) and returns the loss (), or a dict of named ones.
    ``scale``: the loss scale in use. ``float64``: compare with float64 instead of float32.
    """
    runner = Runner(model, passes, criterion, device, seed, float64=float64)
    made = Audit(runner, scale, noise=runner.noise())
    for name, record in {UNSCALED: Record("fp16"), SCALED: Record("fp16", scale), BF16: Record("bf16")}.items():
        made.runs[name] = runner.record(record)
        if record.failure:
            made.failures[record.format] = record.failure
    made.notes = [f"{name} cannot run here: {why}" for name, why in made.failures.items()]
    made.runs = {name: record for name, record in made.runs.items() if record.format not in made.failures}
    if made.reference.loss_finite and made.reference.gradients_finite:
        _judge(made)
        made.notes += _notes(made)
    else:
        made.findings = [_reference_finding(made.reference)]
    return made


def _judge(made: Audit) -> None:
    """Enter findings and recommendation."""
    unscaled = made.run(UNSCALED)
    overflows, keep = overflow_findings(made)
    statistics, lengths = half_statistics(made.runner.model, unscaled)
    errors = made.runner.errors([*statistics, *lengths], "fp16")
    statistics |= {name: why for name, why in lengths.items() if name in errors and costs(errors[name])}
    normalisations = [
        normalisation_finding(name, why, errors.get(name), fault=name in statistics)
        for name, why in {**lengths, **statistics}.items()
    ]
    keep = dict.fromkeys(statistics, NORMALISES) | keep
    choice = made.recommendation = recommend(made, keep, list(statistics))
    for finding in normalisations:
        if any(finding.layer in trial.keep and finding.layer in still_half(made, trial) for trial in made.tried):
            finding.advice = "its own code goes to half precision, wherever it runs: compute its statistics in float32"
    made.findings += [*overflows, *normalisations]
    explained = {finding.layer for finding in made.findings}
    made.findings += [
        not_finite_finding(trial.origin, made)
        for trial in made.tried
        if trial.format == "fp16" and trial.origin is not None and trial.origin not in explained
        if not is_within(trial.origin, trial.keep) and not explained.add(trial.origin)
    ]
    made.findings += gradient_overflow_findings(made, choice.scale if choice.format == "fp16" else None)
    # At scale 1 with what overflows in float32; after an overflowed activation, zeros would mean nothing.
    if choice.format == "fp16" and (kept := [name for name, why in choice.keep.items() if why != UNDERFLOWS]):
        unscaled = made.runner.record(Record("fp16", keep=kept))
    if unscaled.origin is None:
        made.findings += underflow_findings(made, unscaled)


def shown(name: str) -> str:
    """A module's name for display."""
    return name or "the network itself"


def is_within(name: str, others: Iterable[str]) -> bool:
    """Whether a module is one of ``others`` or inside one."""
    return any(name == other or name.startswith(f"{other}.") for other in others)


def outermost(names: Iterable[str]) -> list[str]:
    """The names, each once, without those inside another one."""
    known = list(dict.fromkeys(names))
    return [name for name in known if not is_within(name, [other for other in known if other != name])]


# ----------------------------------------------------------------------------------------- activations


def beyond_limit(record: Record) -> tuple[list[tuple[Operation, float, float]], dict[str, tuple[float, str | None]]]:
    """Where true values beyond fp16 begin.

    Returns operations with their largest result and input, and by module its products' largest such input with the
    module at which that began, or that passed it on as a product; None for what came into the network so.
    """
    values = record.magnitudes
    sources: dict[int, str] = {}  # by value beyond the limit: the last module that could have overflowed for it
    beginnings = []
    products: dict[str, tuple[float, str | None]] = {}
    for operation in record.operations:
        most = max((value.number for value in operation.inputs), key=values.__getitem__, default=None)
        before = 0.0 if most is None else values[most]
        after = max(values[value.number] for value in operation.results)
        source = sources.get(most)
        if PRODUCTS.fullmatch(operation.name) and before > FP16_LIMIT:
            if before > products.get(operation.module, (0.0, None))[0]:
                products[operation.module] = (before, source)
            source = operation.module
        if after > FP16_LIMIT >= before and not MASKS.fullmatch(operation.name):
            beginnings.append((operation, after, before))
            source = operation.module
        if source is not None:
            sources |= {v.number: source for v in operation.results if values[v.number] > FP16_LIMIT}
    return beginnings, products


def overflow_findings(made: Audit) -> tuple[list[LayerFinding], dict[str, str]]:
    """Layers at which values beyond fp16's limit begin, and by module why it must be kept in float32."""
    findings: dict[str, LayerFinding] = {}
    unscaled = made.run(UNSCALED)
    true = made.reference.layers
    modules = dict(made.runner.model.named_modules())
    done = unscaled.by_module()
    multiplies = [name for name in list(done) if products_in(done[name]) & set(HALF)]
    for name in multiplies:
        own = [parameter.detach().abs().max() for parameter in modules[name].parameters(recurse=False)]
        if own and FP16_LIMIT < (weight := float(max(own))) < math.inf:
            findings[name] = _overflow(name, f"its weight's largest value is {weight:.3g}", weight)
    beginnings, products = beyond_limit(made.reference)
    for operation, after, before in beginnings:
        name = operation.module
        large_output = true[name].outputs.largest > FP16_LIMIT
        held = any(o.name == operation.name and any(v.dtype in HALF for v in o.results) for o in done[name])
        if held or (large_output and "float16" in unscaled.layer(name).outputs.dtypes):
            is_output = large_output and next(modules[name].children(), None) is None
            place = "largest activation" if is_output else f"its own {operation.name} gives up to"
            if name not in findings or findings[name].numbers["largest"] < after:
                findings[name] = _overflow(name, f"{place} {after:.3g}, from inputs of {before:.3g}", after)
    keep = dict.fromkeys(findings, OVERFLOWS)
    for name, (largest, source) in products.items():
        if name not in keep and name in multiplies:
            if source not in keep:  # it came in float32, so that only here it overflows
                findings[name] = _overflow(name, f"its input's largest value is {largest:.3g}", largest)
            keep[name] = ITS_INPUT_EXCEEDS
    return [findings[name] for name in unscaled.layers if name in findings], keep


def _overflow(name: str, what: str, largest: float) -> LayerFinding:
    return LayerFinding(
        "overflow",
        name,
        f"{what}; fp16 ends at {FP16_LIMIT:g}, {largest / FP16_LIMIT:.3g} times too small",
        "keep it in float32, or use bf16",
        numbers={"largest": largest, "headroom": math.log2(FP16_LIMIT / largest)},
    )


def not_finite_finding(name: str, made: Audit) -> LayerFinding:
    """A finding on a module whose half-precision result is not finite though its true values fit into fp16."""
    seen = made.run(UNSCALED).layer(name).outputs
    return LayerFinding(
        "not finite",
        name,
        f"{seen.non_finite:,.0f} of {seen.count:,.0f} outputs are not finite in fp16, though the "
        f"largest true one is {made.reference.layers[name].outputs.largest:.3g}: an intermediate value overflows, or a "
        "small one becomes zero and divides",
        "keep it in float32",
        numbers={"non_finite": seen.non_finite},
    )


def _reference_finding(record: Record) -> LayerFinding:
    where = f"the output of {shown(record.origin)}" if record.origin is not None else "the loss or a gradient"
    return LayerFinding(
        "reference",
        record.origin or "",
        f"{where} is not finite in {record.format} either",
        "there is nothing to compare with: fix the weights or the data first",
    )


# ------------------------------------------------------------------------------------------- gradients


def gradient_overflow_findings(made: Audit, fitting_scale: float | None) -> Iterator[LayerFinding]:
    """The layer at which gradients exceed fp16 even without scaling, though all activations fit.

    ``fitting_scale``: that of an fp16 recommendation which its trial confirmed.
    """
    if made.run(UNSCALED).origin is not None:
        return
    for name, layer in reversed(made.run(UNSCALED).layers.items()):
        largest = made.reference.layers[name].gradients.largest
        if "float16" in layer.gradients.dtypes and largest > FP16_LIMIT:
            what = f"largest gradient of its output {largest:.3g}, unscaled; fp16 ends at {FP16_LIMIT:g}"
            advice = "make the loss smaller, or use bf16"
            severity = "fault"
            if fitting_scale:
                advice, severity = f"needs a loss scale below 1; {fitting_scale:g} fixes it", "information"
            yield LayerFinding("gradient overflow", name, what, advice, severity, {"largest": largest})
            return  # those before it in the network receive what it passes on


def underflow_findings(made: Audit, unscaled: Record) -> Iterator[LayerFinding]:
    """A finding for each layer that loses its gradient in fp16 without scaling: does a loss scale fix it?"""
    fine = [trial for trial in made.tried if trial.format == "fp16" and trial.finite and trial.scale > 1]
    for name, lost in made.losing_layers(unscaled).items():
        scales = [t.scale for t in fine if not is_within(name, t.keep) and name not in made.losing_layers(t)]
        what = (
            f"{100 * lost.lost_norm_share:.3g} % of its gradient's norm ({100 * lost.lost_share:.3g} % of its values) "
            "become zero in fp16 without loss scaling"
        )
        numbers = {"lost_norm": lost.lost_norm_share, "lost": lost.lost_share}
        if scales:
            advice = f"needs loss scaling; a scale of {min(scales):g} fixes it"
            yield LayerFinding("underflow", name, what, advice, "information", numbers | {"scale": min(scales)})
        else:
            advice = "no loss scale that fits fixes it: keep it in float32, or use bf16"
            yield LayerFinding("underflow", name, what, advice, numbers=numbers)


def highest_scale(made: Audit) -> float:
    """The largest power of two that leaves ``MARGIN`` to fp16's limit, at most ``HIGHEST_SCALE``.

    The limit is that of gradients which flow in fp16: of outputs, and of weights computed in fp16.
    """
    unscaled = made.run(UNSCALED)
    outputs = [name for name, layer in unscaled.layers.items() if "float16" in layer.gradients.dtypes]
    largest = [made.reference.layers[name].gradients.largest for name in outputs]
    largest += [compared.largest for compared in unscaled.gradients.values() if compared.in_half]
    most = max(largest, default=0.0)
    if not 0 < most < math.inf:
        return DEFAULT_SCALE
    return min(HIGHEST_SCALE, 2.0 ** math.floor(math.log2(FP16_LIMIT / MARGIN / most)))


# -------------------------------------------------------------------------------------- normalisations


def half_statistics(model: nn.Module, record: Record) -> tuple[dict[str, str], dict[str, str]]:
    """By module, in words: statistics of a normalisation that it holds in half precision, and vector norms.

    Vector norms are told of modules that do nothing but normalise. In an attention or a classifier by cosine, which
    also multiply, one is rounded like any other value.
    """
    held = _statistics(record)
    done = record.by_module()
    statistics = {}
    lengths = {}
    for name, module in model.named_modules():
        if name in held:
            statistics[name] = ", ".join(held[name])
        elif name in record.half_weights and any(map(_takes_root, done[name])):
            statistics[name] = f"weights in {record.half_weights[name]}"
        norms = vector_norms(done[name])
        if norms and next(module.children(), None) is None and not products_in(done[name]):
            lengths[name] = ", ".join(norms)
    return statistics, lengths


def still_half(made: Audit, trial: Record) -> dict[str, str]:
    """The modules of a trial that hold statistics in half precision."""
    return half_statistics(made.runner.model, trial)[0]


def _statistics(record: Record) -> dict[str, list[str]]:
    """By module, in words, the statistics held in half precision.

    A statistic is a variance or deviation, a reduction of which a root is taken (mean of squares), or what torch's
    normalisations keep. Their value has the square's range: 256 is too large for fp16, 2^-12 too small. A mean that
    no root is taken of is none, so that average pooling is not meant.
    """
    found: dict[str, list[str]] = {}
    squares: dict[int, torch.dtype] = {}  # values that are squares in half precision
    reduced: dict[int, torch.dtype] = {}  # values reduced from these, or in half precision
    for operation in record.operations:
        name, inputs, out = operation.name, operation.inputs, operation.results[0]
        first = inputs[0] if inputs else None
        half = out.dtype in HALF
        line = ""
        if NORMALISATIONS.fullmatch(name):
            weights = [value.dtype for value in inputs[1:] if value.dtype in HALF]
            kept = _kept(operation)
            if weights:
                line = f"weights in {dtype_name(weights[0])} ({name})"
            elif any(dtype in HALF for dtype in kept):
                line = f"mean and deviation in {dtype_name(kept[0])} ({name})"
        elif half and DEVIATIONS.fullmatch(name):
            line = f"{name} in {dtype_name(out.dtype)}"
        elif _takes_root(operation) and first and first.number in reduced:
            line = f"mean of squares in {dtype_name(reduced[first.number])} (its {name})"
        elif REDUCTIONS.fullmatch(name) and first and out.size < first.size:
            if first.number in squares or half:
                reduced[out.number] = squares.get(first.number, out.dtype)
        elif half and _is_square(operation):
            squares[out.number] = out.dtype
        elif CARRIERS.fullmatch(name):
            for value in inputs:
                for marked in (reduced, squares):
                    if value.number in marked and out.size <= value.size:
                        marked[out.number] = marked[value.number]
        if line and line not in found.setdefault(operation.module, []):
            found[operation.module].append(line)
    return {name: lines for name, lines in found.items() if lines}


def _kept(operation: Operation) -> list[torch.dtype]:
    """The dtypes of the statistics of torch's own normalisation, in which its kernel adds up."""
    # A batch norm that keeps its statistics computes with these; what else a CPU gives has no meaning.
    keeps = operation.name.endswith("no_training") or operation.constants[:1] in ([False],)
    values = operation.inputs[-2:] if keeps else operation.results[1:3]
    return [value.dtype for value in values if value.size] or [operation.results[0].dtype]


def _takes_root(operation: Operation) -> bool:
    return operation.name in ("rsqrt", "sqrt") or (operation.name == "pow" and operation.constants in ([0.5], [-0.5]))


def _is_square(operation: Operation) -> bool:
    if operation.name == "pow":
        return operation.constants == [2]
    numbers = [value.number for value in operation.inputs]
    return operation.name == "square" or (operation.name == "mul" and len(numbers) == 2 and len(set(numbers)) == 1)


def vector_norms(done: Iterable[Operation]) -> list[str]:
    """In words, the vector norms rounded to half precision among the operations of a module."""
    norms = [o for o in done if LENGTHS.fullmatch(o.name) and o.results[0].dtype in HALF]
    return list(dict.fromkeys(f"{o.name} in {dtype_name(o.results[0].dtype)}" for o in norms))


def products_in(done: Iterable[Operation]) -> set[torch.dtype]:
    """The dtypes of products among the operations of a module."""
    return {o.inputs[0].dtype for o in done if o.inputs and PRODUCTS.fullmatch(o.name)}


def computes_in(done: Sequence[Operation]) -> str:
    """The dtype that a module computes in: the narrowest of its products, else of its statistics, else of all."""
    statistics = {dtype for o in done if NORMALISATIONS.fullmatch(o.name) for dtype in _kept(o)}
    others = {value.dtype for o in done if not SHAPES.fullmatch(o.name) for value in o.results}
    dtypes = products_in(done) or statistics or others
    return min(map(dtype_name, dtypes), key=lambda name: ("64" in name, "32" in name, name), default="")


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


# -------------------------------------------------------------------------------------- recommendation


def recommend(made: Audit, keep: dict[str, str], statistics: Sequence[str]) -> Recommendation:
    """fp16 with what it takes; otherwise bf16; otherwise float32. ``statistics``: modules that hold some in half."""
    why = made.failures.get("fp16", "")
    if not why:
        choice, why = _try_fp16(made, keep)
        if not why:
            return choice
    steps = [f"fp16 was given up: {why}"]
    if "bf16" in made.failures:
        steps.append(f"bf16 was left out: {made.failures['bf16']}")
    else:
        kept = outermost(filter(None, statistics))
        trial = made.attempt("bf16", keep=kept)
        if not (why := refusal(made, trial)):
            return Recommendation("bf16", 1.0, {name: keep[name] for name in kept}, trial, steps)
        steps.append(f"bf16 was given up: {why}")
    return Recommendation("fp32", 1.0, {}, made.attempt("fp32"), steps)


def _try_fp16(made: Audit, keep: dict[str, str]) -> tuple[Recommendation, str]:
    """fp16 with remedies added one at a time until it is sound; or why it was given up."""
    keep = dict(keep)
    choice = Recommendation()
    highest = highest_scale(made)
    scale = min(DEFAULT_SCALE, highest)
    for _ in range(MOST_ATTEMPTS):
        if "" in keep:
            return choice, f"the network's own computation {keep['']}, and it cannot be kept in float32 as a layer"
        trial = made.attempt("fp16", scale, outermost(keep))
        if useless := [name for name in still_half(made, trial) if keep.get(name) == NORMALISES]:
            keep = {name: why for name, why in keep.items() if name not in useless}  # its code itself goes to half
            continue
        losing = made.losing_layers(trial) if trial.finite else {}
        if trial.origin is not None and not is_within(trial.origin, keep):
            keep[trial.origin] = NOT_FINITE
        elif trial.origin is None and not trial.failure and not trial.gradients_finite and scale > 2.0**-20:
            scale = highest = scale / 16
        elif losing and scale < highest:
            scale = highest
        elif new := [name for name in losing if name and name not in keep]:
            keep |= dict.fromkeys(new, UNDERFLOWS)
        else:
            kept = {name: keep[name] for name in trial.keep}
            return Recommendation("fp16", scale, kept, trial), refusal(made, trial, losing)
    return choice, f"not sound after {MOST_ATTEMPTS} trials"


def refusal(made: Audit, trial: Record, losing: Iterable[str] = ()) -> str:
    """Why a trial refutes its recommendation; '' if it confirms it."""
    if trial.failure:
        return f"it does not run ({trial.failure})"
    if trial.origin is not None:
        return f"the output of {shown(trial.origin)} is not finite"
    if not trial.loss_finite:
        return "the loss is not finite"
    if not trial.gradients_finite:
        return f"gradients are not finite at a loss scale of {trial.scale:g}"
    # without parts that are rounding noise in the reference too
    error = together(part for parts in made.with_signal(trial.gradients).values() for part in parts).error
    if error > TOLERATED_ERROR:
        return f"the gradient's relative error is {error:.2g}, more than {TOLERATED_ERROR:g}"
    return f"gradients of {', '.join(map(shown, losing))} underflow" if losing else ""


# ----------------------------------------------------------------------------------------------- notes


def _notes(made: Audit) -> Iterator[str]:
    """What is worth knowing but is not a finding."""
    unscaled = made.run(UNSCALED)
    true = made.reference.layers
    tight = [
        f"{shown(name)} ({true[name].outputs.largest:.3g})"
        for name, layer in unscaled.layers.items()
        if "float16" in layer.outputs.dtypes and FP16_LIMIT / 2 < true[name].outputs.largest <= FP16_LIMIT
    ]
    if tight:
        yield f"less than 2x headroom to fp16's limit of {FP16_LIMIT:g}: {', '.join(tight)}"
    statistics, lengths = half_statistics(made.runner.model, unscaled)
    others = [
        shown(name)
        for name, done in unscaled.by_module().items()
        if vector_norms(done) and name not in statistics and name not in lengths
    ]
    if others:
        yield f"vector norms are rounded to half precision, each once: {', '.join(others)}"
    scaled = made.run(SCALED)
    if scaled.origin is None and any(compared.non_finite for compared in scaled.gradients.values()):
        choice = made.recommendation
        lower = f"; {choice.scale:g} fits" if choice.format == "fp16" else ""
        yield f"a loss scale of {made.scale:g} overflows gradients, so training would skip steps{lower}"
    silent = [name for name, noise in made.noise.items() if noise > NOISE]
    if silent:
        more = f" and {len(silent) - 3} more" if len(silent) > 3 else ""
        hint = "; a larger batch says more" if 2 * len(silent) > len(made.noise) else ""
        yield f"gradients that are rounding noise in the reference too: {', '.join(silent[:3])}{more}{hint}"
    if (statistics or lengths) and made.runner.device.type == "cpu":
        yield (
            "on a GPU autocast also keeps layer and group norms, pow, rsqrt and vector norms in float32, on a CPU it "
            "does not: audit where you train"
        )
