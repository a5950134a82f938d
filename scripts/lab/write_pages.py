"""Write the pages of docs/ that are lists: every setting from its field, other programs' flags from the table of them.

python scripts/lab/write_pages.py
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.command_line import ToolParser, run_tool
from utils.config.other_programs import Program, other_programs
from utils.config.settings import Settings, all_settings, as_text, flag_of
from utils.config.synonyms import SYNONYMS

NAME = "lab/write_pages.py"
DOCS = Path(__file__).resolve().parents[2] / "docs"
WHOLE_WORDS = {"break_long_words": False, "break_on_hyphens": False}
SETTINGS_HEAD = """# Settings

Written by `python scripts/lab/write_pages.py` from the fields in `utils/config/groups/`; `python main.py --help` prints
the same. A flag overrides the recipe (`--config`), a recipe the checkpoint (`--resume`), a checkpoint the default. In a
recipe, a setting stands without its dashes: `batch-size: 128`. The value `none` takes back an optional setting that a
recipe makes; `no-` before a switch's name takes it back, as in `--no-nesterov`. *Free* settings may change when a run
is resumed; those without the word shape the result, and a resume that changes one is refused.
"""
PROGRAM_HEAD = """# Coming from {title}

Paste {title}'s command after `python main.py`: it answers each flag in one line, and says what {title} does unasked.
`python scripts/lab/write_pages.py` wrote this page from the same answers.
"""
TIMM_EXAMPLE = """
```bash
# timm's: python train.py DIR --model resnet50 --opt sgd --lr 0.5 --batch-size 256 --amp --smoothing 0.1
python main.py --dataname folder --datapath DIR --arch timm/resnet50 --lr 0.5 --batch-size 256 --amp fp16 \\
  --label-smoothing 0.1 --epochs 300 --nesterov --weight-decay 2e-5 --no-decay-norm-bias --color-jitter 0.4 \\
  --warmup-epochs 5 --warmup-lr 1e-5 --no-warmup-prefix --lr-per-epoch --crop-pct 0.95 --interpolation bicubic
```

From `--epochs` on stands what timm does unasked, with the crop share and interpolation that it has for this network.
What has no equivalent in the list below still differs. `./distributed_train.sh 8` is `python scripts/torchrun.py
--standalone --nproc-per-node 8 main.py`, and `validate.py` is `main.py --evaluate`. Both programs train the same
networks: `scripts/export.py RUN --to timm` gives a trained one back. [Which of the
two?](../README.md#this-or-timms-trainpy)
"""
TORCHVISION_EXAMPLE = """
```bash
# torchvision's: python train.py --data-path DIR --model resnet18 --batch-size 64 --lr-scheduler cosineannealinglr
python main.py --dataname imagenet --datapath DIR --arch torchvision/resnet18 --batch-size 64 --lr-policy cosine \\
  --lr-per-epoch --weight-decay 1e-4 --epochs 90 --amp off
```
"""


def main(argv: list[str]) -> int:
    """Run the tool and return its exit code."""
    build_parser().parse_args(argv)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


def build_parser() -> ToolParser:
    return ToolParser(NAME, __doc__.partition("\n")[0], training_flags=False)


def pages() -> dict[Path, str]:
    """Text of each page, by its path."""
    return {
        DOCS / "settings.md": settings_page(),
        DOCS / "coming_from_timm.md": program_page(other_programs().programs["timm"], TIMM_EXAMPLE),
        DOCS / "coming_from_torchvision.md": program_page(
            other_programs().programs["torchvision"], TORCHVISION_EXAMPLE
        ),
    }


def settings_page() -> str:
    """Page of all settings, by group: flag, default, and help with the possible values."""
    parts = [SETTINGS_HEAD]
    for group, options in itertools.groupby(all_settings(), key=lambda pair: pair[0]):
        about = type(getattr(Settings(), group)).__doc__.partition("\n")[0]
        parts.append(f"\n## {group.capitalize()}\n\n{about}\n\n| flag | default | what |\n|---|---|---|\n")
        parts += [settings_row(option) for _, option in options]
    return "".join(parts)


def settings_row(option: dataclasses.Field) -> str:
    meta = option.metadata
    flag = " ".join(filter(None, (meta["short"], flag_of(option.name))))
    values = f"; one of {', '.join(f'`{choice}`' for choice in meta['choices'])}" if meta["choices"] else ""
    free = "" if meta["affects_result"] else " *Free.*"
    return row([f"`{flag}`", default(option.default), f"{meta['help'].replace('%%', '%')}{values}.{free}"])


def default(value: object) -> str:
    return "" if value in (None, ()) else f"`{as_text(value)}`"


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("<", "&lt;") for cell in cells) + " |\n"


def program_page(program: Program, example: str) -> str:
    """Page of a program's flags: those with the same name here, another name, another solution, or no equivalent."""
    title = program.title.partition("'")[0]
    kinds: dict[str, dict[str, list[str]]] = {"write": {}, "leave it out": {}, "no equivalent": {}}
    for name, advice in program.instead.items():
        kind = next((kind for kind in kinds if advice.startswith(kind)), "write")
        words = advice.removeprefix(kind).removeprefix(":").strip()
        kinds[kind].setdefault(words, []).append(f"`{flag(name)}`")
    renamed: dict[str, list[str]] = {}
    for name in sorted(program.synonyms):
        renamed.setdefault(f"`{flag_of(SYNONYMS[name])}`", []).append(f"`{flag(name)}`")
    parts = [PROGRAM_HEAD.format(title=title), example]
    parts.append(f"\n## What {title} does unasked\n\nIn brackets, the flag that asks for it here.\n\n")
    parts += [f"- {words}\n" for words in dict.fromkeys(one.words for one in program.silent)]
    parts.append("\n## The same name\n\n")
    parts.append(textwrap.fill(" ".join(f"`{flag(name)}`" for name in sorted(program.same)), 120, **WHOLE_WORDS) + "\n")
    elsewhere = other_programs().bare | other_programs().other_meaning
    notes = {name: elsewhere.get(name.replace("-", "_")) for name in sorted(program.same)}
    if any(notes.values()):
        parts.append(
            "\nWith a difference:\n\n" + "".join(f"- `{flag(n)}`: {note}\n" for n, note in notes.items() if note)
        )
    for heading, what, found in (
        ("Another name", "here", renamed),
        ("Something else to write", "here", kinds["write"]),
        ("To leave out", "why", kinds["leave it out"]),
        ("No equivalent", "why, or what is nearest", kinds["no equivalent"]),
    ):
        parts.append(f"\n## {heading}\n\n| {title} | {what} |\n|---|---|\n")
        parts += [row([" ".join(names), words]) for words, names in found.items()]
    return "".join(parts)


def flag(name: str) -> str:
    """A flag as other programs spell it: -x for one letter, otherwise --name."""
    return f"-{name}" if len(name) == 1 else f"--{name}"


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
