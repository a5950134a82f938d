"""Turn a command line and a YAML recipe into checked, read-only settings.

Precedence: flag over recipe over checkpoint over default. All mistakes are reported together, one line each, before
anything is created and before any slow import.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from utils.config import plugins
from utils.config.datasets import name_of_folder
from utils.config.field import CHECKPOINT, DEFAULT, FLAG, RECIPE, not_empty
from utils.config.groups.optimisation import SCHEDULE_FREE
from utils.config.other_programs import other_programs
from utils.config.rules import OPTIONS, Given, contradictions, derive, of_policy
from utils.config.settings import (
    GONE,
    GROUPS,
    IS_GONE,
    ROUNDED_OTHERWISE,
    Settings,
    UserError,
    all_settings,
    flag_of,
    unused,
)
from utils.config.spelling import key_of, meant_value
from utils.config.synonyms import assignment, meant, silent_defaults

__all__ = ["parse"]

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# bytes and values: far more than any recipe has
LARGEST_RECIPE = 100_000
MOST_VALUES = 1000
FOR_TRYING_OUT = ("max_val_batches",)
# How one data set is read and divided, which says nothing of another that --evaluate names.
OF_A_DATA_SET = (
    *("val_split", "folds", "fold", "labels", "class_from_name", "class_map"),
    *("image_column", "label_column"),
)


def parse(argv: Sequence[str], world_size: int = 1, checkpoint: dict[str, Any] | None = None) -> Settings:
    """Read and resolve a command line in one go: see ``read`` and ``CommandLine.resolve``."""
    return read(argv, keeps_plugins=True).resolve(world_size, checkpoint)


def read(argv: Sequence[str], keeps_plugins: bool = False) -> CommandLine:
    """Split a command line, without the program's name, and read its recipe.

    Loads the files of --plugin. Without that flag, ``keeps_plugins`` keeps the files loaded before; otherwise they are
    dropped.
    """
    if isinstance(argv, str) or not all(isinstance(word, str) for word in argv):
        raise UserError("the command line must be a list of texts, such as ['--epochs', '1']")
    own = _plugin_files(argv)
    own_files = [os.path.abspath(file) for file in own or () if own != ["none"]]
    if own is not None or not keeps_plugins:
        plugins.load(own_files)  # before the parser: --help lists what they add
    flags, mistakes = _read_flags(argv)
    if own_files:
        flags["plugin"] = own_files
    layers = [(FLAG, "", flags)]
    if isinstance(flags.get("config"), str) and not_empty(flags["config"]) is None:
        path, recipe, more = _read_recipe(flags["config"])
        layers.insert(0, (RECIPE, f"recipe {path}", recipe))
        mistakes += more
        files = recipe.get("plugin")
        files = [files] if isinstance(files, str) else files
        if files is not None and not (isinstance(files, list) and all(isinstance(file, str) for file in files)):
            mistakes.append(f"recipe {path}: plugin: must name files, not {files!r}")
        elif not own and files is not None:
            recipe["plugin"] = [os.path.abspath(path.parent / file) for file in files]
            plugins.load(recipe["plugin"])
    return CommandLine(tuple(argv), tuple(layers), tuple(mistakes))


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """A command line and its recipe, read once.

    ``layers``: for each source, from lowest to highest precedence, its origin, its name in messages, and its raw values
    by setting. ``mistakes``: lines about what could not be read.
    """

    argv: tuple[str, ...]
    layers: tuple[tuple[str, str, dict[str, Any]], ...]
    mistakes: tuple[str, ...]

    def resolve(self, world_size: int = 1, checkpoint: dict[str, Any] | None = None) -> Settings:
        """Return the settings of a run on ``world_size`` processes.

        ``world_size`` relates the batch of a process to the global one. ``checkpoint``: the settings stored in a
        checkpoint, which replace the defaults. Raises ``UserError`` with all mistakes.
        """
        mistakes = [*self.mistakes]
        layers = [(CHECKPOINT, "checkpoint", checkpoint or {}), *self.layers]
        values = {name: option.default for name, option in OPTIONS.items()}
        origins = dict.fromkeys(OPTIONS, DEFAULT)
        unread: set[str] = set()
        changed: set[str] = set()
        for origin, where, layer in layers:
            for name, raw in layer.items():
                label = flag_of(name) if origin == FLAG else f"{where}: {name.replace('_', '-')}"
                takes_back = origin == FLAG and _takes_back(OPTIONS[name], raw)
                value, mistake = (None, None) if takes_back else convert(OPTIONS[name], raw)
                if mistake:
                    others = other_programs()
                    meaning = (others.bare if "needs a value" in mistake else others.other_meaning).get(name)
                    mistakes.append(f"{label} {mistake}{f'; {meaning}' if meaning else ''}")
                    unread.add(name)
                else:
                    if origin == FLAG and value != values[name]:
                        changed.add(name)
                    values[name] = value
                    origins[name] = DEFAULT if takes_back else origin
        of_other_data = OF_A_DATA_SET if "dataname" in changed else ()
        for name in (*FOR_TRYING_OUT, *of_other_data) if values["evaluate"] else ():
            if origins[name] == CHECKPOINT:  # an evaluation of the run must not be cut unasked, or read as other data
                values[name] = OPTIONS[name].default
                origins[name] = DEFAULT
        # A setting that could not be read has its line already, so contradictions with it need none.
        given = Given(values, origins, world_size, checkpoint_known=checkpoint is not None)
        mistakes += contradictions(given, unread)
        if mistakes:
            raise UserError(*mistakes, on_all_ranks=True)  # all processes have the same command line
        derive(given)
        made: dict[str, Any] = {
            name: group(**{option.name: values[option.name] for option in dataclasses.fields(group)})
            for name, group in GROUPS.items()
        }
        return Settings(**made, origins=origins, changed=frozenset(changed))


# ---------------------------------------------------------------------------------------- flags


class _HelpFormatter(argparse.HelpFormatter):
    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return f"{action.metavar} ..." if action.nargs == "*" else str(action.metavar)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse would print its usage and exit
        raise argparse.ArgumentTypeError(message)


_NO_VALUE = object()


def _plugin_files(argv: Sequence[str]) -> list[str] | None:
    """The files of all --plugin flags; None without the flag."""
    if not any(token.startswith("--plugin") for token in argv):
        return None
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plugin", nargs="*", action="extend")
    try:
        return parser.parse_known_args([*argv])[0].plugin
    except argparse.ArgumentTypeError:
        return None


def build_parser() -> argparse.ArgumentParser:
    """Build the parser, which only splits the command line; ``CommandLine.resolve`` checks the values."""
    return _build_parser(tuple(plugins.digests().values()))


@functools.cache
def _build_parser(_: tuple[str, ...]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="main.py",
        usage="torchrun [--nproc-per-node N] main.py [flag ...]   or   python main.py [flag ...]",
        formatter_class=_HelpFormatter,
        description="Train and validate an image classifier. Without flags: handwritten digits, on any machine.",
        epilog="A flag overrides the recipe (--config) and the checkpoint (--resume); with the value none, an optional "
        "one takes back what they set: --ema-decay none.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # before Python 3.14, argparse mistakes -1e-3 for a flag
    sections = {name: parser.add_argument_group(name) for name in GROUPS}
    for group, option in all_settings():
        meta = option.metadata
        names = [*([meta["short"]] if meta["short"] else []), flag_of(option.name)]
        text = meta["help"]
        if meta["type"] is bool:
            sections[group].add_argument(*names, action=argparse.BooleanOptionalAction, help=text)
            continue
        if option.default is not None:
            text += f" [{option.default}]"
        choices = plugins.choices(option.name)
        metavar = meta["metavar"] or ("{" + ",".join(choices) + "}" if choices else None)
        metavar = metavar or {int: "N", float: "X"}.get(meta["type"], "NAME")
        arity = {"nargs": "*"} if meta["many"] else {"nargs": "?", "const": meta["bare"] or _NO_VALUE}
        sections[group].add_argument(*names, **arity, metavar=metavar, help=text)
        if meta["bare"] and "off" in (choices or ()):
            no = f"--no-{option.name.replace('_', '-')}"
            sections[group].add_argument(
                no, action="store_const", const="off", dest=option.name, help=f"{names[-1]} off"
            )
    return parser


def _read_flags(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Raw values of the flags by setting, and the mistakes."""
    parser = build_parser()
    mistakes = []
    switches = {"-h"} | {option.metadata["short"] for option in OPTIONS.values() if option.metadata["type"] is bool}
    kept = []
    for token in argv:
        flag, equals, _ = token.partition("=")
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if token == "--":  # argparse would read everything after it as values
            mistakes.append("'--' is not a flag; remove it")
        elif token[:2] in switches and len(token) > 2:  # argparse would read -epochs as -e
            kept.append(f"--{token}")
        elif flag.startswith("--") and equals and name in OPTIONS and OPTIONS[name].metadata["type"] is bool:
            mistakes.append(f"{flag} takes no value; write {flag_of(name)} or --no-{name.replace('_', '-')}")
        else:
            kept.append(token)
    try:
        namespace, extras = parser.parse_known_args(kept)
    except argparse.ArgumentTypeError as error:
        return {}, [*mistakes, str(error)]
    known = [flag for action in parser._actions for flag in action.option_strings]
    names = {token.partition("=")[0] for token in argv if token.startswith("-") or "=" in token}
    after_unknown_flag = has_folder = False
    for place, token in enumerate(extras):
        if token.startswith("-"):
            flag = token.partition("=")[0].replace("---", "-")
            value = token.partition("=")[2] or " ".join(extras[place + 1 : place + 2])
            advice = meant(flag, known, names, value)
            help_too = "; --help lists them all" if advice.startswith(" (") or not advice else ""
            is_gone = flag.lstrip("-").replace("-", "_") in GONE
            mistakes.append(f"{_shown(flag)} {IS_GONE if is_gone else f'is not a flag{advice}{help_too}'}")
            after_unknown_flag = "=" not in token
        elif not after_unknown_flag:  # what follows an unknown flag is that flag's value
            is_data = os.path.isdir(token) or token == argv[0]
            has_folder = has_folder or (is_data and "=" not in token)
            advice = assignment(token) or "; remove it or put its flag before it"
            if is_data and advice.startswith(";"):
                dataname = "" if {"--dataname", "--dataset"} & names else f"--dataname {name_of_folder(token)} "
                advice += f"; if it is the data, write {dataname}--datapath {_plain(token)}"
            mistakes.append(f"{_shown(token)} belongs to no flag{advice}")
    mistakes += silent_defaults(names, argv, has_folder) if extras else []
    return vars(namespace), mistakes


# --------------------------------------------------------------------------------------- recipe


def _read_recipe(config: str) -> tuple[Path, dict[str, Any], list[str]]:
    """The path of a recipe, its raw values by setting, and the mistakes."""
    path = recipe_path(config)
    if path is None:
        names = [str(recipe.relative_to(CONFIGS).with_suffix("")) for recipe in sorted(CONFIGS.rglob("*.yaml"))]
        mistake = f"--config {_shown(config)}: no such recipe or file{meant_value(config, names)}"
        return Path(config), {}, [f"{mistake}; 'bash scripts/launch.sh --list' shows all {len(names)}"]
    try:
        content, keys = load_yaml(path)
    except Exception as error:  # PyYAML passes on whatever Python raises for a malformed value
        return path, {}, [f"recipe {path}: cannot be read: {' '.join(str(error).split())[:300]}"]
    if content is None:
        return path, {}, []
    if not isinstance(content, dict):
        return path, {}, [f"recipe {path}: must hold 'setting: value' lines"]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    mistakes = [f"recipe {path}: {_shown(key)} is given twice; keep one" for key in twice]
    allowed = [name for name, option in OPTIONS.items() if option.metadata["in_recipe"]]
    known = {}
    unset = [_text(key) for key, value in content.items() if _is_unset(_text(key), value)]
    if "model_ema" in unset and "model_ema_decay" in content:  # which timm then ignores
        unset.append("model_ema_decay")
    given = {_text(key): value for key, value in content.items() if _text(key) not in unset}
    for key, value in content.items():
        name = _text(key).replace("-", "_")
        if name in allowed:
            known[name] = value
        elif name in GONE:
            if value != GONE[name] and name not in ROUNDED_OTHERWISE:
                mistakes.append(f"recipe {path}: {_shown(key)} {IS_GONE}")
        elif name in OPTIONS:
            mistakes.append(f"recipe {path}: {_shown(key)} belongs on the command line; remove it here")
        elif _text(key) in given:
            advice = meant(_text(key), allowed, given)
            mistakes.append(f"recipe {path}: {_shown(key)} is not a setting{advice}")
    if unset:
        mistakes.append(f"recipe {path}: flags of another program without a value, to be left out: {', '.join(unset)}")
    asked = {name: value for name, value in given.items() if value is not None and value is not False}
    zeros = [name for name, value in asked.items() if value == 0]
    words = [*asked, *map(_text, asked.values())]
    unasked = silent_defaults([f"--{name}" for name in asked], words, zeros=zeros) if mistakes else []
    return path, known, [*mistakes, *(f"recipe {path}: {line}" for line in unasked)]


def _is_unset(key: str, value: Any) -> bool:
    """Whether ``key`` is another program's, with the value that its YAML files give a flag that was not given."""
    programs = other_programs().programs.values()
    theirs = key.replace("-", "_") not in OPTIONS and any(key_of(key) in program.names for program in programs)
    return theirs and (value is None or value is False or value in ("", [], {}))


def load_yaml(path: Path) -> tuple[Any, list[str]]:
    """Content of a YAML file, and its top-level keys, even repeated ones. Raises ``ValueError`` if it is too big."""
    import yaml  # only runs with a recipe need it

    with open(path, "rb") as file:
        data = file.read(LARGEST_RECIPE + 1)
    if len(data) > LARGEST_RECIPE:
        raise ValueError(f"it has more than {LARGEST_RECIPE:,} bytes")
    text = data.decode("utf-8")
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)  # several times as fast, where PyYAML has it
        document = loader.get_single_node()
    except yaml.YAMLError:
        loader = yaml.SafeLoader(text)  # says better what is wrong
        document = loader.get_single_node()
    if document is None:
        return None, []
    if _expanded_size(document, {}) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values")
    content = loader.construct_document(document)
    if not isinstance(content, dict):
        return content, []
    return content, [str(key.value).replace("-", "_") for key, _ in document.value]


def _expanded_size(node: Any, sizes: dict[int, int]) -> int:
    """Number of values below a YAML node, where each repetition by an alias counts."""
    if id(node) not in sizes:
        sizes[id(node)] = 1  # in case it contains itself
        items = node.value if isinstance(node.value, list) else []
        children = [child for item in items for child in (item if isinstance(item, tuple) else (item,))]
        sizes[id(node)] = 1 + sum(_expanded_size(child, sizes) for child in children)
    return sizes[id(node)]


def recipe_path(config: str) -> Path | None:
    """The file that ``--config`` means, a path or a name under configs/; None if there is none."""
    for candidate in (Path(config), CONFIGS / f"{config}.yaml", CONFIGS / config):
        try:
            if candidate.is_file():
                return candidate
        except (OSError, ValueError):  # the name is too long, or contains a NUL
            continue
    return None


# ---------------------------------------------------------------------------------- conversion


def _takes_back(option: dataclasses.Field, raw: Any) -> bool:
    """True if a flag's value is ``none``, which leaves an optional setting as if no recipe or checkpoint set it.

    False if the setting has ``none`` or ``off`` as a choice: if ``--amp none`` unset it, a GPU would train in fp16.
    """
    optional = option.default is None and option.metadata["in_recipe"]
    return optional and raw in ("none", ["none"]) and {"none", "off"}.isdisjoint(option.metadata["choices"] or ())


def convert(option: dataclasses.Field, raw: Any) -> tuple[Any, str | None]:
    """Convert a raw value (text from a flag, anything from YAML) to (value, None), or to (None, what is wrong)."""
    meta = option.metadata
    if raw is None:
        return (None, None) if option.default is None else (None, "must have a value")
    if raw is _NO_VALUE or raw == [] or raw == ():
        choices = plugins.choices(option.name)
        return None, "needs a value" + (f": {', '.join(choices)}" if choices else "")
    if meta["many"]:
        raw = _as_items(meta, raw)
        if not meta["verbatim"] and (mistake := _unseparated(raw)):
            return None, mistake
        items = raw if isinstance(raw, list | tuple) else [raw]
        pairs = [_scalar(option, item) for item in items]
        mistake = next((mistake for _, mistake in pairs if mistake), None)
        value = tuple(item for item, _ in pairs)
        if meta["alone"] and len(value) <= 2 and len(set(value)) == 1:
            (value,) = set(value)
    else:
        value, mistake = _scalar(option, raw)
    if mistake is None and meta["check"] and value not in meta["words"]:
        problem = meta["check"](value)
        mistake = problem and f"{_shown(raw)}: {problem}"
    return (None, mistake) if mistake else (value, None)


def _as_items(meta: Any, raw: Any) -> Any:
    """Turn a recipe's mapping into the values of a ``NAME=VALUE`` setting; return anything else as it is."""
    pairs = isinstance(raw, dict) and "=" in (meta["metavar"] or "")
    if not pairs:
        return raw
    texts = (value if isinstance(value, str) else json.dumps(value, default=str) for value in raw.values())
    return [f"{_text(name)}={text}" for name, text in zip(raw, texts, strict=True)]


def _unseparated(raw: Any) -> str | None:
    """Error message if one text holds several values, as in ``--augment shift,flip``; otherwise None.

    A list or mapping after ``NAME=`` is one value.
    """
    flag = isinstance(raw, list)
    texts = [item for item in (raw if flag else [raw]) if isinstance(item, str)]
    text = next((text for text in texts if re.search(r"[\s,]", re.sub(r"^\w+=([\[{]).*", "", text))), "")
    values = re.split(r"[\s,]+", text.strip("[]() \t\n,"))
    if len(values) < 2:
        return None
    return f"{_shown(text)}: write {' '.join(values) if flag else '[' + ', '.join(values) + ']'}"


def _scalar(option: dataclasses.Field, raw: Any) -> tuple[Any, str | None]:
    meta = option.metadata
    choices = plugins.choices(option.name)
    kind = meta["type"]
    kinds = " or ".join((_KINDS[kind], *meta["words"]))
    if kind is bool:
        return (raw, None) if isinstance(raw, bool) else (None, f"{_shown(raw)}: must be true or false")
    if isinstance(raw, str) and raw in meta["words"]:
        return raw, None
    if raw is False and "off" in choices:
        raw = "off"  # YAML 1.1 reads a bare `off` as false
    if raw is True and meta["bare"]:
        raw = meta["bare"]  # `channels-last: true`, and YAML 1.1's bare `on`
    if choices and isinstance(raw, bool | int | float):
        raw = str(raw)  # so that the message lists the choices
    if isinstance(raw, bool | dict | list | tuple) or not isinstance(raw, str | int | float):
        return None, f"{_shown(raw)}: must be {kinds}"
    if kind is str:
        value = str(raw)
        if choices and value not in choices:
            return None, f"{_shown(value)}: choose from {', '.join(choices)}{meant_value(value, choices)}"
        return value, None
    try:
        if kind is int:
            if isinstance(raw, float) and not raw.is_integer():
                raise ValueError
            return int(raw), None
        number = float(raw)
    except (ValueError, OverflowError):
        return None, f"{_shown(raw)}: must be {kinds}"
    return (number, None) if math.isfinite(number) else (None, f"{_shown(raw)}: must be a finite number")


_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _shown(value: Any) -> str:
    text = _plain(" ".join(map(_text, value)) if isinstance(value, list) else _text(value))
    return f"'{text[:60]}...'" if len(text) > 60 else f"'{text}'" if isinstance(value, str) else text


def _text(value: Any) -> str:
    try:
        return str(value)
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        return "a number too large to show"


def _plain(text: str) -> str:
    """Replace all characters that do not fit on one line, on a terminal or in YAML."""
    return re.sub(r"[^\x20-\x7e\u00a0-\u2027\u202a-\ud7ff\ue000-\ufffd]", "?", text)


def in_yaml(value: Any) -> str:
    """A setting's value as YAML on one line."""
    # JSON writes these alike, a hundred times as fast; 1e-05 would be a text in YAML 1.1.
    if value is None or isinstance(value, int) or (isinstance(value, float) and re.fullmatch(r"[-.\d]+", repr(value))):
        return json.dumps(value)
    return _word_in_yaml(value) if isinstance(value, str) else _dumped(value)


@functools.lru_cache(1000)
def _word_in_yaml(value: str) -> str:
    return _dumped(value)


def _dumped(value: Any) -> str:
    import yaml

    return yaml.safe_dump([value], default_flow_style=True, width=math.inf).strip()[1:-1]


# what follows from optimizer and data set where nobody has set it
FOLLOWING = ("arch", "lr", "lr_base_scale")


def as_recipe(settings: Settings, header: str) -> str:
    """The settings as a recipe that ``--config`` reads back; each line names the origin of its value."""
    values = settings.values()
    of_schedule = of_policy(values["lr_policy"], values["epochs"])
    lines = [f"# {_plain(line)}" for line in header.splitlines()]
    replaced = unused(values)
    for group, fields in GROUPS.items():
        lines.append(f"\n# {group}")
        for option in dataclasses.fields(fields):
            name = option.name
            if not option.metadata["in_recipe"]:
                continue
            # The global batch size is enough; with another number of processes the two would contradict each other.
            # So would a learning rate and the --lr-base that it follows from.
            derived = name == "batch_size" or (name == "lr" and values["lr_base"] is not None)
            # What was left to the schedule has to follow another schedule, or another number of epochs.
            derived = derived or (name in {*of_schedule, *FOLLOWING} and settings.origins[name] == DEFAULT)
            derived = derived or (name == "lr_policy" and values["optimizer"] in SCHEDULE_FREE)  # whose own it is
            # What the optimizer or schedule of a flag does not use would contradict it.
            derived = derived or (name in replaced and values[name] != option.default)
            line = f"{name.replace('_', '-')}: {in_yaml(values[name])}  # {settings.origins[name]}"
            lines.append(f"# {line}" if derived else line)
    return "\n".join(lines) + "\n"
