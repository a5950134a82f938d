"""``--weights`` for another task: which of them fit, which layer begins anew, and what the user learns of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.build import SMALL_IMAGE, is_timm_resnet
from utils.checkpoint import checkpoint
from utils.config.settings import UserError
from utils.optim.clipping import output_layers
from utils.optim.head import head_parameters

AUXILIARY = {"GoogLeNet": ("aux1.", "aux2."), "Inception3": ("AuxLogits.",)}  # torchvision's, used in training only


def load_start(model: nn.Module, state: dict[str, Any], path: Path, new_head: bool) -> str:
    """Load the weights of the checkpoint ``state`` into ``model``; gives the parts that begin anew, in words.

    With ``new_head``, all but the last layer, which stays as it was initialised. Raises ``UserError`` with the first
    names that do not fit, or with both numbers of classes if nothing else is wrong.
    """
    weights = adapted(model, checkpoint.weights_of(state, path))
    _refuse_other_stem(model, weights, path)
    head, classes = head_parameters(model), len(output_layers(model)[-1].weight)
    trained = next((len(weights[name]) for name in head if name in weights and weights[name].ndim), 0)
    if new_head:
        kept = {name: value for name, value in weights.items() if name not in head}
        checkpoint.load_weights(model, kept | {name: head[name].detach() for name in head}, path)
        return last_layer(classes, trained)
    found = checkpoint.misfits(model, weights)
    wrong = {*found.missing, *found.unexpected, *found.misshapen}
    if wrong and wrong <= set(head):
        has = f"is for {trained} classes" if trained else "has no last layer"
        raise UserError(
            f"--weights {path}: {has}, and the data has {classes}; --new-head begins the last layer "
            f"({', '.join(head)}) anew and keeps the other weights"
        )
    checkpoint.load_weights(model, weights, path)
    return ""


def _refuse_other_stem(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Raise ``UserError`` if the size of the images has made the first convolution another one (``stem_line``)."""
    stored, own = weights.get("conv1.weight"), model.state_dict().get("conv1.weight")
    kernels = [weight.shape[-1] for weight in (stored, own) if weight is not None and weight.ndim == 4]
    if len(kernels) == 2 and kernels[0] != kernels[1] and is_timm_resnet(model):
        sizes = f"{SMALL_IMAGE} or less" if kernels[0] == 3 else f"{SMALL_IMAGE + 1} or more"
        raise UserError(
            f"--weights {path}: its first convolution is {kernels[0]}x{kernels[0]}, and that of {type(model).__name__} "
            f"for these images {kernels[1]}x{kernels[1]}; the weights fit --image-size {sizes}"
        )


def last_layer(classes: int, trained: int) -> str:
    """The last layer as a part that begins anew, in words; ``trained``: the weights' own classes, 0 for none."""
    return f"the last layer ({classes} classes, where the weights have {trained or 'none'})"


def adapted(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``weights`` under the names of ``model``, as its library makes them when it loads its own.

    timm knows the names of the papers' published weights, and resizes embeddings of positions to the image. Weights
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
    except Exception:  # written for its own files; of others it expects names that they lack
        return weights
    return {name: value for name, value in changed.items() if isinstance(value, torch.Tensor)}
