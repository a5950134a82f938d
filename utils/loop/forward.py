"""The forward pass and its loss, the same for training, validation and every tool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from utils.config.settings import UserError
from utils.data.loaders import Batch
from utils.optim.criterion import Loss, mean_loss
from utils.optim.distillation import Distillation
from utils.optim.gradient_penalty import gradient_norm, twice_differentiable


class Outputs(NamedTuple):
    """Results of a pass: ``logits`` (n, classes), the ``loss`` () to minimise, and its terms by name, if several."""

    logits: torch.Tensor
    loss: torch.Tensor
    losses: dict[str, torch.Tensor]

    def detached(self) -> Outputs:
        """The same values, without what a backward pass needs."""
        losses = {name: loss.detach() for name, loss in self.losses.items()}
        return Outputs(self.logits.detach(), self.loss.detach(), losses)


def forward(
    network: Callable[[torch.Tensor], torch.Tensor],
    batch: Batch,
    criterion: Callable[..., Loss],
    autocast: AbstractContextManager,
    *,
    penalty: float = 0.0,
    scaler: torch.amp.GradScaler | None = None,
) -> Outputs:
    """Run ``network`` on ``batch``, whose images beyond its targets are padding; return logits and loss.

    ``autocast`` covers only the network and the criterion. ``criterion`` returns the mean loss, or named losses, whose
    sum is minimised; a ``Distillation`` gets the images as well. If the batch has ``image_weights``, float (n,), these
    are factors of the images' losses in the mean. ``penalty`` times the norm of the loss's gradient is added, for which
    ``network`` must be a module and ``scaler`` the one in use. Without targets, the loss is a sum over no logits: 0,
    with zero gradients, so that this rank takes part in the step.
    """
    count = len(batch.targets)
    with twice_differentiable(bool(penalty)), autocast:
        logits = network(batch.images)[:count]
        before = _versions(logits, batch.targets)
        given = _loss(criterion, logits, batch) if count else logits.sum()
    if _versions(logits, batch.targets) != before:
        raise UserError("the loss changes its logits or targets in place, so top-1 would be wrong: clone() them")
    losses = dict(given) if isinstance(given, dict) else {}
    loss: Any = sum(given.values()) if isinstance(given, dict) else given
    if penalty and count:
        assert isinstance(network, torch.nn.Module) and scaler is not None
        losses = losses or {"criterion": loss}
        losses["grad_penalty"] = penalty * gradient_norm(loss, network.parameters(), scaler)
        loss = loss + losses["grad_penalty"]
    return Outputs(logits, loss, losses)


def _versions(*tensors: torch.Tensor) -> list[int]:
    """How often each tensor was changed in place; nothing of tensors that do not count it."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def _loss(criterion: Callable[..., Loss], logits: torch.Tensor, batch: Batch) -> Loss:
    weights = getattr(batch, "image_weights", None)
    if isinstance(criterion, Distillation):  # the teacher looks at the images, too
        return criterion(logits, batch.targets, batch.images[: len(logits)], weights)
    return mean_loss(criterion, weights, logits, batch.targets)
