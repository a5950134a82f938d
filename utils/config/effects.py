"""Settings that were given and have no effect in this run.

What a setting needs is declared next to its default (``effect`` and ``in_evaluation`` in ``utils/config/groups/``).
Much of that is known only once a run is built (``utils/loop/facts.py``): a data set's augmentation, whether its images
stream, which layers a network calls.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, NamedTuple

from utils.config.field import FLAG, RECIPE
from utils.config.settings import Settings, all_settings, as_flag, as_text


class Facts(NamedTuple):
    """Facts on which the ``effect`` of a setting may depend besides the settings."""

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
    gathers_statistics: bool  # it updates running statistics of batch norms in training
    freezes_more_norms: bool  # --freeze-bn keeps some of these that --freeze does not
    trains_backbone: bool  # more than the layers that output the logits train in some epoch
    rates_differ: bool  # some parameters that train have a learning rate other than --lr
    never_called: tuple[str, ...]  # those of --fp32-layers that a forward pass leaves out


def without_effect(args: Settings, facts: Facts) -> list[str]:
    """A line for each setting that was given and changes nothing.

    Every flag counts as given; in a recipe, only what differs from the default, since a run's ``config.yaml`` holds all
    settings. A default that is off counts as not given. A recipe describes a training, even with ``--evaluate``.
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
    """The setting as it was written: a flag, or a line of a recipe; a path as seen from the working directory."""
    if isinstance(value, str) and f"{value}{os.sep}".startswith(f"{os.getcwd()}{os.sep}"):
        value = os.path.relpath(value)
    return as_flag(name, value) if recipe is None else f"recipe {recipe}: {name.replace('_', '-')}: {as_text(value)}"
