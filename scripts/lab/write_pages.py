"""Write the generated pages of docs/: our settings, from their fields, and other programs' flags, from their table.

python scripts/lab/write_pages.py
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from string import ascii_lowercase

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.command_line import ToolParser, run_tool
from utils.config.arguments import convert, read
from utils.config.other_programs import Program, other_programs
from utils.config.rules import OPTIONS
from utils.config.settings import Settings, all_settings, as_text, flag_of
from utils.config.spelling import advice_on, key_of
from utils.config.synonyms import CHOICES, DATA, SYNONYMS

NAME = "lab/write_pages.py"
DOCS = Path(__file__).resolve().parents[2] / "docs"
WHOLE_WORDS = {"break_long_words": False, "break_on_hyphens": False}
SETTINGS_HEAD = """# Settings

Written by `python scripts/lab/write_pages.py` from the fields in `utils/config/groups/`; `python main.py --help` prints
the same. In square brackets: what holds without the flag, where that is not one value. A flag overrides the recipe
(`--config`), and a recipe the default. A recipe has the names without dashes: `batch-size: 128`. The value `none`
takes back an optional setting of a recipe, and `no-` a switch: `--no-nesterov`.

A resumed run has its checkpoint's settings. It may change those that are marked *free*, which are about memory, speed
and records; some of them change the last bits of a result. If another differs, the resume is refused, unless
`--resume-override` is given.
"""
PROGRAM_HEAD = """# Coming from {title}

Paste {title}'s command after `python main.py`. Nothing trains: it ends with code 2 after a line for each flag that
differs, and one on other defaults. Write the command from these lines, and look at it with `--dry-run`.

```
$ python main.py {pasted}
{answers}
```

`python scripts/lab/write_pages.py` wrote this page from the table of these answers{checked}.
"""
TIMM_PASTED = "--model resnet50 --bce-loss --ratio 0.75 1.33"
TIMM_EXAMPLE = """
```bash
# timm's: python train.py DIR --model resnet50 --opt sgd --lr 0.5 --batch-size 256 --amp --smoothing 0.1
python main.py --dataname folder --datapath DIR --arch timm/resnet50 --lr 0.5 --batch-size 256 --amp fp16 \\
  --label-smoothing 0.1 --epochs 300 --nesterov --weight-decay 2e-5 --no-decay-norm-bias --color-jitter 0.4 \\
  --warmup-epochs 5 --warmup-lr 1e-5 --no-warmup-prefix --lr-per-epoch --drop-last --crop-pct 0.95 \\
  --interpolation bicubic
```

Everything from `--epochs` on spells out timm's defaults, with the crop fraction and interpolation of this network.
Items marked *no equivalent* below still differ. **Validation on several processes** counts each image once here; timm
repeats some to give each process as many. `--batch-size` is per process in both. **Nobody has run several GPUs here
yet.**

| timm | here |
|---|---|
| `./distributed_train.sh 8` | `python scripts/torchrun.py --standalone --nproc-per-node 8 main.py` |
| ResNet strikes back, A1 to A3 | `--config imagenet/resnet50_a1`, `_a2` or `_a3`: whole recipes, not trained here |
| `benchmark.py` | `scripts/doctor.py`, with the settings of a training |
| `validate.py` | `main.py --evaluate --resume RUN`, at the run's own size; timm takes the network's test size |
| `inference.py`, `avg_checkpoints.py` | `scripts/predict.py`, `scripts/average_checkpoints.py` |
| `summary.csv`, `args.yaml` | `metrics.csv`, `config.yaml` ([run folder](run_folder.md)) |
| to translate an `args.yaml` | give it to `--config`: each line is answered as a flag is, and nothing trains |
| `eval_top1` with `--model-ema` | `val_top1`, the average's, too; the raw weights' is `raw_val_top1` |
| `--pretrained`, other classes | the same: the last layer begins anew. `--weights` needs `--new-head` for that |
| a checkpoint | give timm's to `--weights`; `scripts/export.py RUN --to timm` makes one for timm |
| `class9` before `class10` | `class10` is first, by characters: a head in timm's order needs `--class-map` |
"""
TORCHVISION_PASTED = "--model resnet50 --lr-scheduler cosineannealinglr --ra-magnitude 9"
TORCHVISION_EXAMPLE = """
```bash
# torchvision's: python train.py --data-path DIR --model resnet18 --batch-size 64 --lr-scheduler cosineannealinglr
python main.py --dataname folder --datapath DIR --arch torchvision/resnet18 --batch-size 64 --lr-policy cosine \\
  --lr-per-epoch --weight-decay 1e-4 --epochs 90 --amp off
```

Everything from `--lr-per-epoch` on spells out torchvision's defaults. For ImageNet's own folder or archives,
`--dataname imagenet` does the same and unpacks the archives. **Validation on several processes** counts each image once
here; torchvision repeats some to give each process as many. `--batch-size` is per process in both, and neither scales
the learning rate by it. **Nobody has run several GPUs here yet.**

**`--weights`** takes a file here. For a name such as `ResNet50_Weights.IMAGENET1K_V2` write `--pretrained`, which loads
the `DEFAULT` of `torchvision/` networks, V2 for ResNet-50. For older weights, save their state dict in torchvision and
give that file.
**`--resume`** continues runs of this program alone: give torchvision's `checkpoint.pth` to `--weights`; optimizer and
epoch begin anew. The flags were compared with a stored copy of the references and with torchvision 0.29's names.

| torchvision | here |
|---|---|
| a network, `--model resnet50` | `--arch torchvision/resnet50`; **without the prefix, timm's network is taken** |
| `torchrun --nproc_per_node=8 train.py` | `python scripts/torchrun.py --standalone --nproc-per-node 8 main.py` |
| the recipe of `IMAGENET1K_V2` | `--config imagenet/resnet50_v2`: whole, not trained here |
| `model_89.pth`, `checkpoint.pth` | `--weights` takes them; here, `checkpoints/` in the [run folder](run_folder.md) |
| `--test-only --weights NAME` | `--arch torchvision/NAME --evaluate` with `--pretrained` or `--weights FILE` |
"""


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
        DOCS / "coming_from_timm.md": program_page(
            other_programs().programs["timm"], TIMM_PASTED, TIMM_EXAMPLE, " (timm 1.0.29.dev0)"
        ),
        DOCS / "coming_from_torchvision.md": program_page(
            other_programs().programs["torchvision"], TORCHVISION_PASTED, TORCHVISION_EXAMPLE
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
    values = f" One of {', '.join(f'`{choice}`' for choice in meta['choices'])}." if meta["choices"] else ""
    free = "" if meta["affects_result"] else " *Free.*"
    return row([f"`{flag}`", default(option.default), f"{meta['help'].replace('%%', '%')}.{values}{free}"])


def default(value: object) -> str:
    return "" if value in (None, ()) else f"`{as_text(value)}`"


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("<", "&lt;") for cell in cells) + " |\n"


def program_page(program: Program, pasted: str, example: str, checked: str = "") -> str:
    """Page of another program's flags, by what main.py has: the same name, another name, another solution, or nothing.

    ``pasted``: flags of the program whose answers the page shows. ``checked``: the program's release that the page was
    compared with.
    """
    title = program.title.partition("'")[0]
    kinds: dict[str, dict[str, list[str]]] = {"write": {}, "leave it out": {}, "no equivalent": {}}
    for name, advice in program.instead.items():
        kind = next((kind for kind in kinds if advice.startswith(kind)), "write")
        words = advice.removeprefix(kind).removeprefix(":").strip()
        kinds[kind].setdefault(words, []).append(f"`{flag(name)}`")
    renamed: dict[str, list[str]] = {}
    for name in sorted(program.synonyms):
        renamed.setdefault(f"`{flag_of(SYNONYMS[name])}`", []).append(f"`{flag(name)}`")
    parts = [PROGRAM_HEAD.format(title=title, checked=checked, pasted=pasted, answers=answers(pasted)), example]
    parts.append(f"\n## Defaults of {title}'s that differ\n\nIn brackets, the flag that gives it here.\n\n")
    always = dict.fromkeys(one.words for one in program.silent if not one.needs)
    parts += [f"- {words}\n" for words in always]
    parts.append("\nOnly where the command has what the line is about:\n\n")
    parts += [f"- {words}\n" for words in dict.fromkeys(one.words for one in program.silent) if words not in always]
    parts.append("\n## The same name\n\n")
    parts.append(textwrap.fill(" ".join(f"`{flag(name)}`" for name in sorted(program.same)), 120, **WHOLE_WORDS) + "\n")
    elsewhere = other_programs().bare | other_programs().other_meaning
    notes = {name: elsewhere.get(name.replace("-", "_")) for name in sorted(program.same)}
    if any(notes.values()):
        parts.append(
            "\nWith a difference:\n\n" + "".join(f"- `{flag(n)}`: {note}\n" for n, note in notes.items() if note)
        )
    values = {}
    for name, theirs in program.values.items():
        for value in theirs:
            values.setdefault(value_here(name, value), []).append(f"`{flag(name)} {value}`")
    for heading, what, found in (
        ("Another name", "here", renamed),
        ("Values that differ", "here", values),
        ("Something else to write", "here", kinds["write"]),
        ("To leave out", "why", kinds["leave it out"]),
        ("No equivalent", "why, or what is nearest", kinds["no equivalent"]),
    ):
        parts.append(f"\n## {heading}\n\n| {title} | {what} |\n|---|---|\n")
        parts += [row([" ".join(names), words]) for words, names in found.items()]
    return "".join(parts)


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
