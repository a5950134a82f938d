"""Loading the weights of a module from a plain dictionary."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import nn


def load_state_dict(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load all of ``weights`` into ``module``, assuming the version that each of its layers has now.

    torch keeps a version of each layer beside a state dict; a checkpoint holds tensors alone, and torchvision's MNASNet
    refuses weights without a version. Raises ``RuntimeError`` if the weights do not fit.
    """
    versioned = OrderedDict(weights)
    vars(versioned)["_metadata"] = vars(module.state_dict())["_metadata"]
    module.load_state_dict(versioned)
