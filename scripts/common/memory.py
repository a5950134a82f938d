"""Lack of memory: how torch reports it on the devices, and what a tool says about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from utils.config.settings import UserError

# In the messages of RuntimeErrors: by torch's allocator for CPUs, and by cuBLAS and cuDNN for their workspaces.
SIGNS = ("can't allocate memory", "ALLOC_FAILED")


def lacks_memory(error: BaseException) -> bool:
    """True if ``error`` says that the device or the machine has too little memory."""
    if isinstance(error, RuntimeError):
        return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)
    return isinstance(error, MemoryError)


@contextmanager
def enough_memory(flag: str, reason: str = "there is not enough memory for so many images") -> Iterator[None]:
    """Context that turns lack of memory into a ``UserError``, which asks for a lower value of ``flag``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        raise UserError(f"{flag}: {reason}; lower it") from error
