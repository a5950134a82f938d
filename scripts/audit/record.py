"""What a few training batches show in one dtype: every operation, and every layer's values and gradients.

A ``TorchDispatchMode`` runs below autocast and autograd, so it sees the casts that autocast inserts and the dtypes that
an operation really got. Tensors are reduced to a few numbers on the device right away; no activation is kept.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from scripts.audit.walkthrough import true_float32
from utils.config.groups.precision import PrecisionSettings
from utils.config.settings import UserError
from utils.loop.forward import forward
from utils.precision.amp import DTYPES, autocast, keep_in_fp32
from utils.precision.probe import tensors_in, watching

FP16_NORMAL = 2.0**-14  # the smallest normal float16; below it precision is lost bit by bit
HALF = (torch.float16, torch.bfloat16)
WIDE = {"fp32": torch.float32, "fp64": torch.float64}
UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # what they hold means nothing

Criterion = Callable[[torch.Tensor, torch.Tensor], "torch.Tensor | dict[str, torch.Tensor]"]
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class AuditBatch:
    """One forward pass of training.

    ``images``: float32 (m, c, h, w), normalised. ``targets``: int64 (n,), n <= m; images beyond n are padding.
    ``weight``: what the loss is multiplied by, as with gradient accumulation.
    """

    images: torch.Tensor
    targets: torch.Tensor
    weight: float = 1.0


# --------------------------------------------------------------------------------------- operations


class Value(NamedTuple):
    """A floating-point tensor at one time: an operation in place makes another value of it."""

    number: int
    dtype: torch.dtype
    size: int


class Operation(NamedTuple):
    """What ``module`` computed itself, not a module in it. ``constants``: its numbers, the first argument's aside."""

    module: str
    name: str
    inputs: list[Value]
    results: list[Value]
    constants: list[float]


class Recorder(TorchDispatchMode):
    """Records the network's operations, and tensors at its modules' borders, while it is active.

    Random numbers are drawn in float32 and then rounded, so that dropout drops the same values in every dtype; dropout
    inside fused attention is out of reach. With a dtype ``wide`` no operation goes to a narrower one, whatever the
    network's code requests, and ``magnitudes`` holds the largest finite one of each value: 0 for weights, since whether
    one of them is too large shows directly.
    """

    def __init__(self, model: nn.Module, wide: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.wide = wide
        self.running: list[str] = []  # modules, the innermost last, '' the network; none in the loss
        self.operations: list[Operation] = []
        self.magnitudes: list[torch.Tensor | float] = []
        self.borders: list[tuple[str, str, torch.dtype, torch.Tensor]] = []  # kind, module, dtype, numbers of a tensor
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()
        weights = [*model.parameters(), *model.buffers()]
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in weights if tensor.numel()}

    def __enter__(self) -> Any:
        self._hooks = ExitStack()
        kinds = {"inputs": "input", "outputs": "output", "gradients": "gradient"}
        self._hooks.enter_context(watching(self.model, **{when: self._at_border(kind) for when, kind in kinds.items()}))
        for name, module in self.model.named_modules():
            self._hooks.callback(
                module.register_forward_pre_hook(lambda *_, name=name: self.running.append(name)).remove
            )
            self._hooks.callback(module.register_forward_hook(self._leave).remove)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if self.wide and dtype and dtype.is_floating_point and dtype.itemsize < self.wide.itemsize:
            kwargs["dtype"] = self.wide
        name = func._schema.name.removeprefix("aten::")
        inputs = [self._value(tensor) for tensor in tensors_in(args)] if self.running else []
        result = _with_same_draws(func, name, args, kwargs)
        name = name.removesuffix("_")  # in place or not
        if self.running:
            results = [self._value(tensor, result_of=name) for tensor in tensors_in(result)]
            if results and name not in UNFILLED:
                constants = [argument for argument in args[1:] if isinstance(argument, bool | int | float)]
                self.operations.append(Operation(self.running[-1], name, inputs, results, constants))
        return result

    def _leave(self, *_: Any) -> None:
        self.running.pop()

    def _value(self, tensor: torch.Tensor, result_of: str = "") -> Value:
        if result_of or tensor not in self._values:
            self._values[tensor] = len(self.magnitudes)
            measured = self.wide and result_of not in UNFILLED
            is_weight = tensor.numel() and tensor.untyped_storage().data_ptr() in self._weights
            self.magnitudes.append(largest(tensor) if measured and not is_weight else 0.0)
        return Value(self._values[tensor], tensor.dtype, tensor.numel())

    def _at_border(self, kind: str) -> Callable[[str, nn.Module, torch.Tensor], None]:
        def note(name: str, module: nn.Module, tensor: torch.Tensor) -> None:
            with _disable_current_modes():
                self.borders.append((kind, name, tensor.dtype, _numbers(tensor)))

        return note


def _with_same_draws(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of ``func``; if it is random, drawn in float32."""
    if name == "native_dropout" and args[2] is not False:
        kept = torch.empty(args[0].shape, dtype=torch.float32, device=args[0].device).bernoulli_(1 - args[1])
        share = 1 - args[1]
        return args[0] * (kept / share if share else kept).to(args[0].dtype), kept.bool()
    if name in ("bernoulli_", "uniform_", "normal_") and args[0].dtype != torch.float32:
        drawn = torch.empty(args[0].shape, dtype=torch.float32, device=args[0].device)
        return args[0].copy_(func(drawn, *args[1:], **kwargs))
    if name == "bernoulli":
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    if name in ("rand", "randn", "rand_like", "randn_like"):
        wanted = kwargs.get("dtype") or (args[0].dtype if name.endswith("like") else torch.get_default_dtype())
        return func(*args, **{**kwargs, "dtype": torch.float32}).to(wanted)
    return func(*args, **kwargs)


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude, a float64 tensor () on the device; 0 for none."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    return torch.nan_to_num(tensor.detach(), 0.0, 0.0, 0.0).abs().max().double()


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor, the fields of ``Values`` but the last, float64 (5,) on the device."""
    zeros = tensor == 0
    subnormal = ~zeros & (tensor.abs() < FP16_NORMAL) & (tensor.dtype == torch.float16)
    counts = [zeros.new_full((), tensor.numel(), dtype=torch.int64), (~torch.isfinite(tensor)).sum()]
    counts += [zeros.sum(), subnormal.sum()]
    return torch.stack([*(count.double() for count in counts), largest(tensor)])


def read_all(numbers: Sequence[torch.Tensor | float]) -> list[Any]:
    """The numbers, or rows of them, on the host with one wait for the device."""
    tensors = [number.double() for number in numbers if isinstance(number, torch.Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(values) if isinstance(number, torch.Tensor) else number for number in numbers]


# ------------------------------------------------------------------------------ layers and gradients


@dataclass
class Values:
    """Counts of the values of several tensors, their largest finite magnitude, their dtypes."""

    count: float = 0
    non_finite: float = 0
    zeros: float = 0
    subnormal: float = 0  # of float16
    largest: float = 0.0
    dtypes: list[str] = field(default_factory=list)

    def add(self, dtype: torch.dtype, numbers: Sequence[float]) -> None:
        """Add a tensor."""
        self.count += numbers[0]
        self.non_finite += numbers[1]
        self.zeros += numbers[2]
        self.subnormal += numbers[3]
        self.largest = max(self.largest, numbers[4])
        if dtype_name(dtype) not in self.dtypes:
            self.dtypes.append(dtype_name(dtype))


@dataclass
class Layer:
    """A module over all its calls and passes; ``gradients``: of the scaled loss with respect to its outputs."""

    outputs: Values = field(default_factory=Values)
    gradients: Values = field(default_factory=Values)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class Compared:
    """Sums over the values of one parameter's gradient (or several) and over all passes.

    ``lost``: zero although the reference is not. Squared norms: ``difference`` of the unscaled gradient from the
    reference, ``reference``, and ``lost_norm`` of the reference at the lost values. ``in_half``: how many passes'
    gradients float16 can hold. ``largest``: magnitude of the reference.
    """

    values: float = 0
    present: float = 0  # values of the reference that are not zero
    lost: float = 0
    non_finite: float = 0
    difference: float = 0.0
    reference: float = 0.0
    lost_norm: float = 0.0
    in_half: float = 0
    largest: float = 0.0

    def __add__(self, other: Compared) -> Compared:
        sums = {part.name: getattr(self, part.name) + getattr(other, part.name) for part in fields(self)}
        return Compared(**{**sums, "largest": max(self.largest, other.largest)})

    @property
    def error(self) -> float:
        """||g / scale - reference|| / ||reference||; nan where there is no reference, inf or nan for an overflow."""
        return math.sqrt(self.difference / self.reference) if self.reference else math.nan

    @property
    def lost_share(self) -> float:
        """The share of the reference's values that were lost."""
        return self.lost / self.present if self.present else 0.0

    @property
    def lost_norm_share(self) -> float:
        """The share of the reference's norm that the lost values carry."""
        return math.sqrt(self.lost_norm / self.reference) if self.reference else 0.0


def compare(passes: Iterable[tuple[Gradients, Gradients]], scale: float) -> dict[str, Compared]:
    """By parameter; each pass's gradients are of the loss times ``scale``, those beside them of the loss itself."""
    rows = defaultdict(list)
    for gradients, reference in passes:
        for name, truth in reference.items():
            gradient = gradients[name] if name in gradients else torch.zeros_like(truth)
            rows[name].append(_compare(gradient, truth, scale))
    table = read_all([torch.stack(of_parameter) for of_parameter in rows.values()])
    return {name: together(Compared(*row) for row in rows) for name, rows in zip(rows, table, strict=True)}


def _compare(gradient: torch.Tensor, truth: torch.Tensor, scale: float) -> torch.Tensor:
    """The fields of ``Compared`` in their order, float64 (9,) on the device."""
    wide = gradient.double()
    truth = truth.double()
    present = truth != 0
    lost = (wide == 0) & present
    in_half = (gradient == gradient.half().to(gradient.dtype)).all()  # then it came through float16
    norms = [(wide / scale - truth).square().sum(), truth.square().sum(), truth.masked_fill(~lost, 0.0).square().sum()]
    counts = [torch.ones_like(present), present, lost, ~torch.isfinite(wide)]
    return torch.stack([*(count.sum().double() for count in counts), *norms, in_half.double(), truth.abs().max()])


def together(compared: Iterable[Compared]) -> Compared:
    """The sums of several gradients, as of one."""
    return sum(compared, Compared())


# ------------------------------------------------------------------------------------------- records


@dataclass
class Record:
    """All passes in ``format`` with the loss ``scale`` and the layers ``keep`` in float32.

    ``layers``: by module, in the order of computation. ``half_weights``: their dtype, by module that holds some.
    ``gradients``: by parameter, against the reference's. ``magnitudes``: of each value, in the wide formats.
    ``trail``: every tensor that went into or came out of a module, with how many of its values are not finite.
    ``origin``: the module at which such values begin in the forward pass, None without any. ``failure``: why it did not
    run at all.
    """

    format: str
    scale: float = 1.0
    keep: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    magnitudes: list[float] = field(default_factory=list)
    layers: dict[str, Layer] = field(default_factory=dict)
    half_weights: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, Compared] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    trail: list[tuple[str, str, float]] = field(default_factory=list)
    origin: str | None = None
    failure: str = ""

    @property
    def error(self) -> float:
        """The relative error of the whole network's gradient."""
        return together(self.gradients.values()).error

    @property
    def gradients_finite(self) -> bool:
        values = [*self.gradients.values(), *(layer.gradients for layer in self.layers.values())]
        return not self.failure and not any(one.non_finite for one in values)

    @property
    def loss_finite(self) -> bool:
        return not self.failure and all(map(math.isfinite, self.losses))

    @property
    def finite(self) -> bool:
        return self.origin is None and self.gradients_finite and self.loss_finite

    def by_module(self) -> dict[str, list[Operation]]:
        """The operations of each module; none for others."""
        found = defaultdict(list)
        for operation in self.operations:
            found[operation.module].append(operation)
        return found

    def layer(self, name: str) -> Layer:
        """What was seen of a module; nothing if it did not run."""
        return self.layers.get(name, Layer())


class Runner:
    """Runs the passes of one audit in any format, each time with a copy of ``model``.

    ``reference``: the record in float32, or with ``float64`` in that. ``truths``: its gradients, pass by pass.
    """

    def __init__(
        self,
        model: nn.Module,
        passes: Sequence[AuditBatch],
        criterion: Criterion,
        device: torch.device,
        seed: int = 0,
        *,
        float64: bool = False,
    ) -> None:
        self.model = model
        self.passes = passes
        self.criterion = criterion
        self.device = device
        self.seed = seed
        self.truths: list[Gradients] = []
        self.reference = Record("fp64" if float64 else "fp32")
        self.record(self.reference)

    def record(self, made: Record) -> Record:
        """Run all passes as ``made`` says and fill it."""
        model = self._copy(made.format, made.keep)
        recorder = Recorder(model, WIDE.get(made.format))
        losses = []
        found = []
        try:
            for loss, gradients in self.passes_of(model, made.format, recorder, made.scale):
                losses.append(loss)
                found.append(gradients)
        except (RuntimeError, UserError) as error:  # an operation, or the device, lacks the dtype
            if made is self.reference or isinstance(error, torch.OutOfMemoryError):
                raise
            made.failure = " ".join(str(error).split())[:160]
            return made
        if made is self.reference:
            self.truths = found
        tensors = [*model.named_parameters(), *model.named_buffers()]
        made.half_weights = {name.rpartition(".")[0]: dtype_name(t.dtype) for name, t in tensors if t.dtype in HALF}
        made.losses = read_all(losses)
        made.gradients = compare(zip(found, self.truths, strict=True), made.scale)
        made.operations = recorder.operations
        made.magnitudes = read_all(recorder.magnitudes)
        numbers = read_all([row for *_, row in recorder.borders])
        for (kind, name, dtype, _), row in zip(recorder.borders, numbers, strict=True):
            if kind == "gradient":
                made.layers[name].gradients.add(dtype, row)
                continue
            made.trail.append((kind, name, row[1]))
            if kind == "output":
                made.layers.setdefault(name, Layer()).outputs.add(dtype, row)
        made.origin = first_non_finite(made.trail, [] if made is self.reference else self.reference.trail)
        return made

    def passes_of(
        self, model: nn.Module, form: str, watcher: Any, scale: float = 1.0
    ) -> Iterator[tuple[torch.Tensor, Gradients]]:
        """Loss () and gradients of each pass, forward inside ``watcher`` and backward as training does it."""
        wide = WIDE.get(form)
        criterion = copy.deepcopy(self.criterion)
        if wide and isinstance(criterion, nn.Module):  # it may hold weights of classes
            criterion = criterion.to(wide)
        for number, batch in enumerate(self.passes):
            torch.manual_seed(self.seed + number)
            with ExitStack() as around:
                if wide:
                    batch = replace(batch, images=batch.images.to(wide))
                    around.enter_context(true_float32())
                    around.callback(torch.set_default_dtype, torch.get_default_dtype())
                    torch.set_default_dtype(wide)
                with watcher:
                    settings = PrecisionSettings(amp=form if form in DTYPES else "off")
                    loss = forward(model, batch, criterion, autocast(settings, self.device)).loss
                # float32, as GradScaler's
                (loss * batch.weight * torch.tensor(scale, device=self.device, dtype=torch.float32)).backward()
            yield loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            model.zero_grad(set_to_none=True)

    def noise(self) -> dict[str, float]:
        """By parameter, how far the reference's gradient of the first pass moves when each pixel moves by its last bit.

        A share of its norm: near 1 the gradient is rounding noise.
        """
        form = self.reference.format
        batch = self.passes[0]
        signs = 2.0 * torch.randint(0, 2, batch.images.shape, generator=torch.Generator().manual_seed(self.seed)) - 1
        wide = batch.images.to(WIDE[form])
        moved = replace(batch, images=wide * (1 + torch.finfo(WIDE[form]).eps * signs.to(wide)))
        other = copy.copy(self)
        other.passes = [moved]
        model = self._copy(form)
        ((_, gradients),) = other.passes_of(model, form, Recorder(model, WIDE[form]))
        return {name: one.error for name, one in compare([(gradients, self.truths[0])], 1.0).items()}

    def errors(self, names: Iterable[str], form: str) -> dict[str, tuple[float, float]]:
        """By module: relative errors ||half - reference|| / ||reference|| of its first call's input and output."""
        wanted = set(names)
        if not wanted:
            return {}
        seen: dict[str, dict[tuple[str, str], torch.Tensor]] = {}
        for run in (self.reference.format, form):
            kept = seen[run] = {}
            model = self._copy(run)

            def keep(kind: str, kept: dict = kept) -> Any:
                return lambda name, _, tensor: (
                    kept.setdefault((name, kind), tensor.to(torch.float64, copy=True)) if name in wanted else None
                )

            with watching(model, inputs=keep("input"), outputs=keep("output")):
                next(self.passes_of(model, run, Recorder(model, WIDE.get(run))))

        def error(place: tuple[str, str]) -> float:
            half, true = seen[form][place], seen[self.reference.format][place]
            return 0.0 if torch.equal(half, true) else float((half - true).norm() / true.norm())  # also where all is 0

        return {
            name: (error((name, "input")), error((name, "output"))) for name in wanted if (name, "input") in seen[form]
        }

    def _copy(self, form: str, keep: Sequence[str] = ()) -> nn.Module:
        """The network in training mode, in a wide ``form`` in that dtype, and the layers ``keep`` in float32."""
        model = copy.deepcopy(self.model).train()
        model.zero_grad(set_to_none=True)
        if form in WIDE:
            model.to(WIDE[form])
        modules = dict(model.named_modules())
        for name in keep:
            modules[name].float()  # where the network's code had put it to half precision
        keep_in_fp32(model, keep, self.device)
        return model


def first_non_finite(
    trail: Sequence[tuple[str, str, float]], reference: Sequence[tuple[str, str, float]]
) -> str | None:
    """The module in which values that are not finite begin, in the order of computation; None without any.

    Those that the reference has in the same place do not count: a mask may contain -inf on purpose.
    """
    true_counts = [count for *_, count in reference] if len(reference) == len(trail) else [0.0] * len(trail)
    for (kind, name, count), true_count in zip(trail, true_counts, strict=True):
        if count > true_count:
            # No module gave this input, or its output would have come first: the module around has computed it.
            return name if kind == "output" else name.rpartition(".")[0]
    return None
