"""Write the generated pages of docs/: our settings, from their fields, and other programs' flags, from their table.

python scripts/lab/write_pages.py
"""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from string import ascii_lowercase

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.command_line import ToolParser, run_tool
from scripts.common.output import filled
from utils.config.arguments import convert, read
from utils.config.other_programs import other_programs
from utils.config.rules import INHERITED, OPTIONS
from utils.config.settings import GROUPS, as_text, flag_of
from utils.config.spelling import advice_on, key_of
from utils.config.synonyms import CHOICES, DATA, SYNONYMS

NAME = "lab/write_pages.py"
DOCS = Path(__file__).resolve().parents[2] / "docs"
TEMPLATES = Path(__file__).with_name("template")
WHOLE_WORDS = {"break_long_words": False, "break_on_hyphens": False}
TIMM_PASTED = "--model resnet50 --bce-loss --ratio 0.75 1.33"
TORCHVISION_PASTED = "--model resnet50 --lr-scheduler cosineannealinglr --ra-magnitude 9"


def main(argv: list[str]) -> int:
    build_parser().parse_args(argv)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


def build_parser() -> ToolParser:
    return ToolParser(NAME, __doc__, training_flags=False)


def pages() -> dict[Path, str]:
    """Text of each page, by its path."""
    return {
        DOCS / "settings.md": settings_page(),
        DOCS / "coming_from_timm.md": program_page("timm", TIMM_PASTED, " (timm 1.0.29.dev0)"),
        DOCS / "coming_from_torchvision.md": program_page("torchvision", TORCHVISION_PASTED),
    }


def settings_page() -> str:
    """Page of all settings, by group: flag, default, and help with the possible values."""
    groups = [
        (name.capitalize(), group.__doc__.partition("\n")[0], map(settings_row, dataclasses.fields(group)))
        for name, group in GROUPS.items()
    ]
    once = ", ".join(f"`{flag_of(name)}`" for name in OPTIONS if name not in INHERITED)
    once = textwrap.fill(once, 119, **WHOLE_WORDS)
    return filled(TEMPLATES / "settings.md.jinja", groups=groups, once=once)


def settings_row(option: dataclasses.Field) -> str:
    meta = option.metadata
    flag = " ".join(filter(None, (meta["short"], flag_of(option.name))))
    values = f" One of {', '.join(f'`{choice}`' for choice in meta['choices'])}." if meta["choices"] else ""
    free = "" if meta["affects_result"] else " *Free.*"
    return row([f"`{flag}`", default(option.default), f"{meta['help'].replace('%%', '%')}.{values}{free}"])


def default(value: object) -> str:
    return "" if value in (None, ()) else f"`{as_text(value)}`"


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("<", "&lt;") for cell in cells) + " |\n"


def program_page(name: str, pasted: str, checked: str = "") -> str:
    """Page of another program's flags, by what main.py has: the same name, another name, another solution, or nothing.

    ``pasted``: flags of the program whose answers the page shows. ``checked``: the program's release that the page was
    compared with.
    """
    program = other_programs().programs[name]
    kinds: dict[str, dict[str, list[str]]] = {"write": {}, "leave it out": {}, "no equivalent": {}}
    for theirs, advice in program.instead.items():
        kind = next((kind for kind in kinds if advice.startswith(kind)), "write")
        words = advice.removeprefix(kind).removeprefix(":").strip()
        kinds[kind].setdefault(words, []).append(f"`{flag(theirs)}`")
    renamed: dict[str, list[str]] = {}
    for theirs in sorted(program.synonyms):
        renamed.setdefault(f"`{flag_of(SYNONYMS[theirs])}`", []).append(f"`{flag(theirs)}`")
    values: dict[str, list[str]] = {}
    for theirs, texts in program.values.items():
        for value in texts:
            values.setdefault(value_here(theirs, value), []).append(f"`{flag(theirs)} {value}`")
    always = dict.fromkeys(one.words for one in program.silent if not one.needs)
    same = sorted(program.same)
    elsewhere = other_programs().bare | other_programs().other_meaning
    tables = (
        ("Another name", "here", renamed),
        ("Values that differ", "here", values),
        ("Something else to write", "here", kinds["write"]),
        ("To leave out", "why", kinds["leave it out"]),
        ("No equivalent", "why, or what is nearest", kinds["no equivalent"]),
    )
    return filled(
        TEMPLATES / "program.md.jinja",
        name=name,
        title=program.title.partition("'")[0],
        pasted=pasted,
        checked=checked,
        answers=answers(pasted),
        always=always,
        sometimes=[words for words in dict.fromkeys(one.words for one in program.silent) if words not in always],
        same=textwrap.fill(" ".join(f"`{flag(one)}`" for one in same), 120, **WHOLE_WORDS),
        notes=[(flag(one), note) for one in same if (note := elsewhere.get(one.replace("-", "_")))],
        tables=[
            (heading, what, [row([" ".join(names), words]) for words, names in found.items()])
            for heading, what, found in tables
        ],
    )


def answers(pasted: str) -> str:
    """What ``main.py`` prints on the flags ``pasted``, with the line on other defaults cut."""
    *lines, defaults = read(pasted.split()).mistakes
    return "\n".join(f"main.py: {line}" for line in (*lines, f"{defaults.partition(':')[0]}: ..."))


def value_here(name: str, value: str) -> str:
    """What to write in main.py's flags for ``value`` of another program's flag ``name``; else advice on it."""
    setting = SYNONYMS.get(name, name.replace("-", "_"))
    if (ours := other_programs().values.get(key_of(value))) in CHOICES[setting]:
        return f"`{flag_of(setting)} {ours}`"
    if setting == "weights":
        return str(convert(OPTIONS[setting], value)[1]).partition("write ")[2]
    return advice_on(value, CHOICES[setting]).removeprefix("; ").removeprefix("write ")


def flag(name: str) -> str:
    """A flag as other programs spell it; 'DIR' for timm's data folder, which is given without a flag."""
    return "DIR" if name == DATA else f"-{name}" if name in ("vb", *ascii_lowercase) else f"--{name}"


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
