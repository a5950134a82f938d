"""``load_model``: the network of a checkpoint, ready to predict with."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from models.build import build_model
from utils.checkpoint import checkpoint
from utils.config.groups.model import ModelSettings
from utils.config.settings import UserError
from utils.data.preprocessing import Preprocessing
from utils.optim.batch_norm_statistics import layers_with_statistics


class Loaded(NamedTuple):
    """What ``load_model`` gives.

    ``network`` is in evaluation mode, on the CPU: float32 images (n, channels, h, w) into logits (n, classes).
    ``classes``: their names, in the order of the logits. ``preprocessing`` turns a Pillow image into the tensor
    (channels, h, w) that the network gets in validation.
    """

    network: nn.Module
    classes: tuple[str, ...]
    preprocessing: Preprocessing


def load_model(path: str | os.PathLike[str]) -> Loaded:
    """The network of a checkpoint file, or of a run folder's newest checkpoint, with its classes and preprocessing.

    The weights are the moving average's if the run kept one, as in its reported results. torch's random state does not
    change. Raises ``UserError`` (a ``ValueError``) with the path and what is wrong with it.
    """
    return load_with_arch(path)[0]


def load_with_arch(path: str | os.PathLike[str]) -> tuple[Loaded, str]:
    """What ``load_model`` gives, and the network's name as ``--arch`` takes it."""
    path, state = _read(Path(path))
    arch, classes = state.get("arch"), state.get("classes")
    if not isinstance(arch, str) or not _are_names(classes):
        raise UserError(f"{path}: does not name its network and classes; give a checkpoint that main.py has saved")
    if state.get("format") != checkpoint.FORMAT:
        raise UserError(
            f"{path}: has checkpoint format {str(state.get('format'))[:20]}, this version loads {checkpoint.FORMAT}"
        )
    preprocessing = Preprocessing.from_state(state.get("preprocessing"), path)
    with torch.random.fork_rng(devices=[]):  # the checkpoint's weights replace the random ones
        network = build_model(
            ModelSettings(arch=arch, model_kwargs=_model_kwargs(state)), classes=len(classes),
            channels=preprocessing.channels, image_size=preprocessing.image_size,
        )  # fmt: skip
    checkpoint.load_weights(network, checkpoint.weights_of(state, path), str(path))
    if checkpoint.average_moved_since_validation(state) and layers_with_statistics(network):
        warnings.warn(
            f"{path} was saved between two validations: the batch-norm statistics of its average are not computed for "
            "these weights, and it may do much worse than best.pt, which has those computed before a validation",
            stacklevel=2,
        )
    return Loaded(network.eval(), tuple(classes), preprocessing), arch


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    if not path.is_dir():
        return path, checkpoint.load(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    newest = checkpoint.newest(folder, warnings.warn, checkpoint.load)
    if newest is None:
        raise UserError(f"{path}: holds no checkpoint that can be loaded; give a run folder or a .pt file")
    return newest


def _model_kwargs(state: dict[str, Any]) -> tuple[str, ...]:
    settings = state.get("settings")
    found = settings.get("model_kwargs") if isinstance(settings, dict) else None
    return tuple(map(str, found)) if isinstance(found, list) else ()


def _are_names(classes: Any) -> bool:
    return isinstance(classes, list) and len(classes) > 1 and all(isinstance(name, str) for name in classes)
