"""After which validations pictures are written (--picture-epochs)."""

from __future__ import annotations

import math

from utils.checkpoint.progress import Progress
from utils.config.settings import Settings

OFF = "off"
LAST = "last"


def may_be(progress: Progress, args: Settings) -> bool:
    """Before the validation of an epoch: whether pictures of it may be wanted. Early stopping decides afterwards."""
    if args.logging.picture_epochs == OFF:
        return False
    epoch = progress.epoch + 1
    patience = args.run.early_stopping
    ends = epoch >= args.optimisation.epochs or progress.step >= (args.run.max_steps or math.inf)
    return ends or _regular(epoch, args) or (patience is not None and epoch - progress.stopping_epoch >= patience)


def after_epoch(progress: Progress, args: Settings) -> bool:
    """After a whole epoch that is not the last: whether pictures of it are wanted."""
    return _regular(progress.epoch, args)


def _regular(epoch: int, args: Settings) -> bool:
    every = args.logging.picture_epochs
    return isinstance(every, int) and epoch % every == 0
