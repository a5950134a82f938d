"""What processes exchange while they train: gradients in each step, or with local SGD weights every few steps.

Local SGD: Stich, Local SGD converges fast and communicates little, 2019; with steps that exchange gradients first, and
with gradients that are still exchanged within a machine: Lin et al., Don't use large mini-batches, use local SGD, 2020.
Gradients and weights are exchanged by torch's own hooks of DDP and its own average of weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, bf16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from utils.config.groups.exchange import ExchangeSettings
from utils.runtime.distributed import Distributed

_TAKEN = inspect.signature(nn.parallel.DistributedDataParallel).parameters
_BUFFERS_IN_STEPS = "forward_sync_buffers" if "forward_sync_buffers" in _TAKEN else "broadcast_buffers"  # torch < 2.13
_LOCAL_IN_BF16 = bf16_compress_wrapper(post_localSGD_hook)


class Exchange:
    """How ``distributed``'s processes exchange gradients, and, with local SGD, weights.

    All that happens in a step is a function of the number of steps done before, ``steps``. With local SGD the processes
    differ in weights, in the optimizer's state and in batch-norm statistics from then on: ``averaged`` lends the
    network the average that is validated and saved, ``gather`` brings each group's own state to the checkpoint. A group
    is what steps together, see ``--local-sgd-group``.
    """

    def __init__(self, settings: ExchangeSettings, distributed: Distributed, steps_per_epoch: int) -> None:
        self.settings, self.distributed = settings, distributed
        self._first_step = round(settings.local_sgd_after_epochs * steps_per_epoch)
        self._groups: list[list[int]] = []
        self._hook_state: _HookState | None = None
        self._kept: dict[str, torch.Tensor] | None = None
        self._begun = False
        if settings.local_sgd_steps is not None and distributed.world_size > 1:
            groups = _groups(distributed, settings.local_sgd_group)
            if len(groups) > 1:
                self._begin_groups(groups)

    def _begin_groups(self, groups: list[list[int]]) -> None:
        self._groups = groups
        (self._own,) = (number for number, ranks in enumerate(groups) if self.distributed.rank in ranks)
        self._group, _ = torch.distributed.new_subgroups_by_enumeration(groups, timeout=self.distributed.timeout)
        alone = all(len(ranks) == 1 for ranks in groups)
        self._hook_state = _HookState(None, self._group, self._first_step, not alone)

    # ------------------------------------------------------------------------------- gradients

    def ddp_options(self) -> dict[str, Any]:
        """What ``DistributedDataParallel`` takes beside the model.

        In local SGD, batch norm's statistics stay with each process; and a network that is wrapped again, as other
        parameters train, keeps its own weights.
        """
        options: dict[str, Any] = {"bucket_cap_mb": self.settings.bucket_mb}
        if self._groups:
            options |= {_BUFFERS_IN_STEPS: False, "init_sync": not self._begun}
            self._begun = True
        return options

    def register(self, wrapped: nn.parallel.DistributedDataParallel) -> None:
        """Make ``wrapped`` exchange its gradients as the settings say."""
        if self.settings.grad_compression == "bf16":
            wrapped.register_comm_hook(self._hook_state, _bf16_hook)
        elif self._hook_state is not None:
            wrapped.register_comm_hook(self._hook_state, post_localSGD_hook)

    def is_local(self, steps: int) -> bool:
        """Whether groups may differ after ``steps`` steps."""
        return bool(self._groups) and steps > self._first_step

    def begin_step(self, steps: int, model: nn.Module) -> None:
        """Tell the hook which step begins; in the first local one, give all processes rank 0's batch-norm statistics.

        Until then those of other ranks do not count, and each save replaces them: saving must not change the result.
        """
        if self._hook_state is not None:
            self._hook_state.iter = steps
            if steps == self._first_step:
                self.distributed.broadcast_buffers(model)

    def any_of(self, found: bool, steps: int) -> bool:
        """Whether any process has ``found`` something in the step after ``steps``.

        Without local SGD all have found the same: nothing is exchanged.
        """
        if not self.is_local(steps + 1):
            return found
        (largest,) = self.distributed.all_reduce_max([found])
        return bool(largest)

    # --------------------------------------------------------------------------------- weights

    def average(self, parameters: Sequence[nn.Parameter], steps: int) -> None:
        """Average ``parameters`` over all processes, if that is due after ``steps`` steps, the last skipped or not."""
        if self.is_local(steps) and (steps - self._first_step) % self.settings.local_sgd_steps == 0:
            _average(parameters)

    @contextmanager
    def averaged(self, model: nn.Module, steps: int) -> Iterator[None]:
        """Inside, ``model`` has the average of all processes' weights and batch-norm statistics. All enter it.

        Outside, it has its own again, to the bit: neither validating nor saving changes what training does.
        """
        if not self.is_local(steps) or self._kept is not None:
            yield
            return
        self._kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        statistics = [buffer for name, buffer in model.named_buffers() if _is_statistic(name, buffer)]
        for buffer in statistics:  # those of a group's first process are the group's
            torch.distributed.broadcast(buffer, src=self._groups[self._own][0], group=self._group)
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        _average([*weights, *statistics])
        try:
            yield
        finally:
            kept, self._kept = self._kept, None
            with torch.no_grad():
                for name, tensor in model.state_dict().items():
                    tensor.copy_(kept[name])

    # ------------------------------------------------------------------------------ checkpoints

    def gather(self, optimizer: Any, steps: int) -> list[dict[str, Any]] | None:
        """Each group's own weights and ``optimizer`` state, on rank 0, for a checkpoint after ``steps`` steps.

        None on all other ranks, and as long as all processes are equal. To be called within ``averaged``.
        """
        if not self.is_local(steps):
            return None
        own = {"model": self._kept, "optimizer": optimizer}
        return self.distributed.collect(own, [ranks[0] for ranks in self._groups])

    def own_state(self, stored: list[dict[str, Any]] | None, steps: int) -> dict[str, Any]:
        """This group's weights and optimizer state of what ``gather`` gave after ``steps`` steps.

        If it was gathered from another number of groups, or groups are equal, nothing: the average goes on. So it does
        if --resume-override has moved the first local step beyond ``steps``: gradients are exchanged from here on.
        """
        fits = stored and len(stored) == len(self._groups) and self.is_local(steps)
        return stored[self._own] if fits else {}


class _HookState(PostLocalSGDState):
    """That of torch's hook, which would count backward passes: SAM has two in a step."""

    def maybe_increase_iter(self, bucket):
        """Nothing: ``begin_step`` says which step it is."""


def _bf16_hook(state, bucket):  # DDP refuses annotations that are texts, as all are here
    """Exchange gradients in bf16. ``state``: that of local SGD, if any; what stays in its process is not rounded.

    Torch's own hooks, under another name: it refuses theirs where it was built without CUDA, though gloo can.
    """
    if state is None:
        return bf16_compress_hook(None, bucket)
    sends = state.post_local_gradient_allreduce or state.iter < state.start_localSGD_iter
    return (_LOCAL_IN_BF16 if sends else post_localSGD_hook)(state, bucket)


def _groups(distributed: Distributed, kind: str) -> list[list[int]]:
    """The ranks of each group, in order."""
    groups: list[list[int]] = []
    for rank, local_rank in enumerate(distributed.gather(distributed.local_rank)):
        if kind == "process" or local_rank == 0:
            groups.append([])
        groups[-1].append(rank)
    return groups


def _is_statistic(name: str, buffer: torch.Tensor) -> bool:
    """Whether a buffer is a running statistic, which has an average."""
    return name.rpartition(".")[2].startswith("running_") and buffer.is_floating_point()


@torch.no_grad()
def _average(tensors: Sequence[torch.Tensor]) -> None:
    """Average ``tensors`` over all processes.

    They stay where they are, in their memory format: torch would replace them by parts of one contiguous tensor, which
    costs channels-last, and rounds otherwise than a resumed run, which begins with it.
    """
    places = [tensor.data for tensor in tensors]
    average_parameters(iter(tensors), torch.distributed.group.WORLD)
    torch._foreach_copy_(places, [tensor.data for tensor in tensors])
    for tensor, place in zip(tensors, places, strict=True):
        tensor.data = place
