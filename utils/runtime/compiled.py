"""torch.compile's output, kept for each machine, versions and recipe, so that a second start compiles nothing.

The compiler caches its output in a folder, by default a temporary one; here it gets a permanent folder.
``torch.compiler.save_cache_artifacts`` would leave out the libraries of CPU kernels, which take longest to compile.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from utils.runtime.files import sha256, whole_file

FOLDER = ".compiled"  # in --output
LIST = "files.json"  # SHA-256 of each file, by its path within the folder
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
MOST_SIZES = 64  # that a function is compiled for; torch would stop at 8, and launch it as it is from then on


def compile_in_place(model: torch.nn.Module, mode: str) -> None:
    """Compile ``model`` in place, so that names stay as they are.

    All modes but 'default' launch CUDA graphs, whose next pass overwrites an output that sums of several steps still
    need; torch refuses to read it then. So it is copied.
    """
    # Each size of batch and image on its own: after a second size, torch would compile for any size, and from then on
    # train with that slower code on all of them.
    torch._dynamo.config.recompile_limit = MOST_SIZES
    forward = getattr(type(model), "forward", None)  # TorchScript's classes have none
    where = getattr(forward, "__module__", None) or ""  # those of torch.fx belong to no module
    if where.startswith("torch.nn."):  # as nn.Sequential's, which torch 2.11 would not compile

        def call(*arguments: Any, **named: Any) -> Any:
            return model._call_impl(*arguments, **named)

        model._compiled_call_impl = torch.compile(call, mode=mode, dynamic=False)
    else:
        model.compile(mode=mode, dynamic=False)
    if mode != "default":
        graphs: Any = model._compiled_call_impl
        model._compiled_call_impl = lambda *arguments, **named: graphs(*arguments, **named).clone()


class KeptCompilation:
    """The folder, within ``parent``, of code compiled for ``recipe`` on ``machine``, for this process to use.

    Whoever can write there can have a program executed, so a folder that belongs to another user, or that others can
    write to, is not used, and ``log`` is told. A file that changed since it was listed is removed and made anew.
    """

    def __init__(self, parent: Path, recipe: str, machine: str, log: Callable[[str], None]) -> None:
        self.folder = parent / FOLDER / digest_of(recipe, machine)
        self._known: dict[str, str] = {}
        self.is_used = VARIABLE not in os.environ  # otherwise the user has chosen a folder
        if not self.is_used:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            doubt = _doubt(self.folder)
            if not doubt:
                self._known, changed = self._verified()
        except OSError as error:
            doubt = str(error)
        if doubt:
            self.is_used = False
            log(f"{self.folder} is not used for what is compiled: {doubt}")
            return
        if changed:
            log(f"{self.folder}: {len(changed)} kept file(s) are damaged, such as {changed[0]}: compiled anew")
        os.environ[VARIABLE] = str(self.folder)

    def write_list(self) -> None:
        """List the files compiled so far, with their digests."""
        if not self.is_used:
            return
        with suppress(OSError):  # without a list nothing can be checked, and all works
            names = [str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if _is_kept(path)]
            if set(names) == set(self._known):
                return
            self._known = {name: self._known.get(name) or sha256(self.folder / name) for name in names}
            with whole_file(self.folder / LIST) as file:
                file.write(json.dumps(self._known, indent=1).encode())

    def _verified(self) -> tuple[dict[str, str], list[str]]:
        """The digests of the listed files that are unchanged, and the names of changed ones, which are removed."""
        try:
            listed = json.loads((self.folder / LIST).read_bytes())
            listed = {str(name): digest for name, digest in listed.items()}
        except FileNotFoundError:
            return {}, []
        except (ValueError, AttributeError):  # no list: nothing in the folder can be checked
            listed = {str(path.relative_to(self.folder)): "" for path in self.folder.rglob("*") if path.is_file()}
        there = {name: self.folder / name for name in listed if (self.folder / name).is_file()}
        changed = [name for name, path in there.items() if sha256(path) != listed[name]]
        for name in changed:
            there.pop(name).unlink(missing_ok=True)
        return {name: listed[name] for name in there}, changed


def digest_of(recipe: str, machine: str) -> str:
    """Name for everything on which compiled code depends: ``recipe``, ``machine``, its instruction set and versions."""
    try:
        import triton

        of_triton = triton.__version__
    except ImportError:  # not on every system
        of_triton = ""
    versions = (platform.python_version(), torch.__version__, torch.version.cuda, of_triton, torch.version.hip)
    own = (machine, platform.machine(), torch.backends.cpu.get_cpu_capability())
    return hashlib.sha256(repr((recipe, own, versions)).encode()).hexdigest()[:16]


def _doubt(folder: Path) -> str:
    """The reason not to execute files in ``folder``; '' if there is none."""
    for one in (folder, folder.parent):
        status = one.stat()
        if status.st_uid != os.getuid():
            return f"{one.name} belongs to another user"
        if one == folder and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "others can write to it"
    return ""


def _is_kept(path: Path) -> bool:
    return path.is_file() and path.name != LIST and path.suffix not in (".lock", ".tmp")
