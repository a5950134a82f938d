"""Flags and values of other training programs (``other_programs.yaml``), read only to answer a mistake."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple


class Silent(NamedTuple):
    """Something that another program does by default; ``words`` describe it and name the flags that ask for it here.

    Not reported if the command line has a flag or value in ``unless``, or none of one of the sets in ``needs``.
    """

    words: str
    unless: frozenset[str]
    needs: tuple[frozenset[str], ...]


class Program(NamedTuple):
    """Flags of another program: ``synonyms`` of ours, those with the advice ``instead``, and the ``same`` as ours.

    ``silent``: what the program does by default. ``values``: by flag, values with another name here or with advice.
    """

    title: str
    synonyms: frozenset[str]
    instead: dict[str, str]
    silent: tuple[Silent, ...]
    same: frozenset[str]
    values: dict[str, tuple[str, ...]]

    @property
    def names(self) -> frozenset[str]:
        return self.synonyms | self.instead.keys() | self.same


class OtherPrograms(NamedTuple):
    """Other training programs. ``common``: those of their flags that many scripts have.

    ``values``: our name of each of their values. ``values_instead``: for a value without an equivalent here, a choice
    of the setting that it belongs to, and advice. ``bare`` and ``other_meaning``: what a flag of ours means elsewhere,
    reported if the flag has no value (``bare``) or a wrong one.
    """

    programs: dict[str, Program]
    common: frozenset[str]
    values: dict[str, str]
    values_instead: dict[str, tuple[str, str]]
    bare: dict[str, str]
    other_meaning: dict[str, str]


@functools.cache
def other_programs() -> OtherPrograms:
    """Read ``other_programs.yaml``."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # several times as fast, where PyYAML has it
    content = loader(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).get_single_data()
    return OtherPrograms(
        {name: _program(entry) for name, entry in content["programs"].items()},
        _words(content["common"]),
        {value: ours for ours, values in content["values"].items() for value in values.split()},
        {value: (row["choice"], row["advice"]) for row in content["values_instead"] for value in row["values"].split()},
        content["bare"],
        content["other_meaning"],
    )


def _program(entry: dict[str, Any]) -> Program:
    assert all(row.keys() <= {"words", "unless", "needs"} for row in entry.get("silent", ())), "a comma needs quotes"
    silent = (
        Silent(row["words"], _words(row["unless"]), _sets(row.get("needs", []))) for row in entry.get("silent", ())
    )
    advice = {name: text for names, text in entry["instead"].items() for name in names.split()}
    same = _words(entry.get("same", ""))
    values = {name: tuple(text.split()) for name, text in entry.get("values", {}).items()}
    return Program(entry["title"], _words(entry.get("synonyms", "")), advice, tuple(silent), same, values)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _sets(texts: str | list[str]) -> tuple[frozenset[str], ...]:
    """The words of each text; one text may stand without its list."""
    return tuple(map(_words, [texts] if isinstance(texts, str) else texts))
