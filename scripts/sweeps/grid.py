"""Training runs of a sweep: one for each combination of values, each seed and each fold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.common.command_line import refuse
from scripts.common.runs import matches
from utils.config import arguments
from utils.config.arguments import OPTIONS
from utils.config.settings import Settings, UserError, flag_of
from utils.config.spelling import meant_value

SWEPT_ITSELF = {"seed", "name", "folds", "fold", "fold_seed"}


@dataclass(frozen=True)
class Trial:
    """A training run: the varied values, a seed, main.py's arguments, and the settings that result.

    ``fold``: the fold that is held out; None without folds. ``number``: of a search's trial; None for other runs.
    """

    point: tuple[str, ...]
    seed: int
    flags: tuple[str, ...]
    args: Settings = field(compare=False)
    fold: int | None = None
    number: int | None = None

    @classmethod
    def of(
        cls, common: Sequence[str], point: tuple[str, ...], seed: int, folds: int | None = None, fold: int | None = None
    ) -> Trial:
        """The run with the flags ``common`` and the values of ``point``; the seed also deals out the ``folds``, if any.

        Raises ``UserError``, also for a network that does not exist.
        """
        from components import unknown_names

        varied = [word for setting in point for word in _flag(setting)]
        flags = [*common, *varied, "--seed", str(seed)]
        if fold is not None:
            flags += ["--folds", str(folds), "--fold", str(fold), "--fold-seed", str(seed)]
        args = arguments.parse(flags)
        refuse(unknown_names(args))
        return cls(point, seed, tuple(flags), args, fold)

    @property
    def name(self) -> str:
        return " ".join(self.parts)

    @property
    def room(self) -> str:
        """Name of the folder, inside the sweep's folder, that holds the run's."""
        return "runs" if self.number is None else f"trials/{self.number:04}"

    @property
    def parts(self) -> tuple[str, ...]:
        """Values, seed and fold, or the number of a search's trial, each as NAME=VALUE."""
        if self.number is not None:
            return (*self.point, f"trial={self.number}")
        return (*self.point, f"seed={self.seed}", *([] if self.fold is None else [f"fold={self.fold}"]))


def trials(
    recipe: str, varied: Sequence[str], seeds: int, training_flags: Sequence[str], folds: int | None = None
) -> list[Trial]:
    """Training runs, seed by seed within each combination of the values in ``varied`` ('lr=0.05,0.1').

    With ``folds``, each seed has that many runs, on folds dealt out by the seed: repeated cross-validation. Raises
    ``UserError`` with the mistakes of all runs, each once.
    """
    choices = [values_of(text) for text in varied]
    names = [values[0].partition("=")[0] for values in choices]
    given = [setting.partition("=") for values in choices for setting in values]
    every = {name: ",".join(value for own, _, value in given if own == name) for name in names if names.count(name) > 1}
    refuse(f"--set {name} is given twice; write {name}={values}" for name, values in every.items())
    refuse_given(names, training_flags)
    made: list[Trial] = []
    mistakes: dict[str, None] = {}
    for point in itertools.product(*choices):
        for seed, fold in itertools.product(range(seeds), [None] if folds is None else range(folds)):
            try:
                made.append(Trial.of(["--config", recipe, *training_flags], point, seed, folds, fold))
            except UserError as error:
                mistakes |= dict.fromkeys(error.mistakes)
    for one, other in itertools.combinations([trial for trial in made if trial.seed == 0 and not trial.fold], 2):
        if matches(one.args, other.args) or matches(other.args, one.args):  # a run of one would count for both
            same = f"--set: {' '.join(one.point)} and {' '.join(other.point)} may be the same training; leave one out"
            mistakes.setdefault(same)
    refuse(mistakes)
    return made


def refuse_given(names: Sequence[str], training_flags: Sequence[str]) -> None:
    """Raise ``UserError`` if a varied setting is also given as a flag."""
    fixed = (name for name in names if _is_given(name, training_flags))
    refuse(f"--{name} contradicts --set {name}=...; remove one" for name in fixed)


def setting_of(text: str) -> tuple[str, str]:
    """Setting that 'lr=0.05,0.1' varies, as a key of ``OPTIONS``, and the text after '='. Raises ``UserError``."""
    name, _, values = text.partition("=")
    name = name.removeprefix("--").replace("-", "_")
    known = [option.replace("_", "-") for option in OPTIONS]
    if name not in OPTIONS:
        raise UserError(f"--set {text}: {name.replace('_', '-')} is not a setting{meant_value(name, known)}")
    meta = OPTIONS[name].metadata
    if name in SWEPT_ITSELF or not meta["in_recipe"] or not meta["affects_result"]:
        advice = "vary --global-batch-size" if name == "batch_size" else "choose a setting that shapes the result"
        raise UserError(f"--set {text}: {flag_of(name)} cannot be varied; {advice}")
    return name, values


def values_of(text: str) -> list[str]:
    """'lr=0.05' and 'lr=0.1' of 'lr=0.05,0.1'. Raises ``UserError``."""
    name, values = setting_of(text)
    given = [value.strip() for value in values.split(",")]
    meta = OPTIONS[name].metadata
    if not all(given):
        raise UserError(f"--set {text}: write setting=value,value such as lr=0.05,0.1")
    if len(set(given)) < len(given):
        raise UserError(f"--set {text}: a value is given twice")
    if ".." in values and meta["type"] in (int, float):
        raise UserError(f"--set {text}: a range needs --search N; list the values instead")
    if meta["type"] is bool and not set(given) <= {"true", "false"}:
        raise UserError(f"--set {text}: the values of {flag_of(name)} are true and false")
    return [f"{name.replace('_', '-')}={value}" for value in given]


def _is_given(name: str, words: Sequence[str]) -> bool:
    """True if the command-line arguments ``words`` contain a flag of the setting ``name``."""
    short = OPTIONS[name.replace("-", "_")].metadata["short"]
    return any(
        word.partition("=")[0] in (f"--{name}", f"--no-{name}") or (short and word.startswith(short)) for word in words
    )


def _flag(setting: str) -> list[str]:
    """Arguments of a flag for NAME=VALUE; for a setting with several values, 'shift+flip' gives two."""
    name, _, value = setting.partition("=")
    meta = OPTIONS[name.replace("-", "_")].metadata
    if meta["type"] is bool:
        return [f"--{name}" if value == "true" else f"--no-{name}"]
    return [f"--{name}", *(value.split("+") if meta["many"] else [value])]
