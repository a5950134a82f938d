"""``load_model``: the network of a checkpoint, ready to predict with."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.build import build_model, locate
from models.confidence import KEY as CONFIDENCE
from models.confidence import Confidence, divide_logits
from utils.checkpoint import checkpoint
from utils.config import hub_networks
from utils.config.arguments import convert
from utils.config.groups.model import ModelSettings
from utils.config.plugins import digests
from utils.config.plugins import load as load_plugins
from utils.config.rules import OPTIONS
from utils.config.settings import UserError, shaping
from utils.data.preprocessing import Preprocessing
from utils.optim.batch_norm_statistics import layers_with_statistics
from utils.record.reading import Reading, reading_of

BEST = "best.pt"
FAVOURED = "chosen_by_validation"  # in a checkpoint, besides best.pt, whose weights validation images chose


@dataclass(frozen=True)
class Loaded:
    """The network that ``load_model`` returns; it unpacks into ``network``, ``classes`` and ``preprocessing``.

    ``network`` is in evaluation mode, on the CPU: float32 images (n, channels, h, w) into logits (n, classes).
    ``classes``: their names, in the order of the logits. ``preprocessing`` turns a Pillow image into the tensor
    (channels, h, w) that the network gets in validation. ``reading`` turns logits into probabilities and answers: one
    class per image, or several labels with their thresholds.

    ``arch``: the network's name as ``--arch`` takes it. ``path``: the checkpoint file that was read. ``settings``: the
    run's, by name, as its checkpoint stores them; empty if it has none. ``fingerprint``: that of its data set
    (``Data.fingerprint``); None if the checkpoint does not say. ``seen``: a line about validation images that the
    weights which the run began with were trained on; '' if there are none. ``has_average``: True if the checkpoint
    holds an average besides the weights as trained. ``loss_scaled``: True if the run scaled its loss, as it does only
    in fp16. ``progress``: how far the run had got, as the checkpoint stores it; None if it does not say. ``chosen``:
    the reason for choosing this file of a run's folder, as text; '' if the file was given, or is the newest and there
    is no better one. ``confidence``: what evaluate.py --store has kept in the file for these weights.
    ``marked``: True if the file says that validation images chose its weights. ``averaged``: how many checkpoints'
    weights these are the mean of, for a soup; otherwise 1.
    """

    network: nn.Module
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    arch: str
    path: Path
    settings: dict[str, Any]
    fingerprint: str | None
    seen: str
    has_average: bool
    loss_scaled: bool
    progress: dict[str, Any] | None
    chosen: str
    reading: Reading
    confidence: Confidence | None = None
    marked: bool = False
    averaged: int = 1

    @property
    def is_favoured(self) -> bool:
        """True if validation images chose the weights, which favours what is measured on these images."""
        return are_chosen(self.path, self.marked)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.network, self.classes, self.preprocessing))

    @property
    def fp32_layers(self) -> list[str]:
        """Names of the layers that computed in float32 under autocast, for ``keep_in_fp32``."""
        layers = self.settings.get("fp32_layers")
        return [*map(str, layers)] if isinstance(layers, list) else []


def are_chosen(path: Path, marked: bool) -> bool:
    """True if validation images chose a checkpoint's weights: best.pt's, or those of a copy or soup ``marked`` so.

    A best.pt that its run has set aside counts, too.
    """
    return marked or path.name == BEST or path.name.startswith(f"{checkpoint.ABANDONED}{Path(BEST).stem}")


def load_model(
    path: str | os.PathLike[str],
    *,
    raw: bool = False,
    best: bool | None = None,
    plugins: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] = (),
    calibrated: bool = True,
) -> Loaded:
    """Load the network of a checkpoint file or of a run folder, with its classes and preprocessing.

    From a folder, this is best.pt if ``best`` is True, or if ``best`` is None and early stopping ended the run;
    otherwise the newest checkpoint. ``plugins``: the --plugin file or files that the run was trained with. If the run
    kept a moving average of its weights, that is loaded, as in the reported results; with ``raw``, the trained weights
    are. If the checkpoint keeps a temperature fitted for these weights, the network divides its logits by it, unless
    ``calibrated`` is False. torch's random state does not change. Raises ``UserError`` (a ``ValueError``) with the path
    and what is wrong.
    """
    if plugins:
        load_plugins([plugins] if isinstance(plugins, str | os.PathLike) else plugins)
    path, state, chosen = read_checkpoint(Path(path), best, warnings.warn)
    arch, classes = _named(state, path)
    hub_networks.remember(state.get(hub_networks.KEY))
    _compare_plugins(path, arch, state.get("plugins") or {})
    preprocessing = Preprocessing.from_state(state.get("preprocessing"), path)
    settings = checkpoint.dict_in(state, "settings")
    fingerprint, progress = (state.get(name) for name in ("fingerprint", "progress"))
    has_average = isinstance(state.get("ema"), dict)
    if raw:
        state = {**state, "ema": None}
    with torch.random.fork_rng(devices=[]):  # the checkpoint's weights replace the random ones
        network = build_model(
            shape_of(arch, settings),
            classes=len(classes),
            channels=preprocessing.channels,
            image_size=preprocessing.image_size,
        )
    checkpoint.load_weights(network, checkpoint.weights_of(state, path), str(path))
    if checkpoint.average_moved_since_validation(state) and layers_with_statistics(network):
        warnings.warn(
            f"{path} was saved between two validations: the batch-norm statistics of its average are not computed for "
            "these weights, and it may do much worse than best.pt, which has those computed before a validation",
            stacklevel=2,
        )
    return Loaded(
        network.eval(),
        classes,
        preprocessing,
        arch,
        path,
        settings,
        fingerprint if isinstance(fingerprint, str) else None,
        str(state.get("seen") or ""),
        has_average,
        bool(state.get("scaler")),
        progress if isinstance(progress, dict) else None,
        chosen,
        *_calibrated(network, state, path, calibrated),
        bool(state.get(FAVOURED)),
        _averaged(state),
    )


def _averaged(state: Mapping[str, Any]) -> int:
    """How many checkpoints' mean a soup is; 1 for other checkpoints."""
    ingredients = checkpoint.dict_in(state, "soup").get("ingredients")
    return len(ingredients) if isinstance(ingredients, list) else 1


def _named(state: Mapping[str, Any], path: Path) -> tuple[str, tuple[str, ...]]:
    """Names of a checkpoint's network and classes. Raises ``UserError`` if it lacks them or has another format."""
    arch = state.get("arch")
    classes = checkpoint.class_names(state)
    if not isinstance(arch, str) or not classes:
        raise UserError(f"{path}: does not name its network and classes; give a checkpoint that main.py has saved")
    if state.get("format") != checkpoint.FORMAT:
        raise UserError(
            f"{path}: has checkpoint format {str(state.get('format'))[:20]}, this version loads {checkpoint.FORMAT}"
        )
    return arch, classes


def _calibrated(
    network: nn.Module, state: Mapping[str, Any], path: Path, calibrated: bool
) -> tuple[Reading, Confidence | None]:
    """Return the way to read the logits, and the ``Confidence`` that a checkpoint keeps for its weights, if any.

    A confidence for other weights does not count, nor do the thresholds beside it. With ``calibrated``, makes
    ``network`` divide its logits by the temperature, if there is one.
    """
    confidence = Confidence.from_state(state.get(CONFIDENCE), path)
    if confidence is not None and confidence.weights != ("trained" if state.get("ema") is None else "average"):
        warnings.warn(
            f"{path}: the temperature, distances and thresholds in it were fitted for other weights, and are not used",
            stacklevel=3,
        )
        confidence = None
        state = {**state, "thresholds": None}
    reading = reading_of(state, len(state["classes"]), path)
    if not calibrated or confidence is None or confidence.temperature is None:
        return reading, confidence
    divide_logits(network, confidence.temperature)
    return reading.divided(confidence.temperature), confidence


def read_checkpoint(path: Path, best: bool | None, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any], str]:
    """The file that ``path``, a checkpoint or a run's folder, means; its content; and the reason (``Loaded.chosen``).

    The one place where this is decided for every tool. Raises ``UserError``.
    """
    if not path.is_dir():
        if best:
            raise UserError(f"--best: {path} is one file; give the run's folder, or leave the flag out")
        return path, checkpoint.load(path), ""
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if best and (folder / BEST).exists():
        return folder / BEST, checkpoint.load(folder / BEST), "as --best asks"
    if best:
        raise UserError(f"--best: {folder} holds no {BEST}; a run has one after its first validated epoch")
    newest = checkpoint.newest(folder, warn, checkpoint.load)
    if newest is None:
        raise UserError(f"{path}: holds no checkpoint that can be loaded; give a run folder or a .pt file")
    taken, state = newest
    if taken.name != "last.pt" and (folder / "last.pt").exists():
        warn(f"{taken} is taken instead")
    its_best, epoch, within, stopped = _epochs(state)
    if best is False or taken.name == BEST or (its_best == epoch and not within) or not (folder / BEST).exists():
        return taken, state, ""
    if not stopped:
        own = f"within epoch {epoch + 1}" if within else f"of epoch {epoch}"
        return taken, state, f"the newest, {own}; --best takes the best one, of epoch {its_best}"
    try:
        why = f"the best epoch, {its_best}: the run stopped early, after epoch {epoch} ({taken.name})"
        return folder / BEST, checkpoint.load(folder / BEST), why
    except UserError as error:
        warn(f"{error}; {taken} is taken instead")
        return taken, state, ""


def _epochs(state: Mapping[str, Any]) -> tuple[int, int, bool, bool]:
    """The best epoch of a checkpoint's run, its own, if it is within the next, and if early stopping ended the run.

    Both epochs are equal, and it is within none, if the checkpoint names no best one, for example because another
    program wrote it.
    """
    progress = state.get("progress")
    settings = state.get("settings")
    if not (isinstance(progress, dict) and isinstance(settings, dict)):
        return 0, 0, False, False
    names = ("best_epoch", "epoch", "stopping_epoch", "step_in_epoch")
    its_best, epoch, improved, steps = (value if isinstance(value := progress.get(name), int) else 0 for name in names)
    patience = settings.get("early_stopping")
    planned = settings.get("epochs")
    if not its_best:  # no validated epoch yet
        return epoch, epoch, False, False
    if not isinstance(patience, int) or not isinstance(planned, int):
        return its_best, epoch, steps > 0, False
    return its_best, epoch, steps > 0, epoch < planned and epoch - improved >= patience


def shape_of(arch: str, settings: Mapping[str, Any]) -> ModelSettings:
    """The settings that shape a network, among all ``settings`` of a checkpoint or an exported file."""
    shape: dict[str, Any] = {"model_kwargs": ()}
    for name in shaping("network"):
        value, mistake = convert(OPTIONS[name], settings.get(name, OPTIONS[name].default))
        if value is not None and not mistake:
            shape[name] = value
    return ModelSettings(arch=arch, **shape)


def _compare_plugins(path: Path, arch: str, trained_with: Mapping[str, str]) -> None:
    """Warn of files of --plugin that have changed since the training; raise ``UserError`` if a needed one is absent."""
    now = digests()
    missing = sorted(trained_with.keys() - now)
    if missing and locate(arch) is None:
        raise UserError(f"{path}: its network {arch} is in {', '.join(missing)}; give that file by --plugin")
    for name in sorted(trained_with.keys() & now):
        if now[name] != trained_with[name]:
            warnings.warn(f"{name} is not what it was when {path} was trained", stacklevel=3)
