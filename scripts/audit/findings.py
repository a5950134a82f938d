"""Faults that the records show, the layers to keep in float32, and a loss scale that fits; advice is tried beforehand.

The thresholds come from sound networks and from networks with a known fault; the comments give what was measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from scripts.audit.record import FP32, HALF, Compared, Operation, Record, Runner, Value, dtype_name, together
from utils.config.spelling import some

FP16_LIMIT = 65504.0  # the largest float16
LIMIT = f"fp16 ends at {FP16_LIMIT:g}"
FP16_NORMAL = 2.0**-14  # the smallest normal float16; below it precision is lost bit by bit
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
MOST_ATTEMPTS = 16  # trials of an fp16 recommendation, each with one more remedy

# the runs' names
UNSCALED = "fp16 unscaled"
SCALED = "fp16"
BF16 = "bf16"

# why a layer is kept in float32
OVERFLOWS = "overflows"
INPUT_EXCEEDS = "its input exceeds"
WEIGHT_EXCEEDS = "its weight exceeds"
NORMALISES = "normalises in half precision"
UNDERFLOWS = "its gradients underflow"
NOT_FINITE = "is not finite in fp16"

# Operations by name. Autocast rounds the inputs of products, which must fit into half precision.
PRODUCTS = re.compile(r"\w*convolution|(add|b|baddb)?mm|(add)?mv|linear|matmul|_scaled_dot_product\w+")
NORMALISATIONS = re.compile(r"\w*(batch_norm|layer_norm|group_norm|rms_norm)\w*")  # torch's own: (out, mean, 1/std)
DEVIATIONS = re.compile(r"(var|std)(_mean)?")
LENGTHS = ("linalg_vector_norm", "norm")
REDUCTIONS = re.compile(r"mean|sum")
SHAPES = re.compile(
    r"_to_copy|(_unsafe_)?view|reshape|(un)?squeeze|detach|alias|clone|permute|transpose|t|expand|select|slice"
)
# What leaves a statistic a statistic: arithmetic with numbers or other statistics, other shapes, other dtypes.
CARRIERS = re.compile(rf"mean|sum|add|r?sub|mul|div|neg|clamp(_min)?|maximum|relu|{SHAPES.pattern}")


@dataclass
class LayerFinding:
    """A problem of one layer. ``kind``: 'overflow', 'not finite', 'underflow', 'normalisation', 'gradient overflow' or
    'reference'. ``severity``: 'fault', or 'information' if ordinary loss scaling fixes it.
    """

    kind: str
    layer: str
    what: str
    advice: str
    severity: str = "fault"


@dataclass
class Recommendation:
    """A format with its remedies. ``trial``: the record that confirms it; its format is '' if nothing is recommended.
    ``keep``: by layer, why it stays in float32. ``steps``: what was tried before, and why it was given up.
    """

    trial: Record = field(default_factory=lambda: Record(""))
    keep: dict[str, str] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)


@dataclass
class Audit:
    """An audit of a network, and after ``run`` its records and what follows from them.

    ``scale``: the loss scale in use. ``already_kept``: layers that the network keeps in float32. ``weights``: where the
    weights come from, as text. ``remarks``: lines to print first. ``runs``: records by name. ``noise``: see
    ``Runner.noise``. ``tried``: trials of recommendations.
    """

    runner: Runner
    scale: float = DEFAULT_SCALE
    already_kept: Sequence[str] = ()
    weights: str = ""
    remarks: list[str] = field(default_factory=list)
    runs: dict[str, Record] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    tried: list[Record] = field(default_factory=list)
    findings: list[LayerFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    recommendation: Recommendation = field(default_factory=Recommendation)

    def run(self) -> Audit:
        """Record the passes in each format, and set the findings, notes and recommendation; return this audit."""
        reference = self.runner.record(self.reference)
        runs = {UNSCALED: Record("fp16"), SCALED: Record("fp16", self.scale), BF16: Record("bf16")}
        self.runs = {name: self.runner.record(record) for name, record in runs.items()}
        self.noise = self.runner.noise()
        failures = {record.format: record.failure for record in runs.values() if record.failure}
        self.notes = [f"{name} cannot run here: {why}" for name, why in failures.items()]
        if not reference.loss_finite or not reference.gradients_finite:
            self.findings = [_reference_finding(reference)]
            return self
        statistics = half_statistics(self.unscaled) | unfit_lengths(self)
        self.recommendation = recommend(self, statistics)
        self.findings = [
            *not_finite_findings(self),
            *(normalisation_finding(self, name, why) for name, why in statistics.items()),
            *gradient_overflow_findings(self),
            *underflow_findings(self),
        ]
        self.notes += _notes(self)
        return self

    @property
    def reference(self) -> Record:
        return self.runner.reference

    @property
    def unscaled(self) -> Record:
        return self.runs[UNSCALED]

    @property
    def ran(self) -> dict[str, Record]:
        """The runs in formats that the device has."""
        return {name: run for name, run in self.runs.items() if not run.failure}

    @property
    def faults(self) -> list[LayerFinding]:
        """The findings that ordinary loss scaling does not fix."""
        return [finding for finding in self.findings if finding.severity == "fault"]

    @property
    def flags(self) -> str:
        """The training flags of the recommendation; '' if nothing can be recommended."""
        trial = self.recommendation.trial
        if trial.format in ("", FP32):
            return "--amp off" if trial.format else ""
        scale = f" --init-scale {trial.scale:.12g}" if trial.format == "fp16" else ""
        names = outermost([*self.already_kept, *self.recommendation.keep])
        return f"--amp {trial.format}{scale}" + (f" --fp32-layers {' '.join(names)}" if names else "")

    def attempt(self, form: str, scale: float = 1.0, keep: Sequence[str] = ()) -> Record:
        """Record a trial with these settings, add it to ``tried`` and return it."""
        self.tried.append(self.runner.record(Record(form, scale, list(keep))))
        return self.tried[-1]

    def by_layer(self, record: Record) -> dict[str, Compared]:
        """The gradient of each layer's own parameters, compared; without those that are noise in the reference too."""
        layers: dict[str, list[Compared]] = {}
        for name, compared in record.gradients.items():
            if compared.reference > 0 and not self.noise.get(name, 0.0) > NOISE:
                layers.setdefault(name.rpartition(".")[0], []).append(compared)
        return {name: together(parts) for name, parts in layers.items()}

    def losing(self, record: Record) -> dict[str, float]:
        """The layers that lose more than ``LOST_NORM`` of their gradient's norm, with the share that they lose."""
        shares = {name: compared.lost_share for name, compared in self.by_layer(record).items()}
        return {name: share for name, share in shares.items() if share > LOST_NORM}


def shown(name: str) -> str:
    """A module's name for display."""
    return name or "the network itself"


def is_within(name: str, others: Iterable[str]) -> bool:
    """True if the module ``name`` is one of ``others`` or inside one of them."""
    return any(name == other or name.startswith(f"{other}.") for other in others)


def outermost(names: Iterable[str]) -> list[str]:
    """The names, each once, without modules inside another of them."""
    known = list(dict.fromkeys(names))
    return [name for name in known if not is_within(name, [other for other in known if other != name])]


# ----------------------------------------------------------------------------------------- activations


def why_not_finite(made: Audit, beginning: Operation) -> tuple[str, str]:
    """Why to keep in float32 the module where ``beginning`` is not finite in fp16, and a text on what happens there.

    Casts to half precision, which the reference does not have, show that an input or a weight is too large.
    """
    name = beginning.name
    size = max((value.largest for value in beginning.inputs), default=0.0)
    largest = made.reference.seen(name, beginning.module).largest
    if name == "_to_copy":
        of_weight = beginning.inputs[0].is_weight
        what = f"{'a weight' if of_weight else 'an input'} of {size:.3g} is rounded to fp16; {LIMIT}"
        return (WEIGHT_EXCEEDS if of_weight else INPUT_EXCEEDS), what
    if largest > FP16_LIMIT:
        operations = made.reference.operations  # of all batches, as ``largest`` is
        alike = [one for one in operations if (one.module, one.name) == (beginning.module, name)]
        size = max((value.largest for one in alike for value in one.inputs), default=0.0)
        return OVERFLOWS, f"its {name} of values up to {size:.3g} gives up to {largest:.3g}; {LIMIT}"
    return NOT_FINITE, (
        f"its {name} of values up to {size:.3g} is not finite in fp16, though the true result is small: an "
        "intermediate value overflows, or a small one becomes zero and divides"
    )


def not_finite_findings(made: Audit) -> Iterator[LayerFinding]:
    """Yield findings on modules in which values stop being finite in fp16.

    A layer is left out if its input is too large only because the layer before it was kept in float32.
    """
    told = set()
    for trial in [made.unscaled, *(trial for trial in made.tried if trial.format == "fp16")]:
        for beginning in trial.beginnings:
            name = beginning.module
            reason, what = why_not_finite(made, beginning)
            is_passed_on = reason == INPUT_EXCEEDS and trial is not made.unscaled
            if name in told or is_passed_on or is_within(name, trial.keep):
                continue
            told.add(name)
            kind, advice = "overflow", "keep it in float32, or use bf16"
            if reason == NOT_FINITE:
                kind, advice = "not finite", "keep it in float32"
            yield LayerFinding(kind, name, what, advice)


def _reference_finding(record: Record) -> LayerFinding:
    where = f"the output of {shown(record.origin)}" if record.origin is not None else "the loss or a gradient"
    advice = "there is nothing to compare with: fix the weights or the data first"
    return LayerFinding("reference", record.origin or "", f"{where} is not finite in {record.format} either", advice)


# ------------------------------------------------------------------------------------------- gradients


def gradient_overflow_findings(made: Audit) -> Iterator[LayerFinding]:
    """Yield the layer at which gradients exceed fp16 even without scaling, though all activations fit."""
    trial = made.recommendation.trial
    if made.unscaled.origin is not None:
        return
    for name, seen in made.unscaled.places["gradients"].items():  # in the order of the backward pass
        largest = made.reference.seen("gradients", name).largest
        if largest > FP16_LIMIT and "float16" in seen.dtypes:
            what = f"largest gradient of its output {largest:.3g}, unscaled; {LIMIT}"
            advice = ("make the loss smaller, or use bf16", "fault")
            if trial.format == "fp16":
                advice = (f"needs a loss scale below 1; {trial.scale:g} fixes it", "information")
            yield LayerFinding("gradient overflow", name, what, *advice)
            return  # those before it in the network receive what it passes on


def underflow_findings(made: Audit) -> Iterator[LayerFinding]:
    """Yield a finding for each layer that loses its gradient in fp16 without scaling: whether a loss scale fixes it.

    Measured at scale 1, with overflowing layers in float32: after an overflowed activation, zeros would mean nothing.
    """
    choice = made.recommendation
    unscaled = made.unscaled
    if choice.trial.format == "fp16" and (kept := [name for name, why in choice.keep.items() if why != UNDERFLOWS]):
        unscaled = made.runner.record(Record("fp16", keep=kept))
    fine = [trial for trial in made.tried if trial.format == "fp16" and trial.finite and trial.scale > 1]
    for name, lost in made.losing(unscaled).items() if unscaled.origin is None else ():
        what = f"{100 * lost:.3g} % of its gradient's norm becomes zero in fp16 without loss scaling"
        scales = [t.scale for t in fine if not is_within(name, t.keep) and name not in made.losing(t)]
        if scales:
            advice = f"needs loss scaling; a scale of {min(scales):g} fixes it"
            yield LayerFinding("underflow", name, what, advice, "information")
        else:
            advice = "no loss scale that fits fixes it: keep it in float32, or use bf16"
            yield LayerFinding("underflow", name, what, advice)


def highest_scale(made: Audit, run: Record) -> float:
    """The largest loss scale, at most ``HIGHEST_SCALE``, with gradients at least ``MARGIN`` times below fp16's limit.

    A power of two. Only gradients in fp16 in ``run`` count: of outputs, and of weights used by products in fp16.
    """
    halves = [name for name, seen in run.places["gradients"].items() if "float16" in seen.dtypes]
    multiplies = [name for name, done in run.by_module().items() if torch.float16 in products_in(done)]
    largest = [made.reference.seen("gradients", name).largest for name in halves]
    largest += [one.largest for name, one in run.gradients.items() if name.rpartition(".")[0] in multiplies]
    most = max(largest, default=0.0)
    if not 0 < most < math.inf:
        return DEFAULT_SCALE
    return min(HIGHEST_SCALE, 2.0 ** math.floor(math.log2(FP16_LIMIT / MARGIN / most)))


# -------------------------------------------------------------------------------------- normalisations


def half_statistics(record: Record) -> dict[str, str]:
    """By module, text on the normalisation statistics that it holds in half precision.

    A statistic is a variance or deviation, a reduction whose root is taken (mean of squares), or what torch's
    normalisations keep. It has the range of squares: the square of 256 is too large for fp16, that of 2^-12 too small.
    A mean without a root is not a statistic, so average pooling does not count.
    """
    found: dict[str, dict[str, None]] = {}
    uses = ((o.module, value) for o in record.operations for value in o.inputs if value.dtype in HALF)
    half_weights = {module: dtype_name(value.dtype) for module, value in uses if value.is_weight}
    marked: dict[Value, tuple[str, int]] = {}  # squares and reductions in half precision: dtype, size before reduction
    for operation in record.operations:
        name, inputs, out = operation.name, operation.inputs, operation.results[0]
        first = inputs[0] if inputs else Value(torch.float32, 0, False)
        dtype = dtype_name(out.dtype) if out.dtype in HALF else ""
        line = ""
        if NORMALISATIONS.fullmatch(name):
            parts = [("weights", value.dtype) for value in inputs[1:]]
            parts += [("mean and deviation", kept) for kept in _kept(operation)]
            line = next((f"{part} in {dtype_name(kept)} ({name})" for part, kept in parts if kept in HALF), "")
        elif dtype and DEVIATIONS.fullmatch(name):
            line = f"{name} in {dtype}"
        elif _takes_root(operation):
            of, size = marked.get(first, ("", 0))
            if size > first.size:
                line = f"mean of squares in {of} (its {name})"
            elif operation.module in half_weights:
                line = f"weights in {half_weights[operation.module]}"
        elif dtype and (_is_square(operation) or (REDUCTIONS.fullmatch(name) and out.size < first.size)):
            marked[out] = marked.get(first, (dtype, first.size))
        elif CARRIERS.fullmatch(name):
            for value in inputs:
                if value in marked and out.size <= value.size:
                    marked[out] = marked[value]
        if line:
            found.setdefault(operation.module, {})[line] = None
    return {name: ", ".join(lines) for name, lines in found.items()}


def _kept(operation: Operation) -> list[torch.dtype]:
    """Dtypes of the statistics that torch's own normalisation keeps, which are those that its kernel sums in."""
    # A batch norm that keeps its statistics computes with these; what else a CPU gives has no meaning.
    keeps = operation.name.endswith("no_training") or operation.constants[:1] in ([False],)
    values = operation.inputs[-2:] if keeps else operation.results[1:3]
    return [value.dtype for value in values if value.size] or [operation.results[0].dtype]


def _takes_root(operation: Operation) -> bool:
    return operation.name in ("rsqrt", "sqrt") or (operation.name == "pow" and operation.constants in ([0.5], [-0.5]))


def _is_square(operation: Operation) -> bool:
    if operation.name == "pow":
        return operation.constants == [2]
    is_by_itself = len(operation.inputs) == 2 and operation.inputs[0] is operation.inputs[1]
    return operation.name == "square" or (operation.name == "mul" and is_by_itself)


def half_lengths(record: Record) -> dict[str, torch.dtype]:
    """By module, the half-precision dtype that its vector norms are rounded to."""
    norms = [operation for operation in record.operations if operation.name in LENGTHS]
    return {norm.module: norm.results[0].dtype for norm in norms if norm.results[0].dtype in HALF}


def unfit_lengths(made: Audit) -> dict[str, str]:
    """By module, text on its float16 vector norms if they exceed fp16's limit or are below its normal numbers."""
    found = {}
    for name, dtype in half_lengths(made.unscaled).items():
        largest = max(made.reference.seen(operation, name).largest for operation in LENGTHS)
        if dtype == torch.float16 and largest and not FP16_NORMAL <= largest <= FP16_LIMIT:
            found[name] = f"vector norms of at most {largest:.2g} in float16"
    return found


def products_in(done: Iterable[Operation]) -> set[torch.dtype]:
    """The dtypes of the matrix products and convolutions among a module's operations, ``done``."""
    return {o.inputs[0].dtype for o in done if o.inputs and PRODUCTS.fullmatch(o.name)}


def computes_in(done: Sequence[Operation]) -> str:
    """Name of the dtype that a module computes in: the narrowest of its matrix products and convolutions.

    If it has none, the narrowest of its normalisation statistics; without those, of all its results.
    """
    statistics = {dtype for o in done if NORMALISATIONS.fullmatch(o.name) for dtype in _kept(o)}
    others = {value.dtype for o in done if not SHAPES.fullmatch(o.name) for value in o.results}
    dtypes = products_in(done) or statistics or others
    return min(map(dtype_name, dtypes), key=lambda name: ("32" in name, name), default="")


def normalisation_finding(made: Audit, name: str, reason: str) -> LayerFinding:
    """A finding on a module that normalises with statistics in half precision."""
    advice = "keep it in float32, or compute its statistics from x.float()"
    if any(name in trial.keep and name in half_statistics(trial) for trial in made.tried):
        advice = "its own code goes to half precision, wherever it runs: compute its statistics in float32"
    return LayerFinding("normalisation", name, f"normalises in half precision: {reason}", advice)


# -------------------------------------------------------------------------------------- recommendation


def recommend(made: Audit, statistics: Collection[str]) -> Recommendation:
    """Recommend fp16 with what it needs; else bf16; else float32. ``statistics``: modules that normalise in half."""
    why = made.unscaled.failure
    choice = _given_up(why) if why else _try_fp16(made, statistics)
    if choice.trial.format:
        return choice
    keep = dict.fromkeys(outermost(filter(None, statistics)), NORMALISES)
    if why := made.runs[BF16].failure:
        choice.steps.append(f"bf16 was left out: {why}")
    elif why := refusal(made, trial := made.attempt("bf16", keep=list(keep))):
        choice.steps.append(f"bf16 was given up: {why}")
    else:
        return Recommendation(trial, keep, choice.steps)
    return Recommendation(made.attempt(FP32), steps=choice.steps)


def _given_up(why: str) -> Recommendation:
    return Recommendation(steps=[f"fp16 was given up: {why}"])


def _try_fp16(made: Audit, statistics: Collection[str]) -> Recommendation:
    """Add remedies to fp16 until a trial is sound, or give it up. Each trial shows what is still wrong."""
    keep = dict.fromkeys(statistics, NORMALISES)
    trial = made.unscaled
    highest = highest_scale(made, trial) if trial.origin is None else HIGHEST_SCALE
    scale = min(DEFAULT_SCALE, highest)
    for _ in range(MOST_ATTEMPTS):
        keep |= not_finite_layers(made, trial, keep)
        if "" in keep:
            why = f"the network's own computation {keep['']}, and it cannot be kept in float32 as a layer"
            return _given_up(why)
        trial = made.attempt("fp16", scale, outermost(keep))
        if useless := [name for name in half_statistics(trial) if keep.get(name) == NORMALISES]:
            keep = {name: why for name, why in keep.items() if name not in useless}  # its code itself goes to half
            continue
        if not_finite_layers(made, trial, keep):
            continue
        losing = made.losing(trial) if trial.finite else {}
        highest = min(highest, highest_scale(made, trial))
        if scale > highest:
            scale = highest
        elif trial.origin is None and not trial.failure and not trial.gradients_finite and scale > 2.0**-20:
            scale = highest = scale / 16
        elif losing and scale < highest:
            scale = highest
        elif new := [name for name in losing if name and name not in keep]:
            keep |= dict.fromkeys(new, UNDERFLOWS)
        else:
            why = refusal(made, trial, losing)
            return _given_up(why) if why else Recommendation(trial, {name: keep[name] for name in trial.keep})
    return _given_up(f"not sound after {MOST_ATTEMPTS} trials")


def not_finite_layers(made: Audit, trial: Record, keep: Iterable[str]) -> dict[str, str]:
    """Modules that ``trial`` shows must stay in float32 as well, each with the reason.

    As soon as an input or a weight is too large for fp16, this includes every module that multiplies too large an input
    in half precision.
    """
    beginnings = [beginning for beginning in reversed(trial.beginnings) if not is_within(beginning.module, keep)]
    found = {beginning.module: why_not_finite(made, beginning)[0] for beginning in beginnings}
    if {INPUT_EXCEEDS, WEIGHT_EXCEEDS} & {*found.values()}:
        for name, done in made.unscaled.by_module().items():
            exceeds = made.reference.seen("inputs", name).largest > FP16_LIMIT
            if exceeds and products_in(done) & set(HALF) and not is_within(name, keep):
                found.setdefault(name, INPUT_EXCEEDS)
    return found


def refusal(made: Audit, trial: Record, losing: Iterable[str] = ()) -> str:
    """Reason why ``trial`` refutes the recommendation that it tries; '' if it confirms it."""
    if trial.failure:
        return f"it does not run ({trial.failure})"
    if trial.origin is not None:
        return f"the output of {shown(trial.origin)} is not finite"
    if not trial.loss_finite:
        return "the loss is not finite"
    if not trial.gradients_finite:
        return f"gradients are not finite at a loss scale of {trial.scale:g}"
    # without parts that are rounding noise in the reference too
    error = together(made.by_layer(trial).values()).error
    if math.isnan(error):
        return "the reference's gradient is zero or rounding noise, so there is nothing to compare with"
    if error > TOLERATED_ERROR:
        return f"the gradient's relative error is {error:.2g}, more than {TOLERATED_ERROR:g}"
    return f"gradients of {', '.join(map(shown, losing))} underflow" if losing else ""


# ----------------------------------------------------------------------------------------------- notes


def _notes(made: Audit) -> Iterator[str]:
    """Yield facts that are worth knowing but are not findings."""
    outputs = made.reference.places["outputs"].items()
    near = {name: true.largest for name, true in outputs if FP16_LIMIT / 2 < true.largest <= FP16_LIMIT}
    in_fp16 = [name for name in near if "float16" in made.unscaled.seen("outputs", name).dtypes]
    if tight := [f"{shown(name)} ({near[name]:.3g})" for name in in_fp16]:
        yield f"less than 2x headroom to fp16's limit of {FP16_LIMIT:g}: {', '.join(tight)}"
    lengths = half_lengths(made.unscaled)
    statistics = half_statistics(made.unscaled)
    if others := [shown(name) for name in lengths if name not in statistics]:
        yield f"vector norms are rounded to half precision, each once: {', '.join(others)}"
    scaled = made.runs[SCALED]
    if scaled.origin is None and any(compared.non_finite for compared in scaled.gradients.values()):
        trial = made.recommendation.trial
        lower = f"; {trial.scale:g} fits" if trial.format == "fp16" else ""
        yield f"a loss scale of {made.scale:g} overflows gradients, so training would skip steps{lower}"
    silent = [name for name, noise in made.noise.items() if noise > NOISE]
    if silent:
        hint = "; a larger batch says more" if 2 * len(silent) > len(made.noise) else ""
        yield f"gradients that are rounding noise in the reference too: {some(silent, 3)}{hint}"
    if (statistics or lengths) and made.runner.device.type == "cpu":
        yield (
            "on a GPU autocast also keeps layer and group norms, pow, rsqrt and vector norms in float32, on a CPU it "
            "does not: audit where you train"
        )
