"""Initialisation of weights by name."""

from __future__ import annotations

from torch import nn

SCHEMES = {
    # He et al., Delving deep into rectifiers, 2015: variance 2 / fan_in
    "kaiming_normal": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
    "kaiming_uniform": lambda weight: nn.init.kaiming_uniform_(weight, nonlinearity="relu"),
    # Glorot and Bengio, Understanding the difficulty of training deep networks, 2010: 2 / (fan_in + fan_out)
    "xavier_normal": nn.init.xavier_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    # as kaiming_normal, and linear layers stay as they are: NVIDIA's ResNet-50 (Deep Learning Examples, ConvNets)
    "kaiming_normal_conv": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
}


def initialise(model: nn.Module, scheme: str) -> None:
    """Set the weights of all convolutions and linear layers by ``scheme`` and their biases to zero.

    ``default`` leaves the model as its library made it, and a scheme whose name ends in ``_conv`` linear layers; none
    changes norms and embeddings.
    """
    if scheme == "default":
        return
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *(() if scheme.endswith("_conv") else (nn.Linear,)))
    for module in model.modules():
        if isinstance(module, kinds):
            SCHEMES[scheme](module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
