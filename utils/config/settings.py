"""Settings: one frozen dataclass per group, with default, help and check beside each field.

Flags, recipe keys, ``--help`` and the saved ``config.yaml`` all come from these fields (see
``utils/config/arguments.py``): to add a setting, add a field to its group in ``utils/config/groups``. Nothing here
imports anything heavy, so that ``--help`` and mistakes on the command line are answered at once.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from utils.config.field import DEFAULT, MEASURED
from utils.config.groups.augmentation import AugmentationSettings
from utils.config.groups.average import AverageSettings
from utils.config.groups.data import DataSettings
from utils.config.groups.exchange import ExchangeSettings
from utils.config.groups.logging import LoggingSettings
from utils.config.groups.loss import LOSSES, OF_EACH_CLASS, LossSettings
from utils.config.groups.model import ModelSettings
from utils.config.groups.optimisation import OptimisationSettings
from utils.config.groups.precision import PrecisionSettings
from utils.config.groups.run import RunSettings
from utils.config.spelling import reason_of, some

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["Settings", "UserError"]


class UserError(ValueError):
    """An error that the user can fix; ``main.py`` prints it and ends with exit code 2.

    ``mistakes``: for each, a line that says what is wrong, where, and what to do.
    """

    def __init__(self, *mistakes: str, on_all_ranks: bool = False) -> None:
        self.mistakes = list(mistakes)
        self.on_all_ranks = on_all_ranks  # then one process prints it
        super().__init__("\n".join(mistakes))


@contextmanager
def as_user_error(
    said: str, kinds: type[Exception] | tuple[type[Exception], ...] = OSError, advice: str = ""
) -> Iterator[None]:
    """Context that turns an error of ``kinds`` into a ``UserError``: ``said``, the reason in brackets, and ``advice``.

    The reason is the system's text if there is one, otherwise the error's, on one line. With ``ValueError`` among
    ``kinds``, a ``UserError`` from within is turned into another, because it is a ``ValueError``.
    """
    try:
        yield
    except kinds as error:
        raise UserError(f"{said} ({reason_of(error)}){advice}") from error


@dataclass(frozen=True)
class Settings:
    """Groups of settings, and the origin of each setting's value ('default', 'recipe', 'flag', ...).

    ``changed``: names of the settings whose flag differs from recipe, checkpoint or default.
    """

    run: RunSettings = RunSettings()
    data: DataSettings = DataSettings()
    augmentation: AugmentationSettings = AugmentationSettings()
    model: ModelSettings = ModelSettings()
    loss: LossSettings = LossSettings()
    optimisation: OptimisationSettings = OptimisationSettings()
    average: AverageSettings = AverageSettings()
    precision: PrecisionSettings = PrecisionSettings()
    exchange: ExchangeSettings = ExchangeSettings()
    logging: LoggingSettings = LoggingSettings()
    origins: dict[str, str] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()

    def values(self) -> dict[str, Any]:
        """Values of all settings by name, in the order of the groups; tuples become lists."""
        values = {option.name: getattr(getattr(self, group), option.name) for group, option in all_settings()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def unmeasured(self) -> list[str]:
        """Names of the settings whose value is to be measured when the run begins."""
        return ["amp"] if self.precision.amp == MEASURED else []

    def left_open(self) -> list[str]:
        """Names of the settings for which any value of the run to continue will do.

        They are those to be measured, and those at a default that is not the value in runs older than the setting.
        """
        older = [
            option.name
            for _, option in all_settings()
            if option.metadata["earlier"] != option.default and self.origins[option.name] == DEFAULT
        ]
        return [*self.unmeasured(), *older]

    def with_values(self, **values: Any) -> Settings:
        """A copy with these values, by setting name; lists become tuples."""
        groups: dict[str, dict[str, Any]] = {}
        for group, option in all_settings():
            if option.name in values:
                value = values[option.name]
                groups.setdefault(group, {})[option.name] = tuple(value) if isinstance(value, list) else value
        changed = {group: dataclasses.replace(getattr(self, group), **own) for group, own in groups.items()}
        return dataclasses.replace(self, **changed)

    def _one_label(self, group: str, option: dataclasses.Field) -> list[str]:
        """A line if the value of ``option`` needs one label per image."""
        value = getattr(getattr(self, group), option.name)
        why = option.metadata["one_label"]
        why = why.get(value) if isinstance(why, dict) else value != option.default and why
        return [f"{as_flag(option.name, value)} {why}; the images have several labels"] if why else []

    def refuse_for_several_labels(self, name: str) -> None:
        """Raise ``UserError`` if the value of setting ``name`` needs one label per image."""
        ((group, option),) = ((group, option) for group, option in all_settings() if option.name == name)
        if mistakes := self._one_label(group, option):
            raise UserError(*mistakes, on_all_ranks=True)

    def of_several_labels(self) -> Settings:
        """A copy for multi-label data, for which some defaults differ.

        Raises ``UserError`` with the settings that need one label per image.
        """
        mistakes = []
        changed = {}
        for group, option in all_settings():
            name, declared = option.name, option.metadata
            if declared["several_labels"] and self.origins.get(name, DEFAULT) == DEFAULT:
                changed[name] = declared["several_labels"]
                continue
            mistakes += self._one_label(group, option)
        if self.loss.loss in set(LOSSES) - set(OF_EACH_CLASS) and "loss" not in changed:
            mistakes.append(
                f"{as_flag('loss', self.loss.loss)} takes one label an image, and these have several; give --loss "
                f"{' or '.join(OF_EACH_CLASS)}"
            )
        if mistakes:
            raise UserError(*mistakes)
        origins = self.origins | dict.fromkeys(changed, SEVERAL_LABELS)
        return dataclasses.replace(self.with_values(**changed), origins=origins)

    def with_absolute_paths(self) -> Settings:
        """A copy in which the paths of the data are absolute."""
        paths = {name: getattr(self.data, name) for name in ("datapath", "labels", "class_map", "cache_dir")}
        return self.with_values(**{name: path and os.path.abspath(path) for name, path in paths.items()})

    def result_values(self) -> dict[str, Any]:
        """Values, by name, of the settings that must agree for one run to continue another."""
        values = self.values()
        names = [option.name for _, option in all_settings() if option.metadata["affects_result"]]
        if self.data.max_val_batches is not None:
            names.append("val_batch_size")  # counts the images of a cut validation
        return {name: values[name] for name in names} | unused(values)


# The groups by name, in order.
GROUPS: dict[str, type[DataclassInstance]] = {
    option.name: type(option.default)
    for option in dataclasses.fields(Settings)
    if dataclasses.is_dataclass(option.default) and not isinstance(option.default, type)
}


@functools.cache
def all_settings() -> tuple[tuple[str, dataclasses.Field], ...]:
    """All settings in order, as (group, field). No two settings share a name."""
    return tuple((name, option) for name, group in GROUPS.items() for option in dataclasses.fields(group))


def shaping(what: str) -> tuple[str, ...]:
    """Names of the settings whose fields say that they shape ``what``, one of ``SHAPED``."""
    return tuple(option.name for _, option in all_settings() if option.metadata["shapes"] == what)


def plan_words(group: Any) -> list[str]:
    """Phrases for the printed plan: one for each setting of ``group`` that declares one and is not its default."""
    words = []
    for option in dataclasses.fields(group):
        value = getattr(group, option.name)
        if option.metadata["plan"] and value != option.default:
            text = some(value, MOST_SHOWN) if isinstance(value, tuple) else as_text(value)
            words.append(option.metadata["plan"].format(text))
    return words


def unused(values: dict[str, Any]) -> dict[str, Any]:
    """Settings of algorithms that the run does not use, each with its default.

    Beside the algorithm in use they would be contradictions, so a run's ``config.yaml`` leaves them out.
    """
    v = SimpleNamespace(**values)
    algorithms = [option for _, option in all_settings() if option.metadata["drops_out"]]
    return {option.name: option.default for option in algorithms if not option.metadata["effect"][0].holds(v)}


SEVERAL_LABELS = "several labels"  # the origin of a default for multi-label data
MOST_SHOWN = 6  # values of one setting in the plan
IS_GONE = "is gone; CHANGELOG.md says what to use instead"
# Settings of earlier versions, each with the value that did nothing.
GONE = {
    "local_sgd_steps": None,
    "local_sgd_after_epochs": 0.0,
    "local_sgd_group": "machine",
    "matmul_weight_grad": None,
}
ROUNDED_OTHERWISE = {"matmul_weight_grad"}  # settings that changed only the rounding, with any value


def flag_of(name: str) -> str:
    """The flag of a setting: ``batch_size`` -> ``--batch-size``."""
    return "--" + name.replace("_", "-")


def as_flag(name: str, value: Any) -> str:
    """A setting as written on a command line: ``--lr 0.1``, ``--no-nesterov``, ``no --ema-decay``."""
    if value is None:
        return f"no {flag_of(name)}"
    if isinstance(value, bool):
        return flag_of(name) if value else f"--no-{name.replace('_', '-')}"
    return f"{flag_of(name)} {as_text(value)}"


def as_text(value: Any) -> str:
    """A setting's value as a person writes it."""
    if isinstance(value, tuple | list):
        return " ".join(map(as_text, value))
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
