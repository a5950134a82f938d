"""A run's name and folder, ``OUTPUT/DATANAME/ARCH/TIME_SPECIFICNAME/``, and how to read the tables in it.

TensorBoard lists runs by these names in a narrow column, so a name says briefly, and only once, what tells runs apart;
its settings are joined by hyphens, after which browsers break lines.
"""

from __future__ import annotations

import csv
import io
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from utils.config.datasets import SPECS
from utils.config.settings import Settings, UserError, all_settings

IN_EVERY_NAME = {"global_batch_size", "optimizer", "lr", "lr_policy", "epochs"}
IN_THE_PARENTS = {"dataname", "arch"}
MOST_CHARACTERS = 80  # of the specific name, without --name's text
SHORT = {
    "accumulate": "acc",
    "augment": "aug",
    "auto_augment": "aa",
    "clip_grad_agc": "agc",
    "clip_grad_norm": "clip",
    "ema_decay": "ema",
    "image_size": "size",
    "init_scale": "scale",
    "label_smoothing": "smooth",
    "warmup_epochs": "warmup",
    "weight_decay": "wd",
}


def make_folder(args: Settings) -> Path:
    """Make a folder that no other run has, even one started in the same second. Raises ``UserError``."""
    planned = planned_folder(args)
    for folder in (planned.parent.parent, planned.parent):
        if os.path.islink(folder):
            raise UserError(
                f"--output {args.run.output}: {folder} is a link, and runs stay inside the output folder; remove "
                "it, or give the --output that it leads to"
            )
    attempt = 1
    while True:
        folder = planned if attempt == 1 else planned.with_name(f"{planned.name}_{attempt}")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()  # fails if another run made it first: the file system is the referee
            (folder / "checkpoints").mkdir()
            return folder
        except FileExistsError as error:
            if not folder.is_dir():
                raise UserError(f"--output {args.run.output}: {error.filename} is not a folder") from error
            attempt += 1
        except OSError as error:
            raise UserError(f"--output {args.run.output}: cannot make {folder}: {error.strerror}") from error


def folder_of_runs(args: Settings) -> Path:
    """The folder that holds all runs of this data set and network."""
    return Path(args.run.output) / args.data.dataname / _as_name(args.model.arch)


def planned_folder(args: Settings) -> Path:
    """The folder that a run started now would get, if it is free."""
    time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return folder_of_runs(args) / f"{time}_{specific_name(args)}"


def specific_name(args: Settings) -> str:
    """The settings that tell runs of one data set and network apart, as part of a folder's name.

    Batch, optimizer, learning rate, its policy and epochs are in every name. Then follow the recipe (a variant's name),
    the folder of ``--dataname folder``, and the flags that affect the result and differ from recipe or default, as many
    as fit into ``MOST_CHARACTERS``: '2more' stands for two further flags, which config.yaml holds. Last comes the whole
    text of ``--name``.
    """
    optimisation = args.optimisation
    parts = [
        f"b{args.data.global_batch_size}",
        optimisation.optimizer,
        f"lr{optimisation.lr:g}",
        optimisation.lr_policy,
        f"e{optimisation.epochs}",
    ]
    waiting = [*_recipe(args), *_data_folder(args), *_changes(args)]
    while waiting:
        longer = [*parts, waiting[0]]
        more = f"{len(waiting)}more"
        if len(_joined([*longer, more] if waiting[1:] else longer)) > MOST_CHARACTERS:
            parts.append(more)
            break
        parts = longer
        waiting = waiting[1:]
    return "_".join([_joined(parts), *([args.run.name] if args.run.name else [])])


def _recipe(args: Settings) -> list[str]:
    """The recipe, if its name says more than the network's: ``configs/cifar10/resnet18_long.yaml`` is 'long'."""
    name = Path(args.run.config or "").stem
    arch = args.model.arch.rpartition("/")[2]
    return [] if name in ("", arch, "config") else [name.removeprefix(f"{arch}_")]  # config.yaml is a run's own


def _data_folder(args: Settings) -> list[str]:
    """Name of the folder of the user's own data (``--dataname folder`` or ``shards``), in a list; otherwise []."""
    data = args.data
    if data.datapath is None or not SPECS[data.dataname].of_the_user:
        return []
    return [os.path.basename(os.path.abspath(data.datapath))]


def _changes(args: Settings) -> list[str]:
    """Flags that affect the result and differ from recipe or default, in the order of ``--help``."""
    values = args.result_values()
    names = [option.name for _, option in all_settings() if option.name in args.changed & values.keys()]
    return [_token(name, values[name]) for name in names if name not in IN_EVERY_NAME | IN_THE_PARENTS]


def _token(name: str, value: Any) -> str:
    """A setting in a few characters: 'ema0.999', 'nesterov', 'no_decay_norm_bias', 'aug_shift_flip'."""
    label = SHORT.get(name, name)
    if isinstance(value, bool):
        return label if value else f"no_{label}"
    items = value if isinstance(value, list) else [value]
    text = "_".join(f"{item:g}" if isinstance(item, float) else os.path.basename(str(item)) for item in items)
    return f"{label}{text}" if text[:1].isdigit() else f"{label}_{text}"


def _joined(parts: list[str]) -> str:
    return "-".join(map(_as_name, parts))


def _as_name(text: str) -> str:
    """Turn text into one harmless path component."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).lstrip(".-")[:80] or "unnamed"


def read_table(path: Path, errors: str = "strict") -> tuple[list[dict[str, str]], bool]:
    """The complete rows of a CSV file, and True if rows that are cut off were left out.

    A row without its line end is left out, as its last number may lack digits. ``errors``: how to decode invalid UTF-8.
    Raises ``OSError`` and ``ValueError``.
    """
    with open(path, newline="", encoding="utf-8", errors=errors) as file:
        text = file.read()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    kept = rows if text.endswith("\n") else rows[:-1]
    whole = [row for row in kept if None not in row.values()]
    return whole, len(whole) < len(rows)
