"""How a setting is declared: its default, kind, help and check."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import field
from typing import Any

LARGEST_INT = 2**31 - 1
MEASURED = "auto"  # a value to be found by measurement when a run begins

# Takes a converted value and returns what it must be, or None if it is fine.
Check = Callable[[Any], str | None]
# Takes all settings and the run's facts by name (utils/config/effects.py); returns the end of a line that says why the
# setting has no effect, or None if it has one.
Effect = Callable[[Any], str | None]


def between(low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = False) -> Check:
    """A check that a number (or each number of a list) lies between ``low`` and ``high``."""

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
    """A check for text that becomes part of a folder's name."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,79}", value):
        return None
    return "must be 1 to 80 letters, digits, '_', '-', '+' or '.', and not begin with '.' or '-'"


def not_empty(value: str) -> str | None:
    """A check for text that must not be blank and can be a path."""
    if not value.strip() or "\0" in value:
        return "must not be empty or hold a NUL character"
    return "must be text in UTF-8" if re.search("[\ud800-\udfff]", value) else None


def needs(words: str, holds: Callable[[Any], bool]) -> Effect:
    """The setting has an effect only if ``holds``; ``words`` describe that condition."""
    return lambda v: None if holds(v) else f"does nothing: it needs {words}"


positive_int = between(1, LARGEST_INT)
positive = between(0, 1e30, open_low=True)
not_negative = between(0, 1e30)


def setting(
    default: Any,
    help: str,
    *,
    type: type | None = None,
    check: Check | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    short: str | None = None,
    synonyms: str = "",
    many: bool = False,
    words: tuple[str, ...] = (),
    bare: str | None = None,
    affects_result: bool = True,
    in_recipe: bool = True,
    in_evaluation: bool = True,
    effect: Effect | None = None,
    earlier: Any = None,
) -> Any:
    """One setting.

    ``type``: that of the default unless given. ``synonyms``: what other programs call it (``other_programs.py`` holds
    the rest). ``many``: a tuple of values. ``words`` are allowed instead of a number. ``bare``: the value if the
    flag is given without one; ``--no-FLAG`` is then 'off'. ``affects_result``: runs that differ here are different
    experiments, so a resume must agree. ``in_recipe`` False keeps a flag that says what to
    do now (rather than how) out of recipes and the saved configuration. ``in_evaluation`` False: ``--evaluate`` does
    not use it. ``effect``: what else may leave it without an effect. Users are warned of settings without one.
    ``earlier``: the value of runs that were begun before there was this setting; a resume goes on with it.
    """
    kind = type or default.__class__
    return field(
        default=default,
        metadata={
            "help": help,
            "type": kind,
            "check": check,
            "choices": choices,
            "metavar": metavar,
            "short": short,
            "synonyms": tuple(synonyms.split()),
            "many": many,
            "words": words,
            "bare": bare,
            "affects_result": affects_result,
            "in_recipe": in_recipe,
            "in_evaluation": in_evaluation,
            "effect": effect,
            "earlier": default if earlier is None else earlier,
        },
    )
