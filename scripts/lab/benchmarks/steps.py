"""Time and memory of a training step in one dtype after the other.

The default workload is that of PyTorch's recipe "Automatic Mixed Precision": an MLP of linear layers with
ReLU between, mean squared error, plain SGD. The rows' rounds are interleaved, so that a busy machine affects
all rows alike; ``step_table.py`` draws the conclusions.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from scripts.common.timing import (
    WARM_UP_STEPS,
    failure_of,
    interleaved,
    peak_resident_bytes,
    settled_bytes,
    timed,
    warm_up,
)
from utils.config.groups.precision import PrecisionSettings
from utils.precision.amp import autocast, build_scaler

AMP = {"fp32": "off", "tf32": "off", "fp16": "fp16", "bf16": "bf16"}
LR = 0.001
CPU_MEMORY_STEPS = 2  # after the warm-up, where memory is measured apart from time

Batches = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class StepVariant:
    """One way to compute a training step; ``format`` is a key of ``AMP``."""

    format: str
    channels_last: bool = False
    compiled: bool = False

    @property
    def label(self) -> str:
        """The row's name in tables and pictures."""
        name = "fp16 + scaler" if self.format == "fp16" else self.format
        return name + ", channels-last" * self.channels_last + ", compiled" * self.compiled


def make_rows(formats: Sequence[str], *, channels_last: bool, compiled: bool) -> list[StepVariant]:
    """All formats as they are, then again in each wanted variant: channels-last, compiled, both."""
    variants = [(a, b) for b in (False, True) for a in (False, True) if a <= channels_last and b <= compiled]
    return [StepVariant(name, *variant) for variant in variants for name in formats]


# ------------------------------------------------------------------------------------------ the step


class Training:
    """A network, its batches and the step that every row runs; the scaler is disabled where it is not needed.

    ``batches``: (inputs, targets) on ``device``, used in turn.
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
    ) -> None:
        self.network = network
        self.batches = batches
        self.criterion = criterion
        self.optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=momentum)
        self.autocast = autocast(settings, device)
        self.scaler = build_scaler(settings, device)

    def run(self, steps: int) -> None:
        """``steps`` optimizer steps and nothing else: no metric, no norm, no synchronisation."""
        for number in range(steps):
            inputs, targets = self.batches[number % len(self.batches)]
            with self.autocast:
                loss = self.criterion(self.network(inputs), targets)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Workload:
    """What is trained, built again for each measurement.

    ``build`` makes the network (its weights depend on torch's seed), ``make_batches`` float32 inputs and
    their targets on the device.
    """

    text: str
    build: Callable[[], nn.Module]
    make_batches: Callable[[torch.device], Batches]
    criterion: nn.Module
    momentum: float
    batch_size: int
    steps: int

    def start(self, row: StepVariant, device: torch.device) -> Training:
        """Network and data on ``device``, as ``row`` wants them."""
        torch.manual_seed(0)
        batches = self.make_batches(device)
        network = self.build().to(device)
        if row.channels_last:
            network = network.to(memory_format=torch.channels_last)
            batches = [(images.contiguous(memory_format=torch.channels_last), targets) for images, targets in batches]
        if row.compiled:
            network.compile()
        settings = PrecisionSettings(amp=AMP[row.format])
        return Training(network, batches, self.criterion, settings, device, momentum=self.momentum)


def mlp(width: int, layers: int, batch_size: int, steps: int) -> Workload:
    """``layers`` linear layers ``width``-``width`` with ReLU between; with a separate batch for each step.

    Inputs and targets: float32 (batch_size, width), standard normal.
    """

    def build() -> nn.Module:
        modules = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*modules[:-1])

    def make_batches(device: torch.device) -> Batches:
        shape = (batch_size, width)
        return [(torch.randn(shape, device=device), torch.randn(shape, device=device)) for _ in range(steps)]

    return Workload(
        text=f"MLP of {layers} linear layers {width}-{width}, batch {batch_size}",
        build=build,
        make_batches=make_batches,
        criterion=nn.MSELoss(),
        momentum=0.0,
        batch_size=batch_size,
        steps=steps,
    )


def classification(
    name: str, build: Callable[[], nn.Module], *, image_size: int, classes: int, batch_size: int, steps: int
) -> Workload:
    """The network that ``build`` makes, on one batch of random images that every step uses again.

    Images: float32 (batch_size, 3, image_size, image_size), standard normal. Targets: int64 (batch_size,).
    """

    def make_batches(device: torch.device) -> Batches:
        images = torch.randn(batch_size, 3, image_size, image_size, device=device)
        return [(images, torch.randint(classes, (batch_size,), device=device))]

    return Workload(
        text=f"{name}, {classes} classes, images 3x{image_size}x{image_size}, batch {batch_size}",
        build=build,
        make_batches=make_batches,
        criterion=nn.CrossEntropyLoss(),
        momentum=0.9,
        batch_size=batch_size,
        steps=steps,
    )


# ------------------------------------------------------------------------------------- measurements


@dataclass
class Result:
    """What was measured of a row: seconds a step of each round, the peak in bytes, or why there is nothing."""

    row: StepVariant
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    failure: str = ""


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """A context in which float32 multiplications may (or may not) be rounded to TF32; then as before."""
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def time_round(workload: Workload, row: StepVariant, device: torch.device) -> tuple[float, int | None]:
    """Seconds a step and, on a GPU, the most bytes that tensors held at once; all data are made before the clock."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if row.compiled:
        torch.compiler.reset()  # past its limit of variants of one function, torch.compile quietly stops compiling
    with tf32(row.format == "tf32"):
        training = workload.start(row, device)
        warm_up(training.run, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds, _ = timed(lambda: training.run(workload.steps), device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return seconds / workload.steps, peak


def run_rounds(
    results: Sequence[Result],
    workload: Workload,
    device: torch.device,
    rounds: int,
    measured: Callable[[int, Result], None],
) -> None:
    """Fill ``results``, whose rounds are interleaved. A row that fails is left out from there.

    ``measured`` is called after each measurement with the round's number, from 1.
    """

    def measure(result: Result) -> None:
        if result.failure:
            return
        seconds, peak = time_round(workload, result.row, device)
        result.seconds.append(seconds)
        result.peak_bytes = max(peak, result.peak_bytes or 0) if peak is not None else result.peak_bytes

    def fail(place: int, error: Exception) -> str:
        results[place].failure = failure_of(error, results[place].row.compiled)
        return results[place].failure

    sides = {place: partial(measure, result) for place, result in enumerate(results)}
    interleaved(sides, rounds, lambda number, place: measured(number, results[place]), fail)


def cpu_memory(workload: Workload, row: StepVariant, device: torch.device) -> int:
    """Bytes by which this process's largest resident size grows when it builds and trains. For a fresh process."""
    # The first step of all loads over 100 MB of libraries, which are no part of the workload.
    mlp(width=8, layers=1, batch_size=8, steps=1).start(StepVariant(row.format, compiled=row.compiled), device).run(1)
    before = settled_bytes()
    training = workload.start(row, device)
    training.run(WARM_UP_STEPS + CPU_MEMORY_STEPS)
    return peak_resident_bytes() - before
