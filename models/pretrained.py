"""The libraries' facts about their pretrained weights: the images they were trained on, and their classes."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from models.build import locate, small_stem_replaces_convolution
from models.transfer import last_layer
from utils.config.groups.model import ModelSettings
from utils.config.settings import UserError


def preprocessing_of(arch: str, testing: bool) -> tuple[dict[str, Any], str]:
    """The preprocessing that the weights of ``--pretrained`` were trained with, and their name.

    In the form of a checkpoint's ``preprocessing``, from timm's data config or torchvision's transforms. timm's weights
    may have a larger image and another crop for ``testing`` than for training. Downloads nothing. Raises ``UserError``
    for a network without weights.
    """
    library, name = locate(arch)
    if library == "own":
        raise UserError(f"--pretrained: there are no pretrained weights of {name}")
    return _of_timm(name, testing) if library == "timm" else _of_torchvision(name)


def begins_anew(model: nn.Module, settings: ModelSettings, classes: int, image_size: int) -> str:
    """Layers of a pretrained ``model`` that do not have the library's weights, in words; '' for none."""
    if not settings.pretrained:
        return ""
    layers = []
    trained = classes_of(settings.arch)
    if trained != classes or settings.new_head:
        layers.append(last_layer(classes, trained))
    if small_stem_replaces_convolution(model, image_size):
        layers.append(
            f"the 3x3 first convolution for images of {image_size} pixels (--image-size 65 or more keeps theirs)"
        )
    return " and ".join(layers)


def _of_timm(name: str, testing: bool) -> tuple[dict[str, Any], str]:
    import timm

    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if config is None or not config.has_weights:
        raise UserError(
            f"--pretrained: timm has no pretrained weights of {name}; leave it out, or choose another --arch"
        )
    source = f"timm's {name.partition('.')[0]}{config.tag and f'.{config.tag}'}"

    def resolved(use_test_size: bool) -> dict[str, Any]:
        return timm.data.resolve_data_config(pretrained_cfg=config.to_dict(), use_test_size=use_test_size)

    trained = resolved(False)
    shown = resolved(testing)
    _, height, width = trained["input_size"]
    if height != width:
        raise UserError(
            f"--pretrained: {source} sees images of {height} x {width} pixels, and here all are square; "
            "choose another --arch"
        )
    return {
        "image_size": height,
        "val_image_size": shown["input_size"][-1],
        **{key: shown[key] for key in ("mean", "std", "crop_pct", "crop_mode", "interpolation")},
    }, source


def _of_torchvision(name: str) -> tuple[dict[str, Any], str]:
    weights = _torchvision_weights(name)
    shown = weights.transforms()
    (size,) = shown.crop_size
    (resized,) = shown.resize_size
    mean = list(shown.mean)
    std = list(shown.std)
    if name in ("googlenet", "inception_v3"):
        # Theirs normalise a second time, from ImageNet's mean and std to these; ours do not.
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
    """``size`` / ``resized``, rounded so that floor(size / share) is ``resized`` and not a pixel less."""
    share = size / resized
    while math.floor(size / share) < resized:
        share = math.nextafter(share, 0)
    return share


def classes_of(arch: str) -> int:
    """The number of classes of the weights' last layer; 0 if they have none."""
    library, name = locate(arch)
    if library == "torchvision":
        return len(_torchvision_weights(name).meta["categories"])
    import timm

    return timm.get_pretrained_cfg(name).num_classes


def _torchvision_weights(name: str) -> Any:
    import torchvision

    return torchvision.models.get_model_weights(name).DEFAULT
