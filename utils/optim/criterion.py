"""Training losses: ``CRITERIA`` holds one for each choice of ``--loss``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from utils.config import plugins
from utils.config.groups.loss import LossSettings
from utils.config.settings import UserError

Loss = torch.Tensor | dict[str, torch.Tensor]


class WeightedCrossEntropy(nn.Module):
    """Cross entropy in which each image counts with its class's weight, divided by the number of images.

    That of a label is ``weights[label]``; each share of a mixed target has its own class's. torch's with
    ``reduction="sum"``: its mean over labels divides by their weights, so that an image's influence would depend on the
    others of its forward pass, and thus on ranks and accumulation. Smoothing counts with the image's weight, where
    torch gives each class's part of it that class's: of 100 images of one class and one of another, the 5 % of either
    that the rare class gets of a smoothed common image would outweigh the other 95. ``weights``: float (classes,).
    """

    def __init__(self, weights: torch.Tensor, label_smoothing: float) -> None:
        super().__init__()
        self.register_buffer("weights", weights)
        self.label_smoothing = label_smoothing

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = _at_least_float32(logits)
        weights = self.weights.to(logits.dtype)
        smoothing = self.label_smoothing
        total = functional.cross_entropy(logits, targets, weights, reduction="sum")
        if smoothing:
            uniform = -logits.log_softmax(1).mean(1)
            total = (1 - smoothing) * total + smoothing * (image_weights(targets, weights) * uniform).sum()
        return total / len(targets)


class BinaryCrossEntropy(nn.Module):
    """Binary cross entropy of each class on its own, the mean over images and classes.

    Wightman et al., ResNet strikes back, 2021. timm's ``BinaryCrossEntropy``, except that mixed targets are smoothed
    too, as by cross entropy (timm's mixup smooths them). ``threshold``: targets above it, after smoothing, become 1 and
    the others 0. ``sum_classes``: the sum over classes instead of their mean. ``weights``: float (classes,), a factor
    of all terms of an image that shows the class (a factor of the class's terms would raise those of the images that do
    not show it alike, and so balance nothing). ``positive_weight``: a factor of the terms of classes that an image
    shows.
    """

    def __init__(
        self,
        label_smoothing: float,
        threshold: float | None = None,
        sum_classes: bool = False,
        positive_weight: float | None = None,
        weights: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.threshold = threshold
        self.sum_classes = sum_classes
        self.positive_weight = positive_weight
        self.register_buffer("weights", weights)

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = _at_least_float32(logits)
        weights = None if self.weights is None else image_weights(targets, self.weights.to(logits.dtype))[:, None]
        targets = _shares(targets, logits) * (1 - self.label_smoothing) + self.label_smoothing / logits.shape[1]
        if self.threshold is not None:
            targets = targets.gt(self.threshold).to(logits.dtype)
        positive = None if self.positive_weight is None else logits.new_full((), self.positive_weight)
        loss = functional.binary_cross_entropy_with_logits(logits, targets, weights, pos_weight=positive)
        return loss * logits.shape[1] if self.sum_classes else loss


class FocalLoss(nn.Module):
    """Cross entropy times (1 - p) ** ``gamma``, p the probability of the target's class; the mean over images.

    Lin et al., Focal loss for dense object detection, 2017, for classes that exclude each other (softmax). Each share
    of a smoothed or mixed target has the factor of its own class. With ``gamma`` 0 it is cross entropy. ``weights``:
    float (classes,), the paper's alpha, which count as those of ``WeightedCrossEntropy``.
    """

    def __init__(self, gamma: float, label_smoothing: float, weights: torch.Tensor | None = None) -> None:
        super().__init__()
        self.gamma = gamma
        self.label_smoothing = label_smoothing
        self.register_buffer("weights", weights)

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logs = _at_least_float32(logits).log_softmax(1)
        smoothing = self.label_smoothing
        # 1 - p without cancellation, and not 0, where the derivative of a power below 1 is infinite.
        others = (-torch.expm1(logs)).clamp(min=torch.finfo(logs.dtype).tiny)
        factors = others.pow(self.gamma)
        shares = _shares(targets, logs)
        uniform = smoothing / logs.shape[1]
        if self.weights is None:
            return (-(shares * (1 - smoothing) + uniform) * factors * logs).sum(1).mean()
        weights = self.weights.to(logs.dtype)
        terms = (-shares * factors * logs * weights) * (1 - smoothing)
        return (terms - uniform * image_weights(targets, weights)[:, None] * factors * logs).sum(1).mean()


def mean_loss(criterion: Callable[..., Loss], weights: torch.Tensor | None, *tensors: torch.Tensor) -> Loss:
    """The mean of ``criterion``'s loss over n images, or with ``weights``, float (n,), of each one's times its weight.

    ``tensors``: what ``criterion`` takes, (n, ...) each. It divides by n, not by the weights of these n, for the same
    reason as ``WeightedCrossEntropy``: then means over ranks and forward passes are those of one large batch.
    """
    if weights is None:
        return criterion(*tensors)
    each = torch.vmap(lambda *one: criterion(*(tensor[None] for tensor in one)))(*tensors)
    if isinstance(each, dict):
        return {name: (values * weights).mean() for name, values in each.items()}
    return (each * weights).mean()


class PluginLoss(nn.Module):
    """A loss of a user's file: a function of logits and targets."""

    def __init__(self, function: plugins.Entry) -> None:
        super().__init__()
        self.function = function

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.function(_at_least_float32(logits), targets)
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            given = f"a tensor of the shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)[:40]
            own = self.function
            raise UserError(f"--plugin {own.file}: loss {own.name} must return a tensor of one number, not {given}")
        return loss


def image_weights(targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weight of each image (n,): its label's of ``weights`` (classes,), or their mean over the image's shares."""
    return targets.to(weights.dtype) @ weights if targets.is_floating_point() else weights[targets]


def _at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _shares(targets: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """``targets`` as shares (n, classes) of the ``logits``' type."""
    if not targets.is_floating_point():
        targets = functional.one_hot(targets, logits.shape[1])
    return targets.to(logits.dtype)


def _cross_entropy(settings: LossSettings, weights: torch.Tensor | None) -> nn.Module:
    if weights is None:
        return nn.CrossEntropyLoss(label_smoothing=settings.label_smoothing)
    return WeightedCrossEntropy(weights, settings.label_smoothing)


def _binary_cross_entropy(settings: LossSettings, weights: torch.Tensor | None) -> nn.Module:
    return BinaryCrossEntropy(
        settings.label_smoothing, settings.bce_target_thresh, settings.bce_sum, settings.bce_pos_weight, weights
    )


def _focal(settings: LossSettings, weights: torch.Tensor | None) -> nn.Module:
    return FocalLoss(settings.focal_gamma, settings.label_smoothing, weights)


# A name here stands in LOSSES of utils/config/groups/loss.py too, which must not import torch.
CRITERIA: dict[str, Callable[[LossSettings, torch.Tensor | None], nn.Module]] = {
    "cross-entropy": _cross_entropy,
    "bce": _binary_cross_entropy,
    "focal": _focal,
}


def build_criterion(settings: LossSettings, class_weights: torch.Tensor | None = None) -> nn.Module:
    """The training loss that ``settings`` name, with label smoothing (Szegedy et al., Rethinking Inception, 2015).

    Takes logits (n, classes) and targets, int64 (n,) or the shares of mixed images (n, classes); gives the mean over n,
    a tensor (). ``class_weights``: float (classes,), on the logits' device. Validation always measures cross entropy
    without smoothing or weights, so that runs with other losses compare.
    """
    own = plugins.added("loss").get(settings.loss)
    if own is None:
        return CRITERIA[settings.loss](settings, class_weights)
    if settings.label_smoothing or class_weights is not None:
        raise UserError(
            f"--loss {settings.loss}: one of --plugin does its own smoothing and weighting; remove the flag"
        )
    return PluginLoss(own)


def describe(settings: LossSettings, gradient_penalty: float) -> str:
    """The training loss and what shapes it."""
    bce = settings.loss == "bce"
    values = {
        "label smoothing": settings.label_smoothing or None,
        "target threshold": settings.bce_target_thresh if bce else None,
        "positive weight": settings.bce_pos_weight if bce else None,
        "gamma": settings.focal_gamma if settings.loss == "focal" else None,
        "gradient penalty": gradient_penalty or None,
    }
    words = [settings.loss.replace("-", " ")]
    words += ["summed over classes"] if bce and settings.bce_sum else []
    words += [f"class weights {settings.class_weights}"] if settings.class_weights else []
    return ", ".join([*words, *(f"{name} {value:g}" for name, value in values.items() if value is not None)])
