"""The training loss of a run: that of ``--loss``, with class weights and a teacher's answers if asked for.

The teacher of ``--teacher`` is the network of a checkpoint, or a library's pretrained one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from models.build import build_model, classes_of, located, unknown_arch
from models.load import Loaded, load_model
from models.starting_weights import preprocessing_of
from utils.checkpoint.checkpoint import dict_in
from utils.checkpoint.resume import ResumePoint
from utils.config.groups.model import ModelSettings
from utils.config.settings import Settings, UserError
from utils.config.spelling import some
from utils.data.data_set import Data
from utils.data.preprocessing import Preprocessing
from utils.data.sampling import first_samples
from utils.optim.class_weights import class_weights, other_weights
from utils.optim.criterion import build_criterion, mean_known
from utils.optim.distillation import Distillation, Origin, Teacher
from utils.precision.amp import keep_in_fp32


def build_loss(
    args: Settings, data: Data, device: torch.device, point: ResumePoint | None, warn: Callable[[str], None]
) -> torch.nn.Module:
    """Build the loss for ``data``, on ``device``; ``point`` is the checkpoint to resume, if any.

    Differences from that checkpoint raise ``UserError``; with --resume-override, they are passed to ``warn`` instead.
    """

    def refuse(difference: str, advice: str, present: str) -> None:
        if difference and not args.run.resume_override:
            raise UserError(f"{difference}; {advice}, or go on like this with --resume PATH --resume-override")
        if difference:
            warn(f"{difference}; going on with {present}")

    settings = args.loss
    weights = None
    assert data.train is not None
    labels = data.train.labels.cpu()[first_samples(len(data.train), args)]
    if settings.class_weights is not None:
        weights = class_weights(labels, data.classes, settings.class_weights)
        if point is not None:
            refuse(*other_weights(weights, settings, point.state, point.path), "these")
        weights = weights.to(device)
    criterion = build_criterion(settings, weights, mean_known(labels))
    if settings.teacher is None:
        return criterion
    teacher = build_teacher(settings.teacher, data, device)
    if point is not None:
        refuse(other_teacher(teacher, point), "give that one", "this one")
    return Distillation(criterion, teacher, settings)


class LibraryNetwork(NamedTuple):
    """A library's pretrained network, in evaluation mode on the CPU, with fields that mean the same in ``Loaded``."""

    network: nn.Module
    arch: str
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    fp32_layers: Sequence[str] = ()


def build_teacher(source: str, data: Data, device: torch.device) -> Teacher:
    """Build the teacher ``source``, a checkpoint's path or a network's name, on ``device``, for ``data``'s images.

    Raises ``UserError`` if ``source`` is neither, or if the teacher's classes or channels are not those of ``data``.
    """
    flag = f"--teacher {source}"
    try:
        # best=False: a run that continues gets the same file; distillation has a temperature of its own
        known = load_model(source, best=False, calibrated=False) if os.path.exists(source) else _of_library(source)
    except UserError as error:
        reasons = (line.removeprefix("--pretrained: ").removeprefix(f"{source}: ") for line in error.mistakes)
        raise UserError(*(f"{flag}: {reason}" for reason in reasons)) from error
    keep_in_fp32(known.network, known.fp32_layers, device)  # it runs under the student's autocast
    own = data.preprocessing
    theirs = known.preprocessing
    if own.channels != theirs.channels:
        raise UserError(f"{flag}: sees images of {theirs.channels} channel(s), and the data has {own.channels}")
    if isinstance(known, Loaded) and own.pixel_range != theirs.pixel_range:
        trained, this = ("{:g} {:g}".format(*of) if of else "none" for of in (theirs.pixel_range, own.pixel_range))
        raise UserError(
            f"{flag}: was trained with --pixel-range {trained}, and here it is {this}; it would see brighter or darker "
            "images than it knows"
        )
    order = _order(flag, data.classes, known.classes)
    normalisation = None
    if (own.mean, own.std) != (theirs.mean, theirs.std):
        mean, std, their_mean, their_std = map(torch.tensor, (own.mean, own.std, theirs.mean, theirs.std))
        normalisation = std / their_std, (mean - their_mean) / their_std
    origin = Origin(source, known.arch, _digest(known))
    return Teacher(known.network, origin, theirs.val_image_size, normalisation, order).to(device)


def other_teacher(teacher: Teacher, resume_point: ResumePoint) -> str:
    """Message if ``teacher`` is not the one of the run to resume; '' if it is, or if that run has none."""
    digest = dict_in(resume_point.state, "teacher").get("digest")
    if digest in (None, teacher.origin.digest):  # a run without one differs in its settings
        return ""
    return (
        f"--teacher {teacher.origin.source}: is another network ({teacher.origin.digest[:12]}) than the teacher of "
        f"{resume_point.path} ({str(digest)[:12]})"
    )


def _of_library(name: str) -> LibraryNetwork:
    """A timm or torchvision network with its pretrained weights, whose classes are ImageNet's. Raises ``UserError``."""
    if mistake := unknown_arch(name):
        raise UserError(f"is no file or folder, and {mistake.partition(': ')[2].replace('own, ', '', 1)}")
    if located(name)[0] == "own":
        raise UserError("has no pretrained weights; give the path of a checkpoint that you have trained")
    preprocessing = preprocessing_of(name).preprocessing
    import timm

    count = classes_of(name)
    classes = tuple(timm.data.ImageNetInfo().label_names())  # WordNet's numbers
    if count != len(classes):
        raise UserError(f"its {count} classes are not those of ImageNet-1k, and their names are not known")
    with torch.random.fork_rng(devices=[]):
        network = build_model(
            ModelSettings(arch=name, pretrained=True), classes=count, channels=3, image_size=preprocessing.image_size
        )
    return LibraryNetwork(network.eval(), name, classes, preprocessing)


def _order(flag: str, classes: Sequence[str], theirs: Sequence[str]) -> torch.Tensor | None:
    """For each of ``classes``, its index in ``theirs``, int64 (n,); None if both are equal. Raises ``UserError``."""
    if list(classes) == list(theirs):
        return None
    lacking = sorted(set(classes) - set(theirs))
    more = sorted(set(theirs) - set(classes))
    if lacking or more:
        parts = [f"lacks {some(lacking)}"] if lacking else []
        parts += [f"has {some(more)} besides"] if more else []
        raise UserError(f"{flag}: knows other classes than the data: it {' and '.join(parts)}")
    places = {name: place for place, name in enumerate(theirs)}
    return torch.tensor([places[name] for name in classes])


def _digest(known: Loaded | LibraryNetwork) -> str:
    """SHA-256 of all that the network's answers depend on."""
    facts = repr((known.arch, known.classes, known.preprocessing.state()))
    digest = hashlib.sha256(facts.encode("utf-8", "backslashreplace"))
    for name, tensor in sorted(known.network.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
