"""Bare training steps: PyTorch's AMP recipe in each dtype, and a classification network to compare others with.

On a GPU the recipe's whole step is also recorded as a CUDA graph, in each dtype. The recipe, "Automatic Mixed
Precision", trains an MLP of linear layers with ReLU between them, with mean squared error and SGD.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from scripts.common.timing import Spread, ratios, timed, warm_up
from utils.config.groups.model import ModelSettings
from utils.config.groups.precision import PrecisionSettings
from utils.loop.step_graph import WARM_UP, CudaGraph
from utils.precision.amp import autocast, build_scaler

GRAPH = " as a graph"  # appended to the name of a format
AMP = {"fp32": "off", "tf32": "off", "fp16": "fp16", "bf16": "bf16"}
LR = 0.001
CLASSES = 10
HEADERS = ("format", "ms a step", "min - max", "images/s", "speed-up", "peak MB", "memory")

Batches = list[tuple[torch.Tensor, torch.Tensor]]


# ------------------------------------------------------------------------------------------ the step


class Training:
    """A network, its batches and a bare loop's step; the gradient scaler is disabled unless needed.

    ``batches``: (inputs, targets) on ``device``, used in turn. ``fused``: whether the optimizer uses the kernel that
    reads the scaler's flag on the device; torch's default reads it on the host.
    """

    def __init__(
        self,
        network: nn.Module,
        batches: Batches,
        criterion: nn.Module,
        settings: PrecisionSettings,
        device: torch.device,
        *,
        momentum: float,
        fused: bool | None = None,
    ) -> None:
        self.network = network
        self.batches = batches
        self.criterion = criterion
        self.optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=momentum, fused=fused)
        self.autocast = autocast(settings, device)
        self.scaler = build_scaler(settings, device)

    def run(self, steps: int) -> None:
        """Take ``steps`` optimizer steps and nothing else: no metric, no norm, no synchronisation."""
        for number in range(steps):
            self.step(*self.batches[number % len(self.batches)])

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with self.autocast:
            loss = self.criterion(self.network(inputs), targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


class RecordedTraining(Training):
    """``Training`` that, after a few ordinary steps, records one as a CUDA graph and then replays it.

    Each batch is copied into the graph's tensors.
    """

    _launched = 0

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._launched += 1
        if self._launched <= WARM_UP:
            super().step(inputs, targets)
        elif self._launched == WARM_UP + 1:
            own = inputs.clone(), targets.clone()
            self._own = own
            self._graph = CudaGraph()
            self._graph.record(lambda: Training.step(self, *own))
        else:
            for kept, given in zip(self._own, (inputs, targets), strict=True):
                kept.copy_(given)
            self._graph.replay()


class Workload(NamedTuple):
    """Network and data to train, built anew for each measurement.

    ``build`` makes the network, with weights that depend on torch's seed; ``make_batches`` makes float32
    inputs and their targets on the device.
    """

    text: str
    build: Callable[[], nn.Module]
    make_batches: Callable[[torch.device], Batches]
    criterion: nn.Module
    momentum: float

    def start(
        self, settings: PrecisionSettings, device: torch.device, kind: type[Training] = Training, **more: Any
    ) -> Training:
        """Build network and data on ``device``, to train in this precision; ``more``: further arguments of ``kind``."""
        torch.manual_seed(0)
        batches = self.make_batches(device)
        network = self.build().to(device)
        return kind(network, batches, self.criterion, settings, device, momentum=self.momentum, **more)


def mlp(width: int, layers: int, batch_size: int, steps: int) -> Workload:
    """Workload of ``layers`` linear layers ``width``-``width`` with ReLU between them and ``steps`` different batches.

    Inputs and targets: float32 (batch_size, width), standard normal.
    """

    def build() -> nn.Module:
        modules = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*modules[:-1])

    def make_batches(device: torch.device) -> Batches:
        shape = (batch_size, width)
        return [(torch.randn(shape, device=device), torch.randn(shape, device=device)) for _ in range(steps)]

    text = f"MLP of {layers} linear layers {width}-{width}, batch {batch_size}"
    return Workload(text, build, make_batches, nn.MSELoss(), 0.0)


def classification(arch: str, image_size: int, batch_size: int) -> Workload:
    """Workload of main.py's network ``arch``, on one batch of random images that every step uses.

    Images: float32 (batch_size, 3, image_size, image_size), standard normal. Targets: int64 (batch_size,).
    """

    def build() -> nn.Module:
        from models import build_model

        return build_model(ModelSettings(arch=arch), classes=CLASSES, channels=3, image_size=image_size)

    def make_batches(device: torch.device) -> Batches:
        images = torch.randn(batch_size, 3, image_size, image_size, device=device)
        return [(images, torch.randint(CLASSES, (batch_size,), device=device))]

    text = f"{arch}, {CLASSES} classes, images 3x{image_size}x{image_size}, batch {batch_size}"
    return Workload(text, build, make_batches, nn.CrossEntropyLoss(), 0.9)


# ------------------------------------------------------------------------------------- measurements


class Round(NamedTuple):
    """Seconds per step and, on a GPU, the peak bytes of all tensors."""

    seconds: float
    peak_bytes: int | None = None


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Context in which float32 products may, or may not, be rounded to TF32."""
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def time_round(workload: Workload, steps: int, form: str, device: torch.device) -> Round:
    """Time ``steps`` steps in ``form``, a key of ``AMP`` with or without ``GRAPH``; data are made before timing."""
    name = form.removesuffix(GRAPH)
    recorded: dict[str, Any] = {"kind": RecordedTraining, "fused": True} if form != name else {}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with tf32(name == "tf32"):
        training = workload.start(PrecisionSettings(amp=AMP[name]), device, **recorded)
        warm_up(training.run, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds, _ = timed(lambda: training.run(steps), device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Round(seconds / steps, peak)


# ---------------------------------------------------------------------------------------- conclusions


def csv_row(
    form: str, rounds: Sequence[Round], first: Sequence[Round], batch_size: int, failure: str = ""
) -> dict[str, Any]:
    """CSV row of a format: milliseconds, bytes, and ratios to the ``first`` format's rounds; None for unknown values.

    A speed-up of 2 means half the first format's time. ``first`` is empty if that format failed.
    """
    seconds = [one.seconds for one in rounds]
    peak = speed_up = memory_ratio = None
    ms = (None, None, None) if failure else Spread.of([1000 * one for one in seconds])
    if not failure and rounds[0].peak_bytes is not None:
        peak = max(one.peak_bytes for one in rounds)
    if first and not failure:
        speed_up = ratios([one.seconds for one in first], seconds).median
        least = max(one.peak_bytes or 0 for one in first)
        memory_ratio = peak / least if peak is not None and least else None
    return {
        "format": form,
        **dict(zip(("ms_per_step", "ms_min", "ms_max"), ms, strict=True)),
        "images_per_second": None if failure else 1000 * batch_size / ms[0],
        "speed_up": speed_up,
        "peak_bytes": peak,
        "memory_ratio": memory_ratio,
        "failure": failure,
    }


def cells(row: Mapping[str, Any], memory: bool) -> list[str]:
    """Text cells of a row, in the order of ``HEADERS``; the last two, about memory, only if ``memory``."""
    label = row["format"].replace("fp16", "fp16 + scaler")
    width = len(HEADERS) if memory else len(HEADERS) - 2
    if row["failure"]:
        return [label, row["failure"], *[""] * (width - 2)]
    shown = {"images_per_second": "{:,.0f}", "speed_up": "{:.2f}x", "peak_mb": "{:,.1f}", "memory_ratio": "{:.2f}x"}
    values = {**row, "peak_mb": None if row["peak_bytes"] is None else row["peak_bytes"] / 1e6}
    figures = ["-" if values[name] is None else form.format(values[name]) for name, form in shown.items()]
    return [label, f"{row['ms_per_step']:,.2f}", f"{row['ms_min']:,.2f} - {row['ms_max']:,.2f}", *figures][:width]
