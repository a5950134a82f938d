"""Flags and values of other training programs (``other_programs.yaml``), read only to answer a mistake."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple


class Silent(NamedTuple):
    """Something that a program does unasked, with the flags that ask for it here.

    Unsaid where the command has one of the words ``unless``, flags or values, or lacks all of ``needs``.
    """

    words: str
    unless: frozenset[str]
    needs: frozenset[str]


class Program(NamedTuple):
    """A program: its flags that are synonyms, what to do about its other ones, its silent defaults, and its flags that
    mean the ``same`` here. ``values``: by flag, those that have another name or an answer here.
    """

    title: str
    synonyms: frozenset[str]
    instead: dict[str, str]
    silent: tuple[Silent, ...]
    same: frozenset[str]
    values: dict[str, tuple[str, ...]]

    @property
    def names(self) -> frozenset[str]:
        """All its flags."""
        return self.synonyms | self.instead.keys() | self.same


class OtherPrograms(NamedTuple):
    """Programs that train, other than this; ``common``: flags of theirs that many scripts have, too.

    ``values``: what a value is called here. ``values_instead``: one choice of the setting that a value belongs to, and
    what to write. ``bare``, ``other_meaning``: what a flag of ours means elsewhere, told if it has no
    value or a wrong one.
    """

    programs: dict[str, Program]
    common: frozenset[str]
    values: dict[str, str]
    values_instead: dict[str, tuple[str, str]]
    bare: dict[str, str]
    other_meaning: dict[str, str]


@functools.cache
def other_programs() -> OtherPrograms:
    """The content of ``other_programs.yaml``."""
    import yaml

    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return OtherPrograms(
        {name: _program(entry) for name, entry in content["programs"].items()},
        _words(content["common"]),
        {value: ours for ours, values in content["values"].items() for value in values.split()},
        {value: (row["choice"], row["advice"]) for row in content["values_instead"] for value in row["values"].split()},
        content["bare"],
        content["other_meaning"],
    )


def _program(entry: dict[str, Any]) -> Program:
    silent = (
        Silent(row["words"], _words(row["unless"]), _words(row.get("needs", ""))) for row in entry.get("silent", ())
    )
    advice = {name: text for names, text in entry["instead"].items() for name in names.split()}
    same = _words(entry.get("same", ""))
    values = {name: tuple(text.split()) for name, text in entry.get("values", {}).items()}
    return Program(entry["title"], _words(entry.get("synonyms", "")), advice, tuple(silent), same, values)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())
