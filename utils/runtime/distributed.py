"""Process group, device and rank: the only file that asks "which rank am I".

``torchrun`` sets a process's rank in environment variables; plain ``python`` is rank 0 of 1. With one
process there is no group and every collective here is the identity: callers need no second code path.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from utils.config.groups.exchange import ExchangeSettings
from utils.config.groups.run import RunSettings
from utils.config.settings import UserError, plan_words
from utils.runtime import devices
from utils.runtime.cpu import keep_freed_memory, threads_per_process
from utils.runtime.heartbeat import Heartbeat
from utils.runtime.long_work import LongWork
from utils.runtime.process import RankInfo, end_with_parent, port_in_use, told_by_each_machine
from utils.runtime.sharding import is_sharded

T = TypeVar("T")


class Distributed:
    """The process group as a context manager: set up on entry, once, and torn down in any case."""

    def __init__(self, ranks: RankInfo, settings: RunSettings, tf32: bool | None = None) -> None:
        """Choose the device; raises ``UserError`` if there is none. ``tf32`` as in ``PrecisionSettings``."""
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.local_rank = ranks.local_rank
        self.local_world_size = ranks.local_world_size
        self.is_main = ranks.is_main
        self.deterministic = settings.deterministic
        self.tf32 = tf32
        # Of the process, in which the run may be one of several things.
        self._tf32_before: tuple[bool, bool] | None = None
        self._algorithms_before = (False, False)
        self._cudnn_before = False
        self.timeout = timedelta(seconds=settings.timeout)
        with told_by_each_machine(ranks):
            self.device = _choose_device(settings, ranks)
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index)

    def __enter__(self) -> Distributed:
        self._algorithms_before = _algorithms()
        self._cudnn_before = torch.backends.cudnn.deterministic
        _set_determinism(self.deterministic)
        self.apply_tf32(self.tf32)
        if self.device.type == "cpu":
            # torchrun sets one thread per process, which leaves cores idle.
            torch.set_num_threads(threads_per_process(self.local_world_size))
            keep_freed_memory()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()
        if self.world_size > 1:
            with _first_contact():
                torch.distributed.init_process_group(
                    backend=torch.distributed.get_default_backend_for_device(self.device),
                    timeout=self.timeout,
                    device_id=self.device if self.device.type != "cpu" else None,
                )
            group = torch.distributed.new_group(backend="gloo", timeout=self.timeout)
            assert isinstance(group, torch.distributed.ProcessGroup)  # as for every member of it
            self.gloo_group = group
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # NCCL's groups are taken down by all processes together: one that alone has an error would wait for the others,
        # and say nothing until the launcher ends it. Such a process ends without that.
        if torch.distributed.is_initialized() and (kind is None or self.device.type == "cpu"):
            torch.distributed.destroy_process_group()
        torch.backends.cudnn.deterministic = self._cudnn_before
        if _algorithms() != self._algorithms_before:  # for setting them imports torch's compiler
            must, warns = self._algorithms_before
            torch.use_deterministic_algorithms(must, warn_only=warns)
        if self._tf32_before is not None:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = self._tf32_before

    def apply_tf32(self, tf32: bool | None) -> None:
        """Set, until the context's end, whether float32 products may be in TF32; None leaves PyTorch's choice."""
        if tf32 is not None:
            with suppress(RuntimeError):  # where the process uses torch's newer settings, these cannot be read
                self._tf32_before = self._tf32_before or (
                    torch.backends.cuda.matmul.allow_tf32,
                    torch.backends.cudnn.allow_tf32,
                )
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32

    def describe_device(self) -> str:
        """Describe the device, for the log."""
        if self.device.type != "cpu":
            untested = "" if self.device.type == "cuda" else ", untested"
            return f"{self.device.type} ({devices.name(self.device) or 'GPU'}{untested})"
        return f"cpu, {torch.get_num_threads()} thread(s) each"

    def describe(self, model: torch.nn.Module, exchange: ExchangeSettings | None) -> dict[str, str]:
        """The rows of a run's plan about its processes and what they exchange; ``model`` may be spread over them."""
        spread = ", parameters spread over them" if is_sharded(model) else ""
        rows = {"Processes": f"{self.world_size} on {self.describe_device()}{spread}"}
        words = plan_words(exchange) if exchange is not None and self.world_size > 1 else []
        return rows | ({"Exchange": "; ".join(words)} if words else {})

    # ------------------------------------------------------------------------- collectives

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` (any shape) over ranks, in place; every rank gets the same bits."""
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gather ``tensor``, of the same shape on all ranks: a list in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        torch.distributed.all_gather(gathered, tensor)
        return gathered

    def norm_over_ranks(self, norm: torch.Tensor) -> torch.Tensor:
        """Norm, on every rank, of a vector divided among ranks; ``norm``, a tensor (), is that of this rank's part."""
        return torch.linalg.vector_norm(torch.cat(self.all_gather(norm.reshape(1))))

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        """The maximum of each of ``numbers`` over ranks, on every rank. With several ranks, waits for their devices."""
        if self.world_size == 1:
            return [*map(float, numbers)]
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return tensor.tolist()

    def run_on_rank0(self, function: Callable[[], T], long_work: str = "") -> T:
        """Run ``function`` on rank 0 and return its (picklable) result on every rank.

        If it raises ``UserError`` or ``OSError``, every rank raises ``UserError``: none waits for a rank that failed.
        ``long_work`` names work that may take longer than ``--timeout``; see ``without_timeout``.
        """
        result: list[Any] = [None]
        with self.raise_on_all_ranks(), self.without_timeout(long_work) if long_work else nullcontext():
            if self.is_main:
                result[0] = function()
        if self.world_size > 1:
            torch.distributed.broadcast_object_list(result, src=0, device=self.device)
        return result[0]

    @contextmanager
    def without_timeout(self, what: str) -> Iterator[None]:
        """Context of work that may take some ranks much longer than others; it ends when all ranks have done theirs.

        ``--timeout`` then limits a rank's silence, not its work. All ranks must enter this context. ``what`` names the
        work in the log if it takes long, even for a single process.
        """
        work = LongWork(self.gloo_group, what) if self.world_size > 1 else None
        began = time.monotonic()

        def words() -> str:
            return f"{what}: {time.monotonic() - began:.0f} s so far{work.waiting_for if work else ''}"

        log = partial(print, file=sys.stderr, flush=True)
        with Heartbeat(words, log) if self.is_main else nullcontext(), work.done() if work else nullcontext():
            yield

    def gather(self, value: T) -> list[T]:
        """Gather a (picklable) ``value`` from each rank: a list in the order of ranks, on every rank."""
        gathered: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(gathered, value)
        return gathered

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Context: if any rank raises ``UserError`` or ``OSError``, all ranks raise ``UserError`` with all mistakes."""
        mistakes: list[str] = []
        try:
            yield
        except UserError as error:
            mistakes = error.mistakes
        except OSError as error:
            path = error.filename2 or error.filename  # of two names, the one that a file was to get
            advice = "move it away, give permission or free some space"
            mistakes = [f"{path}: cannot be read or written ({error.strerror}); {advice}" if path else str(error)]
        mistakes = list(dict.fromkeys(itertools.chain.from_iterable(self.gather(mistakes))))
        if mistakes:
            raise UserError(*mistakes, on_all_ranks=True)

    # ------------------------------------------------------------------------------- model

    def wrap(
        self, model: torch.nn.Module, image_shape: tuple[int, ...], static_graph: bool, exchange: ExchangeSettings
    ) -> torch.nn.Module:
        """Wrap ``model`` so that gradients are averaged over ranks, and give all ranks rank 0's weights.

        ``static_graph``: all backward passes are alike and exchange gradients; DDP can then fix the gradients' order
        after the first pass. ``exchange``: how gradients are exchanged. One process, or a sharded model, needs no
        wrapper.
        """
        if self.world_size == 1 or is_sharded(model):
            return model
        ids = [self.device.index] if self.device.type != "cpu" else None
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=ids,
            gradient_as_bucket_view=True,
            static_graph=static_graph,
            bucket_cap_mb=exchange.bucket_mb,
        )
        if exchange.grad_compression == "bf16":
            wrapped.register_comm_hook(None, _bf16_hook)
        if self.deterministic:
            self._settle(wrapped, image_shape)
        return wrapped

    def unwrap(self, network: torch.nn.Module) -> None:
        """Disable the wrapper ``network`` from ``wrap``: other parameters train from now on and need a new wrapper."""
        if isinstance(network, torch.nn.parallel.DistributedDataParallel):
            network._remove_autograd_hooks()  # the object may live on, and would exchange gradients again

    def _settle(self, wrapped: torch.nn.parallel.DistributedDataParallel, image_shape: tuple[int, ...]) -> None:
        """Run two backward passes whose only effect is DDP's final order of gradients.

        DDP rebuilds its buckets after the first backward pass. Without this, the first step after a resume would add up
        the ranks' gradients in a different order from the same step of an uninterrupted run.
        """
        buffers = [buffer.clone() for buffer in wrapped.module.buffers()]
        wrapped.train()
        for _ in range(2):
            wrapped(torch.zeros(2, *image_shape, device=self.device)).sum().backward()
        wrapped.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in zip(wrapped.module.buffers(), buffers, strict=True):
                buffer.copy_(before)

    def no_sync(self, model: torch.nn.Module, more_to_come: bool) -> AbstractContextManager:
        """Context for forward and backward: ranks exchange gradients only if no more passes of the step are to come."""
        # A sharded model adds up parts: whole gradients, kept until the last pass, would take the memory that it saves.
        if more_to_come and isinstance(model, torch.nn.parallel.DistributedDataParallel):
            return model.no_sync()
        return nullcontext()

    def seed(self, seed: int) -> None:
        """Seed this process's random generators, on CPU and device: torch.manual_seed without its bookkeeping."""
        torch.default_generator.manual_seed(seed)
        # Steps that seed while a graph records them draw nothing.
        graphed = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.device.type != "cpu" and not graphed:
            torch.get_device_module(self.device).manual_seed(seed)

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Copy rank 0's buffers (batch-norm statistics) to all ranks; they differ after a training step."""
        if self.world_size > 1:
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, src=0)


def _bf16_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are texts, as all are here
    """Torch's own hook under another name: without CUDA, torch refuses its own, although gloo can run it."""
    return bf16_compress_hook(state, bucket)


def lost_contact(error: RuntimeError) -> str | None:
    """Line about a collective's ``error`` if another process has ended or is silent; None for all other errors."""
    text = " ".join(str(error).split())
    if not (isinstance(error, torch.distributed.DistError) or "gloo" in text):
        return None
    return re.sub(r"^\[[^\]]*\] *", "", text).partition(". ")[0][:200]  # without the position in gloo's source


@contextmanager
def _first_contact() -> Iterator[None]:
    """Context that turns a missing variable or a used port at the processes' first contact into a ``UserError``."""
    try:
        yield
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"environment: {port_in_use(os.environ.get('MASTER_PORT', ''))}; set another MASTER_PORT"
        ) from error
    except ValueError as error:
        if "MASTER_" not in str(error):
            raise
        raise UserError("environment: MASTER_ADDR and MASTER_PORT must be set, too; start with torchrun") from error


def _choose_device(settings: RunSettings, ranks: RankInfo) -> torch.device:
    kind = devices.accelerator()
    fits = settings.device in ("auto", kind)
    available = torch.accelerator.device_count() if kind and fits else 0
    if settings.device == "cpu" or (settings.device == "auto" and not available and not settings.gpu_ids):
        return torch.device("cpu")
    if not available:
        asked = "--gpu-ids" if settings.gpu_ids else f"--device {settings.device}"
        other = f"{kind} or cpu" if kind else "cpu or repair the driver"
        cure = "remove the flag" if settings.gpu_ids else f"use --device {other}"
        no_such = "such " if kind else ""
        raise UserError(f"{asked}: torch {torch.__version__} sees no {no_such}GPU here; {cure}")
    ids = settings.gpu_ids or tuple(range(available))
    if settings.gpu_ids and len(ids) != ranks.local_world_size:
        raise UserError(
            f"--gpu-ids names {len(ids)} GPU(s) for {ranks.local_world_size} process(es); "
            f"start with torchrun --nproc-per-node {len(ids)}"
        )
    if max(ids) >= available:
        raise UserError(f"--gpu-ids {max(ids)}: this machine has {available} GPU(s), counted from 0")
    if ranks.local_world_size > len(ids):
        raise UserError(
            f"{ranks.local_world_size} processes but {len(ids)} GPU(s); lower torchrun's --nproc-per-node, or give "
            "--device cpu"
        )
    if ranks.local_rank >= len(ids):  # as where srun --gpus-per-task shows each process a GPU of its own
        raise UserError(
            f"environment: LOCAL_RANK is {ranks.local_rank}, and this process sees {len(ids)} GPU(s): the first is 0"
        )
    return torch.device(kind, ids[ranks.local_rank])


def _algorithms() -> tuple[bool, bool]:
    """Whether torch's algorithms must be deterministic, and whether others only lead to a warning."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(deterministic: bool) -> None:
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
        torch.use_deterministic_algorithms(True)
