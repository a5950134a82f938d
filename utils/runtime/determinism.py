"""Refusal of networks that cannot be trained with ``--deterministic``, before a run begins, not at its first step."""

from __future__ import annotations

import copy
import re
from contextlib import AbstractContextManager

import torch
from torch import nn

from utils.config.settings import UserError

_REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")


def refuse_without_determinism(
    model: nn.Module, images: torch.Tensor, autocast: AbstractContextManager, training: bool
) -> None:
    """Raise ``UserError`` if ``model`` needs, for ``images``, an operation without a deterministic algorithm here.

    Tries on a copy: the forward pass of validation and, with ``training``, a training step's forward and backward pass.
    ``torch.use_deterministic_algorithms`` must be on; its errors depend on the device, the dtype and the memory layout.
    On a GPU, the operation is mostly adaptive pooling to several cells; pooling to one cell is a mean.
    """
    model = copy.deepcopy(model)
    try:
        with torch.no_grad(), autocast:
            model.eval()(images)
        if training:
            with autocast:
                output = model.train()(images)
            output.float().sum().backward()
    except RuntimeError as error:
        refused = _REFUSED.search(str(error))
        if refused is None:
            raise
        raise UserError(
            f"--deterministic: the network needs {refused[1]}, which torch {torch.__version__} cannot compute "
            f"deterministically on {images.device.type}; remove the flag or choose another --arch"
        ) from error
