"""Record of a few training batches in one dtype: every operation, every layer's tensors, every gradient.

A ``TorchDispatchMode`` runs below autocast and autograd, so it sees the casts that autocast inserts and the dtypes that
an operation really got. Tensors are reduced to a few numbers on the device right away; no activation is kept.
"""

from __future__ import annotations

import copy
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from scripts.audit.walkthrough import true_float32
from utils.config.groups.precision import PrecisionSettings
from utils.config.settings import UserError
from utils.config.spelling import reason_of
from utils.data.loaders import Batch
from utils.loop.forward import forward
from utils.precision.amp import autocast, keep_in_fp32
from utils.precision.probe import tensors_in, watching
from utils.runtime.memory import lacks_memory

HALF = (torch.float16, torch.bfloat16)
FP32 = "fp32"  # the format of the reference
BORDERS = ("inputs", "outputs", "gradients")  # of a module; gradients: of the scaled loss with respect to its outputs
RANDOM = re.compile(r"native_dropout|bernoulli_?|uniform_|normal_|randn?(_like)?")
MASKS = re.compile(r"masked_fill|where|(new_)?full(_like)?|scalar_tensor|fill")  # infinite on purpose
UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # what they hold means nothing

Criterion = Callable[[torch.Tensor, torch.Tensor], "torch.Tensor | dict[str, torch.Tensor]"]
Gradients = dict[str, torch.Tensor]


# ---------------------------------------------------------------------------------------- recording


@dataclass(eq=False)
class Value:
    """A floating-point tensor at one time: an operation in place makes another value of it.

    ``size``: how many numbers it has; ``non_finite``: how many of them are not finite, always 0 for a weight;
    ``largest``: the largest finite magnitude.
    """

    dtype: torch.dtype
    size: int
    is_weight: bool
    non_finite: float = 0.0
    largest: float = 0.0


class Operation(NamedTuple):
    """Operation of ``module`` itself, not of a module in it. ``constants``: its numeric arguments after the first."""

    module: str
    name: str
    inputs: list[Value]
    results: list[Value]
    constants: list[float]

    @property
    def stops_being_finite(self) -> bool:
        """True if finite values give values that are not finite."""
        return any(value.non_finite for value in self.results) and not any(value.non_finite for value in self.inputs)


class Recorder(TorchDispatchMode):
    """Records the network's operations, and tensors at its modules' ``BORDERS``, while it is active.

    Dropout drops the same values in every dtype, except inside fused attention, which is out of reach. With ``wide``,
    no operation goes to a narrower dtype than float32, whatever the network's code requests. Values have their
    magnitudes only after ``read``.
    """

    def __init__(self, model: nn.Module, *, wide: bool) -> None:
        super().__init__()
        self.model = model
        self.wide = wide
        self.running: list[str] = []  # modules, the innermost last, '' the network; none in the loss
        self.operations: list[Operation] = []
        self.borders: list[tuple[str, str, Value]] = []  # kind, module, tensor
        self._measured: list[tuple[Value, torch.Tensor]] = []
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()
        weights = [*model.parameters(), *model.buffers()]
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in weights if tensor.numel()}

    def __enter__(self) -> Any:
        self._hooks = ExitStack()
        self._hooks.enter_context(watching(self.model, **{kind: partial(self._at_border, kind) for kind in BORDERS}))
        for name, module in self.model.named_modules():
            entering = module.register_forward_pre_hook(lambda *_, name=name: self.running.append(name))
            leaving = module.register_forward_hook(self._leave)
            self._hooks.callback(entering.remove)
            self._hooks.callback(leaving.remove)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self.wide and kwargs.get("dtype") in HALF:
            kwargs["dtype"] = torch.float32
        inputs = [self._value(tensor) for tensor in tensors_in(args)] if self.running else []
        name = func._schema.name.removeprefix("aten::")
        result = _drawn_in_float32(func, args, kwargs) if RANDOM.fullmatch(name) else func(*args, **kwargs)
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
            is_weight = bool(tensor.numel()) and tensor.untyped_storage().data_ptr() in self._weights
            self._values[tensor] = Value(tensor.dtype, tensor.numel(), is_weight)
            if tensor.numel() and result_of not in UNFILLED:
                self._measured.append((self._values[tensor], measure(tensor)))
        return self._values[tensor]

    def read(self) -> None:
        """Read the magnitudes of all values from the device."""
        values, numbers = zip(*self._measured, strict=True)
        for value, (non_finite, value.largest) in zip(values, read_all(numbers), strict=True):
            value.non_finite = 0.0 if value.is_weight else non_finite

    def _at_border(self, kind: str, name: str, module: nn.Module, tensor: torch.Tensor) -> None:
        with _disable_current_modes():
            self.borders.append((kind, name, self._value(tensor)))


def _drawn_in_float32(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of a random operation, drawn in float32 and then rounded to the dtype that it would have."""
    dtype = kwargs.get("dtype") or next((tensor.dtype for tensor in tensors_in(args)), torch.get_default_dtype())
    if "dtype" in kwargs:
        kwargs["dtype"] = torch.float32
    drawn = func(*tree_map_only(torch.Tensor, torch.Tensor.float, args), **kwargs)
    if func._schema.name.endswith("_"):
        return args[0].copy_(drawn)
    return tree_map_only(torch.Tensor, lambda made: made.to(dtype) if made.is_floating_point() else made, drawn)


def measure(tensor: torch.Tensor) -> torch.Tensor:
    """Number of values that are not finite, and the largest finite magnitude, a float64 tensor (2,) on the device."""
    largest = torch.nan_to_num(tensor.detach(), 0.0, 0.0, 0.0).abs().max()
    return torch.stack([(~torch.isfinite(tensor)).sum().double(), largest.double()])


def read_all(numbers: Sequence[torch.Tensor]) -> list[Any]:
    """Values of ``numbers``, tensors of one shape, as floats or lists, read with one wait for the device."""
    return torch.stack([number.double() for number in numbers]).tolist() if numbers else []


# ---------------------------------------------------------------------------------------- gradients


class Compared(NamedTuple):
    """Sums over the values of one parameter's gradient (or several) and over all passes.

    ``non_finite``: how many values are not finite. Squared norms: ``difference`` of the unscaled gradient from the
    reference, ``reference``, and ``lost`` of the reference where the gradient is zero. ``largest``: largest magnitude
    in the reference.
    """

    non_finite: float = 0.0
    difference: float = 0.0
    reference: float = 0.0
    lost: float = 0.0
    largest: float = 0.0

    @property
    def error(self) -> float:
        """||g / scale - reference|| / ||reference||; nan without a reference, inf or nan for an overflow."""
        return math.sqrt(self.difference / self.reference) if self.reference else math.nan

    @property
    def lost_share(self) -> float:
        """The share of the reference's norm that became zero."""
        return math.sqrt(self.lost / self.reference) if self.reference else 0.0


def together(parts: Iterable[Compared]) -> Compared:
    """Combine comparisons of several gradients into one, as if they were one gradient."""
    columns = [*zip(*parts, strict=True)]
    return Compared(*map(sum, columns[:-1]), max(columns[-1])) if columns else Compared()


def compare(passes: Iterable[tuple[Gradients, Gradients]], scale: float) -> dict[str, Compared]:
    """Compare gradients of the loss times ``scale`` with those of the loss itself, over all passes; by parameter name.

    ``passes``: the gradients and the reference gradients of each pass. A gradient that is missing counts as zero.
    """
    rows = defaultdict(list)
    for gradients, reference in passes:
        for name, truth in reference.items():
            truth = truth.double()
            gradient = gradients[name].double() if name in gradients else torch.zeros_like(truth)
            parts = [~torch.isfinite(gradient), (gradient / scale - truth).square(), truth.square()]
            parts.append(truth.square() * (gradient == 0))
            rows[name].append(torch.stack([*(part.sum().double() for part in parts), truth.abs().max()]))
    table = read_all([torch.stack(of_parameter) for of_parameter in rows.values()])
    return {name: together(Compared(*row) for row in rows) for name, rows in zip(rows, table, strict=True)}


# ------------------------------------------------------------------------------------------- records


@dataclass
class Seen:
    """Tensors in one place, over all passes: dtypes, number of values that are not finite, largest finite magnitude."""

    dtypes: list[str] = field(default_factory=list)
    non_finite: float = 0.0
    largest: float = 0.0


@dataclass
class Record:
    """All passes in ``format`` with the loss ``scale`` and the layers ``keep`` in float32.

    ``places``: the tensors seen at each border of each module and as results of each of its own operations, by border
    or operation and then by module, in the order of computation. ``gradients``: by parameter, compared with the
    reference's. ``beginnings``: operations where values stop being finite but not in the reference. ``failure``: why
    the passes could not run, '' if they did.
    """

    format: str
    scale: float = 1.0
    keep: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    beginnings: list[Operation] = field(default_factory=list)
    places: dict[str, dict[str, Seen]] = field(default_factory=lambda: defaultdict(dict))
    gradients: dict[str, Compared] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def origin(self) -> str | None:
        """The module at which values stop being finite; None if all are finite."""
        return self.beginnings[0].module if self.beginnings else None

    def seen(self, place: str, module: str) -> Seen:
        """Tensors seen in ``place``, a border or an operation, of ``module``; an empty ``Seen`` if there were none."""
        return self.places[place].get(module, Seen())

    @property
    def error(self) -> float:
        """The relative error of the whole network's gradient."""
        return together(self.gradients.values()).error

    @property
    def gradients_finite(self) -> bool:
        values = [*self.gradients.values(), *self.places["gradients"].values()]
        return not self.failure and not any(one.non_finite for one in values)

    @property
    def loss_finite(self) -> bool:
        return not self.failure and all(map(math.isfinite, self.losses))

    @property
    def finite(self) -> bool:
        return self.origin is None and self.gradients_finite and self.loss_finite

    def by_module(self) -> dict[str, list[Operation]]:
        """The operations of each module; an empty list for a module without any."""
        found = defaultdict(list)
        for operation in self.operations:
            found[operation.module].append(operation)
        return found

    def enter(self, recorder: Recorder) -> None:
        """Fill the record with what ``recorder`` has seen."""
        recorder.read()
        self.operations = recorder.operations
        self.beginnings = [operation for operation in self.operations if operation.stops_being_finite]
        results = ((done.name, done.module, value) for done in self.operations for value in done.results)
        for place, module, value in [*recorder.borders, *results]:
            seen = self.places[place].setdefault(module, Seen())
            seen.dtypes = [*dict.fromkeys([*seen.dtypes, dtype_name(value.dtype)])]
            seen.non_finite += value.non_finite
            seen.largest = max(seen.largest, value.largest)


@dataclass
class Runner:
    """Runs ``passes`` in any format, each time with a copy of ``model``.

    ``reference``: the record in float32, which must be made first. ``truths``: the reference's gradients, pass by pass.
    """

    model: nn.Module
    passes: Sequence[Batch]
    criterion: Criterion
    device: torch.device
    seed: int = 0
    reference: Record = field(default_factory=lambda: Record(FP32))
    truths: Sequence[Gradients] = ()

    def record(self, made: Record) -> Record:
        """Run all passes with the settings of ``made``, fill it with the results and return it."""
        try:
            recorder, losses, gradients = self.run(made, self.passes)
        except (RuntimeError, UserError) as error:  # an operation, or the device, lacks the dtype
            if made is self.reference or lacks_memory(error):
                raise
            made.failure = reason_of(error)
            return made
        made.losses = read_all(losses)
        made.enter(recorder)
        if made is self.reference:
            self.truths = gradients
        else:
            known = {operation[:2] for operation in self.reference.beginnings}
            made.beginnings = [o for o in made.beginnings if o[:2] not in known and not MASKS.fullmatch(o.name)]
        made.gradients = compare(zip(gradients, self.truths, strict=True), made.scale)
        return made

    def run(self, made: Record, passes: Sequence[Batch]) -> tuple[Recorder, list[torch.Tensor], list[Gradients]]:
        """Run ``passes`` in training mode, with the format, the loss scale and the float32 layers of ``made``.

        Returns the recorder and, of each pass, the loss, a tensor (), and the gradients by parameter name.
        """
        is_wide = made.format == FP32
        model = copy.deepcopy(self.model).train()
        for module in [model] if is_wide else map(model.get_submodule, made.keep):
            module.float()  # where the network's code had put it to half precision
        keep_in_fp32(model, made.keep, self.device)
        criterion = copy.deepcopy(self.criterion)
        context = autocast(PrecisionSettings(amp="off" if is_wide else made.format), self.device)
        scale = torch.tensor(made.scale, device=self.device, dtype=torch.float32)  # as GradScaler's
        recorder = Recorder(model, wide=is_wide)
        losses = []
        gradients = []
        for number, batch in enumerate(passes):
            torch.manual_seed(self.seed + number)
            model.zero_grad(set_to_none=True)
            with true_float32() if is_wide else nullcontext():
                with recorder:
                    loss = forward(model, batch, criterion, context).loss
                (loss * batch.weight * scale).backward()
            losses.append(loss.detach())
            gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        return recorder, losses, gradients

    def noise(self) -> dict[str, float]:
        """How far each parameter's reference gradient moves, in the first pass, if each pixel moves by its last bit.

        Relative to the gradient's norm: near 1, the gradient is only rounding noise.
        """
        batch = self.passes[0]
        signs = 2.0 * torch.randint(0, 2, batch.images.shape, generator=torch.Generator().manual_seed(self.seed)) - 1
        bit = torch.finfo(torch.float32).eps * signs.to(batch.images)
        _, _, gradients = self.run(Record(FP32), [replace(batch, images=batch.images * (1 + bit))])
        return {name: one.error for name, one in compare([(gradients[0], self.truths[0])], 1.0).items()}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
