"""Training losses: ``CRITERIA`` holds one for each choice of ``--loss``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from utils.config import plugins
from utils.config.groups.loss import OF_EACH_CLASS, LossSettings
from utils.config.settings import UserError

Loss = torch.Tensor | dict[str, torch.Tensor]
AnyLoss = TypeVar("AnyLoss", torch.Tensor, dict[str, torch.Tensor], Loss)


class OwnLoss(nn.Module):
    """Base class of the losses here. ``weights``: of the classes, float (classes,), if any.

    ``known``, for multi-label data: the mean number of known labels per training image.
    """

    weights: torch.Tensor | None

    def __init__(self, settings: LossSettings, weights: torch.Tensor | None, known: float | None = None) -> None:
        super().__init__()
        self.settings = settings
        self.register_buffer("weights", weights)
        self.known = known


class WeightedCrossEntropy(OwnLoss):
    """Cross entropy in which each image counts with its class's weight, divided by the number of images.

    A label has the weight ``weights[label]``; each share of a mixed target has the weight of its own class. Computed
    with torch's ``reduction="sum"``: torch's mean divides by the weights of the labels, so that an image's influence
    would depend on the other images of its forward pass, and thus on ranks and accumulation. All of a smoothed target
    has the weight of the image's label, whereas torch gives each class's part the weight of that class: with 100 images
    of one class and one of another, and balanced weights, the 5 % that smoothing moves from a common image's class to
    the rare one would outweigh the other 95 %.
    """

    weights: torch.Tensor

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = at_least_float32(logits)
        weights = self.weights.to(logits.dtype)
        smoothing = self.settings.label_smoothing
        total = functional.cross_entropy(logits, targets, weights, reduction="sum")
        if smoothing:
            uniform = -logits.log_softmax(1).mean(1)
            total = (1 - smoothing) * total + smoothing * (image_weights(targets, weights) * uniform).sum()
        return total / len(targets)


class BinaryCrossEntropy(OwnLoss):
    """Binary cross entropy of each class on its own; the mean over images and classes.

    Wightman et al., ResNet strikes back, 2021. The same as timm's ``BinaryCrossEntropy``, except that mixed targets are
    smoothed too, as in cross entropy (timm's mixup smooths them). ``weights`` are factors of all terms of an image that
    shows the class (a factor of the class's terms would also raise those of images that do not show it, and so balance
    nothing). ``positive_weight``: a factor of the terms of classes that an image shows.

    For multi-label data, targets are floats (n, classes), with NaN for a missing label, whose term is left out. The sum
    of all terms is divided by n times ``known``, the mean number of known labels per training image: a constant, so
    that the gradient depends neither on ranks nor on accumulation, as it would with the number of known labels in a
    forward pass. Without missing labels this is the mean over images and classes. Smoothing moves a target towards a
    half, and ``weights`` are factors of the terms of images that show the class.
    """

    @property
    def positive_weight(self) -> float | None:
        return self.settings.bce_pos_weight

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = at_least_float32(logits)
        if self.known is None:
            weights = None if self.weights is None else image_weights(targets, self.weights.to(logits.dtype))[:, None]
            positive = None if self.positive_weight is None else logits.new_full((), self.positive_weight)
            smoothed = self._smoothed(_shares(targets, logits), self.settings.label_smoothing / logits.shape[1])
            loss = self.mean(logits, smoothed, weights, positive)
        else:
            loss = self._of_several_labels(logits, targets.to(logits.dtype), self.known)
        return loss * logits.shape[1] if self.settings.bce_sum else loss

    def _smoothed(self, targets: torch.Tensor, least: float) -> torch.Tensor:
        targets = targets * (1 - self.settings.label_smoothing) + least
        threshold = self.settings.bce_target_thresh
        return targets if threshold is None else targets.gt(threshold).to(targets.dtype)

    def _of_several_labels(self, logits: torch.Tensor, targets: torch.Tensor, known: float) -> torch.Tensor:
        positive = None if self.weights is None else self.weights.to(logits.dtype)
        if self.positive_weight is not None:
            positive = self.positive_weight * (logits.new_ones(()) if positive is None else positive)
        terms = self.terms(logits, self._smoothed(targets.nan_to_num(0), self.settings.label_smoothing / 2), positive)
        return terms.masked_fill(targets.isnan(), 0).sum() / (len(targets) * known)

    def mean(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, positive: torch.Tensor | None
    ) -> torch.Tensor:
        """Mean of all terms of single-label images, a tensor (). ``weights``: those of the images, (n, 1)."""
        return functional.binary_cross_entropy_with_logits(logits, targets, weights, pos_weight=positive)

    def terms(self, logits: torch.Tensor, targets: torch.Tensor, positive: torch.Tensor | None) -> torch.Tensor:
        """Term of each image and class, (n, classes). ``positive``: a factor of the terms of classes that are shown."""
        return functional.binary_cross_entropy_with_logits(logits, targets, pos_weight=positive, reduction="none")


class AsymmetricLoss(BinaryCrossEntropy):
    """Binary cross entropy with less weight on terms that are already small, above all of classes that are not shown.

    Ben-Baruch et al., Asymmetric loss for multi-label classification, 2021: the term of a class that an image shows has
    the factor (1 - p) ** gamma+. For the other classes p is first reduced by ``clip``, and the factor is p ** gamma-.
    For targets of 0 and 1 this is timm's ``AsymmetricLossMultiLabel``, which sums over classes. Each part of a smoothed
    or mixed target has its own factor.
    """

    positive_weight = None

    def mean(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, positive: torch.Tensor | None
    ) -> torch.Tensor:
        terms = self.terms(logits, targets, positive)
        return (terms if weights is None else terms * weights).mean()

    def terms(self, logits: torch.Tensor, targets: torch.Tensor, positive: torch.Tensor | None) -> torch.Tensor:
        settings = self.settings
        tiny = torch.finfo(logits.dtype).tiny  # not 0, where the derivative of a power below 1 is infinite
        easy = logits.neg().sigmoid().clamp(min=tiny).pow(settings.asymmetric_gamma_pos)
        shown = -functional.logsigmoid(logits) * easy
        if positive is not None:
            shown = shown * positive
        probabilities = logits.sigmoid()
        if settings.asymmetric_clip:
            probabilities = (probabilities - settings.asymmetric_clip).clamp(min=tiny)
            others = -torch.log1p(-probabilities)
        else:
            others = -functional.logsigmoid(-logits)  # without cancellation
        easy = probabilities.clamp(min=tiny).pow(settings.asymmetric_gamma_neg)
        return targets * shown + (1 - targets) * others * easy


class FocalLoss(OwnLoss):
    """Cross entropy times (1 - p) ** gamma, where p is the probability of the target's class; the mean over images.

    Lin et al., Focal loss for dense object detection, 2017, for classes that exclude each other (softmax). Each share
    of a smoothed or mixed target has the factor of its own class. With gamma 0 this is cross entropy. ``weights``:
    the paper's alpha, applied as in ``WeightedCrossEntropy``.
    """

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logs = at_least_float32(logits).log_softmax(1)
        smoothing = self.settings.label_smoothing
        # 1 - p without cancellation, and not 0, where the derivative of a power below 1 is infinite.
        others = (-torch.expm1(logs)).clamp(min=torch.finfo(logs.dtype).tiny)
        factors = others.pow(self.settings.focal_gamma)
        shares = _shares(targets, logs)
        uniform = smoothing / logs.shape[1]
        if self.weights is None:
            return (-(shares * (1 - smoothing) + uniform) * factors * logs).sum(1).mean()
        weights = self.weights.to(logs.dtype)
        terms = (-shares * factors * logs * weights) * (1 - smoothing)
        return (terms - uniform * image_weights(targets, weights)[:, None] * factors * logs).sum(1).mean()


def mean_loss(criterion: Callable[..., AnyLoss], weights: torch.Tensor | None, *tensors: torch.Tensor) -> AnyLoss:
    """Mean of ``criterion``'s loss over n images; ``weights``, if any, float (n,), are factors of images' losses.

    ``tensors``: the arguments of ``criterion``, (n, ...) each. The sum is divided by n, not by the sum of the weights,
    for the same reason as in ``WeightedCrossEntropy``: means over ranks and forward passes are then those of one large
    batch.
    """
    if weights is None:
        return criterion(*tensors)

    def of_one(*one: torch.Tensor) -> AnyLoss:
        return criterion(*(tensor[None] for tensor in one))

    if isinstance(criterion, PluginLoss):  # it may do what torch.vmap cannot, such as choosing by a mask
        losses: list[Any] = [of_one(*one) for one in zip(*tensors, strict=True)]
        mean: Any = (torch.stack(losses) * weights).mean()
        return mean
    each = torch.vmap(of_one)(*tensors)
    if isinstance(each, dict):
        return {name: (values * weights).mean() for name, values in each.items()}
    return (each * weights).mean()


class PluginLoss(nn.Module):
    """A loss from a user's file, a function of logits and targets.

    Raises ``UserError`` unless it returns a number that depends on the logits.
    """

    def __init__(self, function: plugins.Entry) -> None:
        super().__init__()
        self.function = function

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.function(at_least_float32(logits), targets)
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            given = f"a tensor of the shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)[:40]
            raise UserError(f"{self.function.where} must return a tensor of one number, not {given}")
        if torch.is_grad_enabled() and logits.requires_grad and not loss.requires_grad:
            raise UserError(f"{self.function.where} must be computed from the logits; nothing would train")
        return loss


def image_weights(targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weight of each image, (n,): its class's in ``weights`` (classes,); for a mixed image, the mean by shares."""
    if not targets.is_floating_point():
        return weights[targets]
    return (targets.to(weights.dtype) * weights).sum(1)  # autocast would compute a matrix product in half precision


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _shares(targets: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Targets as shares (n, classes), in the dtype of ``logits``."""
    if not targets.is_floating_point():
        targets = functional.one_hot(targets, logits.shape[1])
    return targets.to(logits.dtype)


def _cross_entropy(settings: LossSettings, weights: torch.Tensor | None, known: float | None) -> nn.Module:
    assert known is None, "one label an image"
    if weights is None:
        return nn.CrossEntropyLoss(label_smoothing=settings.label_smoothing)
    return WeightedCrossEntropy(settings, weights)


# A name here stands in LOSSES of utils/config/groups/loss.py too, which must not import torch.
CRITERIA: dict[str, Callable[[LossSettings, torch.Tensor | None, float | None], nn.Module]] = {
    "cross-entropy": _cross_entropy,
    "bce": BinaryCrossEntropy,
    "focal": FocalLoss,
    "asymmetric": AsymmetricLoss,
}


def build_criterion(
    settings: LossSettings, class_weights: torch.Tensor | None = None, known: float | None = None
) -> nn.Module:
    """The training loss that ``settings`` name, with label smoothing (Szegedy et al., Rethinking Inception, 2015).

    Maps logits (n, classes) and targets, int64 (n,) or shares (n, classes) of mixed images, to the mean loss, shape ().
    ``class_weights``: float (classes,), on the logits' device. ``known``, for multi-label data: the mean number of
    known labels per training image; targets are then those of ``BinaryCrossEntropy``. Validation always uses plain
    (binary) cross entropy, without smoothing or weights, so that runs with different losses can be compared.
    """
    own = plugins.added("loss").get(settings.loss)
    if own is None:
        return CRITERIA[settings.loss](settings, class_weights, known)
    if settings.label_smoothing or class_weights is not None:
        raise UserError(
            f"--loss {settings.loss}: one of --plugin does its own smoothing and weighting; remove the flag"
        )
    return PluginLoss(own)


def mean_known(labels: torch.Tensor) -> float | None:
    """Mean number of known labels per image in int8 (n, classes), where -1 is missing; None for single labels, (n,)."""
    return float((labels >= 0).sum() / len(labels)) if labels.ndim > 1 else None


def describe(settings: LossSettings, gradient_penalty: float) -> str:
    """Describe the training loss and its parameters."""
    each = settings.loss in OF_EACH_CLASS
    asymmetric = settings.loss == "asymmetric"
    values = {
        "label smoothing": settings.label_smoothing or None,
        "target threshold": settings.bce_target_thresh if each else None,
        "positive weight": settings.bce_pos_weight if settings.loss == "bce" else None,
        "gamma of classes not shown": settings.asymmetric_gamma_neg if asymmetric else None,
        "of those shown": settings.asymmetric_gamma_pos if asymmetric else None,
        "clip": settings.asymmetric_clip if asymmetric else None,
        "gamma": settings.focal_gamma if settings.loss == "focal" else None,
        "gradient penalty": gradient_penalty or None,
    }
    words = [settings.loss.replace("-", " ")]
    words += ["summed over classes"] if each and settings.bce_sum else []
    words += [f"class weights {settings.class_weights}"] if settings.class_weights else []
    return ", ".join([*words, *(f"{name} {value:g}" for name, value in values.items() if value is not None)])
