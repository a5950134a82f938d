"""Parser, error messages, lines on stderr and tables of the command-line tools under ``scripts/``."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from utils.config import arguments, plugins
from utils.config.field import FLAG, between
from utils.config.groups.data import DataSettings
from utils.config.settings import Settings, UserError, as_flag, as_user_error
from utils.runtime.console import INTERRUPTED, lacks_package, outlive_readers
from utils.runtime.cpu import let_threads_wait_briefly

T = TypeVar("T")
# data settings that tell which images there are, and what they are labelled
WHICH_IMAGES = (
    *("dataname", "datapath", "val_split", "val_split_by", "folds", "fold", "fold_seed", "image_column"),
    *("label_column", "labels", "path_column", "split_column", "group_column", "weight_column", "class_from_name"),
    *("class_map", "label_separator", "label_columns"),
)
# and those that tell how their bytes are had and read, not what a training makes of them
OF_IMAGES = (
    *WHICH_IMAGES,
    *("download", "folds_from", "in_channels", "levels", "pixel_range", "workers", "cache_dir", "skip_bad_images"),
)
_made: list[Path] = []  # folders that ``make_folder`` made, each before those that it lies in
TERMINATED = 128 + signal.SIGTERM  # the exit code that shells report for a process ended by SIGTERM


class ToolParser(argparse.ArgumentParser):
    """Parser of a tool's own flags; every other flag is one of main.py's training flags.

    ``documentation``: the tool's docstring, whose first line describes it; None under python -OO. A mistake raises
    ``UserError`` instead of printing usage and exiting.
    """

    def __init__(self, name: str, documentation: str | None, *, training_flags: bool) -> None:
        more = " [training flag ...]" if training_flags else ""
        super().__init__(
            prog=name,
            usage=f"python scripts/{name} [flag ...]{more}",
            description=(documentation or "").partition("\n")[0],
            epilog="Training flags (--arch, --dataname, --resume ...): see main.py --help." if training_flags else None,
            allow_abbrev=False,
        )
        self.training_flags = training_flags

    def error(self, message: str) -> None:
        raise UserError(message, on_all_ranks=True)  # all processes have the same command line

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        own, others = super().parse_known_args(*args, **kwargs)
        if getattr(own, "plugin", None):
            plugins.load(own.plugin)
        output = getattr(own, "output", None)
        if output is not None and (not output.strip() or "\0" in output):
            self.error("--output must not be empty or hold a NUL character")
        return own, others

    def split(self, argv: Sequence[str]) -> tuple[Any, Settings]:
        """The tool's own flags as a namespace, and all others as checked training settings.

        Raises ``UserError`` for flags such as --resume, since a tool that calls this reads no run.
        """
        own, others = self.parse_known_args(argv)
        args = arguments.parse(others)
        refuse(f"{flag} is not for {self.prog}, which reads no run; give the flags of one" for flag in run_flags(args))
        return own, args


def run_flags(args: Settings) -> list[str]:
    """Flags in ``args`` that only main.py follows: --resume, --evaluate and --dry-run."""
    given = {"--resume": args.run.resume, "--evaluate": args.run.evaluate, "--dry-run": args.run.dry_run}
    return [flag for flag, value in given.items() if value]


def warn_of_unread(args: Settings, read: Collection[str], end: str) -> None:
    """Warn of each flag about images that is none of ``read``, the settings that a tool follows; ``end`` says why."""
    values = args.values()
    for option in dataclasses.fields(DataSettings):
        if args.origins[option.name] == FLAG and option.name not in read:
            warn(f"{as_flag(option.name, values[option.name])} does nothing {end}")


def number(low: float, high: float, kind: type[int] | type[float] = float) -> Callable[[str], Any]:
    """Type for argparse that turns text into a number between ``low`` and ``high``."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
            problem = between(low, high)(value) if math.isfinite(value) else "must be a finite number"
        except (ValueError, OverflowError):
            problem = "must be a whole number" if kind is int else "must be a number"
        if problem:
            raise argparse.ArgumentTypeError(f"{text!r}: {problem}")
        return value

    return read


def whole(low: int, high: int = 10**6) -> Callable[[str], int]:
    """Type for argparse that turns text into a whole number between ``low`` and ``high``."""
    return number(low, high, int)


seconds = number(0.01, 3600)
positive_number = number(1e-30, 1e6)
share = number(0, 1)


def each_of(read: Callable[[str], T], texts: Iterable[str]) -> list[T]:
    """Results of ``read`` for each text. Raises one ``UserError`` with the mistakes of all."""
    found = []
    mistakes = []
    for text in texts:
        try:
            found.append(read(text))
        except UserError as error:
            mistakes += error.mistakes
    refuse(mistakes)
    return found


def refuse(mistakes: Iterable[str]) -> None:
    """Raise one ``UserError`` with all ``mistakes``, if there are any."""
    if lines := [*mistakes]:
        raise UserError(*lines)


class Terminated(BaseException):
    """SIGTERM arrived. Not an ``Exception``: handlers, such as for damaged images, must not catch it."""


@contextmanager
def termination_raises() -> Iterator[None]:
    """Context in which the first SIGTERM raises ``Terminated`` and a second one ends the process.

    The handler from before is restored afterwards. A process forked within the block is ended by its first SIGTERM.
    """
    process = os.getpid()

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != process:
            signal.raise_signal(signal.SIGTERM)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_tool(name: str, tool: Callable[[list[str]], int], *, takes_ranks: bool = False) -> int:
    """Run ``tool`` on the command line and return its exit code; 2, with one line each, for mistakes a user can fix.

    Removes folders that the tool has made and left empty, as on a full disk. ``takes_ranks``: whether a launcher may
    start the tool on several processes; for another, and what it starts, the launcher's variables do not count.

    SIGTERM ends a single process as Ctrl-C does, so that it removes half-written files; one of several ranks ends at
    once.
    """
    outlive_readers()
    let_threads_wait_briefly()  # as in main.py: measurements apply to training
    if not takes_ranks or "WORLD_SIZE" not in os.environ:  # as ``RankInfo`` reads them
        for variable in ("RANK", "WORLD_SIZE"):
            os.environ.pop(variable, None)
    try:
        with nullcontext() if "RANK" in os.environ else termination_raises():
            return tool(sys.argv[1:])
    except UserError as error:
        if os.environ.get("RANK", "0") == "0" or not error.on_all_ranks:
            print("\n".join(f"{name}: {' '.join(line.split())}" for line in error.mistakes), file=sys.stderr)
        return 2
    except ImportError as error:
        own = plugins.mistake(error)
        if own is None:
            return lacks_package(name, error)
        print(f"{name}: {own}", file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:
        from utils.runtime.memory import lacks_memory, out_of_memory

        if not lacks_memory(error):
            raise
        print(f"{name}: {out_of_memory(error)}; a smaller --batch-size needs less", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Terminated:
        print(f"{name}: ended by SIGTERM", file=sys.stderr)
        return TERMINATED
    finally:
        for folder in _made:
            with suppress(OSError):  # it holds files
                folder.rmdir()


def say(line: str) -> None:
    """Print a line on stderr, from rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(" ".join(line.split()), file=sys.stderr, flush=True)  # a name may hold a newline


def warn(line: str) -> None:
    """Print a warning on stderr, from rank 0 only."""
    say(f"warning: {line}")


def make_folder(output: str, flag: str = "--output") -> Path:
    """Make the folder of ``flag`` and return it; done before the work, so that a mistake shows at once."""
    folder = Path(output)
    with as_user_error(f"{flag} {output}: cannot be made", (OSError, ValueError), advice="; choose another folder"):
        _made[:0] = [path for path in (folder.absolute(), *folder.absolute().parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text table: first column left-aligned, the others right-aligned, two spaces between them."""
    cells = [list(headers), *map(list, rows)]
    first, *others = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in (first, *others)])
    line = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    return "\n".join(line.format(*row).rstrip() for row in cells)
