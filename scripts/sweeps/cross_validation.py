"""Cross-validation: each image's prediction by the network that was not trained on it, and the mean over folds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.common.choice import Chosen, point_of, settings_of
from scripts.common.command_line import warn
from scripts.common.output import write_csv
from scripts.common.predictions import Predictions, predict_split
from scripts.common.runs import RunResult, deviation, reach, validated_to_trained
from scripts.common.uncertainty import CONFIDENCE, of_groups, wilson_interval
from scripts.sweeps.grid import Trial
from scripts.sweeps.outcomes import in_words, label
from utils.config.settings import UserError
from utils.data.formats.held_out import Folds, stored_folds

METHOD = "corrected t interval (Nadeau and Bengio 2003; Bouckaert and Frank 2004)"
SAME = 1e-3  # percentage points by which the log's rounded figure may differ


@dataclass(frozen=True)
class OneFold:
    """Predictions for the images of one fold, by the last weights of the run that held it out.

    ``numbers``: int64 (n,), the images' indices among all training images.
    """

    trial: Trial
    predictions: Predictions
    numbers: np.ndarray
    folds: Folds

    def rows(self) -> list[dict[str, Any]]:
        """One row per image: its path or number, class, fold, predicted class, and each class's probability.

        Multi-label images have a column ``unknown``, too: the classes whose label is missing.
        """
        of = self.predictions
        names = of.classes
        reading = of.reading
        given = reading.labels(of.logits) or reading.likeliest(of.logits, 1)
        in_memory = not hasattr(of.images, "paths")
        return [
            {
                "image": f"train[{number}]" if in_memory else image,
                "class": _names(np.flatnonzero(truth == 1) if reading.several else [truth], names),
                **({"unknown": _names(np.flatnonzero(truth < 0), names)} if reading.several else {}),
                "fold": self.trial.fold,
                "predicted": _names([label for label, _ in answer], names),
                **{f"probability {name}": f"{share:.6f}" for name, share in zip(names, shares, strict=True)},
            }
            for number, image, truth, answer, shares in zip(
                self.numbers.tolist(),
                of.ids,
                of.targets if reading.several else of.truth,
                given,
                reading.probabilities(of.logits.double()).tolist(),
                strict=True,
            )
        ]


def _names(labels: Sequence[int], classes: Sequence[str]) -> str:
    return ";".join(classes[label] for label in labels)


def cross_validate(planned: Sequence[Trial], results: Mapping[Trial, RunResult], folder: Path) -> list[str]:
    """Write the files of each combination of values whose folds are all trained; return lines about them.

    Raises ``UserError`` if the runs of a combination do not hold out each image exactly once.
    """
    lines = []
    rows = []
    points = {trial.point: None for trial in planned}
    for place, point in enumerate(points):
        trials = [trial for trial in planned if trial.point == point]
        if not all(trial in results for trial in trials):
            continue
        name = label(point, [results[trials[0]]])
        pooled = []
        sizes = []
        for seed in sorted({trial.seed for trial in trials}):
            folds = [predicted(trial, results[trial]) for trial in trials if trial.seed == seed]
            refuse_incomplete(folds)
            sizes += [len(one.numbers) for one in folds]
            file = folder / f"out_of_fold{f'_{place}' if points.keys() - {point} else ''}_seed{seed}.csv"
            numbered = [pair for one in folds for pair in zip(one.numbers.tolist(), one.rows(), strict=True)]
            write_csv(file, [row for _, row in sorted(numbered, key=lambda pair: pair[0])])
            pooled.append(_pooled(folds, seed, file))
        row = summary([results[trial] for trial in trials], sizes, len(folds))
        rows.append({"setting": name, **row})
        low, high = (row[end] for end in ("low", "high"))
        run = results[trials[0]]
        lines += [
            f"{name}: {in_words([run])} {row[f'mean_{run.headline}']} % over {row['runs']} runs of {row['seeds']} "
            f"seed(s), standard deviation {row['deviation']}, {100 * CONFIDENCE:.0f} % interval {low} to {high}: "
            f"{METHOD}",
            *pooled,
            *_doubts(run),
        ]
    if rows:
        write_csv(folder / "cross_validation.csv", rows)
        lines.append(f"Files: {folder / 'cross_validation.csv'}, {folder / 'out_of_fold*.csv'}")
    return lines


def predicted(trial: Trial, result: RunResult) -> OneFold:
    """Predictions of a finished run for the fold that it held out. Raises ``UserError``."""
    from models import load_model

    loaded = load_model(result.folder, best=False)  # the last weights: best.pt was chosen on this fold
    chosen = Chosen(device=result.args.run.device, progress=False)
    predictions = predict_split(loaded, chosen)
    folds = stored_folds(settings_of(loaded, chosen).data, point_of(loaded))
    if folds is None:
        raise UserError(f"{loaded.path}: does not hold the folds that it was trained with")
    held_out = np.flatnonzero(folds.folds == trial.fold)
    if len(held_out) != len(predictions.images):
        raise UserError(f"{loaded.path}: was trained when fold {trial.fold} had {len(held_out):,} images; train anew")
    whole = result.args.data.max_val_batches is None and len(predictions) == len(held_out)
    now = predictions.report.headline
    if whole and abs(now - result.final) > SAME:
        warn(f"{trial.name}: {in_words([result])} is {now:.4f} now, {result.final:.4f} when it was trained")
    return OneFold(trial, predictions, held_out[predictions.numbers], folds)


def refuse_incomplete(folds: Sequence[OneFold]) -> None:
    """Raise ``UserError`` unless all folds belong to one division of the same images; warn of unreadable images."""
    first = folds[0].folds
    for one in folds:
        if not (np.array_equal(one.folds.images, first.images) and np.array_equal(one.folds.folds, first.folds)):
            raise UserError(
                f"{one.trial.name} and {folds[0].trial.name} were trained on different images or folds, so that they "
                "are no cross-validation; move one away, and it is trained anew"
            )
    numbers = np.concatenate([one.numbers for one in folds])
    assert len(np.unique(numbers)) == len(numbers), "an image in two folds"
    if lacking := len(first.images) - len(numbers):
        warn(f"{lacking:,} of {len(first.images):,} images cannot be read, and have no prediction")


def _pooled(folds: Sequence[OneFold], seed: int, file: Path) -> str:
    """Line about the pooled predictions of all folds of a seed."""
    count = sum(len(one.numbers) for one in folds)
    if folds[0].predictions.reading.several:
        return f"  seed {seed}: {count:,} images predicted out of fold, in {file.name}"
    right = np.concatenate([one.predictions.right for one in folds])
    grouped = folds[0].predictions.groups is not None
    groups = np.concatenate([one.predictions.groups for one in folds]) if grouped else None
    low, high = wilson_interval(right, groups)
    figures = f"{100 * right.mean():.2f} %, 95 % interval {low:.2f} to {high:.2f} (Wilson{of_groups(groups)})"
    return f"  seed {seed}: {right.sum():,} of {count:,} right out of fold, {figures}; {file.name}"


def summary(runs: Sequence[RunResult], sizes: Sequence[int], folds: int) -> dict[str, Any]:
    """Mean, spread and interval of the headline metric of ``runs``, in percent.

    ``sizes``: number of images of each run's fold, which groups make differ by seed; ``folds``: number of each seed.
    """
    values = [run.final for run in runs]
    low, high = corrected_interval(values, validated_to_trained(runs))
    mean = {f"mean_{runs[0].headline}": statistics.fmean(values)}
    numbers = {**mean, "deviation": deviation(values), "low": low, "high": high}
    return {
        "runs": len(values),
        "seeds": len(values) // folds,
        **{name: f"{value:.2f}" for name, value in numbers.items()},
        "smallest_fold": min(sizes),
        "largest_fold": max(sizes),
    }


def corrected_interval(values: Sequence[float], ratio: float) -> tuple[float, float]:
    """95 % interval of a mean of percentages over folds; ``ratio`` as in ``reach``."""
    around = reach(values, ratio)
    mean = statistics.fmean(values)
    return tuple(np.clip([mean - around, mean + around], 0, 100).tolist())


def _doubts(result: RunResult) -> list[str]:
    """Lines about settings that flatter the figures or make them incomplete."""
    args = result.args
    lines = []
    if args.run.early_stopping is not None and args.run.early_stopping < args.optimisation.epochs:
        lines.append("  --early-stopping chose each run's end by the fold that it is scored on, which flatters")
    if args.optimisation.lr_policy == "plateau":
        lines.append("  --lr-policy plateau chose each run's rates by the fold that it is scored on, which flatters")
    if args.data.max_val_batches is not None:
        lines.append("  --max-val-batches: the mean is over some images of each fold, the pooled figure over all")
    return lines
