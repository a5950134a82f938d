"""Bare training steps: PyTorch's AMP recipe in each dtype.

On a GPU the recipe's whole step is also recorded as a CUDA graph, in each dtype. The recipe, "Automatic Mixed
Precision", trains an MLP of linear layers with ReLU between them, with mean squared error and SGD.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from scripts.common.timing import timed, warm_up
from utils.config.groups.precision import PrecisionSettings
from utils.loop.step_graph import WARM_UP, CudaGraph
from utils.precision.amp import autocast, build_scaler

GRAPH = " as a graph"  # appended to the name of a format
AMP = {"fp32": "off", "tf32": "off", "fp16": "fp16", "bf16": "bf16"}
LR = 0.001

Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Training:
    """A network, its batches, used in turn, and a bare loop's step; the gradient scaler is disabled unless needed.

    Trains with SGD on the cross entropy of int64 targets, or the mean squared error of others. ``fused``: whether SGD
    uses the kernel that reads the scaler's flag on the device; torch's default reads it on the host.
    """

    def __init__(
        self,
        network: nn.Module,
        batches: Batches,
        settings: PrecisionSettings,
        momentum: float = 0.0,
        fused: bool | None = None,
    ) -> None:
        self.network = network
        self.batches = batches
        inputs, targets = batches[0]
        self.criterion = nn.MSELoss() if targets.is_floating_point() else nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=momentum, fused=fused)
        self.autocast = autocast(settings, inputs.device)
        self.scaler = build_scaler(settings, inputs.device)

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


def mlp(width: int, layers: int, batch_size: int, steps: int, device: torch.device) -> tuple[nn.Module, Batches]:
    """``layers`` linear layers ``width``-``width`` with ReLU between them, and ``steps`` batches, from seed 0.

    Inputs and targets: float32 (batch_size, width), standard normal.
    """
    torch.manual_seed(0)
    shape = (batch_size, width)
    batches = [(torch.randn(shape, device=device), torch.randn(shape, device=device)) for _ in range(steps)]
    modules = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*modules[:-1]).to(device), batches


class Round(NamedTuple):
    """Seconds per step and the peak bytes of all tensors, 0 on a CPU."""

    seconds: float
    peak_bytes: int = 0


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


def time_round(form: str, width: int, layers: int, batch_size: int, steps: int, device: torch.device) -> Round:
    """Time ``steps`` steps of an MLP in ``form``, a key of ``AMP`` with or without ``GRAPH``."""
    name = form.removesuffix(GRAPH)
    on_gpu = device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    with tf32(name == "tf32"):
        workload = mlp(width, layers, batch_size, steps, device)
        settings = PrecisionSettings(amp=AMP[name])
        training = Training(*workload, settings) if form == name else RecordedTraining(*workload, settings, fused=True)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        warm_up(training.run, device)
        if on_gpu and form == name:  # a graph has its memory from the recording on
            torch.cuda.reset_peak_memory_stats(device)
        seconds, _ = timed(lambda: training.run(steps), device)
    return Round(seconds / steps, torch.cuda.max_memory_allocated(device) if on_gpu else 0)
