"""Model soups: read the checkpoints to average, compare them with each other, average and save them.

Wortsman et al., Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing
inference time, 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from models.confidence import KEY as CONFIDENCE
from models.load import FAVOURED, are_chosen, read_checkpoint
from scripts.common.command_line import refuse, say, warn
from scripts.common.trained import find_run
from utils.checkpoint import checkpoint
from utils.checkpoint.resume import ResumePoint
from utils.config import hub_networks
from utils.config.settings import UserError, shaping

NEEDED = ("format", "arch", "classes", "preprocessing", "settings", "versions", "fingerprint")
OF_ITS_WEIGHTS = {"model", "ema", "optimizer", "scaler", "progress", "soup", CONFIDENCE, "thresholds", FAVOURED}
SAME = {"arch": "network", "classes": "classes", "preprocessing": "preprocessing", "multilabel": "kinds of labels"}
StateDict = dict[str, torch.Tensor]


class Ingredient(NamedTuple):
    """A checkpoint to average: its path, the weights that its run reports metrics of, and the rest of its content.

    ``description`` leaves out what holds for its weights alone, such as progress and temperature. ``is_favoured``: as
    of ``Loaded``.
    """

    path: Path
    weights: StateDict
    description: dict[str, Any]
    is_favoured: bool

    @property
    def point(self) -> ResumePoint:
        """A ``ResumePoint`` with all but the weights."""
        return ResumePoint(self.path, self.description, digest="")


def read(text: str, best: bool | None) -> Ingredient:
    """Read the checkpoint of RUN ``text``, a file or run folder. ``best``: see ``load_model``. Raises ``UserError``."""
    path, state, chosen = read_checkpoint(find_run(text), best, warn)
    if chosen:
        say(f"{path} is taken: {chosen}")
    lacking = [key for key in NEEDED if key not in state]
    if lacking or not isinstance(state["settings"], dict) or state["format"] != checkpoint.FORMAT:
        raise UserError(f"--checkpoints {path}: is not a checkpoint that this version of main.py saves")
    hub_networks.remember(state.get(hub_networks.KEY))
    weights = checkpoint.weights_of(state, path)
    if checkpoint.average_moved_since_validation(state) and any(name.endswith("running_mean") for name in weights):
        warn(
            f"{path} was saved between two validations: the batch-norm statistics of its average are of other weights, "
            "so its own figure, by which a greedy soup chooses, may be much too low"
        )
    description = {key: value for key, value in state.items() if key not in OF_ITS_WEIGHTS}
    return Ingredient(path, weights, description, are_chosen(path, bool(state.get(FAVOURED))))


def refuse_differences(ingredients: Sequence[Ingredient]) -> None:
    """Raise ``UserError`` with a line for each checkpoint whose network, classes or preprocessing differ.

    The first checkpoint is the one that all others are compared with.
    """
    first = ingredients[0]
    mistakes = []
    for number, other in enumerate(ingredients[1:], 1):
        differences = _differences(first, other)
        if same := [earlier.path for earlier in ingredients[:number] if other.path.samefile(earlier.path)]:
            differences.append("is given twice" if same[0] == other.path else f"is the same file as {same[0]}")
        mistakes += [f"--checkpoints {other.path}: {words}" for words in differences[:1]]
    refuse(mistakes)


def _differences(first: Ingredient, other: Ingredient) -> list[str]:
    whose = f"than {first.path}"
    words = [
        f"has {'another' if key == 'arch' else 'other'} {name} {whose}: {_short(theirs)} where that has {_short(ours)}"
        for key, name in SAME.items()
        if (theirs := other.description.get(key)) != (ours := first.description.get(key))
    ]
    settings = (first.description["settings"], other.description["settings"])
    words += [
        f"was made with other --{name.replace('_', '-')} {whose}"
        for name in shaping("network")
        if (settings[0].get(name) or None) != (settings[1].get(name) or None)  # an older checkpoint may lack a setting
    ]
    shapes = [{name: value.shape for name, value in one.weights.items()} for one in (first, other)]
    return words + ([f"has weights of other names or shapes {whose}"] if shapes[0] != shapes[1] else [])


def _short(value: Any) -> str:
    text = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def mean(several: Sequence[StateDict]) -> StateDict:
    """Mean of each weight, in double precision, returned in the weight's dtype; integer counters are the first's."""
    wide = {True: torch.complex128, False: torch.float64}
    return {
        name: sum(weights[name].to(wide[first.is_complex()]) for weights in several).div_(len(several)).to(first.dtype)
        if first.is_floating_point() or first.is_complex()
        else first.clone()
        for name, first in several[0].items()
    }


def statistics_differ(ingredients: Sequence[Ingredient], layer: str) -> bool:
    """True if the batch-norm ``layer`` has other statistics in some ingredient than in the first."""
    names = [f"{layer}.running_mean", f"{layer}.running_var"]
    first, *others = ([one.weights[name] for name in names if name in one.weights] for one in ingredients)
    return any(not torch.equal(one, other) for their in others for one, other in zip(first, their, strict=True))


def save(path: Path, weights: StateDict, description: dict[str, Any], made_of: dict[str, Any]) -> None:
    """Write a checkpoint of ``weights`` for --weights and --evaluate; a run cannot continue from it.

    ``made_of``: facts about what was averaged. Raises ``UserError`` if the file cannot be written.
    """
    cpu = {name: value.detach().cpu() for name, value in weights.items()}
    try:
        checkpoint.write_whole(path, {**description, "model": cpu, "ema": None, "soup": made_of})
    except UserError as error:
        raise UserError(f"--output: {error}") from error


Score = Callable[[StateDict, bool], float]  # of weights, and whether their batch-norm statistics must be computed


class Soup(NamedTuple):
    """Averaged ``weights``. ``scores``: of each ingredient alone. ``kept``: indices of the averaged ones, in order."""

    weights: StateDict
    scores: list[float]
    kept: list[int]


def uniform(ingredients: Sequence[StateDict], score: Score) -> Soup:
    """Average all ingredients. ``score`` gives each ingredient's own score."""
    scores = [score(weights, False) for weights in ingredients]
    return Soup(mean(ingredients), scores, list(range(len(ingredients))))


def greedy(ingredients: Sequence[StateDict], score: Score) -> Soup:
    """Start from the best ingredient; add each other that does not lower the mean's score (the paper's recipe 1)."""
    scores = [score(weights, False) for weights in ingredients]
    # Of equal ones, the first given; mean average precision is NaN for a network that gives NaN.
    first, *others = sorted(range(len(scores)), key=lambda place: (math.isnan(scores[place]), -scores[place]))
    kept = [first]
    best = scores[first]
    for place in others:
        mixed = score(mean([ingredients[one] for one in (*kept, place)]), True)
        if mixed >= best:
            kept = [*kept, place]
            best = mixed
    return Soup(mean([ingredients[place] for place in kept]), scores, kept)
