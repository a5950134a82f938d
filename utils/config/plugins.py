"""Entries that users' own files add: ``--plugin FILE``, whose decorators are in ``utils/plugin.py``.

Each package asks ``added`` for the entries of its kind, besides its own registry. Only files that the command line or
its recipe names are executed: a checkpoint says which files its run had, but never executes them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any, TypeVar

from utils.config.datasets import SPECS
from utils.config.field import safe_name
from utils.config.rules import OPTIONS
from utils.config.settings import UserError
from utils.config.spelling import reason_of

# The settings whose choices an entry's name joins; an entry of another kind is looked up where its name is used.
KIND_OF = {"loss": "loss", "lr_policy": "lr_policy", "dataname": "dataset", "augment": "augmentation"}


Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """A function that a decorator in a user's file registers under ``kind`` and ``name``.

    A call of the entry calls the function, ``make``; an error in it becomes a ``UserError`` that names the line of the
    file. ``options``: the arguments of the decorator besides the name.
    """

    kind: str
    name: str
    make: Callable[..., Any]
    file: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Of the entry alone: a signature of the class, too, breaks python -OO with Python 3.11.2.
        with suppress(ValueError):  # some functions of C tell none
            vars(self)["__signature__"] = inspect.signature(self.make)

    @property
    def where(self) -> str:
        """The beginning of a message about the entry: '--plugin FILE: loss NAME'."""
        return f"--plugin {self.file}: {self.kind} {self.name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with mistakes_of(self.file, f"{self.kind} {self.name}"):
            return self.make(*args, **kwargs)


@dataclass
class _Loaded:
    """The files in use: SHA-256 by path, entries by kind and name, and hooks."""

    digests: dict[Path, str] = field(default_factory=dict)
    entries: dict[str, dict[str, Entry]] = field(default_factory=dict)
    hooks: list[Entry] = field(default_factory=list)


_loaded = _Loaded()
_loading: list[Path] = []


def added(kind: str) -> Mapping[str, Entry]:
    """The entries of ``kind``, such as 'loss', by name."""
    return MappingProxyType(_loaded.entries.get(kind, {}))


def hooks() -> Sequence[Entry]:
    """The hooks, named after their points in ``utils/loop/hooks.py``, in the order of the files."""
    return tuple(_loaded.hooks)


def choices(setting: str) -> tuple[str, ...]:
    """Names that ``setting`` accepts: its own choices, and those that files add."""
    own = OPTIONS[setting].metadata["choices"]
    return (*own, *added(KIND_OF[setting])) if setting in KIND_OF else own


def digests() -> dict[str, str]:
    """SHA-256 of each file in use, by file name."""
    return {path.name: digest for path, digest in _loaded.digests.items()}


def refuse_missing(settings: Mapping[str, Any], path: Path) -> None:
    """Raise ``UserError`` if ``settings`` of checkpoint ``path`` use a part from a plugin file that is not loaded."""
    files = ", ".join(Path(file).name for file in settings.get("plugin") or ())
    for name in KIND_OF if files else ():
        values = settings.get(name) or ()
        for value in (values,) if isinstance(values, str) else values:
            if value not in choices(name):
                made_with = f"was trained with --{name.replace('_', '-')} {value} of {files}"
                raise UserError(f"{path}: {made_with}; give that file by --plugin")


def describe() -> dict[str, str]:
    """The row of a run's plan about the files; {} without files."""
    if not _loaded.digests:
        return {}
    names = [f"{kind} {name}" for kind, entries in _loaded.entries.items() for name in entries]
    names += [f"hook {hook.name}" for hook in _loaded.hooks]
    files = ", ".join(f"{path.name} ({digest[:8]})" for path, digest in _loaded.digests.items())
    return {"Plug-ins": f"{files}: {', '.join(names) or 'nothing'}"}


def load(files: Sequence[str | os.PathLike[str]]) -> None:
    """Execute ``files`` and drop all entries of files loaded earlier. Raises ``UserError``."""
    for name in added("dataset"):
        del SPECS[name]
    vars(_loaded).update(vars(_Loaded()))
    for file in files:
        _load(Path(os.path.abspath(file)))


class _Source(SourceFileLoader):
    """Loader that runs ``source``, the very bytes that are hashed; Python's loader might run older bytecode."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self.path)


def _load(path: Path) -> None:
    try:
        source = path.read_bytes()
    except (OSError, ValueError) as error:  # NUL characters, and bytes that are no UTF-8
        reason = reason_of(error)
        raise UserError(f"--plugin {ascii(str(path))[1:-1]}: cannot be read ({reason})", on_all_ranks=True) from error
    twins = [other for other in _loaded.digests if other.name == path.name]
    if twins:
        raise UserError(f"--plugin {path}: {twins[0]} has the same name; rename one", on_all_ranks=True)
    name = f"plugin_{path.stem}"
    loader = _Source(name, str(path), source)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None  # as always where a loader is given
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # listed: its classes can be pickled for workers
    _loading.append(path)
    try:
        with mistakes_of(path):
            loader.exec_module(module)
    finally:
        _loading.pop()
    _loaded.digests[path] = hashlib.sha256(source).hexdigest()


@contextmanager
def mistakes_of(file: Path, what: str = "", but: type[Exception] = UserError) -> Iterator[None]:
    """Context that turns an error in a user's ``file``, except one of type ``but``, into a ``UserError`` with its line.

    An exit is an error, too: with the code 0 it would look like a training that is done.
    ``what``: the entry that is called; '' while the file is loaded, which fails on all ranks alike.
    """
    try:
        yield
    except (UserError, but):
        raise
    except (Exception, SystemExit) as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which ``report`` explains
            raise
        raise UserError(_line(file, error, what), on_all_ranks=not what) from error


def mistake(error: BaseException) -> str | None:
    """A line about an ``error`` in a user's file or in what the file calls; None for other errors and a GPU's."""
    if type(error).__name__ in ("OutOfMemoryError", "AcceleratorError"):
        return None
    passed = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    file = next((path for path in _loaded.digests if str(path) in passed), None)
    return _line(file, error) if file else None


def _line(path: Path, error: BaseException, what: str = "") -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
    place = f"{path}, line {line}" if line else str(path)
    reason = " ".join(str(error).split())[:300]
    return f"--plugin {place}: {what and f'{what}: '}{type(error).__name__}{reason and f': {reason}'}"


def refuse_other_arguments(make: Callable[..., Any], what: str, taken: Sequence[str], more: bool = False) -> None:
    """Raise ``UserError`` if ``make``, which is ``what``, cannot be called with as many arguments as are ``taken``.

    ``more``: it may require further ones, which flags give by name. Otherwise the mistake would show when ``make`` is
    called, some after an epoch of training.
    """
    try:
        signature = inspect.signature(make)
    except ValueError:  # some functions of C tell none
        return
    try:
        (signature.bind_partial if more else signature.bind)(*taken)
    except TypeError as error:
        raise UserError(f"{what}: must take ({', '.join(taken)}): {error}", on_all_ranks=True) from error


def add(
    kind: str, name: str, taken: Sequence[str] = (), *, more: bool = False, **options: Any
) -> Callable[[Function], Function]:
    """Return a decorator that enters a function as ``name``. It raises ``UserError`` for an unfit or taken name.

    ``taken`` and ``more``: as in ``refuse_other_arguments``; a hook's depend on its point, in ``utils/loop/hooks.py``.
    """
    if callable(name) and _loading:  # a decorator without brackets would enter nothing
        raise UserError(f'{_place(name)}: write @{kind}("NAME"), with a name in brackets', on_all_ranks=True)

    def enter(make: Function) -> Function:
        if not _loading:  # imported as a module of a user's program
            return make
        file = _loading[-1]
        where = _place(make)
        problem = safe_name(name) if isinstance(name, str) else "must be a text"
        if problem:
            raise UserError(f"{where}: the name {name!r} of a {kind} {problem}", on_all_ranks=True)
        entry = Entry(kind, name, make, file, options)
        if kind == "hook":
            _loaded.hooks.append(entry)
            return make
        refuse_other_arguments(make, f"{where}: {kind} {name}", taken, more)
        known = (choices(setting) for setting, other in KIND_OF.items() if other == kind)
        if name in added(kind) or any(name in names for names in known):
            raise UserError(f"{where}: there is a {kind} {name} already; choose another name", on_all_ranks=True)
        _loaded.entries.setdefault(kind, {})[name] = entry
        if kind == "dataset":
            SPECS[name] = options["spec"]
        return make

    return enter


def _place(make: Callable[..., Any]) -> str:
    line = f", line {make.__code__.co_firstlineno}" if inspect.isfunction(make) else ""
    return f"--plugin {_loading[-1]}{line}"
