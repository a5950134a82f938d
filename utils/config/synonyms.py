"""Find the setting that the user meant: first by its names in other programs, then by the nearest spelling."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from utils.config.other_programs import Program, other_programs
from utils.config.settings import all_settings, flag_of
from utils.config.spelling import advice_on, did_you_mean, key_of, nearest

OURS = {option.name.replace("_", "-") for _, option in all_settings()}
SHORT = {key_of(option.metadata["short"]) for _, option in all_settings() if option.metadata["short"]}
# for a setting without choices, its default
CHOICES = {option.name: option.metadata["choices"] or (str(option.default),) for _, option in all_settings()}
DATA = "dir"  # timm's only word without a flag
SYNONYMS = {name: option.name for _, option in all_settings() for name in option.metadata["synonyms"]}


def meant(name: str, known: Iterable[str], others: Collection[str] = (), value: str = "") -> str:
    """Advice for the unknown ``name``, as the end of a sentence: `` (did you mean ...?)``, or what to write.

    '' if no program has the name and no known name is similar. ``known``: flags, or a recipe's keys with underscores;
    the answer is spelled in the style of ``name``. ``others``: other names in the same command line or recipe, which
    tell the program if several have ``name``. ``value``: the value given; for a synonym of a setting with choices, the
    answer translates it or adds advice.
    """
    key = key_of(name)
    known = list(known)
    for program in _likeliest({key, *map(key_of, others)}):
        if key in program.instead:
            advice = program.instead[key]
            return f" and has {advice}" if advice.startswith("no equivalent") else f": {advice}"
        if key in SYNONYMS and key in program.synonyms:
            break
    flags = any(candidate.startswith("-") for candidate in known)
    if key in SYNONYMS:
        choices = CHOICES[SYNONYMS[key]]
        translated = other_programs().values.get(key_of(value))
        ours = f" {translated}" if translated in choices else ""
        advice = advice_on(value, choices).removeprefix("; ")
        if advice:
            advice = f"; {value} has {advice}" if advice.startswith("no equivalent") else f"; for {value} {advice}"
        found = [SYNONYMS[key].replace("_", "-") + ours]
    else:
        advice = ""
        found = [candidate.removeprefix("--") for candidate in nearest(name, known)]
    dashes = flags or "_" not in name
    spelled = [one.replace("_", "-") if dashes else one.replace("-", "_") for one in found]
    return did_you_mean([("--" if flags else "") + one for one in spelled]) + advice


def silent_defaults(
    names: Collection[str], words: Collection[str], folder: bool = False, zeros: Collection[str] = ()
) -> list[str]:
    """At most one line on what a program does by default, if ``names`` are certainly flags of that program; else empty.

    The program is certain if at least two of ``names`` are its flags and neither ours nor those of many scripts.
    Otherwise it must be the only program that has all foreign flags, and either one of these is not a flag of many
    scripts, or they are several and it also has all our flags among ``names``. ``folder``: a folder is given without a
    flag, as timm takes its data. Names without dashes are ultralytics' arguments. ``words``: the whole command line;
    defaults that it settles are left out. ``zeros``: names with the value 0, which may settle a default and ask for
    nothing that has further ones.
    """
    programs = other_programs().programs
    keys = set(map(key_of, names))
    words = {key_of(word.partition("=")[0]) for word in words}
    asked = words - set(map(key_of, zeros))
    own = {name: _count(program, keys) for name, program in programs.items()}
    bare = {key_of(name) for name in names if not name.startswith("-")}
    own["ultralytics"] += _count(programs["ultralytics"], bare & other_programs().common, common=True)
    name = max(own, key=own.__getitem__)
    if own[name] < 2:
        flags = {key_of(name) for name in names if name.startswith("-")} | ({DATA} if folder else set())
        foreign = {key for key in flags - OURS - SHORT if key[:1].isalpha() and key.removeprefix("no-") not in OURS}
        having = [name for name, program in programs.items() if foreign and foreign <= program.names]
        if len(having) != 1:
            return []
        name = having[0]
        if not own[name] and (len(foreign) < 2 or not flags <= programs[name].names):
            return []
    program = programs[name]
    done = [
        silent.words
        for silent in program.silent
        if words.isdisjoint(silent.unless) and not any(map(asked.isdisjoint, silent.needs))
    ]
    if not done:
        return []
    told = "; ".join(dict.fromkeys(done))
    return [f"these are flags of {program.title}, whose other defaults are (in brackets, what gives them here): {told}"]


def assignment(token: str) -> str:
    """Advice, after ``: ``, for a word like ``imgsz=224``, in the manner of ultralytics; '' for any other word."""
    name, equals, value = token.partition("=")
    key = key_of(name)
    if equals and key in (instead := other_programs().programs["ultralytics"].instead):
        return f": {instead[key]}"
    setting = SYNONYMS.get(key, key.replace("-", "_"))
    return f": write {flag_of(setting)} {value}" if equals and setting.replace("_", "-") in OURS else ""


def _likeliest(keys: set[str]) -> list[Program]:
    """All programs, those with most of ``keys`` as flags first; flags that many scripts have only break a tie."""
    programs = other_programs().programs.values()
    return sorted(programs, key=lambda program: (-_count(program, keys), -_count(program, keys, common=True)))


def _count(program: Program, keys: Collection[str], common: bool = False) -> int:
    """Number of ``keys`` that are flags of ``program``, not ours; flags of many scripts count only if ``common``."""
    others = set(keys) - OURS - (set() if common else other_programs().common)
    return sum(key in program.instead or key in program.synonyms for key in others)
