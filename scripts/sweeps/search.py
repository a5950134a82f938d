"""Search by Optuna: trials on a part of the training images, kept in a database, so that a killed search can go on.

A trial's values depend only on its number and the trials before it, since no generator's state is kept: a killed search
continues as if it had not been interrupted. Only among simultaneous trials does the order of ending matter.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from scripts.common.runs import RunResult, identity
from scripts.sweeps.grid import Trial
from scripts.sweeps.space import Space
from utils.config import plugins
from utils.config.settings import UserError, as_user_error
from utils.record.epoch_scalars import EpochScalar
from utils.record.run_folder import read_table
from utils.runtime.console import log

STUDY = "search"
DATABASE = "search.db"
SEARCH, POINT, PRUNED = "search", "point", "pruned"  # attributes of the study and its trials
EPOCHS, FOLDER, SECONDS, WHY = "epochs", "folder", "seconds", "why"
STARTUP_TRIALS = 5  # trials that the median pruner waits for
SHOWN = 10  # trials in the printed table


@dataclass
class Search:
    """A study in ``folder``: trials in ``space``, each judged by ``metric`` on the fold that it holds out.

    Trials worse than others at the same epoch are ended early, unless ``pruner`` is 'none'.
    """

    space: Space
    folder: Path
    metric: EpochScalar
    pruner: str
    study: optuna.Study = field(init=False)
    running: dict[int, optuna.Trial] = field(default_factory=dict)
    judged: dict[int, int] = field(default_factory=dict)  # last epoch of each trial that the pruner saw

    def __post_init__(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        said = f"{self.folder / DATABASE}: cannot be read or written"
        advice = "; free some space if the disk is full, or choose another --output"
        with as_user_error(said, Exception, advice):  # a damaged file raises many kinds of errors
            self.study = optuna.create_study(
                storage=storage(self.folder),
                study_name=STUDY,
                load_if_exists=True,
                direction="minimize" if self.metric.lower_is_better else "maximize",
                pruner=pruner_of(self.pruner, max(self.space.epochs)),
            )

    def refuse_other(self, images: str) -> None:
        """Raise ``UserError`` if the folder holds a search with other settings, --plugin files or images.

        ``images``: the fingerprint of the data set.
        """
        varied = {dimension.name.replace("-", "_") for dimension in self.space.dimensions}
        ours = {
            "--set": sorted(self.space.texts),
            "--folds": self.space.folds,
            "--pruner": self.pruner,
            "--best-metric": self.metric.name,
            "the images": images,
            **({"the files of --plugin": files} if (files := plugins.digests()) else {}),
            **{name: str(value) for name, value in identity(self.space.first).items() if name not in varied},
        }
        kept = self.study.user_attrs.get(SEARCH)
        if kept is None:
            self.study.set_user_attr(SEARCH, ours)
        elif kept != ours:
            other = ", ".join(name for name in {**kept, **ours} if kept.get(name) != ours.get(name))
            raise UserError(f"--output {self.folder}: holds a search with other settings ({other}); choose another")

    # -------------------------------------------------------------------------------------------- trials

    def told(self) -> list[FrozenTrial]:
        return [trial for trial in self.study.trials if trial.state.is_finished()]

    def ask(self, count: int) -> Iterator[Trial]:
        """Yield training runs until there are ``count`` trials: first those that were killed, then new ones."""
        cut = [trial for trial in self.study.trials if not trial.state.is_finished()]
        while cut or len(self.study.trials) < count:
            known = cut.pop(0) if cut else None
            number = len(self.study.trials) if known is None else known.number
            self.study.sampler = sampler(number)
            trial = self.study.ask() if known is None else optuna.Trial(self.study, known._trial_id)
            point = tuple(f"{dimension.name}={dimension.suggest(trial)}" for dimension in self.space.dimensions)
            trial.set_user_attr(POINT, point)
            if PRUNED in trial.user_attrs:  # but killed before the study was told
                self.study.tell(trial, state=TrialState.PRUNED)
                continue
            try:
                training = self.space.trial(trial.number, point)
            except UserError as error:
                self._fail(trial, error.mistakes[0])
                log(f"[{len(self.told())}/{count}] trial={trial.number}: is not possible: {error.mistakes[0]}")
                continue
            self.running[trial.number] = trial
            yield training

    def worthwhile(self, training: Trial) -> bool:
        """Report the epochs that a running trial has finished; False if the pruner wants it ended."""
        trial = self.running[training.number]
        if PRUNED in trial.user_attrs:
            return False
        for epoch, value in self._values(self._rows(training)):
            if epoch >= training.args.optimisation.epochs:
                break  # the trial is fully trained
            if epoch <= self.judged.get(trial.number, 0):
                continue
            self.judged[trial.number] = epoch
            steps = self.study._storage.get_trial(trial._trial_id).intermediate_values
            if epoch not in steps:
                trial.report(value, epoch)
            elif epoch < max(steps):
                continue  # judged before the search was killed
            if trial.should_prune():
                trial.set_user_attr(PRUNED, epoch)
                return False
        return True

    def ended(self, training: Trial, outcome: RunResult | str) -> str:
        """Tell the study how the trial ended; return that as text."""
        worth_it = self.worthwhile(training)
        trial = self.running.pop(training.number)
        column = self.metric.column
        if not worth_it:
            self.study.tell(trial, state=TrialState.PRUNED)
            epoch = trial.user_attrs[PRUNED]
            value = trial.study.trials[trial.number].intermediate_values[epoch]
            return f"ended early, {column} {value:.4g} after epoch {epoch}"
        if isinstance(outcome, str):
            self._fail(trial, outcome)
            return f"failed, and cannot win: {outcome}"
        rows = self._rows(training)
        found = dict(self._values(rows))
        value = found[max(found)] if found else math.nan
        if not math.isfinite(value):
            self._fail(trial, f"{column} is {value}")
            return f"failed, and cannot win: {column} is {value}"
        for name, fact in ((EPOCHS, len(rows)), (SECONDS, round(outcome.seconds, 3)), (FOLDER, str(outcome.folder))):
            trial.set_user_attr(name, fact)
        doubts = "; ".join(outcome.doubts)
        if doubts:
            trial.set_user_attr(WHY, doubts)
        self.study.tell(trial, value)
        return f"{column} {value:.4g} after {outcome.seconds:.0f} s" + (f"; cannot win: {doubts}" if doubts else "")

    def _fail(self, trial: optuna.Trial, why: str) -> None:
        trial.set_user_attr(WHY, why)
        self.study.tell(trial, state=TrialState.FAIL)

    def _rows(self, training: Trial) -> list[dict[str, str]]:
        """Rows of the trial's metrics.csv; empty before its first epoch has ended."""
        files = sorted((self.folder / training.room).rglob("metrics.csv"), key=os.path.getmtime)
        try:
            return read_table(files[-1])[0] if files else []
        except (OSError, ValueError):  # the file is being written
            return []

    def _values(self, rows: Sequence[dict[str, str]]) -> list[tuple[int, float]]:
        """(epoch, metric) of each validated epoch."""
        column = self.metric.column
        return [(int(row["epoch"]), float(row[column])) for row in rows if row.get(column)]

    # ------------------------------------------------------------------------------------------- results

    def best(self, count: int) -> list[FrozenTrial]:
        """The ``count`` best trials at different points, best first, without doubtful ones."""
        sound = [trial for trial in self.study.trials if trial.state == TrialState.COMPLETE and not _why(trial)]
        sign = 1 if self.metric.lower_is_better else -1
        points: dict[tuple[str, ...], FrozenTrial] = {}
        for trial in sorted(sound, key=lambda trial: (sign * trial.value, trial.number)):
            points.setdefault(point_of(trial), trial)
        return [*points.values()][:count]

    def importances(self) -> dict[str, float]:
        """Share of the metric's variance over the ranges that each setting explains alone (fANOVA); {} if unknown.

        By a random forest fitted to the trained trials. What settings explain only together is in no share, so the
        shares add up to at most about 1.
        """
        trained = [trial for trial in self.study.trials if trial.state == TrialState.COMPLETE]
        if len(trained) < 4 or len({trial.value for trial in trained}) < 2:
            return {}
        study = optuna.create_study(direction=self.study.direction)
        study.add_trials([_in_logarithms(trial) for trial in trained])
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator, normalize=False))

    def csv_rows(self) -> list[dict[str, Any]]:
        """One CSV row per trial: its values, how it ended, and its metric (of a pruned trial, at its last epoch)."""
        return [
            {
                "trial": trial.number,
                **dict(setting.split("=", 1) for setting in point_of(trial)),
                "state": trial.state.name.lower(),
                self.metric.column: "" if (value := last_value(trial)) is None else f"{value:.6g}",
                "epochs": trial.user_attrs.get(EPOCHS, trial.user_attrs.get(PRUNED, "")),
                "seconds": trial.user_attrs.get(SECONDS, ""),
                "folder": trial.user_attrs.get(FOLDER, ""),
                "why": _why(trial),
            }
            for trial in self.study.trials
            if point_of(trial)
        ]


def storage(folder: Path) -> optuna.storages.BaseStorage:
    """Optuna storage for the database in ``folder``, whatever characters the folder's name has."""
    from sqlalchemy.engine import URL

    url = URL.create("sqlite", database=str((folder / DATABASE).absolute()))
    return optuna.storages.RDBStorage(url.render_as_string())


def sampler(number: int) -> optuna.samplers.BaseSampler:
    """Tree-structured Parzen estimator whose random numbers depend only on the trial's ``number``."""
    seed = int(np.random.SeedSequence([0, number]).generate_state(1)[0])
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _in_logarithms(trial: FrozenTrial) -> FrozenTrial:
    """A copy with the logarithms of what logarithmic ranges gave: the evaluator takes all numbers as evenly spread."""
    params, ranges = dict(trial.params), dict(trial.distributions)
    for name, its in trial.distributions.items():
        if getattr(its, "log", False):
            params[name] = math.log(params[name])
            ranges[name] = optuna.distributions.FloatDistribution(math.log(its.low), math.log(its.high))
    return optuna.trial.create_trial(params=params, distributions=ranges, value=trial.value)


def pruner_of(name: str, epochs: int) -> optuna.pruners.BasePruner:
    """Optuna pruner: 'median' compares after a quarter of the epochs, 'hyperband' from the first; 'none' never does."""
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=epochs, reduction_factor=3)
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS, n_warmup_steps=math.ceil(epochs / 4))
    return optuna.pruners.NopPruner()


def _why(trial: FrozenTrial) -> str:
    return trial.user_attrs.get(WHY, "")


def point_of(trial: FrozenTrial) -> tuple[str, ...]:
    """Values of a trial, each as NAME=VALUE."""
    return tuple(trial.user_attrs.get(POINT, ()))


def last_value(trial: FrozenTrial) -> float | None:
    """Metric of a trained trial, or of another one after its last reported epoch; None if there is none."""
    if trial.state == TrialState.COMPLETE:
        return trial.value
    return trial.intermediate_values.get(trial.last_step) if trial.last_step is not None else None
