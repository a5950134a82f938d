"""Unreadable images: the run ends, other images replace them, or they are left out.

The outcome depends only on the files, not on the loader, the workers or the ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np

from utils.config.settings import UserError
from utils.data.images.decoding import UnreadableImage
from utils.data.sample_plan import MicroBatch

REFUSE = "refuse"
REPLACE = "replace"
LEAVE_OUT = "leave out"
MOST_IN_A_ROW = 100  # more suggest a missing disk or folder, not bad images


def first_readable(index: int, count: int, read: Callable[[int], None]) -> tuple[int, list[str]]:
    """Number of the first image, from ``index`` on, that ``read`` can read, and the paths of the images skipped.

    After the last of the ``count`` images, the first one follows. Raises ``UserError`` if too many in a row are
    unreadable.
    """
    passed: list[str] = []
    for number in range(index, index + min(MOST_IN_A_ROW, count)):
        try:
            read(number % count)
            return number % count, passed
        except UnreadableImage as error:
            passed.append(error.path)
            last = error
    raise UserError(
        f"{passed[0]} and the {len(passed) - 1} images after it cannot be read ({last.reason}); --skip-bad-images is "
        "for a few bad images: check the disk or the folder"
    ) from last


def read_micro_batch(
    micro_batch: MicroBatch, count: int, policy: str, read: Callable[..., None]
) -> tuple[MicroBatch, np.ndarray]:
    """Read the images of ``micro_batch``; return it, updated, and the numbers of the images that it now shows, int64.

    ``count``: images in the data set. ``read(image, sample, place)`` reads an image with the random numbers of the
    batch's ``sample``-th sample into ``place`` in the batch, or raises ``UnreadableImage``. ``policy``: REPLACE shows
    the next readable image instead of an unreadable one; LEAVE_OUT leaves it out; with both, too many unreadable images
    in a row raise ``UserError``. REFUSE passes the error on.
    """
    if policy == REFUSE:
        for sample, image in enumerate(micro_batch.indices.tolist()):
            read(image, sample, sample)
        return micro_batch, micro_batch.indices
    shown: list[int] = []
    kept: list[int] = []
    unreadable: list[str] = []
    replaced = 0
    for sample, index in enumerate(micro_batch.indices.tolist()):
        image, passed = first_readable(index, count, partial(read, sample=sample, place=len(shown)))
        if passed and policy == LEAVE_OUT:
            unreadable.append(passed[0])
            continue
        shown.append(image)
        kept.append(index)
        if sample < micro_batch.count:  # another rank owns, and reports, the other samples
            unreadable += passed
            replaced += bool(passed)
    if policy == LEAVE_OUT:
        micro_batch = dataclasses.replace(micro_batch, indices=np.array(kept, dtype=np.int64), count=len(kept))
    images = np.array(shown, dtype=np.int64)
    return dataclasses.replace(micro_batch, unreadable=tuple(unreadable), replaced=replaced, shown=images), images
