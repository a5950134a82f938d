"""The declaration of a setting: everything that is true of this setting alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Group = TypeVar("Group", bound="DataclassInstance")

LARGEST_INT = 2**31 - 1
MEASURED = "auto"  # a value to be found by measurement when a run begins
# where a value came from, lowest first
DEFAULT = "default"
CHECKPOINT = "checkpoint"
RECIPE = "recipe"
FLAG = "flag"

# Takes a converted value and returns what it must be, or None if it is fine.
Check = Callable[[Any], str | None]
# Takes all settings and the run's facts by name (utils/loop/effects.py); returns the end of a line that says why the
# setting has no effect, or None if it has one.
Effect = Callable[[Any], str | None]


def outranks(origin: str, other: str) -> bool:
    """True if a value from ``origin`` takes the place of one from ``other``."""
    rank = [DEFAULT, CHECKPOINT, RECIPE, FLAG].index
    return rank(origin) > rank(other)


def between(low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = False) -> Check:
    """Return a check that a number (or each number of a list) lies between ``low`` and ``high``."""

    def shown(bound: float) -> str:
        return f"{bound:,}" if isinstance(bound, int) and bound >= 10**6 else f"{bound:g}"

    def check(value: Any) -> str | None:
        for number in value if isinstance(value, tuple) else (value,):
            if number <= low if open_low else number < low:
                return f"must be {'more than' if open_low else 'at least'} {shown(low)}"
            if number >= high if open_high else number > high:
                return f"must be {'less than' if open_high else 'at most'} {shown(high)}"
        return None

    return check


def safe_name(value: str) -> str | None:
    """Check text that becomes part of a folder's name: return what it must be, or None if it is fine."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,79}", value):
        return None
    return "must be 1 to 80 letters, digits, '_', '-', '+' or '.', and not begin with '.' or '-'"


def not_empty(value: str) -> str | None:
    """Check that text is not blank and can be a path: return what it must be, or None if it is fine."""
    if not value.strip() or "\0" in value:
        return "must not be empty or hold a NUL character"
    return "must be text in UTF-8" if re.search("[\ud800-\udfff]", value) else None


class Needs:
    """Effect of a setting that acts only if ``holds``; ``words`` describe that condition.

    Without ``holds``, the condition is that the flags in ``words`` are given, with the values that ``words`` state, if
    any: '--mixup or --cutmix', '--teacher and --distillation soft'. ``instead`` names another setting, whose value in
    the run the message adds.
    """

    def __init__(self, words: str, holds: Callable[[Any], object] | None = None, instead: str = "") -> None:
        self.words = words
        self.is_of_flags = holds is None
        self.holds = holds or self.flags_hold
        self.instead = instead

    def __call__(self, v: Any) -> str | None:
        if self.holds(v):
            return None
        return f"does nothing: it needs {self.words}" + (f", not {getattr(v, self.instead)}" if self.instead else "")

    def flags(self) -> list[list[tuple[str, str]]]:
        """The needed flags, each as its alternatives (setting, value), where '' stands for any value."""
        needed = []
        for part in self.words.removeprefix("both ").split(" and "):
            alternatives: list[tuple[str, str]] = []
            for text in part.split(" or "):
                flag, _, value = text.partition(" ") if text.startswith("--") else (alternatives[0][0], "", text)
                alternatives.append((flag.lstrip("-").replace("-", "_"), value))
            needed.append(alternatives)
        return needed

    def flags_hold(self, v: Any) -> bool:
        """True if the flags in ``words`` are given, with their values."""
        return all(
            any(getattr(v, name) == value if value else getattr(v, name) for name, value in alternatives)
            for alternatives in self.flags()
        )


def ends_before(name: str, words: str = "does nothing", begins: bool = False) -> Effect:
    """Return an effect that says ``words`` if the run ends before the setting ``name`` acts.

    The setting's value is the number of epochs after which it acts or, with ``begins``, the epoch (from 1) in which it
    begins to.
    """
    return lambda v: f"{words}: --epochs {v.epochs} end before" if getattr(v, name) >= v.epochs + begins else None


def all_not_empty(items: tuple[str, ...]) -> str | None:
    """Check that no name in ``items`` is blank: return what they must be, or None if they are fine."""
    return next(filter(None, map(not_empty, items)), None)


positive_int = between(1, LARGEST_INT)
positive = between(0, 1e30, open_low=True)
not_negative = between(0, 1e30)


@dataclass(kw_only=True)
class Declaration:
    """Facts about a setting besides its default. The field's annotation says what kind of values it takes."""

    help: str
    short: str = ""
    metavar: str = ""
    synonyms: str = ""  # what other programs call it (other_programs.yaml holds the rest)
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # allowed instead of a number
    verbatim: bool = False  # one of several values may hold blanks and commas, as names of columns and files do
    bare: str = ""  # the value if the flag is given without one; --no-FLAG is then 'off'
    # Without a check, text must be a choice or not empty, a whole number positive, any other number not negative.
    check: Check | None = None
    effect: Effect | tuple[Effect, ...] = ()  # asked in turn why the setting does nothing in a run
    unsharded: str = ""  # why it contradicts --shard-model; docs/distributed.md names it
    plan: str = ""  # how the plan of a run names it, with {} for its value (groups model and exchange)
    several_labels: str = ""  # the default for multi-label data, if it is another one
    one_label: str | dict[Any, str] = ""  # why it, or a value of it, contradicts multi-label data
    affects_result: bool = True  # runs that differ here are different experiments, so a resume must agree
    in_recipe: bool = True  # False: a flag that says what to do now (rather than how)
    in_evaluation: bool = True  # False: --evaluate does not use it
    inherited: bool = True  # False: a continued run takes it from its own command line
    drops_out: bool = False  # has its default without what it needs, whatever recipe or checkpoint say
    shapes: str = ""  # what --resume-override has to look after if it changes: see SHAPED
    earlier: Any = None  # the value in runs older than the setting, if that is not the default
    example: str = ""  # values for tests, unless it is a switch or has choices
    within: str = ""  # flags under which the example shapes a run, instead of those that its effect needs


# What a setting may shape, and what changes with it if a run continues with another value.
SHAPED = {
    "state": "the optimizer's state fits no other value",
    "state at all": "the run's state fits another number, but not its absence",
    "groups": "the parameters of an optimizer's groups",
    "first weights": "the weights that a run begins with, and a continued one no longer",
    "network": "what the network computes with the same weights",
    "samples": "which samples a step sees",
    "loss": "what training minimises",
    "validation images": "which images are validated",
    "views of the validation images": "how the network sees validation images",
    "validation": "what the network computes of validation images",
    "stopping": "when the run ends early",
}


def setting(help: str, *, default: Any = None, **declared: Any) -> Any:
    """Declare a field with the facts of ``Declaration``; without a ``default``, the setting has no value by default."""
    return field(default=default, metadata={"help": help, **declared})


training_setting = partial(setting, in_evaluation=False)  # of the parts that --evaluate does not have


def group(**common: Any) -> Callable[[type[Group]], type[Group]]:
    """Return a decorator for a frozen dataclass of settings, which declare ``common`` unless they say otherwise."""

    def decorate(made: type[Group]) -> type[Group]:
        for option in fields(made):
            declared = vars(Declaration(**{"earlier": option.default, **common, **option.metadata}))
            assert declared["shapes"] in ("", *SHAPED), declared["shapes"]
            annotation = str(option.type)  # text, by the module's ``from __future__ import annotations``
            kind = annotation.removeprefix("tuple[").replace("]", " ").replace(",", " ").split()[0]
            many = "tuple[" in annotation
            effect = declared["effect"]
            text = None if declared["choices"] else all_not_empty if many else not_empty
            usual = {"str": text, "int": positive_int, "float": not_negative}
            option.metadata = MappingProxyType(
                declared
                | {
                    "check": declared["check"] or usual.get(kind),
                    "effect": effect if isinstance(effect, tuple) else (effect,),
                    "synonyms": tuple(declared["synonyms"].split()),
                    "many": many,
                    "alone": many and not annotation.startswith("tuple["),  # equal numbers are one, outside a tuple
                    "type": {"int": int, "float": float, "str": str, "bool": bool}[kind],
                }
            )
        return made

    return decorate
