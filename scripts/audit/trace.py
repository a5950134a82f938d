"""Operations of a forward pass as they are computed, with the module each belongs to.

``TorchDispatchMode``s run below autocast and autograd, so they see the casts that autocast inserts and the dtypes
that an operation really got. Two of the four here act: one makes random numbers equal in all dtypes, one keeps
the reference in its wide format. Two watch: magnitudes in the reference, dtypes and statistics under autocast.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from utils.precision.probe import tensors_in

HALF = (torch.float16, torch.bfloat16)
WIDTH = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}  # bytes; others are left alone

# What autocast rounds its inputs for: products, whose inputs must fit into half precision.
PRODUCTS = (
    "convolution",
    "_convolution",
    "cudnn_convolution",
    "mkldnn_convolution",
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "mv",
    "addmv",
    "linear",
    "matmul",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
# torch's own normalisations: (out, mean, 1 / standard deviation, ...); the kernels add up in the statistics' dtype.
NORMALISATIONS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_batch_norm_with_update",
    "native_layer_norm",
    "native_group_norm",
    "_fused_rms_norm",
)
RUNNING = ("native_batch_norm", "_native_batch_norm_legit")  # (input, weight, bias, mean, variance, training, ...)
DEVIATIONS = ("var", "var_mean", "std", "std_mean")
LENGTHS = ("linalg_vector_norm", "norm")
ROOTS = ("rsqrt", "sqrt")
REDUCTIONS = ("mean", "sum")
SHAPES = (
    "_to_copy",
    "view",
    "reshape",
    "_unsafe_view",
    "unsqueeze",
    "squeeze",
    "detach",
    "alias",
    "clone",
    "permute",
    "transpose",
    "t",
    "expand",
    "select",
    "slice",
)
# What leaves a statistic a statistic: arithmetic with numbers or other statistics, other shapes, other dtypes.
CARRIERS = ("add", "sub", "rsub", "mul", "div", "neg", "clamp", "clamp_min", "maximum", "relu", *SHAPES)
MASKS = ("masked_fill", "where", "full", "full_like", "new_full", "scalar_tensor", "fill")  # large on purpose
UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # what they hold means nothing


def operation_name(func: Any) -> str:
    """'add' for aten.add.Tensor and its in-place form."""
    name = func._schema.name.removeprefix("aten::")
    return name[:-1] if name.endswith("_") else name


class SameDraws(TorchDispatchMode):
    """Random numbers that do not depend on the dtype: drawn in float32 and then rounded.

    This way dropout drops the same values in every run. Dropout inside fused attention is out of reach.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
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


class WideOnly(TorchDispatchMode):
    """No operation goes to a floating-point dtype narrower than ``dtype``, whatever the network's code requests."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if WIDTH.get(kwargs.get("dtype"), math.inf) < WIDTH[self.dtype]:
            kwargs["dtype"] = self.dtype
        return func(*args, **kwargs)


class _Tracing(TorchDispatchMode):
    """Knows, while it is active, which module of ``model`` is running: ``stack``, innermost last, '' the network."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.stack = [""]

    def __enter__(self) -> Any:
        self._handles = []
        for name, module in self.model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(lambda *_, name=name: self.stack.append(name)),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)

    def _leave(self, *_: Any) -> None:
        self.stack.pop()


@dataclass
class OverflowingOperation:
    """An operation of ``module`` whose true result exceeds the format though what it computes from does not."""

    module: str
    operation: str
    largest: float
    largest_input: float


@dataclass
class LargeInput:
    """A product's input beyond the format. ``source``: the module at which that began, or that passed it on as a
    product; None for what came into the network so.
    """

    largest: float
    source: str | None


class Magnitudes(_Tracing):
    """The largest finite magnitude of each operation's inputs and result, in the reference's forward pass.

    Weights are left out of the inputs: whether a weight exceeds the format shows directly. Everything
    stays on the device until ``read``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        weights = [*model.parameters(), *model.buffers()]
        self.weights = {tensor.untyped_storage().data_ptr() for tensor in weights if tensor.numel()}
        self.known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> index of its magnitude
        self.magnitudes: list[torch.Tensor] = []
        self.rows: list[tuple[str, str, list[int], list[int]]] = []  # module, operation, inputs, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation_name(func)
        inputs = [self._index(tensor) for tensor in tensors_in(args) if self._counts(tensor)]
        result = func(*args, **(kwargs or {}))
        if name in UNFILLED:
            self._measure(result, result.new_empty(0))
        elif results := [self._measure(tensor, tensor) for tensor in tensors_in(result) if self._counts(tensor)]:
            self.rows.append((self.stack[-1], name, inputs, results))
        return result

    def _counts(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() not in self.weights

    def _index(self, tensor: torch.Tensor) -> int:
        return self.known[tensor] if tensor in self.known else self._measure(tensor, tensor)

    def _measure(self, tensor: torch.Tensor, values: torch.Tensor) -> int:
        """Enter the largest magnitude of ``values`` for ``tensor``; gives its index."""
        self.known[tensor] = len(self.magnitudes)
        self.magnitudes.append(largest(values))
        return self.known[tensor]

    def read(self, limit: float) -> tuple[list[OverflowingOperation], dict[str, LargeInput]]:
        """The operations at which values beyond ``limit`` begin, and by module its products' largest such input."""
        values = torch.stack(self.magnitudes).tolist() if self.magnitudes else []
        sources: dict[int, str] = {}  # by magnitude beyond the limit: the last module that could have overflowed for it
        beginnings: list[OverflowingOperation] = []
        products: dict[str, LargeInput] = {}
        for module, operation, inputs, results in self.rows:
            most = max(inputs, key=values.__getitem__, default=None)
            before = 0.0 if most is None else values[most]
            after = max(values[index] for index in results)
            source = sources.get(most)
            begins = after > limit >= before
            if operation in PRODUCTS and before > limit:
                if module not in products or before > products[module].largest:
                    products[module] = LargeInput(before, source)
                source = module
            if begins and operation not in MASKS:
                beginnings.append(OverflowingOperation(module, operation, after, before))
                source = module
            if source is not None:
                sources |= {index: source for index in results if values[index] > limit}
        return beginnings, products


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude, a float64 tensor () on the device; 0 for none."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    low, high = torch.aminmax(torch.nan_to_num(tensor.detach(), 0.0, 0.0, 0.0))
    return torch.maximum(low.neg(), high).double().abs()  # abs: no -0


@dataclass
class Computed:
    """What a forward pass in half precision did in one module itself, without the modules in it."""

    products: set[torch.dtype] = field(default_factory=set)
    statistics: set[torch.dtype] = field(default_factory=set)  # of torch's normalisations
    others: set[torch.dtype] = field(default_factory=set)
    half_operations: set[str] = field(default_factory=set)  # those with a result in half precision
    roots: bool = False  # whether it takes a square root or an inverse one
    faults: list[str] = field(default_factory=list)  # statistics held in half precision, in words
    lengths: list[str] = field(default_factory=list)  # vector norms rounded to half precision, in words

    def dtype(self) -> torch.dtype | None:
        """The dtype it computes in: the narrowest of its products, else of its statistics, else of all."""
        for seen in (self.products, self.statistics, self.others):
            if seen:
                return min(seen, key=lambda dtype: (WIDTH.get(dtype, 8), str(dtype)))
        return None


class HalfOperations(_Tracing):
    """Dtypes, and statistics held in half precision, of a forward pass under autocast; see ``modules``.

    A statistic is a variance or deviation, a reduction of which a root is taken (mean of squares), or what torch's
    normalisations keep. Their value has the square's range: 256 is too large for fp16, 2^-12 too small. A mean that
    no root is taken of is none, so that average pooling is not meant.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.modules: dict[str, Computed] = defaultdict(Computed)
        self.reduced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensors that a half-precision reduction gave
        self.squares: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensors of squares in half precision

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = operation_name(func)
        inputs = list(tensors_in(args))
        results = list(tensors_in(result))
        if not results or name in UNFILLED:
            return result
        computed = self.modules[self.stack[-1]]
        if name in PRODUCTS and inputs:
            computed.products.add(inputs[0].dtype)
        elif name in NORMALISATIONS:
            self._normalisation(computed, name, args, inputs, results)
        elif name not in SHAPES:
            computed.others.update(tensor.dtype for tensor in results)
        if any(tensor.dtype in HALF for tensor in results):
            computed.half_operations.add(name)
        self._statistics(computed, name, args, inputs, results)
        return result

    @staticmethod
    def _normalisation(
        computed: Computed, name: str, args: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        # A batch norm that keeps its statistics computes with these; what else a CPU gives has no meaning.
        keeps = name.endswith("no_training") or (name in RUNNING and args[5] is False)
        kept = [tensor.dtype for tensor in (args[3:5] if keeps else results[1:3]) if tensor.numel()]
        kept = kept or [results[0].dtype]
        computed.statistics.update(kept)
        weights = [tensor.dtype for tensor in inputs[1:] if tensor.dtype in HALF]
        if weights:
            _once(computed.faults, f"weights in {_short(weights[0])} ({name})")
        elif any(dtype in HALF for dtype in kept):
            _once(computed.faults, f"mean and deviation in {_short(kept[0])} ({name})")

    def _statistics(
        self, computed: Computed, name: str, args: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        out = results[0]
        half = results[0].dtype in HALF
        root = name in ROOTS or (name == "pow" and _exponent(args) in (0.5, -0.5))
        computed.roots |= root
        if name in DEVIATIONS and half:
            _once(computed.faults, f"{name} in {_short(out.dtype)}")
        elif name in LENGTHS and half:
            _once(computed.lengths, f"{name} in {_short(out.dtype)}")
        elif root and inputs and inputs[0] in self.reduced:
            _once(computed.faults, f"mean of squares in {_short(self.reduced[inputs[0]])} (its {name})")
        elif name in REDUCTIONS and inputs and out.numel() < inputs[0].numel():
            source = self.squares.get(inputs[0]) or (out.dtype if half else None)
            if source:
                self.reduced[out] = source
        elif _is_square(name, args) and half:
            self.squares[out] = out.dtype
        elif name in CARRIERS:
            for tensor in inputs:
                for marked in (self.reduced, self.squares):
                    if tensor in marked and out.numel() <= tensor.numel():
                        marked[out] = marked[tensor]


def _exponent(args: Any) -> float | None:
    return args[1] if len(args) > 1 and isinstance(args[1], int | float) else None


def _is_square(name: str, args: Any) -> bool:
    if name == "pow":
        return _exponent(args) == 2
    return name == "square" or (name == "mul" and len(args) > 1 and args[0] is args[1])


def _once(lines: list[str], line: str) -> None:
    if line not in lines:
        lines.append(line)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
