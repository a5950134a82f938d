"""Validation in which every image counts once, on any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn import functional

from utils.data.loaders import ValidationLoader
from utils.loop.bad_images import BadImages
from utils.record.metrics import ClassificationMeter, Report
from utils.record.writer import NullWriter
from utils.runtime.distributed import Distributed


@torch.no_grad()
def validate(
    model: nn.Module,
    loader: ValidationLoader,
    distributed: Distributed,
    autocast: AbstractContextManager,
    writer: NullWriter,
    bad_images: BadImages,
    between: Callable[[], None],
) -> Report:
    """The bare module over this rank's batches, with rank 0's buffers; sums over all ranks.

    ``between`` is called after each round, in which every rank has at most one batch: as often on all of them.
    """
    distributed.broadcast_buffers(model)
    model.eval()
    meter = ClassificationMeter(loader.num_batches, distributed.device)
    with writer.bar(len(loader), 0, "Validation", "batch") as bar:
        batches = loader.batches()
        for _ in range(loader.rounds):
            batch = next(batches, None)  # in the last round some ranks have none
            if batch is not None:
                bad_images.note(batch)
            if batch is not None and len(batch.targets):
                with autocast:
                    output = model(batch.images)
                    loss = functional.cross_entropy(output, batch.targets)
                meter.update(batch.number, loss, output, batch.targets)
            bar.update(batch is not None)
            between()
    model.train()
    return Report.from_sums(distributed.all_reduce_sum(meter.sums).sum(0).tolist())
