"""A network's head: the layers that output its logits. All others are its backbone, whose outputs are features."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def head_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the layers that output the logits, by name; all others are the backbone's."""
    own = {parameter for layer in output_layers(model) for parameter in layer.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if parameter in own}


def output_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that output the logits, one per head.

    timm's networks name their classifier, which may consist of several heads (distillation, several branches) or
    contain a hidden layer; in other networks the head is the last linear layer or convolution.
    """
    of_timm = getattr(model, "get_classifier", None)
    classifier = () if of_timm is None else of_timm()
    heads = [*classifier] if isinstance(classifier, tuple | list) else [classifier]
    is_volo = any(base.__module__ == "timm.models.volo" for base in type(model).__mro__)  # as a base, if sharded
    if is_volo and model.aux_head is not None:  # which is not in its classifier
        heads.append(model.aux_head)
    layers = [layer for head in heads for layer in _linear(head)]
    if not layers:
        return _linear(model)[-1:]
    return [layer for layer in layers if outputs_of(layer) == outputs_of(layers[-1])]


def begin_head(model: nn.Module) -> None:
    """Give the layers that output the logits new weights, for training on top of weights that are already good.

    Weights are drawn with a standard deviation of 0.01 and biases are zero, as torchvision initialises the last layers
    of VGG and MobileNet, so that all classes begin about equally likely. Libraries' own initialisations can be so large
    that a short fine-tuning only undoes them: timm draws EfficientNet's from ±1 / sqrt(classes). The weights are not
    all zero (Dosovitskiy et al., An image is worth 16x16 words, 2021), because a ReLU that follows them would never
    learn.
    """
    for name, parameter in head_parameters(model).items():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=0.01)


def outputs_of(layer: nn.Module) -> int:
    """Number of outputs of a linear layer or convolution."""
    return len(layer.get_parameter("weight"))


def _linear(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]


class SeenFeatures:
    """Records a network's features, the inputs of its first output layer, while the network runs, until ``close``.

    If the network sees images several times, or several views of them in one pass, as with --tta, the features are
    averaged; passes in ``paused`` do not count.
    """

    _is_paused = False  # in the whole process

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[torch.Tensor] = []
        heads = output_layers(model)
        self._hook = heads[0].register_forward_pre_hook(self._see) if heads else None

    @classmethod
    @contextmanager
    def paused(cls) -> Iterator[None]:
        """Context of passes over some of the images, whose features are not recorded."""
        cls._is_paused = True
        try:
            yield
        finally:
            cls._is_paused = False

    def _see(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._is_paused:
            return
        features = inputs[0].detach().float()
        self._seen.append(features.mean((2, 3)) if features.ndim == 4 else features)

    def forget(self) -> None:
        """Forget all features, before the next images."""
        self._seen = []

    def of(self, images: int) -> torch.Tensor | None:
        """Features of the ``images`` images seen since ``forget``, float32 (images, d); None if not of this shape."""
        if not self._seen:
            return None
        features = torch.cat(self._seen)
        if features.ndim != 2 or len(features) % images:
            return None
        return features.unflatten(0, (-1, images)).mean(0)

    def close(self) -> None:
        """Stop recording."""
        if self._hook is not None:
            self._hook.remove()
