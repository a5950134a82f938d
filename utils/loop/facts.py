"""Facts of a run that is built, on which it depends whether a setting has an effect."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from utils.config.effects import Facts
from utils.config.settings import Settings
from utils.data.augmentations import chosen_names
from utils.data.formats.readers import MemoryImages
from utils.data.loaders import choose
from utils.optim.batch_norm_statistics import layers_with_statistics
from utils.optim.head import head_parameters
from utils.optim.optimizers import Optimizers, has_momentum
from utils.precision.amp import never_called, resolve_amp
from utils.runtime.distributed import Distributed


def facts_of(args: Settings, parts: Any, distributed: Distributed, continues: bool) -> Facts:
    """The facts of a run with these components. Takes a forward pass when there are fp32 layers."""
    data = parts.data
    device = distributed.device
    train = parts.train_loader is not None
    trained, scales = _trained(parts.optimizer) if train else (set(), set())
    return Facts(
        continues=continues,
        on_gpu=device.type == "cuda",
        precision=resolve_amp(args.precision, device),
        processes=distributed.world_size,
        local_processes=distributed.local_world_size,
        augmentation=chosen_names(args.augmentation, data.spec),
        classes=len(data.classes),
        multilabel=data.multilabel,
        colour=data.preprocessing.channels > 1,
        in_memory=isinstance(data.validation, MemoryImages),
        cuts_validation=parts.validation_loader.is_cut,
        any_size=not data.spec.fixed_size,
        resizes=data.preprocessing.resizes or bool(train and args.data.progressive_size),
        resident=choose(data, args.data, device)[0],
        has_momentum=has_momentum(args.optimisation.optimizer),
        warmup_steps=parts.lr_policy.warmup_steps if train else 0,
        steps_per_epoch=parts.train_loader.steps_per_epoch if train else 0,
        remainder=parts.train_loader.plan.num_samples % args.data.global_batch_size if train else 0,
        layers=tuple(parts.model.modules()),
        has_filters=any(isinstance(module, nn.Conv2d) for module in parts.model.modules()),
        gathers_statistics=bool(layers_with_statistics(parts.model)) or parts.network.freezing.releases_statistics,
        freezes_more_norms=parts.network.freezing.freezes_more_norms,
        trains_backbone=not trained <= {*head_parameters(parts.model).values()},
        rates_differ=scales != {1.0},
        never_called=never_called(parts.model, args.precision.fp32_layers or (), data.image_shape, device, train),
    )


def _trained(optimizers: Optimizers) -> tuple[set[nn.Parameter], set[float]]:
    """Parameters that train in some epoch, and the multiples of --lr that are their learning rates."""
    each = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    groups = [group for optimizer in each for group in optimizer.param_groups]
    parameters = {parameter for group in groups for parameter in group["params"]}
    return parameters, {group.get("lr_scale", 1.0) for group in groups}
