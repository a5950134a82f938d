"""Everything that an evaluation found, for its text, its files and the copy of the checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.confidence import KEY, Confidence, Distance
from models.load import FAVOURED, Loaded
from scripts.common.command_line import warn
from scripts.common.predictions import AnyPredictions, LabelPredictions
from scripts.evaluation.comparison import Comparison
from scripts.evaluation.distance import LARGEST, Others
from scripts.evaluation.rejection import Rejection
from scripts.evaluation.several_labels import LabelComparison
from scripts.evaluation.summary import Temperature
from utils.checkpoint import checkpoint
from utils.config.datasets import SPECS
from utils.config.settings import UserError


@dataclass(frozen=True)
class Evaluation:
    """Answers, and further results that flags ask for. ``temperature`` is None if the images are too few to fit it."""

    predictions: AnyPredictions
    temperature: Temperature | None
    comparison: Comparison | LabelComparison | None = None
    rejection: Rejection | None = None
    distance: Distance | None = None
    others: Others | None = None


def store(path: Path, loaded: Loaded, found: Evaluation, description: dict[str, Any]) -> str:
    """Write a copy of ``loaded``'s checkpoint with the temperature and distance that were ``found``; return a summary.

    For multi-label data the copy also keeps each label's best threshold, for probabilities without the temperature.
    Raises ``UserError`` if there is nothing to keep, if a run that goes on has replaced the checkpoint meanwhile, or if
    the copy cannot be written.
    """
    several = found.predictions.reading.several
    fit = found.temperature
    fit = None if fit is None or fit.at_limit else fit
    distance = _small_enough(found.distance)
    if fit is None and distance is None and not several:
        raise UserError(
            "--store: the images determine no temperature, and nothing is stored; give more with --datapath"
        )
    fitted = "no temperature"
    if fit is not None:
        name = description["dataname"] or ""
        of_the_user = description["datapath"] and (not name or SPECS[name].of_the_user)
        data = Path(description["datapath"]).name if of_the_user else name  # without a path of this machine
        amp = "" if description["amp"] == "off" else f", in {description['amp']}"
        images = f"{fit.fitted_on_images:,} images ({data}, {description['split']}{amp})"
        fitted = (
            f"temperature {fit.temperature:.4g}, fitted on {images}; on "
            f"{fit.scored_on_images:,} others calibration error {fit.calibration_error_before:.2f} % without and "
            f"{fit.calibration_error_after:.2f} % with it, loss {fit.loss_before:.4f} and {fit.loss_after:.4f}"
        )
    weights = "average" if loaded.has_average and not description["raw_weights"] else "trained"
    temperature = fit and fit.temperature
    kept = Confidence(temperature, weights, description["tta"], fitted, found.predictions.digest, distance)
    entries = {
        KEY: kept.state(),
        **({FAVOURED: True} if loaded.is_favoured else {}),
        **({"thresholds": found.predictions.by_class.thresholds.tolist()} if several else {}),
    }
    try:
        state = checkpoint.load(loaded.path)
        progress = state.get("progress")
        if isinstance(progress, dict) and progress.get("step") != description["step"]:
            raise UserError(f"{loaded.path} has other weights now than were evaluated; evaluate it again")
        checkpoint.write_whole(path, {**state, **entries})
    except UserError as error:
        raise UserError(f"--store: {error}") from error
    words = [fitted, _thresholds(found.predictions)] if several else [fitted]
    if distance is not None:
        words.append(f"distance, fitted on {distance.fitted_on:,} training images")
    return "; ".join(words)


def _thresholds(predictions: LabelPredictions) -> str:
    of = predictions.by_class
    chosen = f"thresholds of {len(of.thresholds)} labels, chosen on {len(predictions):,} images"
    if math.isnan(of.tuned_micro_f1):
        return chosen
    return (
        f"{chosen}; chosen on half of these, "
        f"macro F1 {of.tuned_macro_f1:.2f} % and micro F1 {of.tuned_micro_f1:.2f} % on the other half, at 0.5 "
        f"{of.macro_f1:.2f} % and {of.micro_f1:.2f} %"
    )


def _small_enough(distance: Distance | None) -> Distance | None:
    """The ``distance``; None, with a warning, if it is too large for a checkpoint."""
    size = 0 if distance is None else sum(one.nbytes for one in (distance.mean, distance.whitening, distance.centres))
    if size > LARGEST:
        warn(f"--store: the distance takes {size / 2**20:.0f} MiB of at most {LARGEST / 2**20:.0f}, and is left out")
        return None
    return distance
