"""Numbers that leave the device without a wait, and are read by the host later."""

from __future__ import annotations

import torch


class Mailbox:
    """Takes the numbers of one step at a time: ``send`` does not wait, ``read`` waits for what was launched until then.

    On a GPU they travel into pinned memory, and an event tells when they have arrived: what was launched after ``send``
    goes on computing while the host reads.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._event = torch.cuda.Event() if self._on_gpu else None
        self._numbers = torch.empty(0)

    def send(self, numbers: torch.Tensor) -> None:
        """Start the way of ``numbers`` (n,) to the host; those of before must have been read."""
        if not self._on_gpu:
            self._numbers = numbers
            return
        if self._numbers.shape != numbers.shape:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._event.record()

    def read(self) -> list[float]:
        """The numbers that were sent last."""
        if self._on_gpu:
            self._event.synchronize()
        return self._numbers.tolist()
