"""Checkpoints of sharded networks: a small file as in any run, and beside it the tensors, written by all processes.

``checkpoints/last.pt`` then holds everything but the tensors and names a folder ``checkpoints/shards/STEP_TEXT/`` with
the SHA-256 of each file in it, which torch.distributed.checkpoint has written. A folder is complete before a file names
it, never changes, and is removed when no file names it any more: a process that dies at any moment leaves whole
checkpoints.

torch.distributed.checkpoint describes its files by a pickle, ``.metadata``, which could run code. The pickle is there
for other programs; here the same description is read from the checkpoint's own file.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from utils.checkpoint.inventory import CONTENTS, inventory
from utils.config.settings import UserError
from utils.runtime.distributed import Distributed
from utils.runtime.files import sha256, sync

SHARDS = "shards"  # the key in a checkpoint's file, and the folder beside it
ONE_FILE = "python scripts/join_shards.py makes one file of a checkpoint"
Keys = tuple[str | int, ...]  # the path to a tensor in nested dicts


class Places(NamedTuple):
    """Layout of a state's tensors over processes: each is spread like the parameter with the same keys and shape."""

    parameters: Mapping[Keys, nn.Parameter]

    @classmethod
    def of(cls, model: nn.Module, average: nn.Module | None, optimizer: torch.optim.Optimizer) -> Places:
        """Layout of the state of a sharded network, its average and its optimizer."""
        known: dict[Keys, nn.Parameter] = {("model", name): p for name, p in model.named_parameters()}
        if average is not None:
            known |= {("ema", "model", name): p for name, p in average.named_parameters()}
        optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return cls(known | {("optimizer", "state", n): p for n, p in enumerate(optimized)})

    def empty(self, keys: Keys, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the tensor with these ``keys``: for this process's part, or for the whole if it is not spread."""
        like = self._like(keys, shape)
        return torch.empty(shape, dtype=dtype) if like is None else torch.empty_like(like, dtype=dtype)

    def part(self, keys: Keys, whole: torch.Tensor) -> torch.Tensor:
        """Take this process's part of a ``whole`` tensor on the CPU; returns the tensor itself if it is not spread."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        like = self._like(keys, whole.shape)
        if not isinstance(like, DTensor):
            return whole
        return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    def _like(self, keys: Keys, shape: torch.Size) -> torch.Tensor | None:
        parameter = self.parameters.get(keys, self.parameters.get(keys[:3]))
        return parameter.detach() if parameter is not None and parameter.shape == shape else None


# ---------------------------------------------------------------------------------------------- write


def write_shards(state: dict[str, Any], checkpoints: Path, distributed: Distributed) -> dict[str, Any]:
    """Write the tensors of ``state``; return all else, and an index of the tensors, for a file. All ranks call this.

    Returns when everything is on the disk. Raises ``UserError`` on all ranks if one of them cannot write.
    """
    from torch.distributed import checkpoint as dcp

    named: dict[str, tuple[Keys, torch.Tensor]] = {}

    def take(keys: Keys, tensor: torch.Tensor) -> None:
        named["/".join(map(str, keys))] = keys, tensor.detach()

    rest = mapped(state, take)
    whole = mapped(state, lambda _, tensor: tensor)
    step = state["progress"]["step"]
    folder = distributed.run_on_rank0(lambda: _new_folder(checkpoints / SHARDS, step))
    try:
        with _quiet():
            metadata = dcp.save(
                {name: tensor for name, (_, tensor) in named.items()},
                storage_writer=_writer(folder),
                planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=distributed.gloo_group,
            )
    except dcp.api.CheckpointException as error:  # the same on all ranks
        if distributed.is_main:
            shutil.rmtree(folder, ignore_errors=True)  # the disk lacks the space that it takes
        raise UserError(
            f"--output: cannot write {folder} ({_reason(error)}): free some space; the checkpoints before it are "
            "whole, and --resume continues",
            on_all_ranks=True,
        ) from error
    with distributed.raise_on_all_ranks():
        written = [path for path in folder.iterdir() if path.name.startswith(f"__{distributed.rank}_")]
        for path in written:
            sync(path)  # torch 2.11 does so before it has written the last bytes
        mine = {path.name: sha256(path) for path in written}
    digests = {name: digest for each in distributed.gather(mine) for name, digest in each.items()}
    if distributed.is_main:
        for path in (folder, folder.parent, checkpoints):
            sync(path)
    tensors = json.dumps(_description(metadata, {name: keys for name, (keys, _) in named.items()}))
    index = {"folder": folder.name, "sha256": digests, "tensors": tensors}
    return {**rest, CONTENTS: inventory(whole), SHARDS: index}


def _writer(folder: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemWriter

    class Writer(FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, results)
            # torch 2.11 records only in a copy where the pieces lie.
            metadata.storage_data = {one.index: one.storage_data for written in results for one in written}

    return Writer(folder)


def _new_folder(shards: Path, step: int) -> Path:
    folder = shards / f"{step:08d}_{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    return folder


def _description(metadata: Any, keys: dict[str, Keys]) -> dict[str, Any]:
    """Describe each tensor in torch's ``metadata``: keys, dtype, shape, and where its pieces lie."""
    stored = {(index.fqn, tuple(index.offset or ())): where for index, where in metadata.storage_data.items()}
    described = {}
    for name, tensor in metadata.state_dict_metadata.items():
        pieces = []
        for chunk in tensor.chunks:
            where = stored[name, tuple(chunk.offsets)]
            place = [where.relative_path, where.offset, where.length]
            pieces.append([list(chunk.offsets), list(chunk.sizes), *place])
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        described[name] = {"keys": keys[name], "dtype": dtype, "shape": list(tensor.size), "pieces": pieces}
    return described


def remove_unused(checkpoints: Path, read: Callable[[Path], dict[str, Any]]) -> None:
    """Remove the shards that no checkpoint in folder ``checkpoints`` names. ``read`` returns a file's content.

    Does nothing while one of the checkpoints cannot be read.
    """
    shards = checkpoints / SHARDS
    if not shards.is_dir():
        return
    with suppress(Exception):  # that space is not freed is no reason to end a run; the next save tries again
        states = [read(path) for path in checkpoints.glob("*.pt")]
        used = {state[SHARDS]["folder"] for state in states if SHARDS in state}
        for folder in shards.iterdir():
            if folder.name not in used:
                shutil.rmtree(folder)


def bytes_of(path: Path) -> int:
    """Total bytes of all shards in the folder of the checkpoint ``path``."""
    return sum(file.stat().st_size for file in (path.parent / SHARDS).glob("*/*"))


# ----------------------------------------------------------------------------------------------- read


class Shards:
    """The tensors of the checkpoint ``path``, laid out by its ``index``. Raises ``UserError`` if that is damaged."""

    def __init__(self, path: Path, index: Any) -> None:
        self.path = path
        try:
            self.folder = path.parent / SHARDS / _file_name(index["folder"])
            self.digests = {_file_name(name): str(digest) for name, digest in index["sha256"].items()}
            self.tensors = {
                str(name): SimpleNamespace(
                    keys=tuple(one["keys"]),
                    dtype=_dtype(one["dtype"]),
                    shape=_size(one["shape"]),
                    pieces=[
                        (_size(at), _size(sizes), _file_name(file), *_size([start, length]))
                        for at, sizes, file, start, length in one["pieces"]
                    ],
                )
                for name, one in json.loads(index["tensors"]).items()
            }
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}: its list of shards is damaged ({str(error)[:100]}); use another") from error

    def verify(self) -> None:
        """Raise ``UserError`` if a file does not have its SHA-256, or tensors claim more than the files can hold."""
        total = 0
        for name, digest in self.digests.items():
            file = self.folder / name
            if not file.is_file():
                raise UserError(
                    f"{self.path}: lacks {file}, which holds a part of it; copy the folder {SHARDS} too ({ONE_FILE})"
                )
            if sha256(file) != digest:
                raise UserError(f"{self.path}: {file} is damaged (its SHA-256 is another); use another checkpoint")
            total += file.stat().st_size
        tensors = self.tensors.values()
        claimed = sum(math.prod(one.shape) * one.dtype.itemsize for one in tensors)
        strangers = {piece[2] for one in tensors for piece in one.pieces} - set(self.digests)
        # Numbers that no piece covers would be whatever the memory holds.
        uncovered = [math.prod(one.shape) - sum(math.prod(sizes) for _, sizes, *_ in one.pieces) for one in tensors]
        if claimed > total or strangers or any(uncovered):
            raise UserError(f"{self.path}: its shards cannot hold what it says; use another checkpoint")

    def outlined(self, state: dict[str, Any]) -> dict[str, Any]:
        """Complete ``state`` by its tensors, with shape and dtype but without content."""
        empty = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in self.tensors.items()}
        return self._placed(state, empty)

    def read(self, state: dict[str, Any], places: Places | None = None) -> dict[str, Any]:
        """Complete ``state`` by its tensors, on the CPU, or by this process's part of each (``places``), on its device.

        Needs no other process. Raises ``UserError``.
        """
        from torch.distributed import checkpoint as dcp

        places = Places({}) if places is None else places
        room = {name: places.empty(one.keys, one.shape, one.dtype) for name, one in self.tensors.items()}
        try:
            with _quiet(), torch.no_grad():
                dcp.load(
                    room,
                    storage_reader=_reader(self.folder, self._metadata()),
                    planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                    no_dist=True,
                )
        except dcp.api.CheckpointException as error:
            raise UserError(f"{self.path}: its shards cannot be read ({_reason(error)})") from error
        return self._placed(state, room)

    def _placed(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        whole = {key: value for key, value in state.items() if key != SHARDS}
        try:
            for name, one in self.tensors.items():
                place = whole
                for key in one.keys[:-1]:
                    place = place[key]
                place[one.keys[-1]] = tensors[name]
        except (KeyError, TypeError, IndexError) as error:
            raise UserError(f"{self.path}: its list of shards does not fit it; use another checkpoint") from error
        return whole

    def _metadata(self) -> Any:
        """The description of all tensors in torch's classes."""
        from torch.distributed.checkpoint import metadata as meta

        tensors: dict[str, meta.STORAGE_TYPES] = {}
        stored = {}
        for name, one in self.tensors.items():
            chunks = [meta.ChunkStorageMetadata(at, sizes) for at, sizes, *_ in one.pieces]
            tensors[name] = meta.TensorStorageMetadata(meta.TensorProperties(dtype=one.dtype), one.shape, chunks)
            for at, _, file, start, length in one.pieces:
                where = SimpleNamespace(relative_path=file, offset=start, length=length, transform_descriptors=None)
                stored[meta.MetadataIndex(name, at)] = where
        return meta.Metadata(tensors, storage_data=stored)


def _reader(folder: Path, metadata: Any) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return metadata

    return Reader(folder)


# ------------------------------------------------------------------------------------------- a state


def mapped(state: dict[Any, Any], change: Callable[[Keys, torch.Tensor], Any], keys: Keys = ()) -> dict[Any, Any]:
    """Copy ``state`` into plain dicts, as in a file, with each tensor replaced by ``change(keys, tensor)``.

    If that is None, the tensor is left out.
    """
    changed = {}
    for key, value in state.items():
        if isinstance(value, dict):
            value = mapped(value, change, (*keys, key))
        elif isinstance(value, torch.Tensor) and (value := change((*keys, key), value)) is None:
            continue
        changed[key] = value
    return changed


def _file_name(text: Any) -> str:
    if not isinstance(text, str) or text in ("", ".", "..") or os.path.basename(text) != text:
        raise ValueError(f"{str(text)[:40]!r} is not the name of a file")
    return text


def _size(numbers: Any) -> torch.Size:
    if not all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"{str(numbers)[:40]} are not sizes")
    return torch.Size(numbers)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name[:40]} is not a number format")
    return dtype


def _reason(error: Any) -> str:
    """The first process's error, in one line."""
    first = next(iter(error.failures.values()), (error,))[0]
    return " ".join(f"{type(first).__name__}: {first}".split())[:200]


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():  # of a save or load in which no process group takes part, and of old names
        warnings.simplefilter("ignore")
        yield
