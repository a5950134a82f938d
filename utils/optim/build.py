"""Builds all that updates a network's weights, together: optimizer, average of the weights and scaler.

The memory of the optimizer's first step is measured beforehand, without allocating it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.config.groups.optimisation import OptimisationSettings
from utils.config.settings import Settings, UserError
from utils.optim.ema import WeightAverage, build_average
from utils.optim.freezing import Freezing
from utils.optim.optimizers import OWN, Optimizers, build_optimizers
from utils.precision.amp import DTYPES, build_scaler, resolve_amp
from utils.runtime import sharding
from utils.runtime.devices import memory_bytes
from utils.runtime.distributed import Distributed


class OptimizerParts(NamedTuple):
    """The optimizers, each for its own parameters; the average of the weights, if any; and the scaler."""

    optimizers: Optimizers
    ema: WeightAverage | None
    scaler: torch.amp.GradScaler


def build_optimizer_parts(
    args: Settings, model: nn.Module, freezing: Freezing, distributed: Distributed
) -> OptimizerParts:
    """Build what updates ``model``, first spread over the processes if --shard-model says so. Raises ``UserError``."""
    twin = None
    if args.model.shard_model and distributed.world_size > 1 and not args.run.dry_run:
        dtype = DTYPES.get(resolve_amp(args.precision, distributed.device))
        twin = sharding.spread(model, distributed.device, dtype, with_copy=args.average.ema_decay is not None)
    elif distributed.world_size > 1:
        sharding.equalise(model)  # DDP does so only after the copies that averages and lookahead make here
    refuse_beyond_memory(args.optimisation, model, distributed.device)
    optimizers = freezing.separate(build_optimizers(args.optimisation, model))
    epochs = args.optimisation.epochs
    average = build_average(model, args.average, epochs, optimizers, twin)
    return OptimizerParts(optimizers, average, build_scaler(args.precision, distributed.device))


# ------------------------------------------------------------------------------------ memory of the first step


class _Largest(TorchDispatchMode):
    """Records the most bytes that one operation has read and written together, not counting ``old`` tensors.

    Reading a tensor's value gives 1 for a floating-point number, and 0 for an integer or a boolean.
    """

    def __init__(self, old: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.old = {tensor.untyped_storage()._cdata for tensor in old}
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 0
        result = function(*args, **(kwargs or {}))
        tensors = _tensors((args, kwargs, result))
        storages = {(storage := tensor.untyped_storage())._cdata: storage.nbytes() for tensor in tensors}
        self.bytes = max(self.bytes, sum(size for place, size in storages.items() if place not in self.old))
        return result


def refuse_beyond_memory(settings: OptimisationSettings, model: nn.Module, device: torch.device) -> None:
    """Raise ``UserError`` if ``device`` lacks memory for the first step: on a CPU the system might kill the process."""
    needed = step_bytes(settings, model)
    there = memory_bytes(device)
    if needed > there:
        raise UserError(
            f"--optimizer {settings.optimizer}: its first step on this network needs {needed / 1e9:,.0f} GB, and the "
            f"{device.type} has {there / 1e9:,.0f} GB; choose another, or save memory (timm's kron: python -m "
            "pip install opt_einsum, or --opt-kwargs memory_save_mode=all_diag)"
        )


def step_bytes(settings: OptimisationSettings, model: nn.Module) -> int:
    """Bytes that the first step needs at least: the optimizer's state, and what its largest operation holds besides.

    A twin of ``model`` on the meta device, where tensors have shapes but no content, takes that step and a second one,
    for which the state exists already. 0 for torch's own optimizers and ours, whose state is at most a few times the
    weights.
    """
    if settings.optimizer in OWN:
        return 0
    tensors = [*model.parameters(), *model.buffers()]
    memo = {id(tensor): tensor.detach().to("meta").requires_grad_(tensor.requires_grad) for tensor in tensors}
    memo |= {id(one): nn.Parameter(memo[id(one)], one.requires_grad) for one in model.parameters()}
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        twin = copy.deepcopy(model, memo)
        optimizers = build_optimizers(settings, twin)
        for parameter in twin.parameters():
            parameter.grad = torch.empty_like(parameter)
        old = [*twin.parameters(), *twin.buffers(), *(one.grad for one in twin.parameters() if one.grad is not None)]
        state: list[torch.Tensor] = []
        for _ in range(2):
            largest = _Largest([*old, *state])
            # A step that fails on the meta device may work on the real one, and needs at least what it has made so far.
            with suppress(Exception), largest:
                for optimizer in optimizers:
                    optimizer.step()
            state = _tensors([optimizer.state_dict()["state"] for optimizer in optimizers])
    return largest.bytes + sum(tensor.nbytes for tensor in state)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
