"""Validations of which pictures are made (--picture-epochs)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from utils.checkpoint.progress import Progress
from utils.config.settings import Settings
from utils.loop.hooks import call
from utils.loop.test_time_augmentation import in_views
from utils.loop.validation import validate
from utils.record.multilabel import AnyReport
from utils.record.pictures.collector import Collector, Gathered, MultilabelCollector

OFF = "off"


def may_be_due(progress: Progress, args: Settings) -> bool:
    """Before the validation of an epoch: whether pictures of it may be wanted. Early stopping decides afterwards."""
    wanted = args.logging.picture_epochs != OFF
    return wanted and (progress.may_end(args) or _every_few_epochs(progress.epoch + 1, args))


def _every_few_epochs(epoch: int, args: Settings) -> bool:
    every = args.logging.picture_epochs
    return isinstance(every, int) and epoch % every == 0


def validate_in_views(loop: Any, model: nn.Module, pictured: bool) -> tuple[AnyReport, Gathered | None]:
    """The validation of ``model`` in the views of --tta and, if ``pictured``, what pictures of it need.

    ``loop``: the ``TraVal`` that validates.
    """
    network = in_views(model, loop.args.data.tta)
    collector = None
    before_batch: list[Callable[[Any], None]] = [partial(call, loop.hooks.before_validation_batch, loop)]
    if pictured:
        loader = loop.validation_loader
        kind = MultilabelCollector if loader.multilabel else Collector
        collector = kind(network, model, len(loop.class_names), len(loader.source), loader.transform.to_pixels)
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


def write(loop: Any, gathered: Gathered | None, finished: bool) -> None:
    """Write the pictures if they are due now that the epoch has ended, and with it perhaps the run."""
    if gathered is not None and (finished or _every_few_epochs(loop.progress.epoch, loop.args)):
        loop.writer.pictures(gathered, loop.class_names, loop.progress.step)
