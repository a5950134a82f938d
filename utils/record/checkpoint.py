"""Checkpoints: atomic save, verified load, retention.

A checkpoint is written to a temporary file in the same folder, flushed to the disk, entered with its
SHA-256 in ``manifest.json`` and then renamed; the last one that it replaces is kept as ``previous.pt``.
So whenever the process dies, a whole checkpoint is there, and a damaged one is told from a whole one.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from utils.settings import UserError

FORMAT = 1
KEYS = (
    "format", "arch", "model", "ema", "optimizer", "scaler", "progress", "classes", "preprocessing", "settings",
    "versions", "fingerprint",
)  # fmt: skip
MANIFEST = "manifest.json"
NEWEST_FIRST = ("last.pt", "previous.pt", "final.pt", "best.pt", "initial.pt")


class Checkpointer:
    """Saves into one folder. Made on every rank; only ``is_main`` writes."""

    def __init__(self, folder: Path, is_main: bool) -> None:
        self.folder, self.is_main = folder, is_main

    def save(self, state: dict[str, Any], *names: str) -> None:
        """Write ``state`` under each of ``names`` ('last', 'best', ...). ``state`` has exactly ``KEYS``.

        Raises ``UserError`` when the disk is full or not writable; what was there before stays.
        """
        assert set(state) == set(KEYS), set(state) ^ set(KEYS)
        if not self.is_main:
            return
        temporary = self.folder / f".{names[0]}.tmp"
        try:
            with open(temporary, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            self._replace(temporary, names)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            raise UserError(f"--output: cannot write {self.folder / names[0]}.pt ({error}); free some space") from error
        finally:
            temporary.unlink(missing_ok=True)

    def _replace(self, written: Path, names: tuple[str, ...]) -> None:
        """Rename with the manifest one step ahead: until all is done it admits the old and the new digest."""
        digest, before = _sha256(written), _manifest(self.folder)
        after = before | {f"{name}.pt": [digest] for name in names}
        if "last" in names and "last.pt" in before:
            after["previous.pt"] = before["last.pt"]
        _write_manifest(self.folder, {name: [*after[name], *before.get(name, [])] for name in after})
        for name in names:
            self._place(written, name)
        _sync_folder(self.folder)
        _write_manifest(self.folder, after)

    def _place(self, written: Path, name: str) -> None:
        target, copy = self.folder / f"{name}.pt", self.folder / f".{name}.copy"
        copy.unlink(missing_ok=True)
        try:
            os.link(written, copy)  # checkpoints are only ever replaced, never changed, so they may share bytes
        except OSError:  # a file system without hard links
            shutil.copyfile(written, copy)
        if name == "last" and target.exists():
            os.replace(target, self.folder / "previous.pt")
        os.replace(copy, target)


def load(path: Path) -> dict[str, Any]:
    """A verified checkpoint, on the CPU. Raises ``UserError`` that names the file and what is wrong."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give a file in it")
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        digests = _manifest(path.parent).get(path.name)
        if digests and _sha256(path) not in digests:
            raise UserError(f"{path}: is damaged (not the bytes of {MANIFEST}'s SHA-256); use another of the run")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        if isinstance(error, UserError):
            raise
        refused = re.search(r"(?:GLOBAL|class|type) [\w.]+", str(error))
        reason = f"it holds {refused.group()}" if refused else "it is damaged, or no file of torch.save's"
        raise UserError(f"{path}: is not a checkpoint that can be loaded safely: {reason}; give another") from error
    if not isinstance(state, dict):
        raise UserError(f"{path}: is not a checkpoint (it holds a {type(state).__name__})")
    return state


def load_run(path: Path) -> dict[str, Any]:
    """As ``load``, for a checkpoint to continue from: nothing may be missing."""
    state = load(path)
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}; it can give --weights but a run cannot continue from it")
    if state["format"] != FORMAT:
        raise UserError(f"{path}: has checkpoint format {state['format']}, this version reads {FORMAT}")
    return state


def newest(folder: Path, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint in ``folder`` that verifies; ``warn`` hears of damaged ones. None without any."""
    found: list[tuple[Path, dict[str, Any]]] = []
    for name in NEWEST_FIRST:
        if not (folder / name).is_file():
            continue
        try:
            state = load_run(folder / name)
        except UserError as error:
            warn(str(error))
            continue
        if name == "last.pt":
            return folder / name, state
        found.append((folder / name, state))
    return max(found, key=lambda item: item[1]["progress"]["step"], default=None)


def weights_of(state: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """The weights to use from a checkpoint, ours (the moving average if it has one) or a bare state_dict."""
    if state.get("ema"):
        state = state["ema"]["model"]
    else:
        state = next((state[key] for key in ("model", "state_dict") if isinstance(state.get(key), dict)), state)
    weights = {_clean(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not weights:
        raise UserError(f"--weights {path}: holds no weights")
    return weights


def _clean(name: str) -> str:
    for prefix in ("module.", "_orig_mod."):
        name = name.removeprefix(prefix)
    return name


def load_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor], where: str) -> None:
    """Put ``weights`` into ``model``; raises ``UserError`` with the first names and shapes that do not fit."""
    own = model.state_dict()
    wrong = [f"lacks {name}" for name in own if name not in weights]
    wrong += [f"has {name}, which the network lacks" for name in weights if name not in own]
    wrong += [
        f"{name} is {tuple(weights[name].shape)} and should be {tuple(own[name].shape)}"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(f"{where}: does not fit the network: {'; '.join(wrong[:3])}{more}; is --arch right?")
    model.load_state_dict(weights)


def _manifest(folder: Path) -> dict[str, list[str]]:
    """For each checkpoint the SHA-256 digests it may have; empty when the folder has no manifest."""
    try:
        content = json.loads((folder / MANIFEST).read_text())["sha256"]
        return {str(name): [str(digest) for digest in digests] for name, digests in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / MANIFEST}: cannot be read; remove it to load checkpoints unverified") from error


def _write_manifest(folder: Path, digests: dict[str, list[str]]) -> None:
    temporary = folder / f".{MANIFEST}.tmp"
    temporary.write_text(json.dumps({"sha256": digests}, indent=1))
    os.replace(temporary, folder / MANIFEST)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make renames last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
