"""Settings that were given but have no effect in this run.

What a setting needs is declared next to its default (``effect`` and ``in_evaluation`` in ``utils/config/groups/``).
Much of that is known only once a run is built (``facts_of``): a data set's augmentation, whether its images stream,
which layers a network calls.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from torch import nn

from utils.config.field import FLAG, RECIPE
from utils.config.settings import Settings, all_settings, as_flag, as_text
from utils.data.augmentations import chosen_names
from utils.data.formats.readers import MemoryImages
from utils.data.loaders import choose
from utils.optim.batch_norm_statistics import layers_with_statistics
from utils.optim.head import head_parameters
from utils.optim.optimizers import has_momentum
from utils.precision.amp import never_called, resolve_amp
from utils.runtime.distributed import Distributed


def facts_of(args: Settings, parts: Any, distributed: Distributed, continues: bool) -> dict[str, Any]:
    """Facts of a run with these components, besides the settings, on which the ``effect`` of a setting may depend.

    Takes a forward pass if there are --fp32-layers.
    """
    data = parts.data
    device = distributed.device
    train = parts.train_loader is not None
    groups = [group for optimizer in parts.optimizers for group in optimizer.param_groups]  # none with --evaluate
    trained = {parameter for group in groups for parameter in group["params"]}
    augmentation = chosen_names(args.augmentation, data.spec)  # with the data set's own filled in
    crops = "resized-crop" in augmentation
    return {
        "continues": continues,  # the run goes on in an existing folder
        "on_gpu": device.type == "cuda",
        "precision": resolve_amp(args.precision, device),  # 'off', 'fp16' or 'bf16'
        "processes": distributed.world_size,
        "local_processes": distributed.local_world_size,
        "augmentation": augmentation,
        "classes": len(data.classes),
        "multilabel": data.multilabel,
        "colour": data.preprocessing.channels > 1,
        # the data set comes as pixels, not as files
        "in_memory": isinstance(data.validation, MemoryImages),
        "cuts_validation": parts.validation_loader.is_cut,
        "any_size": not data.spec.fixed_size,
        "resizes": data.preprocessing.resizes or (train and bool(args.data.progressive_size or crops)),
        # all images are kept in the device's memory
        "resident": choose(data, args.data, device)[0],
        "has_momentum": has_momentum(args.optimisation.optimizer),
        "warmup_steps": parts.lr_policy.warmup_steps if train else 0,
        "steps_per_epoch": parts.train_loader.steps_per_epoch if train else 0,  # 0 with --evaluate
        # an epoch's images beyond the last full global batch
        "remainder": parts.train_loader.plan.num_samples % args.data.global_batch_size if train else 0,
        "layers": tuple(parts.model.modules()),
        "has_filters": any(isinstance(module, nn.Conv2d) for module in parts.model.modules()),
        # the network updates running statistics of batch norms in training
        "gathers_statistics": bool(layers_with_statistics(parts.model)) or parts.network.freezing.releases_statistics,
        # --freeze-bn keeps some running statistics that --freeze does not
        "freezes_more_norms": parts.network.freezing.freezes_more_norms,
        # more than the layers that output the logits train in some epoch
        "trains_backbone": not trained <= {*head_parameters(parts.model).values()},
        "rates_differ": {group.get("lr_scale", 1.0) for group in groups} != {1.0},
        "never_called": never_called(parts.model, args.precision.fp32_layers or (), data.image_shape, device, train),
    }


def without_effect(args: Settings, facts: dict[str, Any]) -> list[str]:
    """A line for each setting that was given and changes nothing.

    Every flag counts as given; in a recipe, only what differs from the default, since a run's ``config.yaml`` holds all
    settings. A default that switches something off counts as not given. A recipe describes a training run, even with
    ``--evaluate``.
    """
    v = SimpleNamespace(**args.values(), **facts)
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
