"""Which parameters of a network belong to its last layer, the head, and which to the rest, the backbone."""

from __future__ import annotations

from torch import nn

from utils.optim.clipping import output_layers


def head_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the layers that output the logits, by name; all others are the backbone's."""
    own = {id(parameter) for layer in output_layers(model) for parameter in layer.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in own}
