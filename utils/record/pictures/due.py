"""After which validations pictures are written (--picture-epochs)."""

from __future__ import annotations

from utils.checkpoint.progress import Progress
from utils.config.settings import Settings

OFF = "off"


def may_be(progress: Progress, args: Settings) -> bool:
    """Before the validation of an epoch: whether pictures of it may be wanted. Early stopping decides afterwards."""
    wanted = args.logging.picture_epochs != OFF
    return wanted and (progress.may_end(args) or _regular(progress.epoch + 1, args))


def after_epoch(progress: Progress, args: Settings) -> bool:
    """After a whole epoch that is not the last: whether pictures of it are wanted."""
    return _regular(progress.epoch, args)


def _regular(epoch: int, args: Settings) -> bool:
    every = args.logging.picture_epochs
    return isinstance(every, int) and epoch % every == 0
