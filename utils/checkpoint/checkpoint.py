"""Checkpoints: atomic save, verified load, retention.

A checkpoint is written to a temporary file in the same folder, flushed to the disk, entered with its
SHA-256 in ``manifest.json`` and then renamed; the ``last.pt`` that it replaces becomes ``previous.pt``.
So whenever the process dies, there is a whole checkpoint, and damaged ones can be recognised.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from utils.checkpoint.inventory import CONTENTS, inventory, missing, refuse_swollen, wrong_kinds
from utils.checkpoint.progress import Progress
from utils.checkpoint.sharded import SHARDS, Places, Shards, mapped, remove_unused
from utils.checkpoint.snapshot import Snapshot
from utils.config.settings import UserError, as_user_error
from utils.config.spelling import reason_of, some
from utils.runtime.files import sha256, sync, whole_file
from utils.runtime.state_dicts import load_state_dict

FORMAT = 4
KEYS = (
    "format",
    "arch",
    "model",
    "ema",
    "optimizer",
    "scaler",
    "progress",
    "classes",
    "preprocessing",
    "settings",
    "versions",
    "fingerprint",
)
MANIFEST = "manifest.json"
ABANDONED = "abandoned_"  # begins the name of a checkpoint behind which its run went back
IF_GONE = "give its new place to --resume, or begin the run anew"
NOT_OURS = "it is damaged, or not a file of torch.save"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NEWEST_FIRST = ("last.pt", "previous.pt", "final.pt", "best.pt", "initial.pt")
# Keys under which training programs keep the weights. Like ours, timm's and torchvision's prefer a moving average.
HOLDERS = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile


class Checkpointer:
    """Saves checkpoints into ``folder``. Every rank has a ``Checkpointer``; only the main one calls ``save``.

    ``save`` copies the state and returns; a thread writes the copies, one at a time. The next ``save`` or ``wait``
    raises a write's error. ``warn`` gets a line when somebody has removed the folder and it is made again.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None] = lambda line: None) -> None:
        self.folder = folder
        self._warn = warn
        self._snapshot = Snapshot()
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # the interpreter lets it finish before it ends
        self._writing: Future[None] | None = None

    @property
    def failed(self) -> bool:
        """True if a write has failed whose error neither ``save`` nor ``wait`` has raised yet."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def save(self, state: dict[str, Any], *names: str) -> None:
        """Write ``state``, as it is now, under each of ``names`` ('last', 'best', ...).

        ``state`` has all of ``KEYS``. Waits for the previous write and raises its error.
        """
        assert set(state) >= set(KEYS), set(KEYS) - set(state)
        self.wait()
        self._make_again()
        copy, complete = self._snapshot.take(state)

        def write() -> None:
            complete()
            self._write(copy, names)

        self._writing = self._thread.submit(write)

    def _make_again(self) -> None:
        """Make the folder again if it was removed while its parent remains: losing the state would be worse."""
        if self.folder.is_dir() or not self.folder.parent.is_dir():
            return
        with suppress(OSError):  # which writing will report
            self.folder.mkdir()
            self._warn(
                f"{self.folder} was removed while the run was writing there, with all its checkpoints; it is made "
                "again for those that follow, and best.pt will be that of the next better epoch"
            )

    def wait(self) -> None:
        """Wait until everything is on the disk.

        Raises ``UserError`` if the disk is full or not writable; earlier checkpoints stay.
        """
        if self._writing is None:
            return
        error = self._writing.exception()  # waits
        self._writing = None
        if error is not None:
            raise error

    def take_as_last(self, path: Path) -> None:
        """Make the checkpoint ``path`` also ``last.pt``; the one that it replaces becomes ``previous.pt``."""
        self._replace(path, ("last",))

    def _write(self, state: dict[str, Any], names: tuple[str, ...]) -> None:
        temporary = self.folder / ".next.tmp"
        try:
            temporary.unlink(missing_ok=True)  # what a kill left may be a second name of a checkpoint
            with open(temporary, "wb") as file:
                torch.save({**state, CONTENTS: state.get(CONTENTS) or inventory(state)}, file)
            sync(temporary)
            self._replace(temporary, names)
            remove_unused(self.folder, read_quickly)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            raise UserError(self._failure(names, error)) from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _failure(self, names: tuple[str, ...], error: OSError | RuntimeError) -> str:
        """Advice about a checkpoint that cannot be written, with the system's reason."""
        if not self.folder.is_dir():
            return f"--output: {self.folder} was removed or renamed while the run was writing there; {IF_GONE}"
        cause = _cause(error)
        advice = "free some space" if cause.errno in (None, *FULL) else "let this process write there"
        before = "" if names == ("initial",) else "; the checkpoints before it are whole, and --resume continues"
        return f"--output: cannot write {self.folder / names[0]}.pt ({_reason(error)}): {advice}{before}"

    def _replace(self, written: Path, names: tuple[str, ...]) -> None:
        """Rename ``written`` to ``names``; until that is done, the manifest accepts old and new digests."""
        digest = sha256(written)
        before = _manifest(self.folder)
        after = before | {f"{name}.pt": [digest] for name in names}
        if "last" in names and "last.pt" in before:
            after["previous.pt"] = before["last.pt"]
        both = {name: list(dict.fromkeys([*after[name], *before.get(name, [])])) for name in after}
        _write_manifest(self.folder, both)
        for name in names:
            self._place(written, name)
        sync(self.folder)
        _write_manifest(self.folder, after)

    def _place(self, written: Path, name: str) -> None:
        target = self.folder / f"{name}.pt"
        copy = self.folder / ".next.copy"
        copy.unlink(missing_ok=True)
        try:
            os.link(written, copy)  # a checkpoint is replaced, never changed, so names may share bytes
        except OSError:  # a file system without hard links
            shutil.copyfile(written, copy)
            sync(copy)
        if name == "last" and target.exists():
            os.replace(target, self.folder / "previous.pt")
        os.replace(copy, target)


def load(
    path: Path, digest: str | None = None, places: Places | None = None, *, outline: bool = False
) -> dict[str, Any]:
    """Load a verified checkpoint, on the CPU. Raises ``UserError`` with the file and what is wrong.

    ``digest``: the SHA-256 that the file must have, regardless of the manifest. ``places``: load only this process's
    part of each tensor, onto its device. ``outline``: tensors of a sharded checkpoint may have no content.
    """
    state = _content(path, digest)
    if SHARDS not in state:
        return state if places is None else mapped(state, places.part)
    shards = Shards(path, state[SHARDS])
    if digest is None:  # otherwise rank 0 has verified them, and each process reads its part alone
        shards.verify()
    return shards.outlined(state) if outline else shards.read(state, places)


def write_whole(path: Path, state: dict[str, Any]) -> None:
    """Write ``state``, as ``load`` returned it, into one new file at ``path``, which appears once it is whole.

    Raises ``UserError`` if the file cannot be written.
    """
    try:
        with whole_file(path, durable=True) as file:
            torch.save({**state, CONTENTS: inventory(state)}, file)
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot write {path} ({_reason(error)})") from error


def read_quickly(path: Path) -> dict[str, Any]:
    """Load a checkpoint without verifying it or reading its tensors, which stay in the file. Raises torch's errors."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _content(path: Path, digest: str | None) -> dict[str, Any]:
    """The verified content of the file ``path``; for a sharded checkpoint, everything except tensors."""
    if os.path.isdir(path):
        raise UserError(f"{path}: is a folder; give a file in it")
    if not os.path.isfile(path):  # waiting for a pipe could take forever
        raise UserError(f"{path}: {'is not a file' if os.path.exists(path) else 'no such checkpoint'}")
    try:
        _verify(path, digest)
        size = path.stat().st_size
        state = _safetensors(path) if _is_safetensors(path, size) else _unpickle(path)
        refuse_swollen(state, size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({reason_of(error)})") from error
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path}: is not a checkpoint that can be loaded safely: {str(error)[:200]}; give another"
        ) from error
    if not isinstance(state, dict):
        raise UserError(f"{path}: is not a checkpoint (it holds a {type(state).__name__})")
    return state


def _verify(path: Path, digest: str | None) -> None:
    """Compare the file with ``digest``, else with the manifest's SHA-256, else with its own CRC-32; refuse zip bombs.

    Raises ``UserError`` or ``ValueError``. torch.load also reads compressed and overlapping entries, with which a few
    bytes can claim terabytes.
    """
    digests = [digest] if digest else _manifest(path.parent).get(path.name)
    while digests and sha256(path) not in digests:
        newer = None if digest else _manifest(path.parent).get(path.name)
        if newer and newer != digests:  # another process has replaced the checkpoint since the manifest was read
            digests = newer
            continue
        if digest:
            raise UserError(f"{path}: is no longer the file that was found, or another machine sees another one")
        raise UserError(f"{path}: is damaged (its SHA-256 is not that in {MANIFEST}); use another of the run")
    with open(path, "rb") as file:
        if file.read(2) != b"PK":  # torch's format before 1.6
            return
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            if packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
                raise ValueError("it holds compressed parts, which torch.save never writes")
            damaged = None if digests else archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, struct.error) as error:
        raise ValueError(NOT_OURS) from error
    if damaged:
        raise UserError(f"{path}: is damaged (its own CRC-32 does not match); use another")


def _unpickle(path: Path) -> Any:
    """The content of a file of torch.save. Raises ``ValueError`` if that is not safe to load."""
    try:
        # timm and torchvision keep the command line beside the weights; a Namespace only holds values.
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")  # our errors say what is wrong with a file
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a hostile file makes torch raise almost anything
        refused = re.search(r"(?:GLOBAL|class|type) [\w.]{1,100}", str(error))
        raise ValueError(f"it holds {refused.group()}" if refused else NOT_OURS) from error


def _is_safetensors(path: Path, size: int) -> bool:
    """True if the file, whatever its name, begins like a safetensors file, with the length of a JSON header."""
    with open(path, "rb") as file:
        start = file.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= size - 8


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The content of a safetensors file, which holds nothing but tensors. Raises ``ValueError`` if it is damaged."""
    import safetensors.torch  # needed for such files only

    try:
        return safetensors.torch.load_file(path)
    except OSError:
        raise
    except Exception as error:  # the library has several kinds
        raise ValueError(f"it is a damaged file of safetensors ({reason_of(error)})") from error


def load_run(path: Path) -> dict[str, Any]:
    """Load, as ``load`` does, a checkpoint to continue from: every part must be present and of the right kind."""
    state = load(path, outline=True)
    lacking = [key for key in KEYS if key not in state]
    if not lacking and state["format"] != FORMAT:
        raise UserError(
            f"{path}: has checkpoint format {str(state['format'])[:20]}, this version continues {FORMAT}; use it with "
            "--weights"
        )
    lacking = lacking or missing(state)
    if lacking:
        raise UserError(f"{path}: lacks {some(lacking, 5)}; use it with --weights; a run cannot continue from it")
    wrong = [*wrong_kinds(state), *Progress.problems(state["progress"])]
    if wrong:
        raise UserError(f"{path}: a run cannot continue from it: {'; '.join(wrong[:5])}")
    return state


def newest(
    folder: Path, warn: Callable[[str], None], read: Callable[[Path], dict[str, Any]] = load_run
) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint in ``folder`` that ``read`` accepts, None without any; calls ``warn`` for damaged ones."""
    whole: list[tuple[Path, dict[str, Any]]] = []
    _manifest(folder, warn)
    for name in NEWEST_FIRST:
        if not os.path.lexists(folder / name):
            continue
        try:
            state = read(folder / name)
        except UserError as error:
            warn(str(error))
            continue
        whole.append((folder / name, state))
        # With --save-every-epochs above 1, best.pt may be of a later step.
        if name == "last.pt" and (step_of(folder / "best.pt") or 0) <= _step(state):
            break
    return max(whole, key=lambda item: _step(item[1]), default=None)  # of several with the same step, the first


def step_of(path: Path) -> int | None:
    """The step of the checkpoint ``path``; None if it is missing or damaged."""
    if not path.is_file():  # waiting for a pipe could take forever
        return None
    try:
        state: Any = read_quickly(path)
        return int(state["progress"]["step"])
    except Exception:  # a damaged file makes torch raise almost anything
        return None


def _step(state: dict[str, Any]) -> int:
    step = dict_in(state, "progress").get("step")
    return step if isinstance(step, int) else -1


def dict_in(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The dict that a checkpoint has under ``name``; {} without one, as in files of other programs."""
    found = state.get(name)
    return found if isinstance(found, dict) else {}


def class_names(state: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The classes' names in label order; None if a checkpoint has none."""
    names = state.get("classes")
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def weights_of(state: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """The weights to use from a checkpoint: ours, timm's, torchvision's, or a bare state_dict. Raises ``UserError``.

    A moving average of the weights is preferred. The prefixes of wrapped networks are removed, but not from our own
    checkpoints, whose names are those of the network.
    """
    is_ours = "format" in state
    ema = state.get("ema")
    if isinstance(ema, dict) and isinstance(ema.get("model"), dict):
        state = ema["model"]
    else:
        state = next((state[key] for key in HOLDERS if isinstance(state.get(key), dict)), state)
    weights = {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not is_ours:
        weights = {_clean(name): value for name, value in weights.items()}
        weights.pop("n_averaged", None)  # of torch.optim.swa_utils.AveragedModel
    if not weights:
        raise UserError(f"--weights {path}: holds no weights")
    return weights


def _clean(name: str) -> str:
    """Remove wrappers' prefixes from ``name``: torch.compile may wrap a layer, the other wrappers wrap a network."""
    while name.startswith(PREFIXES):
        name = name.removeprefix("module.").removeprefix("_orig_mod.")
    return name.replace("._orig_mod.", ".")


class Misfits(NamedTuple):
    """Names of weights that do not fit a network: ``missing`` and ``unexpected`` ones, and ``misshapen`` ones."""

    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]


def misfits(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> Misfits:
    """Compare ``weights`` with what ``model`` needs."""
    own = model.state_dict()
    return Misfits(
        missing=[name for name in own if name not in weights],
        unexpected=[name for name in weights if name not in own],
        misshapen=[name for name in own if name in weights and weights[name].shape != own[name].shape],
    )


def load_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor], where: str | Path) -> None:
    """Load ``weights`` into ``model``; raises ``UserError`` with the first names and shapes that do not fit."""
    own = model.state_dict()
    found = misfits(model, weights)
    wrong = [f"lacks {name}" for name in found.missing]
    wrong += [f"has {name}, which the network lacks" for name in found.unexpected]
    wrong += [
        f"{name} is {tuple(weights[name].shape)} and should be {tuple(own[name].shape)}" for name in found.misshapen
    ]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(f"{where}: does not fit the network: {'; '.join(wrong[:3])}{more}; is --arch right?")
    with as_user_error(f"{where}: does not fit the network", RuntimeError):
        load_state_dict(model, weights)


def average_moved_since_validation(state: dict[str, Any]) -> bool:
    """True if a checkpoint's average of the weights has moved since its batch-norm statistics were computed."""
    if not isinstance(state.get("ema"), dict):
        return False
    progress = dict_in(state, "progress")
    settings = dict_in(state, "settings")
    validated = progress.get("validated_step")
    averaged = progress.get("averaged_step")
    if settings.get("swa_start_epoch"):  # moves once an epoch
        return isinstance(validated, int) and isinstance(averaged, int) and averaged > validated
    return bool(settings.get("ema_bn_batches")) and validated != progress.get("step")


def _manifest(folder: Path, warn: Callable[[str], None] = lambda line: None) -> dict[str, list[str]]:
    """SHA-256 digests that each checkpoint may have; empty without a manifest. Calls ``warn`` if that is damaged."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return {}
    try:
        if not os.path.isfile(path):
            raise ValueError("no file")
        content = json.loads(path.read_text(encoding="utf-8"))["sha256"]
        return {str(name): [str(digest) for digest in digests] for name, digests in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        warn(f"{path}: cannot be read; checkpoints are verified by their own CRC-32 instead")
        return {}


def _write_manifest(folder: Path, digests: dict[str, list[str]]) -> None:
    with whole_file(folder / MANIFEST, "w", durable=True, encoding="utf-8") as file:
        json.dump({"sha256": digests}, file, indent=1)


def _reason(error: OSError | RuntimeError) -> str:
    """The system's text for the error; torch's own message names a line of its source instead."""
    cause = _cause(error)
    return cause.strerror or str(cause) or reason_of(error)


def _cause(error: OSError | RuntimeError) -> OSError:
    """The system's error behind an error of torch; an empty ``OSError`` if there is none."""
    cause = error if isinstance(error, OSError) else error.__context__
    return cause if isinstance(cause, OSError) else OSError()
