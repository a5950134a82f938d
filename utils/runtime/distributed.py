"""Process group, device and rank: the only file that asks "which rank am I".

``torchrun`` sets a process's rank in environment variables; plain ``python`` is rank 0 of 1. With one
process there is no group and every collective here is the identity: callers need no second code path.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from utils.config.groups.run import RunSettings
from utils.config.settings import UserError
from utils.runtime.cpu import keep_freed_memory, threads_per_process
from utils.runtime.heartbeat import Heartbeat
from utils.runtime.long_work import LongWork

if TYPE_CHECKING:  # torch takes seconds to import, and argument mistakes must not wait for it
    import torch

    from utils.config.groups.exchange import ExchangeSettings

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass(frozen=True)
class RankInfo:
    """A process's place: its rank among all processes and among those of its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> RankInfo:
        """What torchrun has set, or a single process. Raises ``UserError`` if the variables contradict each other."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        try:
            rank, world_size, local_rank, local_world_size = (
                int(os.environ.get(name, "0" if name == "LOCAL_RANK" else "1")) for name in names
            )
        except ValueError as error:
            raise UserError(f"environment: {', '.join(names)} must be whole numbers; start with torchrun") from error
        if not 0 <= rank < world_size or local_rank < 0 or local_world_size < 1:
            raise UserError(
                f"environment: RANK {rank} of WORLD_SIZE {world_size}, LOCAL_RANK {local_rank} of LOCAL_WORLD_SIZE "
                f"{local_world_size} cannot be; start with torchrun"
            )
        return cls(rank, world_size, local_rank, local_world_size)

    @property
    def is_main(self) -> bool:
        """True on the one process that writes files and prints."""
        return self.rank == 0


class Distributed:
    """The process group as a context manager: entered once, torn down in any case."""

    def __init__(self, ranks: RankInfo, settings: RunSettings, tf32: bool | None = None) -> None:
        """Choose the device; raises ``UserError`` if there is none. ``tf32`` as in ``PrecisionSettings``."""
        import torch

        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.local_rank = ranks.local_rank
        self.local_world_size = ranks.local_world_size
        self.is_main = ranks.is_main
        self.deterministic = settings.deterministic
        self.tf32 = tf32
        self.timeout = timedelta(seconds=settings.timeout)
        try:
            self.device = _choose_device(settings, ranks)
        except UserError as error:
            error.on_all_ranks = ranks.local_rank > 0  # one process of each machine reports it
            raise
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def __enter__(self) -> Distributed:
        import torch

        _set_determinism(self.deterministic)
        self.apply_tf32(self.tf32)
        if self.device.type == "cpu":
            # torchrun sets one thread per process, which leaves cores idle.
            torch.set_num_threads(threads_per_process(self.local_world_size))
            keep_freed_memory()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _end_with_launcher()
        if self.world_size > 1:
            with _first_contact():
                torch.distributed.init_process_group(
                    backend="nccl" if self.device.type == "cuda" else "gloo",
                    timeout=self.timeout,
                    device_id=self.device if self.device.type == "cuda" else None,
                )
            self.gloo_group = torch.distributed.new_group(backend="gloo", timeout=self.timeout)
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def apply_tf32(self, tf32: bool | None) -> None:
        """Set whether float32 products may be computed in TF32; None leaves PyTorch's choice."""
        import torch

        if tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32

    def describe_device(self) -> str:
        """The device in words, for the log."""
        import torch

        if self.device.type == "cuda":
            return f"cuda ({torch.cuda.get_device_name(self.device)})"
        return f"cpu, {torch.get_num_threads()} thread(s) each"

    def describe(self, model: torch.nn.Module) -> dict[str, str]:
        """The row of a run's plan about its processes, over which ``model`` may be spread."""
        from utils.runtime.sharding import is_sharded

        spread = ", parameters spread over them" if is_sharded(model) else ""
        return {"Processes": f"{self.world_size} on {self.describe_device()}{spread}"}

    # ------------------------------------------------------------------------- collectives

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of ``tensor`` (any shape) over ranks, in place; every rank gets the same bits."""
        import torch

        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's ``tensor``, of one shape on all of them, in the order of ranks, on every rank."""
        import torch

        if self.world_size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        torch.distributed.all_gather(gathered, tensor)
        return gathered

    def norm_over_ranks(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of a vector of which each rank has a part with this ``norm``, a tensor (); on every rank."""
        import torch

        return torch.linalg.vector_norm(torch.cat(self.all_gather(norm.reshape(1))))

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        """The maximum of each of ``numbers`` over ranks, on every rank. A synchronisation point."""
        import torch

        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return tensor.tolist()

    def run_on_rank0(self, function: Callable[[], T], long_work: str = "") -> T:
        """Run ``function`` on rank 0 and give its (picklable) result to every rank.

        Every rank raises its ``UserError`` or ``OSError``: none waits for one that has failed.
        ``long_work`` names work that may take longer than ``--timeout``, see ``without_timeout``.
        """
        import torch

        result: list[Any] = [None]
        with self.raise_on_all_ranks(), self.without_timeout(long_work) if long_work else nullcontext():
            if self.is_main:
                result[0] = function()
        if self.world_size > 1:
            torch.distributed.broadcast_object_list(result, src=0, device=self.device)
        return result[0]

    def without_timeout(self, what: str) -> AbstractContextManager[None]:
        """Around work that may take some ranks much longer than others: ends when it has ended on all of them.

        ``--timeout`` then limits a rank's silence, not its work. All ranks must enter it; ``what`` is logged if it
        takes long, for a single process, too.
        """
        if self.world_size == 1:
            began = time.monotonic()
            return Heartbeat(lambda: f"{what}: {time.monotonic() - began:.0f} s so far", _log)
        return LongWork(self.gloo_group, what, _log if self.is_main else lambda line: None).waited_for()

    def gather(self, value: T) -> list[T]:
        """Every rank's (picklable) ``value``, in the order of ranks, on every rank."""
        import torch

        gathered: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(gathered, value)
        return gathered

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """If any rank raises ``UserError`` or ``OSError`` inside, every rank raises ``UserError`` with all mistakes."""
        mistakes: list[str] = []
        try:
            yield
        except UserError as error:
            mistakes = error.mistakes
        except OSError as error:
            mistakes = [str(error)]
        mistakes = list(dict.fromkeys(itertools.chain.from_iterable(self.gather(mistakes))))
        if mistakes:
            raise UserError(*mistakes, on_all_ranks=True)

    # ------------------------------------------------------------------------------- model

    def wrap(
        self, model: torch.nn.Module, image_shape: tuple[int, ...], static_graph: bool, exchange: ExchangeSettings
    ) -> torch.nn.Module:
        """The model with gradients averaged over ranks, and rank 0's weights on all of them.

        ``static_graph``: all backward passes are alike and exchange gradients; DDP can then fix their order after the
        first. ``exchange``: how.
        """
        import torch

        from utils.runtime.exchange import exchanging
        from utils.runtime.sharding import is_sharded

        if self.world_size == 1 or is_sharded(model):
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=ids,
            gradient_as_bucket_view=True,
            static_graph=static_graph,
            bucket_cap_mb=exchange.bucket_mb,
        )
        exchanging(wrapped, exchange)
        if self.deterministic:
            self._settle(wrapped, image_shape)
        return wrapped

    def unwrap(self, network: torch.nn.Module) -> None:
        """End what ``wrap`` gave, as other parameters train from now on: the model then needs another wrapper."""
        if self.world_size > 1:
            network._remove_autograd_hooks()  # the object may live on, and would exchange gradients again

    def _settle(self, wrapped: torch.nn.parallel.DistributedDataParallel, image_shape: tuple[int, ...]) -> None:
        """Two backward passes whose only effect is DDP's final order of gradients.

        DDP rebuilds its buckets after the first backward pass. Without this, the first step after a resume would add up
        the ranks' gradients in another order than the same step of an uninterrupted run.
        """
        import torch

        buffers = [buffer.clone() for buffer in wrapped.module.buffers()]
        wrapped.train()
        for _ in range(2):
            wrapped(torch.zeros(2, *image_shape, device=self.device)).sum().backward()
        wrapped.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in zip(wrapped.module.buffers(), buffers, strict=True):
                buffer.copy_(before)

    def no_sync(self, model: torch.nn.Module, more_to_come: bool) -> AbstractContextManager:
        """Around forward and backward: ranks exchange gradients only in a step's last pass."""
        from utils.runtime.sharding import is_sharded

        # Whole gradients, kept until the last pass, would take the room that sharding saves: it adds up parts.
        waits = self.world_size > 1 and more_to_come and not is_sharded(model)
        return model.no_sync() if waits else nullcontext()

    def seed(self, seed: int) -> None:
        """Seed this process's device generators: torch.manual_seed without its bookkeeping."""
        import torch

        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Copy rank 0's buffers (batch-norm statistics) to all ranks; they differ after a training step."""
        import torch

        if self.world_size > 1:
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, src=0)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small CPU tensor on ``device``; to a GPU through pinned memory, so that the host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def memory_bytes(device: torch.device) -> int:
    """The device's total memory."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def lost_contact(error: RuntimeError) -> str | None:
    """In one line, a collective's error when another process has ended or is silent; None for all other errors."""
    import torch

    text = " ".join(str(error).split())
    if not (isinstance(error, torch.distributed.DistError) or "gloo" in text):
        return None
    return re.sub(r"^\[[^\]]*\] *", "", text).partition(". ")[0][:200]  # without the position in gloo's source


@contextmanager
def _first_contact() -> Iterator[None]:
    """Around the processes' first contact: a missing variable or a used port becomes a ``UserError``."""
    import torch

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


def port_in_use(port: str) -> str:
    """The message about a ``port`` at which these processes should have met."""
    return f"port {port} is in use on this machine, by another training perhaps"


def _end_with_launcher() -> None:
    """Have the system send SIGTERM when torchrun dies, even by kill -9: nothing else would end this process."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_process(code: int) -> NoReturn:
    """End with exit code ``code`` as ``sys.exit`` does, without the interpreter's teardown after the exit functions.

    DDP keeps gloo's process group alive after it is destroyed, and if one of its threads releases a tensor during the
    teardown, the process aborts (exit code 134 after a finished run, about one in twenty on busy cores). Extension
    modules would list there what ``garbage_collection`` has left out as leaked, and it takes a third of a second.
    """
    atexit.register(_skip_teardown, code)
    sys.exit(code)  # profilers and debuggers that run the program go on from here


def _skip_teardown(code: int) -> None:
    """The first of the exit functions, since it is registered last: calls the others, and ends."""
    atexit.unregister(_skip_teardown)
    atexit._run_exitfuncs()  # data workers and logging end as usual
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _choose_device(settings: RunSettings, ranks: RankInfo) -> torch.device:
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if settings.device == "cpu" or (settings.device == "auto" and not available and not settings.gpu_ids):
        return torch.device("cpu")
    if not available:
        asked = "--gpu-ids" if settings.gpu_ids else "--device cuda"
        raise UserError(f"{asked}: torch {torch.__version__} sees no GPU here; use --device cpu or repair the driver")
    ids = settings.gpu_ids or tuple(range(available))
    if settings.gpu_ids and len(ids) != ranks.local_world_size:
        raise UserError(
            f"--gpu-ids names {len(ids)} GPUs for {ranks.local_world_size} processes; "
            f"start with torchrun --nproc-per-node {len(ids)}"
        )
    if max(ids) >= available:
        raise UserError(f"--gpu-ids {max(ids)}: there are GPUs 0 to {available - 1} here")
    if ranks.local_world_size > len(ids):
        raise UserError(
            f"{ranks.local_world_size} processes but {len(ids)} GPUs; lower torchrun's --nproc-per-node or --device cpu"
        )
    return torch.device("cuda", ids[ranks.local_rank])


def _set_determinism(deterministic: bool) -> None:
    import torch

    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
        torch.use_deterministic_algorithms(True)
