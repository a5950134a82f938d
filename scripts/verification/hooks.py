"""Hooks of ``scripts/verification/hooked_main.py`` into the training."""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.verification.records import Marks
from utils.loop.hooks import Hooks

if TYPE_CHECKING:
    import torch

    from utils.data.loaders import Batch
    from utils.train_validation import TraVal


class RunRecorder:
    """Writes a mark into ``folder`` at each point of this process, and a line for each step."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._step = 0
        self._crc = 0
        self._samples: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.marks = Marks(folder / f"rank{rank}.now")
        self._lines = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._lines, b"\n")  # ends a line that a kill may have cut

    def hooks(self) -> Hooks:
        """The hooks for ``main.main``."""
        return Hooks(
            before_forward=[self._before_forward],
            after_forward=[lambda *_: self.marks.set("forward", self._step)],
            before_update=[self._before_update],
            after_update=[lambda traval: self.marks.set("after_step", traval.progress.step)],
            before_validation_batch=[lambda traval, _: self.marks.set("validation", traval.progress.step)],
            after_validation=[lambda traval, _: self.marks.set("epoch_end", traval.progress.step)],
        )

    def _before_forward(self, traval: TraVal, batch: Batch) -> None:
        step = traval.progress.step + 1
        if step != self._step:
            self._step = step
            self._crc = 0
            self._samples = []
            self.marks.set("step", step)
        for tensor in (batch.images, batch.targets):
            self._crc = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), self._crc)
        self._samples.append(",".join(map(str, batch.indices.tolist())))

    def _before_update(self, traval: TraVal, norm: torch.Tensor) -> None:
        line = f"{self._step} {time.time():.6f} {self._crc:08x} {';'.join(self._samples)} end\n"
        os.write(self._lines, line.encode())
        self.marks.set("update", self._step)
