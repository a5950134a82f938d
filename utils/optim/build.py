"""Everything that updates a network's weights, built together: optimizer, moving average and scaler."""

from __future__ import annotations

from typing import NamedTuple

import torch

from utils.config.settings import Settings
from utils.optim.ema import WeightAverage, build_average
from utils.optim.freezing import Freezing
from utils.optim.optimizer_memory import refuse_beyond_memory
from utils.optim.optimizers import Optimizers, build_optimizer
from utils.precision.amp import DTYPES, build_scaler, resolve_amp
from utils.runtime import sharding
from utils.runtime.distributed import Distributed


class OptimizerParts(NamedTuple):
    """Optimizer, or several, each for its own parameters; the average of the weights, if any; and the scaler."""

    optimizer: Optimizers
    ema: WeightAverage | None
    scaler: torch.amp.GradScaler


def build_optimizer_parts(
    args: Settings, model: torch.nn.Module, freezing: Freezing, distributed: Distributed
) -> OptimizerParts:
    """The parts that update ``model``, which ``--shard-model`` spreads over the processes. Raises ``UserError``."""
    twin = _spread(args, model, distributed)
    refuse_beyond_memory(args.optimisation, model, distributed.device)
    optimizer = freezing.separate(build_optimizer(args.optimisation, model))
    epochs = args.optimisation.epochs
    average = build_average(model, args.average, epochs, optimizer, twin)
    return OptimizerParts(optimizer, average, build_scaler(args.precision, distributed.device))


def _spread(args: Settings, model: torch.nn.Module, distributed: Distributed) -> torch.nn.Module | None:
    """Spread ``model`` over the processes if ``--shard-model`` says so, before its optimizer is built.

    Gives the module that its moving average needs, spread alike; None without. Raises ``UserError``.
    """
    if not args.model.shard_model or distributed.world_size == 1 or args.run.dry_run:
        return None
    dtype = DTYPES.get(resolve_amp(args.precision, distributed.device))
    return sharding.spread(model, distributed.device, dtype, with_copy=args.average.ema_decay is not None)
