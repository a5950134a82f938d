"""The layers of a network that output its logits, the head; all others are its backbone."""

from __future__ import annotations

from torch import nn


def head_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the layers that output the logits, by name; all others are the backbone's."""
    own = {id(parameter) for layer in output_layers(model) for parameter in layer.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in own}


def output_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that output the logits, one per head.

    timm's networks name their classifier, which may be several heads (distillation, several branches) or contain a
    hidden layer; in other networks it is the last linear layer or convolution.
    """
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else ()
    heads = classifier if isinstance(classifier, tuple | list) else (classifier,)
    layers = [layer for head in heads for layer in _linear(head)]
    if not layers:
        return _linear(model)[-1:]
    return [layer for layer in layers if len(layer.weight) == len(layers[-1].weight)]


def _linear(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
