"""Time and memory of a training step in one number format after the other.

The default workload is that of PyTorch's recipe "Automatic Mixed Precision": an MLP of linear layers with
ReLU between, mean squared error, plain SGD. The rows' rounds are interleaved, so that a busy machine affects
all rows alike; ``figures.py`` draws the conclusions.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from utils.config.groups.precision import PrecisionSettings
from utils.precision.amp import autocast, build_scaler

AMP = {"fp32": "off", "tf32": "off", "fp16": "fp16", "bf16": "bf16"}
LR = 0.001
WARM_UP_STEPS = 3  # of each round: they compile, choose convolution algorithms and fill the allocator's cache
GPU_WARM_UP_SECONDS = 0.5  # then, on a GPU: one that was idle takes a while to raise its clock
CPU_MEMORY_STEPS = 2  # after the warm-up, where memory is measured apart from time
OUT_OF_MEMORY = "out of memory"
PEAK_RESET = Path("/proc/self/clear_refs")  # to write: the peak of this process's size starts anew

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


def unsupported(format: str, device: torch.device) -> str | None:
    """Why ``device`` cannot compute in ``format``; None if it can. A CPU emulates the half-precision formats."""
    if format == "tf32":
        if device.type != "cuda":
            return "needs a GPU"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return f"{torch.cuda.get_device_name(device)} has no TF32 arithmetic (compute capability 8.0 and higher)"
    if format == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic"
    return None


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
    their targets on the device. ``is_default``: the published workload.
    """

    text: str
    build: Callable[[], nn.Module]
    make_batches: Callable[[torch.device], Batches]
    criterion: nn.Module
    momentum: float
    batch_size: int
    steps: int
    is_default: bool = False

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
        is_default=(width, layers, batch_size, steps) == (4096, 3, 512, 50),
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


def synchronise(device: torch.device) -> None:
    """Wait for what the GPU still has to do; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm_up(run: Callable[[int], None], device: torch.device) -> None:
    """Let ``run``, a function of the number of steps, do what is not to be timed, and wait for the device."""
    run(WARM_UP_STEPS)
    synchronise(device)
    began = time.perf_counter()
    while device.type == "cuda" and time.perf_counter() - began < GPU_WARM_UP_SECONDS:
        run(WARM_UP_STEPS)
        synchronise(device)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """In this context, float32 multiplications may (or may not) be rounded to TF32; then as before."""
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
        began = time.perf_counter()
        training.run(workload.steps)
        synchronise(device)
        seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return seconds / workload.steps, peak


def run_rounds(
    results: Sequence[Result],
    workload: Workload,
    device: torch.device,
    rounds: int,
    measured: Callable[[int, Result], None],
) -> None:
    """Fill ``results``: the first round of every row, then the second ... A row that fails is left out from there.

    ``measured`` is called after each measurement with the round's number, from 1.
    """
    for number in range(1, rounds + 1):
        for result in results:
            if not result.failure:
                try:
                    seconds, peak = time_round(workload, result.row, device)
                    result.seconds.append(seconds)
                    result.peak_bytes = max(peak, result.peak_bytes or 0) if peak is not None else result.peak_bytes
                except RuntimeError as error:
                    result.failure = failure_of(error, result.row)
                    if not result.failure:
                        raise
            measured(number, result)


def failure_of(error: RuntimeError, row: StepVariant) -> str:
    """Why a row failed with ``error``, in words; '' if the row is not the cause."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text or "ALLOC_FAILED" in text:
        return OUT_OF_MEMORY
    if row.compiled and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return "does not compile"
    return ""


def cpu_memory(workload: Workload, row: StepVariant, device: torch.device) -> int:
    """Bytes by which this process's largest resident size grows when it builds and trains. For a fresh process."""
    # The first step of all loads over 100 MB of libraries, which are no part of the workload.
    mlp(width=8, layers=1, batch_size=8, steps=1).start(StepVariant(row.format, compiled=row.compiled), device).run(1)
    before = settled_bytes()
    training = workload.start(row, device)
    training.run(WARM_UP_STEPS + CPU_MEMORY_STEPS)
    return peak_resident_bytes() - before


def settled_bytes() -> int:
    """Physical memory in use, without what is free in this process; on Linux, ``peak_resident_bytes`` starts from it.

    The C library keeps memory that was freed. A step that is given it does not make the process grow.
    """
    gc.collect()
    with suppress(AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        PEAK_RESET.write_text("5", encoding="ascii")
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most physical memory that this process has had: on Linux since ``settled_bytes``, else since its start."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if platform.system() == "Darwin" else size * 1024  # macOS counts bytes, Linux kibibytes


def interleaved_rounds(
    sides: Sequence[Callable[[], None]], rounds: int, device: torch.device, measured: Callable[[int], None]
) -> list[list[float]]:
    """Seconds of each side in each round, in the order a b c, c b a, a b c ...

    Alternating keeps what one leaves behind for the next (caches, clock rates) from favouring a side.
    ``measured`` is called after each round with its number, from 1.
    """
    seconds: list[list[float]] = [[] for _ in sides]
    for number in range(1, rounds + 1):
        for side in range(len(sides)) if number % 2 else reversed(range(len(sides))):
            synchronise(device)
            began = time.perf_counter()
            sides[side]()
            synchronise(device)
            seconds[side].append(time.perf_counter() - began)
        measured(number)
    return seconds
