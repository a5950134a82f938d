"""Validation in which every image counts once, on any number of processes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from utils.checkpoint.progress import Progress
from utils.config import plugins
from utils.config.settings import Settings, UserError
from utils.data.loaders import Batch, ValidationLoader
from utils.loop.bad_images import BadImages
from utils.loop.forward import forward
from utils.loop.hooks import call
from utils.loop.test_time_augmentation import in_views
from utils.record.epoch_scalars import best_metric, stopping_metric
from utils.record.metrics import ClassReport, Report, ValidationMeter
from utils.record.multilabel import AnyReport, MultilabelMeter, ValidationAnswers
from utils.record.pictures.collector import Collector, Gathered, MultilabelCollector
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
    """Run the bare module on this rank's batches, with rank 0's buffers; return the report over all ranks.

    It is made from sums; for multi-label data, from the logits of all images, as average precision needs. Calls
    ``before_batch`` for each of this rank's batches, and ``between`` equally often on all ranks: after each round, in
    which every rank has at most one batch. A sharded network needs all ranks in every pass.
    """
    distributed.broadcast_buffers(model)
    model.eval()
    network = model.network if isinstance(model, Collector) else model  # pictures leave idle passes out
    answers = ValidationAnswers(loader.groups) if loader.multilabel else None
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
    """Zero in place of a batch's loss: that of multi-label data is a mean over the known labels of all batches."""
    return logits.new_zeros(())


def _mean(metric: plugins.Entry, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean of a user's metric over a batch, float64 (). Raises ``UserError`` for a result of another shape."""
    values = metric(logits.to(torch.float32, copy=True), targets.clone())  # it may change them in place
    if not isinstance(values, torch.Tensor) or values.shape != targets.shape[:1]:
        given = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise UserError(
            f"{metric.where} must return a value for each of {len(targets)} images, a tensor of the shape "
            f"({len(targets)},), not {given}"
        )
    return values.to(exact_device(values.device), torch.float64).mean()


# --------------------------------------------------------------------------- within a training run

OFF = "off"  # of --picture-epochs


def pictures_may_be_due(progress: Progress, args: Settings) -> bool:
    """True if pictures of the coming validation may be wanted; only after it, early stopping decides."""
    wanted = args.logging.picture_epochs != OFF
    return wanted and (progress.may_end(args) or _every_few_epochs(progress.epoch + 1, args))


def _every_few_epochs(epoch: int, args: Settings) -> bool:
    every = args.logging.picture_epochs
    return isinstance(every, int) and epoch % every == 0


def validate_in_views(loop: Any, model: nn.Module, pictured: bool) -> tuple[AnyReport, Gathered | None]:
    """Validate ``model`` in the views of --tta; if ``pictured``, also gather what pictures of the validation need.

    ``loop``: the ``TraVal`` that validates.
    """
    network = in_views(model, loop.args.data.tta)
    collector = None
    before_batch: list[Callable[[Any], None]] = [partial(call, loop.hooks.before_validation_batch, loop)]
    if pictured:
        loader = loop.validation_loader
        kind = MultilabelCollector if loader.multilabel else Collector
        to_pixels = loader.transform.to_pixels
        collector = kind(network, model, len(loop.class_names), len(loader.source), to_pixels, loop.device)
        network = collector
        before_batch.append(collector.before_batch)
    report = validate(
        network,
        loop.validation_loader,
        loop.distributed,
        loop.autocast,
        loop.writer,
        loop.bad_images,
        loop.stop_if_requested,
        lambda batch: call(before_batch, batch),
    )
    if collector is None:
        return report, None
    collector.close()
    return report, collector.gather(loop.distributed)


def write_pictures(loop: Any, gathered: Gathered | None, finished: bool) -> None:
    """Write the pictures if they are due at the end of an epoch. ``finished``: True if the run ends with it."""
    if gathered is not None and (finished or _every_few_epochs(loop.progress.epoch, loop.args)):
        loop.writer.pictures(gathered, loop.class_names, loop.progress.step)


def update_best(progress: Progress, row: dict[str, float], args: Settings, whole: bool) -> bool:
    """Enter the validation in ``row`` into ``progress``; return True if it makes best.pt.

    An epoch that was cut (not ``whole``) makes best.pt only until there is a whole one, which always replaces it, and
    does not count for early stopping. A validation whose loss is not finite is never the best, nor an improvement. Call
    this before ``Progress.finish_epoch``.
    """
    epoch = int(row["epoch"])
    sound = math.isfinite(row["val_loss"])
    run = args.run
    metric = best_metric(run)
    watched = stopping_metric(run)
    value, current = (row.get(one.column, math.nan) for one in (metric, watched))  # none without a readable image
    on = progress.best_value if progress.best_epoch else None
    best = sound and (whole or not progress.best_epoch) and metric.improves(value, on)
    if best:
        progress.best_value = value
    if best and whole:
        headline = row["val_map" if "val_map" in row else "val_top1"]
        progress.best_top1 = headline if math.isfinite(headline) else -1.0  # NaN without any positive label
        progress.best_epoch = epoch
    if whole and sound and watched.improves(current, progress.stopping_value, run.early_stopping_delta):
        progress.stopping_value = current
        progress.stopping_epoch = epoch
    return best
