"""Unreadable images that --skip-bad-images skips: counted and listed, over all ranks."""

from __future__ import annotations

import os
from itertools import chain

from utils.checkpoint.progress import Progress
from utils.config.spelling import some
from utils.data.loaders import Batch
from utils.record.writer import Writer
from utils.runtime.distributed import Distributed


class BadImages:
    """Collects the unreadable images of batches. If not ``enabled``, there are none, and ranks exchange nothing."""

    def __init__(self, enabled: bool, distributed: Distributed, writer: Writer) -> None:
        self.enabled = enabled
        self.distributed = distributed
        self.writer = writer
        self._noted: list[tuple[int, set[str], int]] = []  # step, paths, how many were replaced

    def note(self, batch: Batch, step: int = 0) -> None:
        """Remember the unreadable images of a batch of ``step`` until the next ``collect``."""
        if batch.counted and (batch.unreadable or batch.replaced):
            self._noted.append((step, {*map(os.path.abspath, batch.unreadable)}, batch.replaced))

    def forget_after(self, step: int) -> None:
        """Forget what was noted in steps after ``step``, which are not counted."""
        self._noted = [noted for noted in self._noted if noted[0] <= step]

    def collect(self, progress: Progress) -> None:
        """Add what all ranks have noted to ``progress``; log and list new paths. A synchronisation point."""
        if not self.enabled:
            return
        known = set(progress.bad_images)
        for _, paths, replaced in chain(*self.distributed.gather(self._noted)):
            known |= paths
            progress.replaced_images += replaced
        self._noted = []
        new = sorted(known.difference(progress.bad_images))
        if new:
            progress.bad_images = sorted(known)
            self.writer.bad_images(progress.bad_images)
            listed = "; bad_images.txt lists all" if self.writer.folder else ""
            self.writer.log(f"warning: passed over, as they cannot be read: {some(new)} ({len(known)} so far{listed})")
