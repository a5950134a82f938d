"""Unreadable images that --skip-bad-images passes over: counted and listed, over all ranks."""

from __future__ import annotations

import os

from utils.checkpoint.progress import Progress
from utils.data.loaders import Batch
from utils.record.writer import Writer
from utils.runtime.distributed import Distributed


class BadImages:
    """Collects the unreadable images of batches. Unless ``enabled`` there are none, and ranks exchange nothing."""

    def __init__(self, enabled: bool, distributed: Distributed, writer: Writer) -> None:
        self.enabled = enabled
        self.distributed = distributed
        self.writer = writer
        self._paths: set[str] = set()
        self._replaced = 0

    def note(self, batch: Batch) -> None:
        """Remember the batch's unreadable images until the next ``collect``."""
        if batch.counted:
            self._paths.update(map(os.path.abspath, batch.unreadable))
            self._replaced += batch.replaced

    def collect(self, progress: Progress) -> None:
        """Add what all ranks have met to ``progress``; log and list new paths. A synchronisation point."""
        if not self.enabled:
            return
        known = set(progress.bad_images)
        for paths, replaced in self.distributed.gather((self._paths, self._replaced)):
            known |= paths
            progress.replaced_images += replaced
        self._paths = set()
        self._replaced = 0
        new = len(known) - len(progress.bad_images)
        if new:
            progress.bad_images = sorted(known)
            self.writer.bad_images(progress.bad_images)
            self.writer.log(f"warning: {new} more image(s) that cannot be read are passed over, {len(known)} so far")
