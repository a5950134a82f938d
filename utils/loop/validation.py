"""Validation in which every image counts once, on any number of processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn import functional

from utils.config import plugins
from utils.config.settings import UserError
from utils.data.loaders import Batch, ValidationLoader
from utils.loop.bad_images import BadImages
from utils.loop.forward import forward
from utils.record.metrics import ClassReport, Report, ValidationMeter
from utils.record.multilabel import AnyReport, MultilabelMeter, ValidationAnswers
from utils.record.pictures.collector import Collector
from utils.record.writer import Writer
from utils.runtime.devices import exact_device
from utils.runtime.distributed import Distributed
from utils.runtime.sharding import idle_pass, release


@torch.no_grad()
def validate(
    model: nn.Module,
    loader: ValidationLoader,
    distributed: Distributed,
    autocast: AbstractContextManager,
    writer: Writer,
    bad_images: BadImages,
    between: Callable[[], None],
    before_batch: Callable[[Batch], None] = lambda batch: None,
) -> AnyReport:
    """Run the bare module on this rank's batches, with rank 0's buffers; returns the report over all ranks.

    That is of sums; of several labels an image, of the answers of all ranks, which average precision takes at once.
    ``before_batch`` is called for each of this rank's batches. ``between`` is called after each round, in which every
    rank has at most one batch, and so equally often on all of them. A sharded network needs all ranks in every pass.
    """
    distributed.broadcast_buffers(model)
    model.eval()
    network = model.network if isinstance(model, Collector) else model  # pictures are of no idle pass
    answers = ValidationAnswers() if loader.multilabel else None
    kind = ValidationMeter if answers is None else MultilabelMeter
    meter = kind(loader.num_batches, distributed.device)
    own = plugins.added("metric")
    columns = [meter.column(name) for name in own]  # on all ranks alike
    title = "Validation (cut)" if loader.is_cut else "Validation"
    with writer.bar(len(loader), 0, title, "batch") as bar:
        batches = loader.batches()
        for _ in range(loader.rounds):
            batch = next(batches, None)  # in the last round some ranks have none
            if batch is not None:
                before_batch(batch)
                bad_images.note(batch)
            if batch is not None and len(batch.targets):
                criterion = functional.cross_entropy if answers is None else _no_loss
                logits, loss, _ = forward(model, batch, criterion, autocast)
                values = {name: _mean(metric, logits, batch.targets) for name, metric in own.items()}
                meter.update(batch.number, loss, logits, batch.targets, values)
                if answers is not None:
                    answers.update(batch.indices, logits, batch.targets)
            else:
                with autocast:
                    idle_pass(network, loader.image_shape, distributed.device)
            bar.update(batch is not None)
            between()
    model.train()
    release(network)
    sums = distributed.all_reduce_sum(torch.cat([meter.sums, *(column[:, None] for column in columns)], 1)).sum(0)
    if answers is not None:
        report: AnyReport = answers.report(distributed)
        numbers = sums.tolist()
    else:
        assert not isinstance(meter, MultilabelMeter)
        (classes,) = distributed.all_reduce_max([meter.classes])  # some ranks may have had no batch
        class_sums = distributed.all_reduce_sum(meter.class_sums(int(classes)))
        read = torch.cat([sums.view(torch.int64), class_sums]).cpu()  # both at once: the host waits for the device once
        numbers = read[: len(sums)].view(torch.float64).tolist()
        by_class = ClassReport.from_sums(read[len(sums) :])
        report = dataclasses.replace(Report.from_sums(numbers), by_class=by_class)
    means = [number / max(1, report.count) for number in numbers[len(numbers) - len(own) :]]
    return dataclasses.replace(report, own=dict(zip(own, means, strict=True)))


def _no_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Zero: the loss of several labels is a mean over all known cells, which no batch knows."""
    return logits.new_zeros(())


def _mean(metric: plugins.Entry, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over a batch of a user's metric, float64 ()."""
    values = metric(logits.float(), targets)
    if not isinstance(values, torch.Tensor) or values.shape != targets.shape[:1]:
        given = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise UserError(
            f"--plugin {metric.file}: metric {metric.name} must return a value for each of {len(targets)} images, a "
            f"tensor of the shape ({len(targets)},), not {given}"
        )
    return values.to(exact_device(values.device), torch.float64).mean()
