"""``NAME=VALUE`` settings: arguments for a constructor whose parameters the settings do not know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from utils.config.settings import UserError, as_user_error
from utils.config.spelling import or_nearest


def read_keyword(flag: str, item: str) -> tuple[str, Any]:
    """Split ``item`` into name and value: a number, text, bool or None, or a list or mapping in JSON.

    Raises ``UserError`` for anything else.
    """
    import yaml

    name, equals, text = item.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(f"{flag} {item}: write NAME=VALUE, for example width=64 or layers=[2,2,2,2]")
    if text[:1] in ("[", "{"):  # not in YAML, whose aliases can make a short text a value without end
        with as_user_error(f"{flag} {item:.200}: is not JSON", (ValueError, RecursionError)):
            return name, json.loads(text)
    try:
        value = yaml.safe_load(text)
        if isinstance(value, str):
            value = float(value) if value[:1].isdigit() else value  # YAML 1.1 takes 1e-3 for text
    except (yaml.YAMLError, ValueError):
        value = text
    return name, value if isinstance(value, str | int | float | None) else text


def not_accepted(flag: str, item: str, subject: str, accepted: Sequence[str]) -> UserError:
    """The error for a ``NAME=VALUE`` whose name is not among those that ``subject`` accepts."""
    name = item.partition("=")[0]
    hint = or_nearest(name, accepted, f"it takes {', '.join(accepted[:12]) or 'none'}")
    return UserError(f"{flag} {item}: {subject} takes no {name}; {hint}")


def given_twice(flag: str, item: str) -> UserError:
    """The error for a name that is given twice, or also by a flag of its own."""
    return UserError(f"{flag} {item}: {item.partition('=')[0]} is given twice")
