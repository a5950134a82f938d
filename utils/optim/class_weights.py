"""Weights of the classes in the training loss, for data sets with rare classes."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from utils.config.groups.loss import BALANCED, LossSettings
from utils.config.settings import UserError
from utils.config.spelling import reason_of, some


def class_weights(labels: torch.Tensor, classes: Sequence[str], setting: str) -> torch.Tensor:
    """The weight of each class, float32 (classes,), whose mean over the training images is 1.

    ``labels``: int64 (n,), of the training images. ``setting``: 'balanced' for n / (k * count), as in scikit-learn's
    ``compute_class_weight``, where k is the number of classes with images; otherwise a CSV or YAML file of class names
    and weights (``read_weights``), which are divided by their mean over the training images, because losses divide by
    the number of images, not by the sum of the weights (``WeightedCrossEntropy``). For multi-label data, labels are
    int8 (n, classes), and the weights those of ``of_several_labels``.
    """
    if labels.ndim > 1:
        return of_several_labels(labels, classes, setting)
    counts = torch.bincount(labels.cpu(), minlength=len(classes)).double()
    if setting == BALANCED:
        present = counts > 0
        weights = torch.where(present, counts.sum() / (present.sum() * counts), 1.0)
    else:
        weights = torch.tensor(read_weights(Path(setting), classes), dtype=torch.float64)
        mean = (weights * counts).sum() / counts.sum()
        if not mean > 0:
            raise UserError(f"--class-weights {setting}: no training image has a weight above 0")
        weights = weights / mean
    return weights.float()


def of_several_labels(labels: torch.Tensor, classes: Sequence[str], setting: str) -> torch.Tensor:
    """Factor, for each class, of the loss terms of images that show it: float32 (classes,), as torch's ``pos_weight``.

    ``labels``: int8 (n, classes) of multi-label data: 1 shown, 0 not shown, -1 missing. With 'balanced' the factor is
    the number of images known not to show the class divided by the number that show it, so that both weigh the same; 1
    if either number is 0. Otherwise the file gives the factors.
    """
    if setting != BALANCED:
        return torch.tensor(read_weights(Path(setting), classes), dtype=torch.float32)
    shown, others = ((labels.cpu() == label).sum(0).double() for label in (1, 0))
    return torch.where((shown > 0) & (others > 0), others / shown, 1.0).float()


def other_weights(weights: torch.Tensor, settings: LossSettings, state: dict[str, Any], path: Path) -> tuple[str, str]:
    """Message if the checkpoint to resume was trained with other class weights, and what to do; both '' if it was not.

    ``state``: the checkpoint's content; ``path``: its file. There is a message, too, if an earlier version applied the
    same weights to the terms of classes (--loss bce, label smoothing) instead of to images.
    """
    trained = f"--class-weights: {path} was trained with"
    begun = state.get("class_weights")
    if begun not in (None, weights.tolist()):  # a run without weights differs in its settings
        return f"{trained} other weights of the classes", "restore the file"
    if begun and not state.get("weighs_images") and (settings.loss == "bce" or settings.label_smoothing):
        losses = "--loss bce" if settings.loss == "bce" else "--label-smoothing"
        return (
            f"{trained} an earlier version's {losses}, which weighted the classes' terms, not the images",
            "begin anew",
        )
    return "", ""


def read_weights(path: Path, classes: Sequence[str]) -> list[float]:
    """Read the weights of ``classes`` from lines ``name,weight`` of a CSV file or ``name: weight`` of a YAML file.

    Raises ``UserError`` if the file cannot be read, lacks a class, names an unknown class or one twice, or if a weight
    is not a finite number of at least 0.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = _of_yaml(text) if path.suffix in (".yaml", ".yml") else _of_csv(text)
    except OSError as error:
        raise UserError(f"--class-weights {path}: cannot be read ({reason_of(error)})") from error
    except (ValueError, yaml.YAMLError, csv.Error) as error:
        raise UserError(
            f"--class-weights {path}: not lines of a class name and its weight ({reason_of(error)})"
        ) from error
    weights = dict(rows)
    names = [name for name, _ in rows]
    wrong = {
        "lacks": [name for name in classes if name not in weights],
        "names what is no class:": [name for name in weights if name not in classes],
        "names twice": [name for name in weights if names.count(name) > 1],
        "has no weight of at least 0 for": [name for name, weight in rows if not _is_weight(weight)],
    }
    if mistakes := [f"--class-weights {path}: {text} {some(those, 5)}" for text, those in wrong.items() if those]:
        raise UserError(*mistakes)
    return [float(weights[name]) for name in classes]


def _of_csv(text: str) -> list[tuple[str, str]]:
    rows = []
    for row in csv.reader(text.splitlines(), strict=True):
        if any(row) and len(row) != 2:
            raise ValueError(f"{','.join(cell.strip() for cell in row)!r}")
        if any(row):
            rows.append((row[0].strip(), row[1].strip()))
    return rows[1:] if rows and rows[0] == ("class", "weight") else rows


def _of_yaml(text: str) -> list[tuple[str, str]]:
    mapping = yaml.compose(text, Loader=yaml.SafeLoader)  # as written: a class may be called 007 or no
    if not isinstance(mapping, yaml.MappingNode) or any(
        not isinstance(node, yaml.ScalarNode) for pair in mapping.value for node in pair
    ):
        raise ValueError("no mapping of names to numbers")
    return [(name.value, weight.value) for name, weight in mapping.value]


def _is_weight(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False
