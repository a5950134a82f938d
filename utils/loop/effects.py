"""Which of the given settings have no effect in this run, found once its components exist.

What a setting needs is declared next to its default (``effect`` and ``in_evaluation`` in ``utils/config/groups/``).
Much of that is known only late: a data set's augmentation, whether its images stream, which layers a network calls.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from utils.config.rules import FLAG, RECIPE
from utils.config.settings import Settings, all_settings, as_flag, as_text
from utils.data.augmentations import chosen_names
from utils.data.loaders import choose
from utils.data.sets.readers import MemoryImages
from utils.optim.batch_norm_statistics import layers_with_statistics
from utils.optim.head import head_parameters
from utils.optim.optimizers import Optimizers, has_momentum
from utils.precision.amp import never_called, resolve_amp
from utils.runtime.distributed import Distributed

TRAINING_GROUPS = {"loss", "optimisation", "average"}  # of which ``--evaluate`` uses nothing


class Facts(NamedTuple):
    """What the ``effect`` of a setting may depend on besides the settings.

    ``continues``: the run goes on in an existing folder. ``precision``: 'off', 'fp16' or 'bf16'. ``augmentation``:
    its names, with the data set's own filled in. ``colour``: the images have colour. ``in_memory``: the data set
    comes as pixels, not as files. ``cuts_validation``: not all validation images are validated.
    ``any_size``: its images are of any size. ``resizes``: they are resized. ``resident``: they are all kept in the
    device's memory. ``remainder``: an epoch's images beyond the last full global batch. ``has_filters``: the
    network has convolutions. ``blurs``: ``--blur-pool`` has changed some of them. ``has_statistics``: it has batch
    norm with running statistics. ``gathers_statistics``: and updates some of them in training. ``freezes_more_norms``:
    and ``--freeze-bn`` keeps some of them that ``--freeze`` does not. ``trains_backbone``: more than the layers that
    output the logits train in some epoch. ``rates_differ``: some parameters that train have a learning rate other than
    ``--lr``. ``trains_products``: some layers of ``--matmul-weight-grad`` train. ``never_called``: those of
    ``--fp32-layers`` that a forward pass leaves out.
    """

    continues: bool
    on_gpu: bool
    precision: str
    processes: int
    local_processes: int
    augmentation: tuple[str, ...]
    classes: int
    colour: bool
    in_memory: bool
    cuts_validation: bool
    any_size: bool
    resizes: bool
    resident: bool
    has_momentum: bool
    warmup_steps: int
    remainder: int
    has_filters: bool
    blurs: bool
    has_statistics: bool
    gathers_statistics: bool
    freezes_more_norms: bool
    trains_backbone: bool
    rates_differ: bool
    trains_products: bool
    never_called: tuple[str, ...]


def facts_of(args: Settings, parts: Any, distributed: Distributed, continues: bool) -> Facts:
    """The facts of a run with these ``parts`` (``main.Parts``). Takes a forward pass when there are fp32 layers."""
    data = parts.data
    device = distributed.device
    train = not args.run.evaluate
    shape = (data.spec.channels, data.image_size, data.image_size)
    trained, scales = _trained(parts.optimizer) if train else (set(), set())
    return Facts(
        continues=continues,
        on_gpu=device.type == "cuda",
        precision=resolve_amp(args.precision, device),
        processes=distributed.world_size,
        local_processes=distributed.local_world_size,
        augmentation=chosen_names(args.augmentation, data.spec),
        classes=len(data.classes),
        colour=data.spec.channels > 1,
        in_memory=isinstance(data.validation, MemoryImages),
        cuts_validation=parts.validation_loader.is_cut,
        any_size=not data.spec.fixed_size,
        resizes=data.preprocessing.resizes or bool(train and args.data.progressive_size),
        resident=choose(data, args.data, device)[0],
        has_momentum=has_momentum(args.optimisation.optimizer),
        warmup_steps=parts.lr_policy.warmup_steps if train else 0,
        remainder=parts.train_loader.plan.num_samples % args.data.global_batch_size if train else 0,
        has_filters=any(isinstance(module, nn.Conv2d) for module in parts.model.modules()),
        blurs=any(hasattr(module, "blur") for module in parts.model.modules()),
        has_statistics=any(getattr(module, "running_mean", None) is not None for module in parts.model.modules()),
        gathers_statistics=bool(layers_with_statistics(parts.model)) or parts.freezing.releases_statistics,
        freezes_more_norms=parts.freezing.freezes_more_norms,
        trains_backbone=not trained <= {*head_parameters(parts.model).values()},
        rates_differ=scales != {1.0},
        trains_products=any(
            parameter in trained
            for name, parameter in parts.model.named_parameters()
            if name.rpartition(".")[0] in (args.model.matmul_weight_grad or ())
        ),
        never_called=never_called(parts.model, args.precision.fp32_layers or (), shape, device, train),
    )


def _trained(optimizers: Optimizers) -> tuple[set[nn.Parameter], set[float]]:
    """All parameters that train in some epoch, and the multiples of --lr that are their learning rates."""
    each = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    groups = [group for optimizer in each for group in optimizer.param_groups]
    parameters = {parameter for group in groups for parameter in group["params"]}
    return parameters, {group.get("lr_scale", 1.0) for group in groups}


def without_effect(args: Settings, facts: Facts) -> list[str]:
    """A line for each setting that was given and changes nothing.

    Every flag counts as given; in a recipe, only what differs from the default, since a run's ``config.yaml`` holds all
    settings. A default that is off counts as not given. A recipe describes a training, even with ``--evaluate``.
    """
    v = SimpleNamespace(**args.values(), **facts._asdict())
    lines = []
    for group, option in all_settings():
        name = option.name
        meta = option.metadata
        origin = args.origins[name]
        value = getattr(getattr(args, group), name)
        asked = origin == FLAG or (origin == RECIPE and value != option.default)
        if not asked or (value == option.default and not value):
            continue
        in_evaluation = meta["in_evaluation"] and group not in TRAINING_GROUPS
        if args.run.evaluate and not in_evaluation:
            end = "does nothing with --evaluate" if origin == FLAG else None
        else:
            end = meta["effect"] and meta["effect"](v)
        if end:
            lines.append(f"{_as_given(name, value, args.run.config if origin == RECIPE else None)} {end}")
    return lines


def _as_given(name: str, value: Any, recipe: str | None) -> str:
    """The setting as it was written: a flag, or a line of a recipe."""
    return as_flag(name, value) if recipe is None else f"recipe {recipe}: {name.replace('_', '-')}: {as_text(value)}"
