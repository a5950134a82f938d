"""Search space: ranges and choices of settings, and the training runs at its points."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scripts.common.command_line import refuse
from scripts.sweeps.grid import Trial, refuse_given, setting_of, values_of
from utils.config.arguments import OPTIONS
from utils.config.settings import Settings, UserError, flag_of

if TYPE_CHECKING:
    import optuna

RANGE = re.compile(r"(?P<low>.+?)\.\.(?P<high>.+?)(?P<log>:log)?")
FIXED = ("dataname", "best_metric", "max_val_batches", "val_split")  # the validation images, and the metric
SEARCHED_WITH = 0  # seed of each trial; the best are retrained with other seeds


@dataclass(frozen=True)
class Dimension:
    """A setting that a search varies: one of ``choices``, or a number from ``low`` to ``high``, both included.

    ``log``: sample uniformly in the logarithm. ``whole``: whole numbers.
    """

    name: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    def suggest(self, trial: optuna.Trial) -> str:
        """Value that the sampler proposes, as text for the flag; fractions have four significant digits."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        if self.whole:
            return str(trial.suggest_int(self.name, int(self.low), int(self.high), log=self.log))
        value = float(f"{trial.suggest_float(self.name, self.low, self.high, log=self.log):.4g}")
        return f"{min(max(value, self.low), self.high):g}"

    @property
    def ends(self) -> tuple[str, ...]:
        """Values to check for validity: all choices, or both ends of the range."""
        low, high = (str(int(end)) if self.whole else f"{end:g}" for end in (self.low, self.high))
        return self.choices or (low, high)


@dataclass(frozen=True)
class Space:
    """What is varied (``texts``, parsed into ``dimensions``), and the flags that all runs have in ``common``."""

    common: tuple[str, ...]
    texts: tuple[str, ...]
    dimensions: tuple[Dimension, ...]
    folds: int

    @classmethod
    def of(cls, recipe: str, training_flags: Sequence[str], texts: Sequence[str], folds: int) -> Space:
        """Parse ``texts`` and check all values. Raises ``UserError`` if one is wrong."""
        dimensions = tuple(map(_dimension, texts))
        names = [dimension.name for dimension in dimensions]
        if not names:
            raise UserError("--search needs --set NAME=LOW..HIGH or --set NAME=VALUE,VALUE, what to search")
        twice = sorted({name for name in names if names.count(name) > 1})
        refuse(f"--set {name} is given twice; remove one" for name in twice)
        refuse_given(names, training_flags)
        space = cls(("--config", recipe, *training_flags), tuple(texts), dimensions, folds)
        space.refuse_mistakes()
        return space

    def refuse_mistakes(self) -> None:
        """Raise ``UserError`` unless each end and choice is valid, combined with the first value of other settings."""
        mistakes: dict[str, None] = {}
        for point in self.points():
            try:
                mistakes |= dict.fromkeys(_unfit(self._whole(point)))
                self.trial(0, point)
            except UserError as error:
                mistakes |= dict.fromkeys(error.mistakes)
        refuse(mistakes)

    def points(self) -> Iterator[tuple[str, ...]]:
        """Yield each end and choice, combined with the first value of the other settings."""
        first = [f"{dimension.name}={dimension.ends[0]}" for dimension in self.dimensions]
        for place, dimension in enumerate(self.dimensions):
            for value in dimension.ends:
                yield (*first[:place], f"{dimension.name}={value}", *first[place + 1 :])

    @property
    def first(self) -> Settings:
        """Settings of a run on all training images, at the first point."""
        return self._whole(next(self.points()))

    @property
    def epochs(self) -> set[int]:
        """Numbers of epochs that trials may have."""
        return {self._whole(point).optimisation.epochs for point in self.points()}

    def pruner(self, asked: str | None) -> str:
        """Name of the pruner; 'none' if trials differ in epochs, as they cannot be compared. Raises ``UserError``."""
        if len(self.epochs) == 1:
            return asked or "median"
        if asked not in (None, "none"):
            raise UserError(
                f"--pruner {asked} compares trials at the same epoch, and --set varies epochs; leave it out"
            )
        return "none"

    def _whole(self, point: tuple[str, ...]) -> Settings:
        return Trial.of(self.common, point, SEARCHED_WITH).args

    def trial(self, number: int, point: tuple[str, ...]) -> Trial:
        """Training run of trial ``number``, which validates on the first fold of the training images."""
        return replace(Trial.of(self.common, point, SEARCHED_WITH, self.folds, 0), number=number)

    def finalists(self, points: Sequence[tuple[str, ...]], seeds: int) -> list[Trial]:
        """Training runs of ``points`` on all training images, each with ``seeds`` seeds that no trial had."""
        others = range(SEARCHED_WITH + 1, SEARCHED_WITH + 1 + seeds)
        return [Trial.of(self.common, point, seed) for point in points for seed in others]


def _unfit(args: Settings) -> list[str]:
    """Messages about settings that would make a search's report biased."""
    mistakes = []
    if args.data.val_split is not None:
        mistakes.append(
            "--search: --val-split takes the images of the last report from those of the search; put images aside in "
            "val/, or in a column of splits"
        )
    if args.run.early_stopping is not None:
        mistakes.append(
            "--search: --early-stopping would choose the end of the last trainings by the images of the report; leave "
            "it out, and vary --epochs"
        )
    if args.optimisation.lr_policy == "plateau":
        mistakes.append(
            "--search: --lr-policy plateau would choose the rates of the last trainings by the images of the report; "
            "take another policy"
        )
    return mistakes


def _dimension(text: str) -> Dimension:
    name, values = setting_of(text)
    if name in FIXED:
        fixed = flag_of(name)
        raise UserError(f"--set {text}: a search compares its trials by one figure of the same images; fix {fixed}")
    kind = OPTIONS[name].metadata["type"]
    shown = name.replace("_", "-")
    numbers = RANGE.fullmatch(values) if kind in (int, float) and "," not in values else None
    if numbers is None:
        choices = [setting.partition("=")[2] for setting in values_of(text)]
        if len(choices) < 2:
            raise UserError(f"--set {text}: one value leaves nothing to search; give the flag --{shown} {values}")
        return Dimension(shown, tuple(choices))
    if OPTIONS[name].metadata["many"]:
        raise UserError(f"--set {text}: {flag_of(name)} takes several numbers; list its values")
    try:
        low, high = (kind(numbers[end]) for end in ("low", "high"))
    except ValueError:
        words = "whole numbers" if kind is int else "numbers"
        raise UserError(f"--set {text}: the ends of a range are {words}, such as {shown}=LOW..HIGH") from None
    if not low < high:
        raise UserError(f"--set {text}: the lower end of a range comes first")
    if numbers["log"] and low <= 0:
        raise UserError(f"--set {text}: a logarithmic range begins above 0")
    return Dimension(shown, (), low, high, bool(numbers["log"]), kind is int)
