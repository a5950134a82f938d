"""``NAME=VALUE`` settings: arguments for a constructor whose parameters the settings do not know."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from utils.config.settings import UserError
from utils.config.spelling import or_nearest


def read_keyword(flag: str, item: str) -> tuple[str, Any]:
    """Split ``item`` into name and value, which is read as YAML. Raises ``UserError`` if it is not ``NAME=VALUE``."""
    import yaml

    name, equals, text = item.partition("=")
    try:
        value = _with_numbers(yaml.safe_load(text))
    except yaml.YAMLError:
        value = text
    if not equals or not name.isidentifier():
        raise UserError(f"{flag} {item}: write NAME=VALUE, for example width=64 or layers=[2,2,2,2]")
    return name, value


def _with_numbers(value: Any) -> Any:
    """``value`` with the numbers that YAML 1.1 takes for text, such as 1e-3."""
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_numbers(item) for name, item in value.items()}
    if isinstance(value, str) and value[:1].isdigit():
        with suppress(ValueError):
            return float(value)
    return value


def not_accepted(flag: str, item: str, subject: str, accepted: Sequence[str]) -> UserError:
    """The error for a ``NAME=VALUE`` whose name is not among those that ``subject`` accepts."""
    name = item.partition("=")[0]
    hint = or_nearest(name, accepted, f"it takes {', '.join(accepted[:12]) or 'none'}")
    return UserError(f"{flag} {item}: {subject} takes no {name}; {hint}")


def given_twice(flag: str, item: str) -> UserError:
    """The error for a name that is given twice, or also by a flag of its own."""
    return UserError(f"{flag} {item}: {item.partition('=')[0]} is given twice")
