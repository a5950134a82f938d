"""Knowledge distillation: a loss that also compares the network's logits with a teacher's for the same images."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from utils.config.groups.loss import LossSettings
from utils.config.image_size import Size, sides, size_text
from utils.optim.criterion import at_least_float32, mean_loss


class Origin(NamedTuple):
    """Identity of a teacher. ``digest``: SHA-256 of its weights, classes and preprocessing."""

    source: str
    arch: str
    digest: str


class Teacher(nn.Module):
    """A trained network that maps the student's images, float (n, c, h, w), to logits (n, classes).

    It stays in evaluation mode and computes no gradients. Its images are the student's, augmented and mixed,
    renormalised by ``scale`` and ``shift`` (c,) if mean or standard deviation differ, and resized to ``size`` pixels if
    their size differs. ``order``: the teacher's number of each of the student's classes, int64 (classes,); None if the
    classes agree.
    """

    scale: torch.Tensor | None
    shift: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(
        self,
        network: nn.Module,
        origin: Origin,
        size: Size,
        normalisation: tuple[torch.Tensor, torch.Tensor] | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.network = network.eval().requires_grad_(False)
        self.origin = origin
        self.size = size
        scale, shift = normalisation or (None, None)
        self.register_buffer("scale", None if scale is None else scale[:, None, None])
        self.register_buffer("shift", None if shift is None else shift[:, None, None])
        self.register_buffer("order", order)

    @torch.no_grad()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.scale is not None and self.shift is not None:
            images = images * self.scale + self.shift
        if images.shape[-2:] != (size := sides(self.size)):
            images = functional.interpolate(images, size, mode="bilinear", antialias=True)
        logits = self.network(images)
        return logits if self.order is None else logits[:, self.order]

    def __str__(self) -> str:
        tensors = [*self.network.parameters(), *self.network.buffers()]
        megabytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6
        parameters = sum(parameter.numel() for parameter in self.network.parameters())
        adapted = ", renormalised" if self.scale is not None else ""
        return (
            f"{self.origin.source}: {self.origin.arch}, {parameters:,} parameters ({megabytes:,.1f} MB in the memory "
            f"of each process's device), sees {size_text(self.size)} pixels{adapted}, SHA-256 {self.origin.digest[:12]}"
        )


class Distillation(nn.Module):
    """Sum of ``(1 - alpha)`` times the loss against the labels and ``alpha`` times the loss against a teacher's logits.

    ``soft``: the Kullback-Leibler divergence between the teacher's and the network's softmax at ``temperature``, times
    the temperature squared (Hinton et al., Distilling the knowledge in a neural network, 2015). DeiT's code also
    divides it by the number of classes; here it is the mean over images, as in timm. ``hard``: cross entropy with the
    teacher's predictions as labels (Touvron et al., Training data-efficient image transformers, 2021).
    """

    def __init__(self, criterion: nn.Module, teacher: Teacher, settings: LossSettings) -> None:
        super().__init__()
        self.criterion = criterion
        self.teacher = teacher
        self.hard = settings.distillation == "hard"
        self.alpha = settings.distillation_alpha
        self.temperature = settings.distillation_temperature

    def __str__(self) -> str:
        kind = "hard" if self.hard else "soft"
        temperature = "" if self.hard else f", temperature {self.temperature:g}"
        return f"{self.teacher}; {kind} distillation, alpha {self.alpha:g}{temperature}"

    def forward(
        self, logits: torch.Tensor, targets: torch.Tensor, images: torch.Tensor, weights: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The weighted terms, by name, that add up to the loss: tensors (), means over ``logits`` (n, classes).

        ``targets``: those of the criterion. ``images``: float (n, c, h, w), the input that gave ``logits``.
        ``weights``: of the images, in all terms; see ``mean_loss``.
        """
        loss = mean_loss(self.criterion, weights, logits, targets)
        losses = loss if isinstance(loss, dict) else {"criterion": loss}
        terms = {name: (1 - self.alpha) * value for name, value in losses.items()}
        return terms | {"distillation": self.alpha * mean_loss(self.compare, weights, logits, self.teacher(images))}

    def compare(self, logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """The teacher's term before weighting, shape (): ``logits`` against its ``answers``, (n, classes) each."""
        logits = at_least_float32(logits)
        answers = answers.to(logits.dtype)
        if self.hard:
            return functional.cross_entropy(logits, answers.argmax(1))
        network, teacher = ((values / self.temperature).log_softmax(1) for values in (logits, answers))
        return self.temperature**2 * functional.kl_div(network, teacher, reduction="batchmean", log_target=True)
