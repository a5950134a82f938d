"""The plan that ``--dry-run`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from utils.distributed import Distributed
from utils.precision.amp import resolve_amp
from utils.settings import Settings


def plan(args: Settings, parts: Any, distributed: Distributed, folder: Path) -> str:
    """What a run with these settings and ``parts`` would do, as text of a few aligned lines."""
    data, steps = parts.data, parts.train_loader.steps_per_epoch
    batch, remainder = args.data, parts.train_loader.plan.remainder
    total = steps * args.optimisation.epochs
    amp = resolve_amp(args.precision, distributed.device)
    scale = f", loss scale from {args.precision.init_scale:g}" if parts.scaler.is_enabled() else ""
    rows = [
        ("Data", f"{batch.dataname}: {len(data.train):,} training, {len(data.validation):,} validation images"),
        ("Classes", f"{len(data.classes)}: {', '.join(data.classes[:5])}{', ...' if len(data.classes) > 5 else ''}"),
        ("Images", f"{data.spec.channels} x {data.image_size} x {data.image_size}"),
        ("Augmentation", ", ".join(data.augment) or "none"),
        ("Loader", parts.loader_choice),
        ("Network", f"{args.model.arch}, initialisation {args.model.init}"),
        ("Parameters", f"{sum(p.numel() for p in parts.model.parameters()):,}"),
        ("Multiply-adds", f"{multiply_adds(parts.model, data, distributed.device):,} an image"),
        ("Processes", f"{distributed.world_size} on {distributed.describe_device()}"),
        (
            "Batch",
            f"{batch.batch_size} a process x {distributed.world_size} x {args.optimisation.accumulate} "
            f"forward passes a step: {batch.global_batch_size} in total" + (remainder and f", {remainder}"),
        ),
        ("Steps", f"{steps} an epoch x {args.optimisation.epochs} epochs = {total:,}" + _cut(args, total)),
        ("Optimizer", _optimizer(args)),
        ("Learning rate", _curve(parts.lr_policy, steps, total)),
        ("Precision", f"{amp}{scale}" if amp != "off" else "float32 (mixed precision off)"),
        ("Run folder", f"{folder} (not created)"),
    ]
    return "\n".join(f"{title:<14} {text}" for title, text in rows)


def multiply_adds(model: torch.nn.Module, data: Any, device: torch.device) -> int:
    """Multiply-adds of one image's forward pass, counted by torch (matrix products and convolutions)."""
    image = torch.zeros(1, data.spec.channels, data.image_size, data.image_size, device=device)
    counter = FlopCounterMode(display=False)
    model.eval()
    with torch.no_grad(), counter:
        model(image)
    model.train()
    return counter.get_total_flops() // 2


def _cut(args: Settings, total: int) -> str:
    return f", cut at {args.run.max_steps:,}" if args.run.max_steps and args.run.max_steps < total else ""


def _optimizer(args: Settings) -> str:
    settings = args.optimisation
    extra = f", momentum {settings.momentum:g}{' (Nesterov)' if settings.nesterov else ''}"
    average = f", weight average {settings.ema_decay:g}" if settings.ema_decay else ""
    clips = {"norm": settings.clip_grad_norm, "value": settings.clip_grad_value, "AGC": settings.clip_grad_agc}
    clip = "".join(f", clipped by {name} {size:g}" for name, size in clips.items() if size)
    penalty = f", gradient penalty {settings.grad_penalty:g}" if settings.grad_penalty else ""
    decay = "" if settings.decay_norm_bias else " (not on norms and biases)"
    return (
        f"{settings.optimizer}{extra if settings.optimizer == 'sgd' else ''}, "
        f"weight decay {settings.weight_decay:g}{decay}{clip}{penalty}{average}"
    )


def _curve(policy: Any, steps: int, total: int) -> str:
    points = sorted({0, policy.warmup_steps, total // 4, total // 2, 3 * total // 4, total - 1})
    values = "  ".join(f"epoch {point / steps:.3g}: {policy(point):.4g}" for point in points if point < total)
    return f"{policy.policy}  {values}"
