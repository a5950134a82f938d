"""``--amp auto``: the number format in which this machine trains this network fastest, chosen by measurement."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time

import torch
from torch import nn

from utils.config.settings import Settings
from utils.precision.amp import autocast, resolve_amp
from utils.runtime.console import log
from utils.runtime.cpu import has_bf16_units
from utils.runtime.distributed import Distributed

ENOUGH = 0.9  # times float32's seconds: bfloat16 has to save a tenth to be worth its rounding
MOST_IMAGES = 64
ROUNDS = 3


def with_chosen_amp(
    args: Settings, model: nn.Module, image_shape: tuple[int, int, int], distributed: Distributed
) -> Settings:
    """Replace ``--amp auto`` in the settings by a measured format, the same on all ranks. A dry run measures nothing.

    The network's images are float32 (n, *image_shape).
    """
    if "amp" not in args.unmeasured() or args.run.dry_run:
        return args
    device = distributed.device
    images = max(2, min(args.data.batch_size, MOST_IMAGES))  # batch norm takes no single value per channel
    amp, why = distributed.run_on_rank0(
        lambda: choose(model, (images, *image_shape), device), long_work="Measuring for --amp auto"
    )
    if distributed.is_main:
        log(f"--amp auto: {amp}, {why}")
    return args.with_values(amp=amp)


def choose(model: nn.Module, shape: tuple[int, int, int, int], device: torch.device) -> tuple[str, str]:
    """Choose the format for training ``model``, which stays unchanged, on images of ``shape``; return it and why."""
    if device.type != "cpu":
        return resolve_amp(Settings().precision, device), "as usual on a GPU"
    if not has_bf16_units():
        return "off", "this CPU has no units for bfloat16"
    off, bf16 = seconds_of_passes(model, shape, ("off", "bf16"), device)
    words = f"forward and backward pass take {bf16 / off:.2f} times as long as in float32 (measured)"
    return "bf16" if bf16 < ENOUGH * off else "off", f"in bfloat16 {words}"


def seconds_of_passes(
    model: nn.Module, shape: tuple[int, int, int, int], formats: tuple[str, ...], device: torch.device
) -> list[float]:
    """Median seconds of a forward and backward pass of a copy of ``model`` in each of ``formats``, measured in turn."""
    model = copy.deepcopy(model).train()
    generator = torch.Generator().manual_seed(0)
    images = in_layout_of(model, torch.randn(shape, generator=generator))
    contexts = [autocast(dataclasses.replace(Settings().precision, amp=name), device) for name in formats]
    times: list[list[float]] = [[] for _ in formats]
    with torch.random.fork_rng(devices=[]):
        for number in range(1 + ROUNDS):
            for context, found in zip(contexts, times, strict=True):
                began = time.perf_counter()
                with context:
                    loss = model(images).float().square().mean()
                loss.backward()
                if number:  # the first pass of a format prepares it
                    found.append(time.perf_counter() - began)
    return [statistics.median(found) for found in times]


def in_layout_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Lay out ``images`` (n, c, h, w) in channels-last if the filters of ``model`` are, as a loader does."""
    filters = (parameter for parameter in model.parameters() if parameter.ndim == 4)
    if any(parameter.is_contiguous(memory_format=torch.channels_last) for parameter in filters):
        return images.contiguous(memory_format=torch.channels_last)
    return images
