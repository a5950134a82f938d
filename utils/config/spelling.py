"""What messages consist of: the name meant by a misspelt one, other programs' names, lists of names, and reasons."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Collection, Iterable, Sequence

from utils.config.other_programs import other_programs

SHORTEST_PREFIX = 3
MOST_SHOWN = 3
SIMILAR = 0.8  # share of letters, so that a mistyped letter or two are forgiven, not other words taken
SHOWN = 10  # names in a line
LONGEST = 300  # characters of a reason


def meant_value(value: str, known: Iterable[str]) -> str:
    """Advice for a value not among the choices ``known``: `` (did you mean ...?)``, what to write, or ''."""
    key = key_of(value)
    known = list(known)
    ours = other_programs().values.get(key)
    if ours in known:
        return did_you_mean([ours])
    return advice_on(value, known) or did_you_mean(nearest(value, known))


def advice_on(value: str, known: Collection[str]) -> str:
    """Advice, after ``; ``, on another program's value for the setting with the choices ``known``; '' without any."""
    key = key_of(value)
    answers = other_programs().values_instead
    choice, advice = answers.get(key) or answers.get(key[: key.find("/") + 1]) or ("", "")
    if key.startswith("lookahead-"):
        choice = "sgd"
        advice = f"write --optimizer {value[len('lookahead-') :]} --lookahead 6 0.5"
    return f"; {advice}" if choice in known else ""


def nearest(name: str, known: Collection[str]) -> list[str]:
    """The name in ``known`` with the same letters; otherwise the few that begin with ``name``, or the most similar one.

    A name that begins with ``name`` counts if a dash follows there, or if ``name`` is at least three quarters of it.
    """
    key = key_of(name)
    keys = {candidate: key_of(candidate) for candidate in known}
    plain = {candidate: one.replace("-", "") for candidate, one in keys.items() if not candidate.startswith("--no-")}
    if same := [candidate for candidate, one in plain.items() if one == key.replace("-", "")]:
        return same[:1]
    longer = [candidate for candidate in plain if _begins(key, keys[candidate])]
    if longer:
        return longer if len(longer) <= MOST_SHOWN else []
    for word in dict.fromkeys((key, key.removeprefix("no-"))):
        if close := difflib.get_close_matches(word, keys.values(), n=1, cutoff=SIMILAR):
            return [next(candidate for candidate, one in keys.items() if one == close[0])]
    return []


def _begins(key: str, longer: str) -> bool:
    if len(key) < SHORTEST_PREFIX or not longer.startswith(key):
        return False
    return longer[len(key)] == "-" or 4 * len(key) >= 3 * len(longer)


def did_you_mean(names: list[str]) -> str:
    return f" (did you mean {either(names)}?)" if names else ""


def either(names: Sequence[str]) -> str:
    """``names`` as alternatives: 'a', 'a or b', 'a, b or c'."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def or_nearest(name: str, known: Iterable[str], otherwise: str, cutoff: float = 0.5) -> str:
    """``did you mean ...?`` with up to three of ``known`` that contain or resemble ``name``; else ``otherwise``."""
    names = list(dict.fromkeys(known))
    longer = [other for other in names if len(name) > 5 and name in other]
    near = list(dict.fromkeys([*longer, *difflib.get_close_matches(name, names, n=3, cutoff=cutoff)]))[:3]
    return f"did you mean {', '.join(near)}?" if near else otherwise


def key_of(name: str) -> str:
    return name.lstrip("-").lower().replace("_", "-")


def some(names: Iterable[str], shown: int = SHOWN, count: int | None = None) -> str:
    """The first few of ``names`` in printable characters, and how many more there are (of ``count`` if it is given)."""
    names = list(names)
    more = (len(names) if count is None else count) - shown
    return ", ".join(map(printable, names[:shown])) + (f" and {more:,} more" if more > 0 else "")


def folded(name: str) -> str:
    """``name`` without what a reader hardly sees: capitals, and whether é is one character or, as on macOS, two."""
    return unicodedata.normalize("NFC", name.casefold())


def printable(text: str) -> str:
    """Replace the unprintable characters of ``text``, such as the name of a file or class."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def reason_of(error: BaseException, with_file: bool = False) -> str:
    """Why ``error`` was raised, on one line: the system's text, or its own, or else the name of its class.

    ``with_file``: its own text rather than the system's, which lacks the file; for a message that does not name it.
    """
    system = None if with_file else getattr(error, "strerror", None)
    return " ".join(str(system or error).split())[:LONGEST] or type(error).__name__


def counted(count: float, noun: str = "image") -> str:
    """Text for a number of things, such as '1 image' or '1.5 epochs'."""
    number = f"{count:g}" if isinstance(count, float) else f"{count:,}"
    return f"{number} {noun}{'s' * (count != 1)}"
