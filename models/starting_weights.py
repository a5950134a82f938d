"""Weights that a network begins with: a library's pretrained ones, or those of ``--weights``, even from another task.

The libraries say which images and classes their weights were trained on. From a file, weights that fit are loaded; the
last layer may begin anew, and the user is told.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.build import (
    SMALL_IMAGE,
    WITH_EXTRA_HEADS,
    classes_of,
    is_timm_resnet,
    located,
    small_stem_replaces_convolution,
    torchvision_weights,
)
from utils.checkpoint import checkpoint
from utils.config.groups.model import ModelSettings
from utils.config.image_size import Size, size_of, size_text
from utils.config.settings import UserError
from utils.config.spelling import some
from utils.data.preprocessing import KnownPreprocessing, Preprocessing
from utils.optim.head import head_parameters, output_layers, outputs_of

AUXILIARY = {"GoogLeNet": ("aux1.", "aux2."), "Inception3": ("AuxLogits.",)}  # torchvision's, used in training only


def preprocessing_of(arch: str, testing: bool = False) -> KnownPreprocessing:
    """Preprocessing that the weights of ``--pretrained`` were trained with, and their name.

    It comes from timm's data config or torchvision's transforms; nothing is downloaded. With ``testing``, timm's image
    size and crop for validation are those for testing, which may differ. Raises ``UserError`` for a network without
    weights.
    """
    library, name = located(arch)
    if library == "own":
        raise UserError(f"--pretrained: there are no pretrained weights of {name}")
    values, source = _of_timm(name, testing) if library == "timm" else _of_torchvision(name)
    return KnownPreprocessing(Preprocessing.from_state(values, source), source)


def begins_anew(model: nn.Module, settings: ModelSettings, classes: int, image_size: Size) -> str:
    """Layers of a pretrained ``model`` that do not have the library's weights, as text; '' for none."""
    if not settings.pretrained:
        return ""
    layers = []
    trained = classes_of(settings.arch)
    if trained != classes or settings.new_head:
        layers.append(last_layer(classes, trained))
    if small_stem_replaces_convolution(model, image_size):
        layers.append(
            f"the 3x3 first convolution for images of {size_text(image_size)} pixels (--image-size 65 or more keeps "
            "theirs)"
        )
    return " and ".join(layers)


def _of_timm(name: str, testing: bool) -> tuple[dict[str, Any], str]:
    import timm

    try:
        config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    except RuntimeError:  # for a tag that the network does not have
        config = None
    if config is None or not config.has_weights:
        raise UserError(
            f"--pretrained: timm has no pretrained weights of {name}; leave it out, or choose another --arch"
        )
    source = f"timm's {name.partition('.')[0]}{config.tag and f'.{config.tag}'}"

    def resolved(use_test_size: bool) -> dict[str, Any]:
        return timm.data.resolve_data_config(pretrained_cfg=config.to_dict(), use_test_size=use_test_size)

    trained = resolved(False)
    shown = resolved(testing)
    return {
        "image_size": size_of(*trained["input_size"][1:]),
        "val_image_size": size_of(*shown["input_size"][1:]),
        **{key: shown[key] for key in ("mean", "std", "crop_pct", "crop_mode", "interpolation")},
    }, source


def _of_torchvision(name: str) -> tuple[dict[str, Any], str]:
    weights = torchvision_weights(name)
    shown = weights.transforms()
    (size,) = shown.crop_size
    (resized,) = shown.resize_size
    mean = list(shown.mean)
    std = list(shown.std)
    if name in WITH_EXTRA_HEADS:
        # torchvision's network normalises a second time, from ImageNet's mean and std to these; ours does not.
        mean = [0.5] * 3
        std = [0.5] * 3
    values = {
        "image_size": size,
        "val_image_size": size,
        "mean": mean,
        "std": std,
        "crop_pct": _share(size, resized),
        "crop_mode": "center",
        "interpolation": shown.interpolation.value,
    }
    return values, f"torchvision's {weights}"


def _share(size: int, resized: int) -> float:
    """The share ``size`` / ``resized``, rounded so that floor(size / share) is ``resized`` and not a pixel less."""
    share = size / resized
    while math.floor(size / share) < resized:
        share = math.nextafter(share, 0)
    return share


def load_start(model: nn.Module, state: dict[str, Any], path: Path, new_head: bool, names: Sequence[str] = ()) -> str:
    """Load the weights of the checkpoint ``state`` into ``model``; return the parts that begin anew, as text.

    ``names``: the classes of ``model``, if known. The last layer's rows then go to the classes of their names; rows
    from a checkpoint that does not name its classes stay in their order. With ``new_head``, the whole layer stays as it
    was initialised. Raises ``UserError`` with the first names that do not fit, or with both numbers of classes if
    nothing else is wrong.
    """
    weights = of_other_channels(model, adapted(model, checkpoint.weights_of(state, path)))
    _refuse_other_stem(model, weights, path)
    head = head_parameters(model)
    classes = outputs_of(output_layers(model)[-1])
    trained = next((len(weights[name]) for name in head if name in weights and weights[name].ndim), 0)
    if new_head:
        kept = {name: value for name, value in weights.items() if name not in head}
        checkpoint.load_weights(model, kept | {name: head[name].detach() for name in head}, path)
        return last_layer(classes, trained)
    anew = ""
    theirs = checkpoint.class_names(state) if names else None
    if theirs is not None and len(theirs) == trained and theirs != tuple(names) and set(theirs) & set(names):
        weights, anew = _by_name(head, weights, theirs, names)
    found = checkpoint.misfits(model, weights)
    wrong = {*found.missing, *found.unexpected, *found.misshapen}
    advice = f"--new-head begins the last layer ({', '.join(head)}) anew and keeps the other weights"
    if wrong and wrong <= set(head):
        has = f"is for {trained} classes" if trained else "has no last layer"
        raise UserError(f"--weights {path}: {has}, and the data has {classes}; {advice}")
    if theirs is not None and not set(theirs) & set(names):
        others = f"is for other classes ({some(theirs)}) than the data's ({some(names)})"
        raise UserError(f"--weights {path}: {others}; {advice}")
    checkpoint.load_weights(model, weights, path)
    return anew


def _by_name(
    head: dict[str, nn.Parameter], weights: dict[str, torch.Tensor], theirs: Sequence[str], names: Sequence[str]
) -> tuple[dict[str, torch.Tensor], str]:
    """``weights`` with the rows of the last layer, ``head``, moved from the classes ``theirs`` to ``names``, by name.

    Also returns, as text, the classes whose rows stay as they were initialised.
    """
    found = {name: place for place, name in enumerate(theirs)}
    kept = [place for place, name in enumerate(names) if name in found]
    sources = [found[names[place]] for place in kept]
    matched = {}
    for name, fresh in head.items():
        rows = weights.get(name)
        if rows is not None and rows.shape == (len(theirs), *fresh.shape[1:]) and len(fresh) == len(names):
            matched[name] = fresh.detach().clone()
            matched[name][kept] = rows[sources].to(fresh)
    lacking = [name for name in names if name not in found]
    if not lacking:
        return weights | matched, "no class of the last layer, whose rows go to the classes of their names,"
    new = f"{len(lacking)} of the last layer's {len(names)} classes ({some(lacking)})"
    return weights | matched, f"{new}, whose other rows go to the classes of their names,"


def _refuse_other_stem(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Raise ``UserError`` if the images' size gave ``model`` a different first convolution (``stem_line``)."""
    stored = weights.get("conv1.weight")
    own = model.state_dict().get("conv1.weight")
    kernels = [weight.shape[-1] for weight in (stored, own) if weight is not None and weight.ndim == 4]
    if len(kernels) == 2 and kernels[0] != kernels[1] and is_timm_resnet(model):
        sizes = f"{SMALL_IMAGE} or less" if kernels[0] == 3 else f"{SMALL_IMAGE + 1} or more"
        raise UserError(
            f"--weights {path}: its first convolution is {kernels[0]}x{kernels[0]}, and that of {type(model).__name__} "
            f"for these images {kernels[1]}x{kernels[1]}; the weights fit --image-size {sizes}"
        )


def of_other_channels(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adapt the first convolution in ``weights`` of an RGB network to ``model``'s channels, as timm does."""
    first = next(((name, one) for name, one in model.named_modules() if isinstance(one, nn.Conv2d)), None)
    if first is None or (stored := weights.get(f"{first[0]}.weight")) is None or stored.ndim != 4:
        return weights
    name, layer = first
    channels = layer.in_channels
    if layer.groups != 1 or stored.shape[1] != 3 or channels == 3:
        return weights
    from timm.models import adapt_input_conv

    return weights | {f"{name}.weight": adapt_input_conv(channels, stored)}


def last_layer(classes: int, trained: int) -> str:
    """Text on the last layer as a part that begins anew; ``trained``: the weights' number of classes, 0 for none."""
    return f"the last layer ({classes} classes, where the weights have {trained or 'none'})"


def adapted(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename ``weights`` for ``model``, as its library does when it loads its own.

    timm knows the names in the papers' published weights, and resizes embeddings of positions to the image. Weights
    that it cannot adapt stay as they are.
    """
    auxiliary = AUXILIARY.get(type(model).__name__, ())
    weights = {name: value for name, value in weights.items() if not auxiliary or not name.startswith(auxiliary)}
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if adapt is None or not any(
        set(names) - set(head_parameters(model)) for names in checkpoint.misfits(model, weights)
    ):
        return weights
    try:
        changed = adapt(dict(weights), model)
    except Exception:  # written for the library's own files, whose names others may lack
        return weights
    return {name: value for name, value in changed.items() if isinstance(value, torch.Tensor)}
