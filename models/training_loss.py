"""The training loss of a run: that of ``--loss``, with the weights of classes, and with a teacher's answers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from models.teacher import build_teacher, other_teacher
from utils.checkpoint.resume import ResumePoint
from utils.config.settings import Settings, UserError
from utils.data.datasets import Data
from utils.data.sampling import first_samples
from utils.optim.class_weights import class_weights, refuse_other_weights
from utils.optim.criterion import build_criterion
from utils.optim.distillation import Distillation


def build_loss(
    args: Settings, data: Data, device: torch.device, point: ResumePoint | None, warn: Callable[[str], None]
) -> torch.nn.Module:
    """The loss for ``data``, on ``device``; ``point`` is the checkpoint to resume, if any.

    With --resume-override, ``warn`` takes what differs from that checkpoint; otherwise it is a ``UserError``.
    """
    settings = args.loss
    override = args.run.resume_override
    weights = None
    if settings.class_weights is not None:
        labels = data.train.labels.cpu()[first_samples(len(data.train), args)]
        weights = class_weights(labels, data.classes, settings.class_weights)
        if point is not None:
            refuse_other_weights(weights, settings, point.state, point.path, warn if override else None)
        weights = weights.to(device)
    criterion = build_criterion(settings, weights)
    if settings.teacher is None:
        return criterion
    teacher = build_teacher(settings.teacher, data, device)
    difference = point is not None and other_teacher(teacher, point)
    if difference and not override:
        raise UserError(f"{difference}; give that one, or go on like this with --resume PATH --resume-override")
    if difference:
        warn(f"{difference}; going on with this one")
    return Distillation(criterion, teacher, settings)
