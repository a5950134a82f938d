"""Settings that were given but have no effect in this run.

What a setting needs is declared next to its default (``effect`` and ``in_evaluation`` in ``utils/config/groups/``).
Much of that is known only once a run is built (``Facts``): a data set's augmentation, whether its images stream, which
layers a network calls.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from utils.config.field import FLAG, RECIPE
from utils.config.settings import Settings, all_settings, as_flag, as_text
from utils.data.augmentations import chosen_names
from utils.data.formats.readers import MemoryImages
from utils.data.loaders import choose
from utils.optim.batch_norm_statistics import layers_with_statistics
from utils.optim.head import head_parameters
from utils.optim.optimizers import Optimizers, has_momentum
from utils.precision.amp import never_called, resolve_amp
from utils.runtime.distributed import Distributed


class Facts(NamedTuple):
    """Facts, besides the settings, on which the ``effect`` of a setting may depend."""

    continues: bool  # the run goes on in an existing folder
    on_gpu: bool
    precision: str  # 'off', 'fp16' or 'bf16'
    processes: int
    local_processes: int
    augmentation: tuple[str, ...]  # its names, with the data set's own filled in
    classes: int
    multilabel: bool  # images have several labels
    colour: bool  # images have colour
    in_memory: bool  # the data set comes as pixels, not as files
    cuts_validation: bool  # not all validation images are validated
    any_size: bool  # images are of any size
    resizes: bool  # images are resized
    resident: bool  # all images are kept in the device's memory
    has_momentum: bool
    warmup_steps: int
    steps_per_epoch: int  # 0 with --evaluate
    remainder: int  # an epoch's images beyond the last full global batch
    layers: tuple[Any, ...]  # all modules of the network
    has_filters: bool  # the network has convolutions
    gathers_statistics: bool  # the network updates running statistics of batch norms in training
    freezes_more_norms: bool  # --freeze-bn keeps some running statistics that --freeze does not
    trains_backbone: bool  # more than the layers that output the logits train in some epoch
    rates_differ: bool  # some parameters that train have a learning rate other than --lr
    never_called: tuple[str, ...]  # those of --fp32-layers that a forward pass leaves out


def facts_of(args: Settings, parts: Any, distributed: Distributed, continues: bool) -> Facts:
    """The facts of a run with these components. Takes a forward pass if there are --fp32-layers."""
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
    """Parameters that train in some epoch, and the multiples of --lr that they have as learning rates."""
    each = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    groups = [group for optimizer in each for group in optimizer.param_groups]
    parameters = {parameter for group in groups for parameter in group["params"]}
    return parameters, {group.get("lr_scale", 1.0) for group in groups}


def without_effect(args: Settings, facts: Facts) -> list[str]:
    """A line for each setting that was given and changes nothing.

    Every flag counts as given; in a recipe, only what differs from the default, since a run's ``config.yaml`` holds all
    settings. A default that switches something off counts as not given. A recipe describes a training run, even with
    ``--evaluate``.
    """
    v = SimpleNamespace(**args.values(), **facts._asdict())
    lines = []
    for group, option in all_settings():
        name = option.name
        declared = option.metadata
        origin = args.origins[name]
        value = getattr(getattr(args, group), name)
        asked = origin == FLAG or (origin == RECIPE and value != option.default)
        if not asked or (value == option.default and not value):
            continue
        if args.run.evaluate and not declared["in_evaluation"]:
            end = "does nothing with --evaluate" if origin == FLAG else None
        else:
            end = next(filter(None, (effect(v) for effect in declared["effect"])), None)
        if end:
            lines.append(f"{_as_given(name, value, args.run.config if origin == RECIPE else None)} {end}")
    return lines


def _as_given(name: str, value: Any, recipe: str | None) -> str:
    """The setting as it was written: a flag or a recipe's line; a path below the working directory becomes relative."""
    if isinstance(value, str) and f"{value}{os.sep}".startswith(f"{os.getcwd()}{os.sep}"):
        value = os.path.relpath(value)
    return as_flag(name, value) if recipe is None else f"recipe {recipe}: {name.replace('_', '-')}: {as_text(value)}"
