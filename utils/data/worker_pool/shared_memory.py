"""Shared memory, through which a worker hands tensors over without a copy."""

from __future__ import annotations

import torch
from torch.utils.data import get_worker_info

from utils.config.settings import UserError

MORE_SHARED_MEMORY = (
    "give more (docker run --shm-size 8g), use fewer --workers or a smaller --batch-size, or --workers 0, "
    "which needs none"
)


def shared_bytes(count: int) -> torch.Tensor:
    """uint8 (``count``,), not initialised; in a worker in shared memory. Raises ``UserError`` when that is full.

    torch would move a tensor that is not in shared memory there on its way to the training process, in a thread that
    cannot report a lack of room: the training process would wait forever.
    """
    if get_worker_info() is None:
        return torch.empty(count, dtype=torch.uint8)
    try:
        return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(count))
    except RuntimeError as error:  # torch's one line about the system's answer
        raise UserError(
            f"shared memory (/dev/shm) has no room for a batch of {count:,} bytes ({error}); {MORE_SHARED_MEMORY}"
        ) from error


def in_shared_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A uint8 tensor as it is, in a worker copied into shared memory. Raises ``UserError`` as ``shared_bytes``."""
    if get_worker_info() is None:
        return tensor
    return shared_bytes(tensor.numel()).view(tensor.shape).copy_(tensor)
