"""One training step in float32, fp16 and bf16 from the same state, looked at stage by stage.

The stages are those of a training step: forward under autocast, loss times scale, backward, unscale, optimizer
step. Autocast and scaler are the program's own. The optimizer is plain SGD, so that the update is the gradient
times the learning rate and what differs between two columns is arithmetic alone.

When do two updates agree? Measured by ||update - update in fp32|| / ||update in fp32||, sound half precision is
off by 2 u in a vision transformer and by 230 u in VGG-11 (u: the format's unit roundoff), because rounding makes
some units of ReLU, max-pool and batch norm switch. No multiple of u fits both. But the error is nearly that of
float32 itself when weights and images are nudged by u: a sound computation gives the right answer to a slightly
changed question (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 1.5). So

    tolerance = min(50 %, 2 u sqrt(layers) + 2 x the largest of four nudges by up to 2 u).

Layers are module calls that gave half precision: each rounds anew, and independent errors add up as a root. The
nudges come in pairs of opposite sign, one of which makes a unit near its switching point switch. A lost update is
off by 100 %, hence the 50 %. Measured on a CPU, first batch, weights as initialised, medians over seeds:

    network, images (batch, seeds)    layers    fp16 off by      bf16 off by     fp32 nudged by u of fp16, bf16
    fc, digits (64, 30)                    5    1.2 %    25 u    3.6 %    9 u    1.0 %     4.0 %
    conv2, digits (64, 30)                11    1.8 %    36 u    5.4 %   14 u    1.9 %     5.6 %
    vgg11, digits (8, 10)                 30     11 %   228 u     32 %   81 u     11 %      31 %
    resnet18, 32 pixels (8, 2)            77    1.4 %    28 u    4.4 %   11 u    1.6 %     4.5 %
    vit_tiny, 32 pixels (8, 2)           195   0.12 %     2 u   0.92 %    2 u   0.11 %    0.92 %

Of 222 comparisons (most of fc, conv2 and vgg11; batches of 4 to 64) none went beyond its tolerance, the nearest used
77 % of it; with other seeds none of 210, the nearest 63 %. resnet18 on 8 images of 8 pixels is off by up to 97 %,
and nudged float32 by 103 %: there batch norm averages over 8 numbers, and only a larger batch is conclusive. The
verdict then says so.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from utils.config.groups.precision import PrecisionSettings
from utils.config.settings import UserError
from utils.precision.amp import DTYPES, autocast, build_scaler, resolve_amp
from utils.precision.probe import watching

UNIT_ROUNDOFF = {name: torch.finfo(dtype).eps / 2 for name, dtype in DTYPES.items()}  # fp16 2^-11, bf16 2^-8
# of the tolerance, see above
ROUNDINGS = 2.0
NUDGED = 2.0
LARGEST = 0.5
NUDGE_SIZE = 2.0
NUDGE_PAIRS = 2
HALVINGS = 20  # skipped steps at a real network's beginning that training would sit through
LAYER_SCALE = 4096.0  # the usual first scale, 65536, lies beyond fp16's end: the layer's gradient would be infinite

Tensors = dict[str, torch.Tensor]
Forward = Callable[[nn.Module, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # (model, images) -> (output, loss)


@dataclass(frozen=True)
class Start:
    """The state that all steps begin from. ``forward`` must use the same random numbers in every call."""

    model: nn.Module
    images: torch.Tensor
    forward: Forward
    lr: float
    device: torch.device

    def nudged(self, size: float, seed: int) -> Start:
        """A copy whose weights and pixels are each multiplied by 1 + r, with r uniform in [-size, size].

        With the same seed, a negative ``size`` gives the opposite r.
        """
        generator = torch.Generator(self.device).manual_seed(seed)

        def nudge(values: torch.Tensor) -> torch.Tensor:
            random = torch.rand(values.shape, generator=generator, device=values.device, dtype=values.dtype)
            return values * (1 + size * (2 * random - 1))

        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(nudge(p))
        return dataclasses.replace(self, model=model, images=nudge(self.images))


class Step:
    """One step of a copy of the network of ``start`` in the precision that ``settings.amp`` names, stage by stage.

    Dicts are by parameter name; their tensors are float32 and shaped like the parameters. ``scaled_loss``: the loss
    that backward begins from. ``scaled`` and ``unscaled``: gradients as backward leaves them and as the optimizer sees
    them. ``skipped``: True if the scaler left the optimizer out. ``half_layers``: number of calls of modules without
    children that give half precision. ``too_large``: larger scales with which the step was tried before, and skipped.
    """

    def __init__(self, start: Start, settings: PrecisionSettings) -> None:
        self.name = "fp32" if settings.amp == "off" else settings.amp
        self.too_large: tuple[float, ...] = ()
        self.half_layers = 0
        self.skipped = True
        model = copy.deepcopy(start.model)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        scaler = build_scaler(settings, start.device)
        optimizer = torch.optim.SGD(parameters.values(), lr=start.lr)
        optimizer.register_step_post_hook(lambda *_: setattr(self, "skipped", False))
        with watching(model, outputs=self._count_half), autocast(settings, start.device):
            output, loss = start.forward(model, start.images)
        scaled_loss = scaler.scale(loss)
        scaled_loss.backward()
        self.output = output.detach()
        self.loss = loss.detach()
        self.scaled_loss = scaled_loss.detach()
        self.scaled = _gradients(parameters)
        self.scale = scaler.get_scale()
        scaler.unscale_(optimizer)
        self.unscaled = _gradients(parameters)
        self.before = {name: p.detach().clone() for name, p in parameters.items()}
        with torch.no_grad():
            for p in parameters.values():
                p.zero_()  # a small update added to a large parameter would lose the last digits, which we compare
        scaler.step(optimizer)
        scaler.update()
        self.update = {name: p.detach() for name, p in parameters.items()}

    def _count_half(self, name: str, module: nn.Module, output: torch.Tensor) -> None:
        self.half_layers += output.dtype in DTYPES.values() and not any(module.children())

    @property
    def after(self) -> Tensors:
        """The parameters after the step."""
        return {name: value + self.update[name] for name, value in self.before.items()}

    @property
    def non_finite(self) -> int:
        """Number of gradient values that are infinite or nan after backward."""
        return sum(int((~torch.isfinite(gradient)).sum()) for gradient in self.scaled.values())


def _gradients(parameters: Mapping[str, nn.Parameter]) -> Tensors:
    return {name: p.grad.detach().clone() for name, p in parameters.items() if p.grad is not None}


# In this context a GPU's float32 convolutions are float32: by default they round to TF32, as coarse as fp16.
true_float32 = partial(torch.backends.cudnn.flags, enabled=True, benchmark=False, deterministic=True, allow_tf32=False)


def formats(device: torch.device) -> tuple[list[str], list[str]]:
    """The half-precision formats that ``device`` computes in, and a line for each that it does not."""
    names = []
    missing = []
    for name in DTYPES:
        try:
            names.append(resolve_amp(PrecisionSettings(amp=name), device))
        except UserError as error:
            missing.append(f"{name}: left out ({error.mistakes[0]})")
    return names, missing


# ---------------------------------------------------------------------------------- the two examples


def single_layer(device: torch.device, init_scale: float) -> tuple[torch.Tensor, Step, list[Step]]:
    """The classic example: input (1, 1), a first step in float32, and second steps in float32 and each half precision.

    ``Linear(1, 1)`` and a random input, both from seed 47; learning rate 1; the output itself is the loss.
    """
    torch.manual_seed(47)
    # made on the CPU: a GPU's generator has other numbers
    layer = nn.Linear(1, 1)
    images = torch.randn(1, 1)
    layer = layer.to(device)
    images = images.to(device)

    def forward(layer: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = layer(images)
        return output, output

    start = Start(layer, images, forward, 1.0, device)
    first = Step(start, PrecisionSettings(amp="off"))
    layer.load_state_dict(first.after)
    names = ("off", *formats(device)[0])
    return images, first, [Step(start, PrecisionSettings(amp=name, init_scale=init_scale)) for name in names]


def network(start: Start, settings: PrecisionSettings, *, halve: bool) -> tuple[Step, list[Agreement]]:
    """A step in float32, and how a step in each half-precision format agrees with it.

    ``halve``: after a skipped step, try again with half the scale, as training does; otherwise try only
    ``settings.init_scale``.
    """
    full = dataclasses.replace(settings, amp="off")
    reference = Step(start, full)
    agreements = []
    for name in formats(start.device)[0]:
        tried: list[float] = []
        mixed = Step(start, dataclasses.replace(settings, amp=name))
        while mixed.skipped and halve and len(tried) < HALVINGS:
            tried.append(mixed.scale)
            mixed = Step(start, dataclasses.replace(settings, amp=name, init_scale=mixed.scale / 2))
        size = NUDGE_SIZE * UNIT_ROUNDOFF[name]
        nudges = [Step(start.nudged(sign * size, seed), full) for seed in range(NUDGE_PAIRS) for sign in (1, -1)]
        nudged = torch.tensor([relative_error(step.update, reference.update) for step in nudges], dtype=torch.float64)
        mixed.too_large = tuple(tried)
        agreements.append(Agreement(mixed, reference, float(nudged.max())))  # nan, if one is
    return reference, agreements


# ----------------------------------------------------------------------------------------- comparing


def norm(tensors: Mapping[str, torch.Tensor]) -> float:
    """The Euclidean norm of all numbers together, summed in float64."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def relative_error(update: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> float:
    """||update - reference|| / ||reference||; 0 when both are zero."""
    off = norm({name: update[name].double() - value.double() for name, value in reference.items()})
    size = norm(reference)
    return off / size if size else (math.inf if off else 0.0)


def tolerance(name: str, layers: int, nudged: float = 0.0) -> float:
    """Largest relative error allowed to an update in format ``name``, by the formula in the module's docstring.

    ``layers``: number of layers that round. ``nudged``: largest error of float32 with nudged weights and images, or 0.
    """
    allowed = ROUNDINGS * UNIT_ROUNDOFF[name] * math.sqrt(max(layers, 1)) + NUDGED * nudged
    return min(LARGEST, allowed)


@dataclass(frozen=True)
class Agreement:
    """A step in half precision compared with ``reference``, one in float32. Errors are relative, of the update.

    ``nudged``: the largest error of float32 with nudged weights and images, 0 if it was not measured.
    """

    step: Step
    reference: Step
    nudged: float = 0.0

    @property
    def error(self) -> float:
        return relative_error(self.step.update, self.reference.update)

    @property
    def tolerance(self) -> float:
        return tolerance(self.step.name, self.step.half_layers, self.nudged)

    @property
    def problem(self) -> str:
        """Text on a fault that the error alone does not show; '' if there is none."""
        size = norm(self.reference.update)
        bad = f"{self.step.non_finite:,} gradient values not finite" if self.step.non_finite else ""
        if not 0 < size < math.inf:
            return f"nothing to compare with: the update in fp32 has the norm {size:g}"
        if not self.step.skipped:
            return bad
        cure = "so it is not the scale" if self.step.too_large else "lower --init-scale"
        return f"step skipped: {bad or 'all finite'} at scale {self.step.scale:g}; {cure}"

    @property
    def agrees(self) -> bool:
        return not self.problem and self.error <= self.tolerance  # nan does not agree

    def line(self) -> str:
        """The comparison as a line: whether the step agrees, its error and its tolerance."""
        if self.problem:
            return f"{self.step.name}: DISAGREES ({self.problem})"
        figures = f"update off by {percent(self.error)}, tolerance {percent(self.tolerance)}"
        shaky = f"; nudged fp32 by {percent(self.nudged)}: take a larger batch" if self.nudged >= LARGEST else ""
        return f"{self.step.name}: {'agrees' if self.agrees else 'DISAGREES'} ({figures}{shaky})"


def underflow(step: Step, reference: Step) -> float:
    """The share of zeros in the step's gradient, among values whose gradient in float32 is not zero."""
    lost = there = 0
    for name, gradient in reference.unscaled.items():
        nonzero = gradient != 0
        there += int(nonzero.sum())
        lost += int((nonzero & (step.unscaled[name] == 0)).sum())
    return lost / max(there, 1)


# ---------------------------------------------------------------------------------- numbers as text


def number(value: float | torch.Tensor) -> str:
    """Four decimals, or significant digits if the value is too small or too large; no trailing zeros."""
    value = float(value)
    if value == 0 or 1e-3 <= abs(value) < 100:
        return f"{value:.4f}".rstrip("0").rstrip(".")
    return f"{value:.7g}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"


def percent(share: float) -> str:
    """``share`` as a percentage of two significant digits, three from 100 % on."""
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.3g} %"
