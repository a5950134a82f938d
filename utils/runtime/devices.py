"""Devices: which ones there are, and what they can do.

torch calls AMD's GPUs (ROCm) ``cuda`` as well as NVIDIA's. Apple's (``mps``) and Intel's (``xpu``) have run nothing
here yet, so they are treated like a CPU wherever streams, pinned memory and fused kernels would only save time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from utils.config.groups.run import ACCELERATORS


def accelerator() -> str:
    """The kind of this machine's accelerator, such as 'cuda'; '' if it has none that a run can use."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in ACCELERATORS else ""


def name(device: torch.device) -> str:
    """The product name of an accelerator; '' if torch does not tell."""
    module = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else ""


def runs_ahead(device: torch.device) -> bool:
    """True if the host launches the device's work and copies without waiting, by streams, events and pinned memory."""
    return device.type == "cuda"


@contextmanager
def timing_algorithms(allowed: bool) -> Iterator[None]:
    """Context in which cuDNN, if ``allowed``, times its algorithms for each new shape, and keeps the fastest.

    For the steps of a training. Elsewhere, a new shape takes up to 8 s, and cuDNN's own guess was as fast (on an H100:
    docs/benchmarks/removed_programs.md).
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def exact_device(device: torch.device) -> torch.device:
    """The device on which to sum in float64 what ``device`` computes: itself, or the host if it has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def scales_losses(device: torch.device) -> bool:
    """True if ``device`` is made for fp16 and has the kernel of torch's loss scaler, which is tried except on CUDA."""
    if device.type in ("cpu", "cuda"):
        return device.type == "cuda"
    if not torch.amp.is_autocast_available(device.type):
        return False
    try:
        gradient, flag, scale = torch.ones(3, 1, device=device).unbind()
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], flag, scale)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def memory_bytes(device: torch.device) -> int:
    """Total memory of ``device`` in bytes; the host's if they share it."""
    if device.type in ("cpu", "mps"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.get_device_module(device).get_device_properties(device).total_memory


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small CPU tensor to ``device``; to a GPU through pinned memory, so that the host does not wait.

    float64 becomes float32 if the device has no float64.
    """
    if runs_ahead(device):
        return tensor.pin_memory().to(device, non_blocking=True)
    if tensor.dtype == torch.float64 and exact_device(device) != device:
        tensor = tensor.float()
    return tensor.to(device)


@lru_cache(maxsize=32)
def constant(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of ``values`` on ``device``, kept there: to move it, the host would wait for the device each time."""
    return torch.tensor(values, dtype=dtype, device=device)
