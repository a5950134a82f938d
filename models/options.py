"""Options of a network's constructor: ``--drop``, ``--drop-path`` and ``--model-kwargs``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from models.initialisation import shapes_alone
from utils.config.groups.model import ModelSettings
from utils.config.keywords import given_twice, not_accepted, read_keyword
from utils.config.settings import UserError

# What each library calls dropout before the last layer and stochastic depth (Huang et al., Deep networks with
# stochastic depth, 2016).
DROP = ("drop_rate", "dropout")
DROP_PATH = ("drop_path_rate", "stochastic_depth_prob")
# What else decides an argument: a setting, or the data; '' if it loads weights or nobody may give it.
RESERVED = {
    **dict.fromkeys(("img_size", "image_size", "size"), "--image-size"),
    **dict.fromkeys(("num_classes", "classes", "in_chans", "channels"), "the data set"),
    **dict.fromkeys(("self", "weights", "aux_logits", "init_weights", "transform_input", "features"), ""),
}
OF_PLUGIN = ("the data set", "the data set", "--image-size")  # what decides the first arguments of a user's network


def options_of(
    settings: ModelSettings, constructor: Callable[[], Callable[..., Any]], reserved: Mapping[str, str] = RESERVED
) -> dict[str, Any]:
    """The keyword arguments that ``settings`` add to those of the network's constructor; {} without any.

    ``constructor`` returns that constructor; it is called only if needed, as it may build the network. ``reserved``: as
    ``RESERVED``. Raises ``UserError`` for an argument that the constructor does not take.
    """
    if settings.drop is None and settings.drop_path is None and not settings.model_kwargs:
        return {}
    parameters = inspect.signature(constructor()).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepted = [name for name in named if name not in reserved]
    options: dict[str, Any] = {}
    for flag, value, names, what in (
        ("--drop", settings.drop, DROP, "dropout"),
        ("--drop-path", settings.drop_path, DROP_PATH, "stochastic depth"),
    ):
        if value is None:
            continue
        name = next((name for name in names if name in accepted), None)
        if name is None:
            raise UserError(f"{flag} {value:g}: {settings.arch} has no {what} to set; remove the flag")
        options[name] = value
    for item in settings.model_kwargs or ():
        name, value = read_keyword("--model-kwargs", item)
        if decides := reserved.get(name):
            raise UserError(f"--model-kwargs {item}: {decides} says that; leave it out here")
        if name not in accepted:
            raise not_accepted("--model-kwargs", item, settings.arch, accepted)
        if name in options:
            raise given_twice("--model-kwargs", item)
        options[name] = value
    return options


def constructor_of(create: Callable[[], Any]) -> Callable[..., Any]:
    """The constructor of the network that ``create`` makes, without memory for its weights where that is possible."""
    with torch.random.fork_rng(devices=[]):
        try:
            with shapes_alone():
                return type(create()).__init__
        except Exception:  # a network that computes with numbers as it is made
            return type(create()).__init__
